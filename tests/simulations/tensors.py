"""Comparison of tensors by name."""

import torch


def equal(found, expected):
    """Say whether the second one's tensors have the same bits in the first one."""
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def close(found, expected, atol=2e-5):
    """Say whether both have the same names, and tensors that are near each other."""
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name].float(), tensor.float(), atol=atol)
        for name, tensor in expected.items()
    )
