"""Flower records as tensors and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor


def to_tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    """Return the arrays as CPU tensors of the same names, shapes and dtypes."""
    return {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}


def replace_changed(
    arrays: ArrayRecord, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> ArrayRecord:
    """Return ``arrays`` with the tensors that were replaced or cast; the others keep their bytes."""

    def same(name: str, array: Array) -> bool:
        return after[name] is before[name] and f"torch.{array.dtype}" == str(after[name].dtype)

    return ArrayRecord(
        {
            name: array if same(name, array) else Array(after[name].cpu().numpy())
            for name, array in arrays.items()
        }
    )
