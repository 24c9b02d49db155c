"""Task heads in closed form from sums over clients' rows, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from fedrot.task_head.choice import Candidate, with_fitted_task_heads
from fedrot.task_head.sums import ClassSums

RIDGES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
#: From 1/32 to 32, wider than fedrot.task_head.losses': regressions and normalised
#: means need small ones.
TEMPERATURES = tuple(2.0 ** (step / 8) for step in range(-40, 41))
#: Weights ``[candidates, classes, width]`` and biases ``[candidates, classes]``.
Head = tuple[Tensor, Tensor]
Losses = npt.NDArray[np.float64]


def sums_of(features: Tensor, labels: Tensor, classes: int) -> ClassSums:
    """Return the sums over rows; every client could send its own, and the server add
    them.
    """
    wide, one_hot = features.double(), functional.one_hot(labels, classes).double()
    return ClassSums(one_hot.sum(0), one_hot.mT @ wide, wide.mT @ wide)


def from_means(
    features: Tensor, labels: Tensor, client: Tensor, classes: int
) -> ClassSums:
    """Return sums whose covariance inside the classes is FedCOF's (arXiv 2412.14326,
    equation 6).

    ``S_c = 1 / (K_c - 1) sum_k n_kc (m_kc - m_c)(m_kc - m_c)^T`` over the ``K_c``
    clients with rows of the class, averaged over classes by rows. Classes at one client
    have no estimate.
    """
    own, one_hot = (
        functional.one_hot(client).double(),
        functional.one_hot(labels, classes).double(),
    )
    counts, sums = (
        own.mT @ one_hot,
        torch.einsum("nk,nc,nd->kcd", own, one_hot, features.double()),
    )
    total, degrees = counts.sum(0), (counts > 0).sum(0) - 1
    means = sums.sum(0) / total.clamp_min(1)[:, None]
    shares = torch.where(degrees > 0, total, 0.0)
    weights = counts * shares / shares.sum() / degrees.clamp_min(1)
    parts = (sums / counts.clamp_min(1)[..., None] - means) * weights.sqrt()[..., None]
    covariance = parts.flatten(0, 1).mT @ parts.flatten(0, 1)
    return ClassSums(
        total, sums.sum(0), total.sum() * covariance + means.mT @ sums.sum(0)
    )


def of_fedrot(total: ClassSums, shrinkages: Sequence[float]) -> Head:
    """Return fedrot's heads of all shrinkages, with logits of bounded size.

    Classes without rows have weights 0.
    """
    like = Candidate("", torch.zeros_like(total.sums), total.counts)
    fitted = with_fitted_task_heads(like, total, shrinkages, bias=True)
    weights = torch.stack([candidate.weight for candidate in fitted])
    return weights, torch.stack([candidate.bias for candidate in fitted])


def ridge(total: ClassSums) -> Head:
    """Return ridge regressions with an intercept: AFL (CVPR 2025) and Fed3R (ICML 2024)
    have none.
    """
    shares, mean = total.counts / total.rows, total.sums.sum(0) / total.rows
    covariance = total.gram / total.rows - torch.outer(mean, mean)
    products = total.sums / total.rows - torch.outer(shares, mean)
    identity = covariance.diagonal().mean() * torch.eye(len(mean)).double()
    strengths = torch.tensor(RIDGES).double()[:, None, None]
    weight = torch.linalg.solve(covariance + strengths * identity, products.mT).mT
    return weight, shares - weight @ mean


def nearest_mean(total: ClassSums) -> Head:
    """Return FedNCM's head, the normalised class means (Legate et al., NeurIPS
    2023).
    """
    weight = functional.normalize(total.means(), dim=1)
    return weight[None], torch.zeros(1, len(weight))


def drawn(
    features: Tensor, labels: Tensor, classes: int, seed: int, rows: int = 2000
) -> Head:
    """Return CCVR's head (Luo et al., NeurIPS 2021): logistic regression on drawn
    features.

    Each class has a Gaussian, and draws in proportion to its rows.
    """
    generator, found, targets = torch.Generator().manual_seed(seed), [], []
    for c in range(classes):
        own = features[labels == c].double()
        if len(own) < 2:
            continue
        covariance, number = own.mT.cov(), max(2, rows * len(own) // len(labels))
        # With few rows the covariance is singular.
        covariance.diagonal().add_(1e-6 * covariance.diagonal().mean())
        noise = torch.randn(number, len(covariance), generator=generator).double()
        found.append(own.mean(0) + noise @ torch.linalg.cholesky(covariance).mT)
        targets += [c] * number
    x, y = with_ones(torch.cat(found)), torch.tensor(targets)

    def loss(head: Tensor) -> Tensor:
        losses = functional.cross_entropy(x @ head.mT, y)
        return losses + 1e-4 * head.square().sum()

    head = minimum(loss, torch.zeros(classes, x.shape[1]).double())
    return head[None, :, :-1], head[None, :, -1]


def with_ones(features: Tensor) -> Tensor:
    """Return features with a column of ones, for a bias; float64."""
    return functional.pad(features.double(), (0, 1), value=1.0)


def minimum(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return where a loss is lowest, by L-BFGS from a start."""
    place = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([place], max_iter=100, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimiser.zero_grad()
        value = loss(place)
        value.backward()
        return value

    optimiser.step(step)
    return place.detach()


def flattened(head: Head) -> Tensor:
    """Return a head as the last of flat parameters, float32."""
    return torch.cat([part.flatten().float() for part in head])


def scores(features: Tensor, head: Head) -> Tensor:
    """Return logits ``[candidates, rows, classes]``."""
    return features.double() @ head[0].double().mT + head[1].double().unsqueeze(-2)


def calibrated(
    features: Tensor,
    labels: Tensor,
    head: Head,
    temperatures: Sequence[float] = TEMPERATURES,
) -> tuple[Head, Losses]:
    """Return the candidate with the lowest loss, divided by its best temperature, and
    its losses.
    """
    tried = [
        (
            functional.cross_entropy(logits / t, labels, reduction="none"),
            weight / t,
            bias / t,
        )
        for weight, bias, logits in zip(*head, scores(features, head), strict=True)
        for t in temperatures
    ]
    losses, weight, bias = min(tried, key=lambda found: float(found[0].mean()))
    return (weight, bias), losses.numpy()
