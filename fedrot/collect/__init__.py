"""What a client collects: activations, Gram matrices, Fisher information."""

# The import registers the collectors for their kinds of statistics.
from fedrot.collect import fisher, gram

__all__ = ["fisher", "gram"]
