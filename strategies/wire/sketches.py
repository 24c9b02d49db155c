"""Sketches of Gram matrices as arrays of a reply, and back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from logging import INFO
from math import prod

import numpy as np
import torch
from flwr.app import Array
from flwr.common import log
from torch import Tensor

from fedrot.collect.gram_sketch import GramSketch, sketched
from fedrot.collect.statistics import INPUT_AXIS
from fedrot.errors import FedrotError, UpdateError

#: The ``stype`` of a sketch.
SKETCH = "fedrot.gram-sketch"

#: Entries on the wire.
_FACTOR, _DIAGONAL = np.dtype("<f2"), np.dtype("<f4")

#: Bytes of another matrix on the wire beside its entries.
_HEADER = 128

#: Sketches of one reply may stand for so many entries in all, or for so many times the model's.
_MOST_ENTRIES, _MOST_TIMES = 2**24, 4


def sketches_within(budget: int, grams: Mapping[str, Tensor], entry: int) -> dict[str, GramSketch]:
    """Return sketches of full Gram matrices that together fit into a number of bytes.

    One rule shares the bytes out: a sketch has the eigenpairs that explain at least a share ``t`` of its
    matrix's trace at unit diagonal, and ``t``, the same for all, is as small as the bytes allow. So the
    spectral error of each sketch is below ``t`` times the trace. A matrix that is no larger than its
    sketch has none, and is sent as it is; so are all if all fit.

    Args:
        budget: for all of them.
        grams: ``[n, n]``, by what they are called in errors.
        entry: bytes of an entry of a matrix that is sent as it is.

    Raises:
        FedrotError: the diagonals alone do not fit, or a matrix is not finite.
    """

    def whole(name: str) -> int:
        return entry * len(grams[name]) ** 2 + _HEADER

    def smaller(name: str, rank: int) -> int:
        return len(grams[name]) * (_FACTOR.itemsize * rank + _DIAGONAL.itemsize)

    def spent(ranks: Mapping[str, int]) -> int:
        return sum(min(whole(name), smaller(name, rank)) for name, rank in ranks.items())

    in_full, least = sum(map(whole, grams)), spent(dict.fromkeys(grams, 0))
    if least > budget:
        raise FedrotError(
            f"The Gram matrices may take {budget:,} bytes, and their diagonals take {least:,}. Give a "
            "larger share."
        )
    if in_full <= budget:
        return {}
    entire = {name: _entire(name, gram) for name, gram in grams.items()}
    explained = {name: sketch.explained() for name, sketch in entire.items()}

    def ranks_at(share: float) -> dict[str, int]:
        return {name: int((shares >= share).sum()) for name, shares in explained.items()}

    everything = torch.cat(list(explained.values()))
    steps = everything[everything > 0].unique().flip(0).tolist()
    fitting = bisect_right(steps, budget, key=lambda share: spent(ranks_at(share)))
    ranks = ranks_at(steps[fitting - 1]) if fitting else dict.fromkeys(grams, 0)
    found = {n: entire[n].cut(rank) for n, rank in ranks.items() if smaller(n, rank) < whole(n)}
    kept = [float(sketch.explained().sum()) for sketch in found.values()]
    cut = [ranks[name] for name in found]
    log(
        INFO,
        "Statistics: %d Gram matrices take %.1f MB instead of %.1f; %d sketches of rank %d to %d keep "
        "%.1f %% to %.1f %% of the inputs' energy.",
        *(len(grams), spent(ranks) / 1e6, in_full / 1e6),
        *(len(found), min(cut), max(cut), 100 * min(kept), 100 * max(kept)),
    )
    return found


def _entire(name: str, gram: Tensor) -> GramSketch:
    """Return the sketch of full rank."""
    try:
        return sketched(gram)
    except FedrotError as error:
        raise FedrotError(f"The Gram matrix of '{name}' {error}") from error


def encode_sketch(sketch: GramSketch) -> Array:
    """Return a sketch as an array: the bytes of the diagonal, then those of the factor.

    The array's shape and dtype are those of the factor.
    """
    values = (sketch.diagonal.numpy().astype(_DIAGONAL), sketch.factor.numpy().astype(_FACTOR))
    data = b"".join(value.tobytes() for value in values)
    return Array(_FACTOR.name, tuple(sketch.factor.shape), SKETCH, data)


def _decoded(array: Array) -> GramSketch:
    size, rank = array.shape if len(array.shape) == 2 else (-1, -1)
    expected = size * (_DIAGONAL.itemsize + rank * _FACTOR.itemsize)
    if array.dtype != _FACTOR.name or not 0 <= rank <= size or len(array.data) != expected:
        raise UpdateError(
            f"a sketch [in, rank] of {array.dtype!r:.60} {array.shape!r:.60}, the rank at most in, does "
            f"not have {len(array.data)} bytes."
        )
    diagonal = np.frombuffer(array.data, _DIAGONAL, size)
    factor = np.frombuffer(array.data, _FACTOR, size * rank, offset=diagonal.nbytes)
    sketch = GramSketch(
        torch.from_numpy(factor.reshape(size, rank).copy()), torch.from_numpy(diagonal.copy())
    )
    if problem := sketch.problem():
        raise UpdateError(f"the sketch has {problem}.")
    return sketch


class SketchReader:
    """Reads the sketches of one reply, which stand for a bounded number of entries in all.

    Args:
        shapes: of the model's tensors; None checks no sizes, for a client's own statistics.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        self._shapes = shapes
        entries = sum(prod(shape) for shape in (shapes or {}).values())
        self._left = max(_MOST_ENTRIES, _MOST_TIMES * entries)

    def read(self, kind: str, names: Sequence[str], array: Array) -> Tensor:
        """Return the matrix of a sketch, float32 ``[n, n]``; it is made after all checks.

        Raises:
            UpdateError: the array is no sketch of a Gram matrix, its size is not that of the inputs of
                the tensors ``names``, or all sketches together stand for too much.
        """
        if kind not in INPUT_AXIS:
            raise UpdateError(f"they are '{kind:.60}', and only Gram matrices are sketched.")
        sketch = _decoded(array)
        if self._shapes is None:
            return sketch.matrix()
        size = len(sketch.diagonal)
        for name in names:
            shape = self._shapes.get(name, ())
            if len(shape) != 2 or shape[INPUT_AXIS[kind]] != size:
                raise UpdateError(
                    f"the sketch has {size} inputs, and '{name:.60}' has shape {list(shape)}."
                )
        self._left -= size**2
        if self._left < 0:
            raise UpdateError(
                "the sketches stand for far more entries than the model has. Send the matrices in full, "
                "without a share."
            )
        return sketch.matrix()
