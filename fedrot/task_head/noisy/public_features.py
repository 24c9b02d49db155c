"""``PublicFeatures``: what unlabelled rows that are nobody's say about features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.task_head.labelled_rows import labelled_rows
from fedrot.task_head.outputs import SINGLE
from fedrot.task_head.sums import unlike
from fedrot.tensors import TensorDict, Tensors


@dataclass(frozen=True, eq=False)
class Clipping:
    """How a site bounds the features of a row before it sums them.

    Attributes:
        mean: subtracted from each row, float64 ``[inputs]``.
        radius: the length that a centred row may have, float64 ``[]``.

    Raises:
        UpdateError: another dtype or shape, not finite, or a radius that is not above
            0.
    """

    mean: Tensor
    radius: Tensor

    def __post_init__(self) -> None:
        shapes = {"mean": (self.mean.numel(),), "radius": ()}
        for name, shape in shapes.items():
            if reason := unlike(getattr(self, name), shape):
                raise UpdateError(f"Of the public features, the '{name}' {reason}.")
        if not float(self.radius) > 0:
            raise UpdateError(
                f"The radius of the public features is {float(self.radius):g}. It has "
                "to be above 0: give public rows that differ."
            )

    def clip(self, rows: Tensor) -> Tensor:
        """Return rows in units of the radius, none longer than 1.

        A row that is not finite becomes 0.

        Args:
            rows: ``[rows, inputs]``.
        """
        centred = (rows - self.mean.to(rows)) / self.radius.to(rows)
        usable = torch.isfinite(centred).all(1, keepdim=True)
        centred = torch.where(usable, centred, 0.0)
        return centred / centred.norm(dim=1, keepdim=True).clamp(min=1)


@dataclass(frozen=True, eq=False)
class PublicFeatures:
    """Features of public rows, before any private row is read.

    Attributes:
        clipping: by the mean of the rows, and the median of their distances from it.
        values: eigenvalues of their covariance, float64 ``[inputs]``.
        vectors: its eigenvectors, ``[inputs, inputs]``.
    """

    clipping: Clipping
    values: Tensor
    vectors: Tensor


def public_features(
    model: nn.Module, batches: Iterable[Tensors], task_head: str
) -> PublicFeatures:
    """Return what public rows say about the inputs of a task head.

    Args:
        model: a ``transformers`` classifier of sequences; it is run in evaluation mode,
            without gradients, and is not changed.
        batches: keyword arguments of the model's forward. Labels are not needed and not
            read.
        task_head: the name of the model's last linear layer, from ``task_head_of``.

    Example: ``public = public_features(model, loader, "classifier")``

    Raises:
        FedrotError: see ``labelled_rows``; or there are fewer than two rows.
        UpdateError: the features are not finite, or do not differ.
    """
    unlabelled = _with_labels(batches)
    features = torch.cat(
        [rows.cpu() for rows, *_ in labelled_rows(model, unlabelled, SINGLE, task_head)]
    )
    if len(features) < 2:
        raise FedrotError(
            f"There are {len(features)} public rows, which have no covariance. Give "
            "some hundreds of texts that are nobody's."
        )
    mean = features.mean(0)
    clipping = Clipping(mean, torch.linalg.vector_norm(features - mean, dim=1).median())
    values, vectors = torch.linalg.eigh(features.mT.cov())
    return PublicFeatures(clipping, values.clamp(min=0), vectors)


def _with_labels(batches: Iterable[Tensors]) -> Iterator[TensorDict]:
    """Yield batches with a label for each row, since rows without one are not read."""
    for batch in batches:
        rows = len(next(iter(batch.values())))
        yield {**batch, "labels": torch.zeros(rows, dtype=torch.int64)}
