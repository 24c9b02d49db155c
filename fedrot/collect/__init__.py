"""What a client computes beside its weights: activations, Gram matrices, Fisher information."""

from fedrot.collect import known_kinds

__all__ = ["known_kinds"]
