"""The supported families of models, a module each, and symmetries that none uses.

Transformers have further continuous symmetries. They are not used: most of them scale
weights, which would change weight decay and Adam's steps. A test counts the dimensions
of all of them.

* Attention heads: ``GL(d_h)`` beyond rotations; under rotary positions a scale per
  frequency; under a norm on queries and keys, scales between their gains.
* Attention biases: a key's bias without rotary positions, and a value's bias if the
  output projection has a bias. See ``fedrot.canonical``.
* Feed-forward: scales of ReLU's neurons, and scales between up and down if there is a
  gate.
* Norms: biases and gains that can be folded into the next projection. If all gains of a
  pre-norm model are folded, its residual stream can be rotated. (Gemma 3's norms of the
  blocks' outputs prevent this.)
* LayerNorm: the mean of its input, which it removes, and constants along its inverse
  gains in the rows that read its output.
* Embeddings: constants that tables, or parallel blocks, can exchange; linear maps of
  embeddings that are projected (ALBERT, ELECTRA, OPT).
* A norm between embeddings and stream (ModernBERT, BLOOM): its gain and bias, which the
  table can compensate.
* Mixtures of experts: one vector added to all rows of the router.
* Relative positions: one constant per head of a bias; in DeBERTa ``GL(d)`` of the
  positions.
* CLIP: a rotation of the space of similarities; the embeddings that the model returns
  would change.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

from fedrot.symmetry.describe.family import Family


def _declared() -> Iterator[Family]:
    """Yield the families that the modules of this package declare."""
    for module in walk_packages(__path__, f"{__name__}."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, Family):
                yield value


#: Every supported family. The tests check function preservation for each.
FAMILIES: tuple[Family, ...] = tuple(dict.fromkeys(_declared()))
