"""Models of single sites, and what they are worth on each site's own rows.

A site's own test rows are drawn from the test set in the proportions of its rows. Here
each test row has its expected weight in place of a draw, which has no noise of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas
import torch
from pandas import DataFrame
from torch import Tensor
from torch.nn import functional

from fedrot.errors import UpdateError
from fedrot.task_head.choice import REFERENCE, SHRINKAGES
from fedrot.task_head.losses import TEMPERATURES
from fedrot.task_head.outputs import OUTPUT_KINDS, SINGLE
from fedrot.task_head.site_head import site_shift
from fedrot.task_head.sums import ClassSums
from reproductions.heads import closed
from reproductions.heads.arms import ARMS, Arm
from reproductions.heads.cell import Array, Cell
from reproductions.heads.federation import Federation, Model, epoch
from reproductions.heads.rounds import clients_of, play_all

#: Learning rates of the sites' own arms, chosen from up to four by accuracy on own rows
#: of dair_emotion, Dirichlet 0.3, seed 10.
RATES = {"alone": 2e-4, "finetuning": 1e-4, "fedrep": 5e-4, "pfedfda": 2e-4}
#: FedRep: epochs of a site's head in a round, and their rate.
HEAD_EPOCHS, HEAD_RATE = 5, 1e-2
#: The most epochs of local fine-tuning; a site's held-out rows choose their number.
FINETUNED = 2
#: pFedFDA: shares of a site's own means and covariance in its mixture.
MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Of a head that is refined on own rows: the pull to the head of all clients.
PULL = 3.0
STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)
#: All arms, in the order in which they are computed.
SITE_ARMS = (
    "constant",
    "alone-head",
    "step0",
    "alone",
    "fedavg",
    "fedavg+fit",
    "fedavg+finetuning",
    "fedrep",
    "pfedfda",
    "ours-lowest",
    "ours+finetuning",
)

#: What a site can do without the priors of fedrot.
PERSONAL = ("alone-head", "alone", "fedavg+finetuning", "fedrep", "pfedfda")


@dataclass(eq=False)
class Sites:
    """The sites of a federation.

    ``features`` are those of all rows, ``[rows, width]``; logits are those of the test
    rows by the models of all sites, ``[sites, rows, classes]``.

    Attributes:
        federation: of a cell.
        rounds: of the arms that train.
        rates: in place of ``RATES``.
        models: after the last round, by the name of an arm of ``arms.py``.
    """

    federation: Federation
    rounds: int
    rates: Mapping[str, float]
    models: dict[str, Model] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        """The cell of the federation."""
        return self.federation.cell

    def features(self, flat: Tensor) -> Tensor:
        """Return the features of all rows by a body."""
        return self.federation.features(flat, np.arange(len(self.cell.labels)))

    def logits(self, models: Sequence[Tensor]) -> Tensor:
        """Return the logits of flat parameters, one model for each site."""
        logits = []
        for flat in models:
            features = self.federation.features(flat, self.cell.test)
            logits.append(closed.scores(features, self.federation.head(flat)))
        return torch.stack(logits)

    def answers(self, arms: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and the logits of arms and of their variants."""
        makers: dict[str, Callable[[], Tensor]] = {
            "constant": self.constant,
            "alone-head": self.alone_heads,
            "alone": self.alone,
            "fedavg+finetuning": partial(self.finetuned, "fedavg"),
            "fedrep": self.fedrep,
            "pfedfda": self.pfedfda,
            "ours+finetuning": partial(self.finetuned, "ours-lowest"),
        }
        for arm in arms:
            if arm in makers:
                yield arm, makers[arm]()
            else:
                yield from self.global_heads(arm)

    # One model of all sites

    def played(self, name: str) -> Model:
        """Return the last model of an arm of ``arms.py``; it is computed once."""
        if name not in self.models:
            arm = ARMS[name]
            if name == "fedavg+fit":  # the same rounds
                flat = self.played("fedavg").flat
                self.models[name] = self.federation.evaluate(flat, arm.head)
            else:
                self.models[name] = play_all(self.federation, arm, self.rounds)
        return self.models[name]

    def counts(self, name: str) -> Tensor:
        """Return the rows by class behind the head of an arm: of sums or of rounds."""
        counts = torch.from_numpy(self.cell.counts).double()
        if ARMS[name].fit == "never" and not ARMS[name].start:
            numbers = range(1, self.rounds + 1)
            clients = [clients_of(self.cell, number) for number in numbers]
            counts = counts[np.concatenate(clients)]
        return counts.sum(0)

    def shifts(self, name: str, strength: float = 1.0) -> Tensor:
        """Return what each site adds to the logits of an arm, ``[sites, classes]``."""
        priors = OUTPUT_KINDS[SINGLE].priors(self.counts(name))
        counts = torch.from_numpy(self.cell.counts)
        shifts = [site_shift(priors, site, strength=strength) for site in counts]
        return torch.stack(shifts)

    def global_heads(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield one model of all sites, with the priors of all and with those of each
        site; without training also for other strengths, a mixture and a refined head.
        """
        model = self.played(name)
        features = self.features(model.flat)
        logits = closed.scores(features[self.cell.test], model.head)
        yield name, logits.expand(self.cell.clients, -1, -1)
        yield f"{name}/own", logits + self.shifts(name)[:, None]
        if name == "step0":
            for strength in STRENGTHS:
                shifts = self.shifts(name, strength)
                yield f"{name}/own:{strength:g}", logits + shifts[:, None]
        if name in ("step0", "ours-lowest"):
            yield f"{name}/mixture", self.mixtures(features)
            yield f"{name}/refined", self.refined(name, features, model.head)

    def refined(self, name: str, features: Tensor, head: closed.Head) -> Tensor:
        """Return the logits of heads that are refined on own rows.

        Logistic regression on a site's training rows, with ``PULL / 2 * mean |h|^2``
        times the squared change of the head added to the sum of losses.
        """
        weight, bias = (part.double() for part in head)
        inputs = closed.with_ones(features)
        logits = []
        for site, shift in enumerate(self.shifts(name)):
            rows = self.cell.of_client(self.cell.training, site)
            size = features[rows].double().square().sum(1).mean()
            pull = PULL / 2 * float(size)
            start = torch.cat([weight, (bias + shift)[:, None]], 1)
            labels = self.federation.labels[rows]
            change = _fitted_change(inputs[rows], labels, start, pull)
            logits.append(inputs[self.cell.test] @ (start + change).mT)
        return torch.stack(logits)

    # Heads of single sites

    def constant(self) -> Tensor:
        """Return the shares of a site's classes, with one row of equal shares more; the
        same for every row.
        """
        counts = torch.from_numpy(self.cell.counts).double()
        shares = (counts + 1 / self.cell.classes) / (counts.sum(1, keepdim=True) + 1)
        return shares.log()[:, None].expand(-1, len(self.cell.test), -1)

    def alone_heads(self) -> Tensor:
        """Return heads that are fitted to a site's own sums, with the first body."""
        features = self.features(self.federation.start)
        reference = SHRINKAGES.index(REFERENCE)
        logits = []
        for site, constant in enumerate(self.constant()):
            try:
                heads = closed.of_fedrot(self.sums(features, site), SHRINKAGES)
            except UpdateError:  # rows of one class
                logits.append(constant)
                continue
            head = self.chosen(features, site, heads, TEMPERATURES, reference)
            logits.append(closed.scores(features[self.cell.test], head))
        return torch.stack(logits)

    def sums(self, features: Tensor, site: int) -> ClassSums:
        """Return the sums over a site's training rows."""
        rows = self.cell.of_client(self.cell.training, site)
        return self.federation.sums(features[rows], rows)

    def chosen(
        self,
        features: Tensor,
        site: int,
        heads: closed.Head,
        temperatures: Sequence[float],
        otherwise: int,
    ) -> closed.Head:
        """Return the best of fitted heads and temperatures by a site's held-out rows,
        without such rows the head at the place ``otherwise``.
        """
        held = self.cell.of_client(self.cell.held_out, site)
        if not len(held):
            return heads[0][otherwise], heads[1][otherwise]
        labels = self.federation.labels[held]
        head, _ = closed.calibrated(features[held], labels, heads, temperatures)
        return head

    def mixtures(self, features: Tensor) -> Tensor:
        """Return the logits of pFedFDA's heads on features; no round is trained."""
        test = features[self.cell.test]
        heads = self.mixed_heads(features)
        return torch.stack([closed.scores(test, head) for head in heads])

    def mixed_heads(self, features: Tensor) -> list[closed.Head]:
        """Return each site's discriminant of the mixture that its held-out rows choose.

        Shrinkage and temperature are those of the head of all sites: a site's few
        held-out rows do not tell them.
        """
        training = self.cell.training
        total = self.federation.sums(features[training], training)
        shrinkage, temperature = self.calibration(features, total)
        chosen = []
        for site in range(self.cell.clients):
            of_site = self.sums(features, site)
            mixtures = [_mixture(of_site, total, share) for share in MIXTURES]
            heads = [closed.of_fedrot(mixture, [shrinkage]) for mixture in mixtures]
            weights, biases = map(torch.cat, zip(*heads, strict=True))
            scaled = weights / temperature, biases / temperature
            chosen.append(self.chosen(features, site, scaled, (1.0,), 0))
        return chosen

    def calibration(self, features: Tensor, total: ClassSums) -> tuple[float, float]:
        """Return shrinkage and temperature of the head of all sites."""
        held = self.cell.held_out
        labels = self.federation.labels[held]
        tried = []
        for shrinkage in SHRINKAGES:
            heads = closed.of_fedrot(total, [shrinkage])
            (weight, _), losses = closed.calibrated(features[held], labels, heads)
            # The head that is returned has been divided by its temperature.
            temperature = float(heads[0].norm() / weight.norm())
            tried.append((losses.mean(), shrinkage, temperature))
        _, shrinkage, temperature = min(tried)
        return shrinkage, temperature

    # Models of single sites

    def trained(self, flat: Tensor, rows: Array, rate: float) -> Tensor:
        """Return flat parameters after training on rows in this order."""
        return epoch(self.federation.loss, flat, rows, Arm(rate))[0]

    def alone(self) -> Tensor:
        """Return models that a site trains alone, for an epoch a round."""
        start, rate = self.federation.start, self.rates["alone"]
        rounds = [self.cell.batches(number) for number in range(1, self.rounds + 1)]
        rows = map(np.concatenate, zip(*rounds, strict=True))
        return self.logits([self.trained(start, of_site, rate) for of_site in rows])

    def finetuned(self, name: str) -> Tensor:
        """Return the model of an arm, trained further at each site; its held-out rows
        choose for how many epochs.
        """
        model = self.played(name)
        ends = []
        for site, shift in enumerate(self.shifts(name).float()):
            start = self.federation.with_head(model.flat, model.head)
            if name != "fedavg":  # with the priors of the site
                start[-self.cell.classes :] += shift
            tried = [start]
            for number in range(self.rounds + 1, self.rounds + 1 + FINETUNED):
                rows = self.cell.batches(number)[site]
                tried.append(self.trained(tried[-1], rows, self.rates["finetuning"]))
            ends.append(min(tried, key=partial(self.held_loss, site)))
        return self.logits(ends)

    @torch.no_grad()
    def held_loss(self, site: int, flat: Tensor) -> float:
        """Return the loss of a model on a site's held-out rows, 0 without such rows."""
        held = self.cell.of_client(self.cell.held_out, site)
        return float(self.federation.loss(flat, held)) if len(held) else 0.0

    def fedrep(self) -> Tensor:
        """Return FedRep (Collins et al., ICML 2021): one body, a head for each site.

        In a round a site trains its head for ``HEAD_EPOCHS``, then the body for an
        epoch. After the last round every site trains its head.
        """
        flat, size = self.federation.start, self.federation.size
        heads = [flat[-size:]] * self.cell.clients
        for number in range(1, self.rounds + 1):
            features = self.features(flat)
            for site in clients_of(self.cell, number):
                heads[site] = self.head_trained(features, heads[site], site, number)
            flat = self.mean_body(flat, heads, number, self.rates["fedrep"])
        features = self.features(flat)
        ends = []
        for site, head in enumerate(heads):
            last = self.head_trained(features, head, site, self.rounds + 1)
            ends.append(torch.cat([flat[:-size], last]))
        return self.logits(ends)

    def pfedfda(self) -> Tensor:
        """Return pFedFDA (McLaughlin and Su, NeurIPS 2024): Gaussians of each site.

        A site's head is the discriminant of a mixture of its own means and covariance
        and those of all sites, with its own priors. It is fixed while the site trains
        the body.
        """
        flat = self.federation.start
        for number in range(1, self.rounds + 1):
            heads = map(closed.flattened, self.mixed_heads(self.features(flat)))
            flat = self.mean_body(flat, [*heads], number, self.rates["pfedfda"])
        return self.mixtures(self.features(flat))

    def head_trained(
        self, features: Tensor, head: Tensor, site: int, number: int
    ) -> Tensor:
        """Return a site's head after ``HEAD_EPOCHS`` on fixed features."""
        loss = partial(self.federation.loss, read=features)
        rows = np.tile(self.cell.batches(number)[site], HEAD_EPOCHS)
        return epoch(loss, head, rows, Arm(HEAD_RATE))[0]

    def mean_body(
        self, flat: Tensor, heads: Sequence[Tensor], number: int, rate: float
    ) -> Tensor:
        """Return flat parameters with the mean of the bodies that the clients of a
        round train for an epoch, each with its fixed head.
        """
        body, rest = flat.tensor_split([-self.federation.size])
        clients = clients_of(self.cell, number)
        batches = self.cell.batches(number)
        ends = []
        for site in clients:

            def loss(body: Tensor, rows: Array, head: Tensor = heads[site]) -> Tensor:
                return self.federation.loss(torch.cat([body, head]), rows)

            ends.append(epoch(loss, body, batches[site], Arm(rate))[0])
        return torch.cat([self.federation.mean(ends, clients), rest])


def _mixture(of_site: ClassSums, total: ClassSums, share: float) -> ClassSums:
    """Return the sums of a mixture of means and covariances, with a site's priors."""
    priors = total.counts / total.rows
    counts = of_site.counts + priors
    known = (of_site.counts > 0)[:, None]
    mixed = total.means().lerp(of_site.means(), share)
    means = torch.where(known, mixed, total.means())
    within = total.within().lerp(of_site.within(), share)
    sums = counts[:, None] * means
    gram = counts.sum() * within + means.mT @ sums
    return replace(total, counts=counts, sums=sums, gram=gram, trusted=True)


def _fitted_change(inputs: Tensor, labels: Tensor, head: Tensor, pull: float) -> Tensor:
    """Return the change of a head with the lowest loss and pull."""

    def loss(change: Tensor) -> Tensor:
        logits = inputs @ (head + change).mT
        losses = functional.cross_entropy(logits, labels, reduction="sum")
        return losses + pull * change.square().sum()

    return closed.minimum(loss, torch.zeros_like(head))


# What models are worth on own rows


def own_weights(cell: Cell) -> Tensor:
    """Return the weight of each test row for each site, ``[sites, rows]``.

    A row of class ``c`` has the site's share of ``c`` among all its rows, divided by
    the number of test rows of ``c``. Only test rows of a site's corpus count. Rows of
    a site sum to 1.
    """
    counts = torch.from_numpy(cell.counted(np.arange(len(cell.client)))).double()
    labels = torch.from_numpy(cell.labels[cell.test])
    # A site has rows of one corpus.
    home = dict(zip(cell.client.tolist(), cell.corpus.tolist(), strict=False))
    tested_at = [cell.corpus[cell.test] == home[site] for site in range(cell.clients)]
    counted = torch.from_numpy(np.stack(tested_at)).double()
    tested = counted @ functional.one_hot(labels, cell.classes).double()
    counts[tested == 0] = 0
    weights = counted * (counts / tested.clamp(min=1))[:, labels]
    return weights / weights.sum(1, keepdim=True)


def measured(cell: Cell, logits: Tensor) -> Iterator[dict[str, Any]]:
    """Yield for each site accuracy, balanced accuracy, loss and ECE on own rows.

    The row has ``right`` too: which test rows are predicted as labelled.
    """
    labels = torch.from_numpy(cell.labels[cell.test])
    for site, weights in enumerate(own_weights(cell)):
        scores = logits[site]
        right = (scores.argmax(1) == labels).double()
        losses = functional.cross_entropy(scores, labels, reduction="none")
        shares = torch.bincount(labels, weights)
        recalls = torch.bincount(labels, weights * right) / shares
        # Ten bins of equal width: where the model is as sure as it is right?
        sure = scores.softmax(1).max(1).values
        bins = (sure * 10).long().clamp(max=9)
        gaps = torch.bincount(bins, weights * (right - sure))
        rows = int(cell.counts[site].sum())
        yield {
            "site": site,
            "rows": rows,
            "accuracy": float(weights @ right),
            "balanced": float(recalls[shares > 0].mean()),
            "loss": float(weights @ losses),
            "ece": float(gaps.abs().sum()),
            "right": right,
        }


def gain(weights: Tensor, right: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the gain in accuracy on own rows, and its standard error over rows.

    ``right`` and ``other`` may have more rows than there are weights.
    """
    differences = (right - other)[: len(weights)]
    mean = float(weights @ differences)
    return mean, float((weights.square() @ (differences - mean).square()).sqrt())


def site_rows(
    federation: Federation,
    arms: Sequence[str],
    rounds: int,
    rates: Mapping[str, float] = RATES,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm and site, and one of all test rows for a global model.

    ``right`` has a bit for each test row, as hexadecimal digits.
    """
    sites = Sites(federation, rounds, rates)
    for name, logits in sites.answers(arms):
        for row in measured(federation.cell, logits):
            bits = np.packbits(row.pop("right").bool().numpy())
            yield {"arm": name, **row, "right": bits.tobytes().hex()}
        if name in ARMS:
            model = sites.played(name)
            yield {"arm": name, "site": -1} | federation.measure(model)


def add_gains(frame: DataFrame, cell_of: Callable[..., Cell]) -> DataFrame:
    """Return rows of ``site_rows`` with their gain over the stronger way alone.

    That is ``alone-head`` or ``alone``, as far as a run has them, by the mean over its
    sites; ``than`` names it.

    Args:
        frame: has columns data, skew and seed, too.
        cell_of: returns the cell of these three.
    """
    runs = []
    for place, run in frame.groupby(["data", "skew", "seed"]):
        sites = run[run["site"] >= 0].copy()
        accuracy = sites.groupby("arm")["accuracy"].mean()
        stronger = accuracy.reindex(["alone-head", "alone"]).idxmax()
        weights = own_weights(cell_of(*place))
        places = [*zip(sites["arm"], sites["site"], strict=True)]
        answers = map(_unpacked, sites["right"])
        right = dict(zip(places, answers, strict=True))
        sites["than"] = stronger
        sites[["gain", "error"]] = [
            gain(weights[site], right[arm, site], right[stronger, site])
            for arm, site in places
        ]
        runs += [sites, run[run["site"] < 0]]
    return pandas.concat(runs).drop(columns="right")


def _unpacked(digits: str) -> Tensor:
    """Return the bits of ``site_rows``, float64, with up to seven zeros more."""
    packed = np.frombuffer(bytes.fromhex(digits), np.uint8)
    return torch.from_numpy(np.unpackbits(packed)).double()
