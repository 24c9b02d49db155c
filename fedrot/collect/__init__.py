"""Activations, Gram matrices and Fisher information that a client collects from its
model.
"""

# The import registers the collectors for their kinds of statistics.
from fedrot.collect import fisher, gram

__all__ = ["fisher", "gram"]
