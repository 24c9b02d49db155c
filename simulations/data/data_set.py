"""Data sets in memory: single label, multi-label or regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy.typing as npt

Kind: TypeAlias = Literal["single", "multi", "regression"]
METRICS_OF_KIND: Mapping[Kind, tuple[str, ...]] = {
    "single": ("accuracy", "macro_f1"),
    "multi": ("macro_f1", "micro_f1", "accuracy"),
    "regression": ("pearson", "spearman"),
}


@dataclass(frozen=True)
class Split:
    """Rows of one split; subclasses add the inputs of models.

    Attributes:
        labels: int64 ``[n]`` (single label), float32 ``[n, classes]`` of 0 and 1 (multi-label) or
            float32 ``[n]`` (regression).
        columns: every other column by name, ``n`` values each.
    """

    labels: npt.NDArray[Any]
    columns: Mapping[str, Sequence[object]]

    def __len__(self) -> int:
        return len(self.labels)


S_co = TypeVar("S_co", bound=Split, covariant=True)


@dataclass(frozen=True)
class DataSet(Generic[S_co]):
    """A data set.

    Attributes:
        label_names: one name per class (``("score",)`` in regression).
        metrics: names for ``evaluate_predictions``, the headline metric first.
        test: the held-out split: validation for GLUE tasks, test for the emotion corpora.
        note: how the rows were divided; see ``Source``.
        said: which rows were left out, and how the labels were read; see ``Source`` and ``Labels``.
    """

    name: str
    kind: Kind
    label_names: tuple[str, ...]
    metrics: tuple[str, ...]
    train: S_co
    test: S_co
    note: str = field(default="", kw_only=True)
    said: str = field(default="", kw_only=True)
