"""Activations, Gram matrices and Fisher information, collected by a client."""

# The import registers the collectors for their kinds of statistics.
from fedrot.collect import fisher, gram

__all__ = ["fisher", "gram"]
