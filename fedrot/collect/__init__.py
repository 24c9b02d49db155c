"""Activations, Gram matrices and Fisher information that a client collects from its model."""

from fedrot.collect import known_kinds

__all__ = ["known_kinds"]
