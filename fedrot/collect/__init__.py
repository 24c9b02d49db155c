"""What a client computes beside its weights: activations, Gram matrices, Fisher information."""

from fedrot.collect import kinds

__all__ = ["kinds"]
