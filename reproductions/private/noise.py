"""Task heads from sums with noise, and rivals with the same guarantee.

The unit of the guarantee is a row, delta is 1e-5. An epsilon of 0 stands for no noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional

from fedrot.simulations.tasks.scores import evaluate_predictions
from fedrot.strategies import Privacy
from fedrot.strategies.client.ledger import release_of
from fedrot.task_head.choice import SHRINKAGES
from fedrot.task_head.noisy.noisy_fit import fit_to_noisy_sums
from fedrot.task_head.noisy.noisy_sums import NoisySums
from fedrot.task_head.noisy.public_features import Clipping, PublicFeatures
from reproductions.heads.__main__ import federation_of
from reproductions.heads.closed import Head, calibrated, of_fedrot, scores, sums_of

#: Data sets, and the one whose training texts are public beside each.
SETS = {
    "dair_emotion": "crowdflower",
    "crowdflower": "goemotions",
    "goemotions": "crowdflower",
    "sst2": "crowdflower",
}
#: Training rows of a data set, test rows and public rows, where there are so many.
DRAWN, TESTED, PUBLIC = 10_000, 2000, 4000
#: Sites, and rows of each. GoEmotions' 6,000 rows are 120 for each of 50 sites.
DIVISIONS, SEEDS = ((8, 150), (8, 750), (50, 150)), range(11, 16)
EPSILONS = (8.0, 4.0, 2.0, 1.0, 0.0)
#: Of DP-SGD, chosen on test rows of dair_emotion and CrowdFlower: steps, the longest
#: gradient of a row, the rate, and the noise from which on the rate is lower.
STEPS, LONGEST, RATE, LOUD = 300, 0.25, 40.0, 2.0
MEASURES = ("accuracy", "macro_f1", "ece")
#: What a covariance with noise weighs beside the public one; chosen likewise.
MIXED = 0.25
#: Of tests of membership: rows of the site, releases, and epsilons.
ROWS, RELEASES, ASKED = 150, 1000, (*EPSILONS, 3.0)


def texts_of(name: str, folder: Path) -> tuple[Tensor, ...]:
    """Return features of training rows and of test rows, and the labels of both."""
    federation = federation_of(name, 0, 0, folder, size=DRAWN, tests=TESTED)
    every = np.arange(len(federation.labels))
    features = federation.features(federation.start, every).double()
    rows = [len(federation.cell.client)]
    return *features.tensor_split(rows), *federation.labels.tensor_split(rows)


@cache
def multiplier_of(epsilon: float) -> float:
    """Return the noise of one answer, as a site's ledger has it."""
    if not epsilon:
        return 0.0
    return release_of(Privacy(epsilon=epsilon, record="none"), [])["multiplier"]


def noisy(total: Tensor, variance: float) -> NoisySums:
    """Return counts and sums, ``[classes, 1 + inputs]``, with noise."""
    sent = total + variance**0.5 * torch.randn_like(total)
    of_noise = torch.tensor(variance, dtype=total.dtype)
    return NoisySums(sent[:, 0], sent[:, 1:], of_noise)


def with_gram(
    clipped: Tensor, sums: NoisySums, public: PublicFeatures
) -> PublicFeatures:
    """Return public features whose covariance is mixed with that of a Gram matrix.

    The Gram matrix has the noise of ``sums``, by entries of a symmetric matrix.
    """
    inputs, rows = clipped.shape[1], len(clipped)
    noise = sums.variance.sqrt() * torch.randn(inputs, inputs).double()
    gram = clipped.mT @ clipped + (noise + noise.mT) / 2
    mean = sums.sums.sum(0) / rows
    own = (gram / rows - torch.outer(mean, mean)) * public.clipping.radius**2
    covariance = public.vectors * public.values @ public.vectors.mT
    values, vectors = torch.linalg.eigh(covariance.lerp(own, MIXED))
    return PublicFeatures(public.clipping, values.clamp(min=0), vectors)


def descended(features: Tensor, truth: Tensor, multipliers: Tensor) -> Head:
    """Return heads of DP-SGD (Abadi et al., CCS 2016), with all rows in every step.

    Args:
        multipliers: the noise of all steps together, by head.
    """
    rows = functional.pad(features, (0, 1), value=1.0).float()
    noises = LONGEST * STEPS**0.5 * multipliers[:, None, None]
    rates = RATE / (multipliers / LOUD).clamp(min=1)[:, None, None] / len(rows)
    heads = torch.zeros(len(multipliers), truth.shape[1], rows.shape[1])
    for _ in range(STEPS):
        logits = (rows @ heads.flatten(0, 1).mT).unflatten(1, heads.shape[:2])
        errors = logits.softmax(2) - truth[:, None].float()
        lengths = errors.norm(dim=2, keepdim=True) * rows.norm(dim=1)[:, None, None]
        clipped = errors * (LONGEST / lengths).clamp(max=1)
        gradients = (clipped.flatten(1).mT @ rows).view_as(heads)
        heads -= rates * (gradients + noises * torch.randn_like(heads))
    return heads[..., :-1].double(), heads[..., -1].double()


def exact(features: Tensor, labels: Tensor, classes: int) -> Head:
    """Return fedrot's head without noise: a quarter of the rows, held out, chooses its
    shrinkage and temperature.
    """
    held = len(labels) // 4
    heads = of_fedrot(sums_of(features[held:], labels[held:], classes), SHRINKAGES)
    return calibrated(features[:held], labels[:held], heads)[0]


def added_by(clipped: Tensor, truth: Tensor) -> Tensor:
    """Return what each row adds to counts and sums, ``[rows, classes, 1 + inputs]``."""
    return truth[:, :, None] * functional.pad(clipped, (1, 0), value=1.0)[:, None]


def public_of(features: Tensor) -> PublicFeatures:
    """Return what rows say without their labels, as ``public_features`` of a model."""
    features = features[:PUBLIC]
    mean = features.mean(0)
    radius = (features - mean).norm(dim=1).median()
    return PublicFeatures(Clipping(mean, radius), *torch.linalg.eigh(features.mT.cov()))


def rows_of(
    name: str, texts: tuple[Tensor, ...], public: PublicFeatures
) -> Iterator[dict[str, Any]]:
    """Yield what heads are worth on test rows."""
    features, test, labels, test_labels = texts
    mean, radius = public.clipping.mean, public.clipping.radius
    unit, clipped = (features - mean) / radius, public.clipping.clip(features)
    truth = functional.one_hot(labels).double()
    multipliers = torch.tensor([multiplier_of(epsilon) for epsilon in EPSILONS])
    for seed, (sites, rows) in product(SEEDS, DIVISIONS):
        torch.manual_seed(seed)
        own = torch.randperm(len(labels))[: sites * rows]
        total = added_by(clipped[own], truth[own]).sum(0)
        heads = {("exact", 0.0): exact(features[own], labels[own], truth.shape[1])}
        # One row changes the sums by 2^0.5, and with a Gram matrix by 3^0.5.
        for epsilon, (arm, more) in product(
            EPSILONS, {"sites": sites, "one": 1}.items()
        ):
            sums = noisy(total, 2 * more * multiplier_of(epsilon) ** 2)
            heads[arm, epsilon] = fit_to_noisy_sums(sums, public)[:2]
        for arm, more in {"dp-sgd": 1, "dp-sgd-sites": sites**0.5}.items():
            weights, biases = descended(unit[own], truth[own], more * multipliers)
            weights /= radius
            found = zip(weights, biases - weights @ mean, strict=True)
            heads |= zip(product([arm], EPSILONS), found, strict=True)
        for epsilon in EPSILONS:
            sums = noisy(total, 3 * sites * multiplier_of(epsilon) ** 2)
            mixed = with_gram(clipped[own], sums, public)
            heads["gram", epsilon] = fit_to_noisy_sums(sums, mixed)[:2]
        told = {"data": name, "sites": sites, "rows": len(own) // sites, "seed": seed}
        for (arm, epsilon), head in heads.items():
            logits, truths = scores(test, head).numpy(), test_labels.numpy()
            measures = evaluate_predictions("single", MEASURES, logits, truths)
            yield told | {"arm": arm, "epsilon": epsilon} | measures


def areas(
    texts: tuple[Tensor, ...], public: PublicFeatures, epsilon: float, seed: int
) -> dict[str, float]:
    """Return the areas under the curves of two tests of whether a site has a row.

    Both are sums along what the row adds. ``best`` is the likelihood ratio of whoever
    knows all other rows, ``usual`` is that of whoever knows the mean of all rows. Rows
    that are tested are clipped: others change the sums by less.
    """
    torch.manual_seed(seed)
    truth = functional.one_hot(texts[2]).double()
    added = added_by(public.clipping.clip(texts[0]), truth).flatten(1)
    long = added[added.norm(dim=1) > 2**0.5 - 1e-9]
    deviation = 2**0.5 * multiplier_of(epsilon)
    usual, members = ROWS * added.mean(0), torch.arange(RELEASES) % 2
    found = []
    for member in members:
        row = long[torch.randint(len(long), ())]
        others = added[torch.randint(len(added), (ROWS - 1,))].sum(0)
        sent = others + member * row + deviation * torch.randn_like(row)
        found.append([(sent - others) @ row, (sent - usual) @ row])
    best, usual = (roc_auc_score(members, score) for score in torch.tensor(found).mT)
    return {"epsilon": epsilon, "seed": seed} | {"best": best, "usual": usual}
