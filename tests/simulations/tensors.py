"""Comparison of tensors by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def equal(found: Tensors, expected: Tensors) -> bool:
    """Say whether the second one's tensors have the same bits in the first one."""
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def close(found: Tensors, expected: Tensors, atol: float = 2e-5) -> bool:
    """Say whether both have the same names, and tensors that are near each other."""
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name].float(), tensor.float(), atol=atol)
        for name, tensor in expected.items()
    )
