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

from fedrot.collect.gram_sketch import GramSketch, energy_kept, sketched
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

    All have one rank, the largest that fits. A matrix that is no larger than its sketch, or of no more
    inputs than this rank, has none: it is sent as it is, within the same bytes.

    Args:
        budget: for all of them.
        grams: ``[n, n]``, by what they are called in errors.
        entry: bytes of an entry of a matrix that is sent as it is.

    Raises:
        FedrotError: the diagonals alone do not fit, or a matrix is not finite.
    """
    sizes = [len(gram) for gram in grams.values()]

    def whole(size: int) -> int:
        return entry * size**2 + _HEADER

    def bytes_of(size: int, rank: int) -> int:
        smaller = size * (_FACTOR.itemsize * rank + _DIAGONAL.itemsize)
        return min(smaller, whole(size)) if rank < size else whole(size)

    def spent(rank: int) -> int:
        return sum(bytes_of(size, rank) for size in sizes)

    rank = bisect_right(range(max(sizes, default=0) + 1), budget, key=spent) - 1
    if rank < 0:
        raise FedrotError(
            f"The Gram matrices may take {budget:,} bytes, and their diagonals take {spent(0):,}. Give "
            "a larger share."
        )
    found, kept = dict[str, GramSketch](), dict[str, float]()
    for name, gram in grams.items():
        if bytes_of(len(gram), rank) < whole(len(gram)):
            found[name] = _sketch(name, gram, rank)
            kept[name] = energy_kept(gram, found[name])
    log(
        INFO,
        "Statistics: %d Gram matrices take %.1f MB instead of %.1f; %d sketches of rank %d keep %.1f %% "
        "to %.1f %% of their energy.",
        len(sizes),
        spent(rank) / 1e6,
        sum(map(whole, sizes)) / 1e6,
        len(found),
        rank,
        100 * min(kept.values(), default=1),
        100 * max(kept.values(), default=1),
    )
    return found


def _sketch(name: str, gram: Tensor, rank: int) -> GramSketch:
    try:
        return sketched(gram, rank)
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

        Args:
            kind: of the matrix.
            names: of the tensors that the matrix belongs to.
            array: from ``encode_sketch``.

        Raises:
            UpdateError: the array is no sketch of a Gram matrix, its size is not that of the tensors'
                inputs, or all sketches together stand for too much.
        """
        if kind not in INPUT_AXIS:
            raise UpdateError(f"they are '{kind:.60}', and only Gram matrices are sketched.")
        sketch = _decoded(array)
        if self._shapes is not None:
            self._check(kind, names, len(sketch.diagonal), self._shapes)
        return sketch.matrix()

    def _check(
        self, kind: str, names: Sequence[str], size: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        for name in names:
            shape = shapes.get(name, ())
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
