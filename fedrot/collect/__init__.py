"""Activations, Gram matrices and Fisher information that a client collects from its model."""

# Collectors register themselves for their kind of statistics when they are imported.
from fedrot.collect import fisher, gram

__all__ = ["fisher", "gram"]
