"""Whom a round's updates are aligned to.

Aligning to the broadcast model is the cheapest choice, but clients that trained far from it agree
with each other more than with it. The other anchors make the clients agree with each other; the
round as a whole stays in the broadcast model's coordinates, because whoever comes first is aligned
to the broadcast model before anybody is aligned to it. Moving all clients by one common element
does not change the function of their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from fedrot.aggregation import Mean
from fedrot.alignment import Alignment, align
from fedrot.errors import FedrotError
from fedrot.matching.match import Anchor
from fedrot.options import AlignmentOptions
from fedrot.symmetry.description import Symmetry

Tensors = Mapping[str, Tensor]

#: Generalised Procrustes stops when a pass lowers the total squared distance by less than this share.
CONSENSUS_TOLERANCE = 1e-4

#: Passes after the first; two or three suffice in practice.
CONSENSUS_PASSES = 3


@dataclass(frozen=True)
class AlignedUpdate:
    """An update in the round's coordinates, its weight, and the alignment that brought it there."""

    tensors: Tensors
    weight: float
    alignment: Alignment


Updates = Iterable[tuple[Tensors, float]]
_Round = Callable[[Updates, Anchor, Symmetry, AlignmentOptions], Iterator[AlignedUpdate]]


def _aligned(
    update: Tensors, weight: float, anchor: Anchor, symmetry: Symmetry, options: AlignmentOptions
) -> AlignedUpdate:
    alignment = align(update, anchor, symmetry, options)
    return AlignedUpdate(alignment.apply(update), weight, alignment)


def _to_global(
    updates: Updates, broadcast: Anchor, symmetry: Symmetry, options: AlignmentOptions
) -> Iterator[AlignedUpdate]:
    for update, weight in updates:
        yield _aligned(update, weight, broadcast, symmetry, options)


def _to_first(
    updates: Updates, broadcast: Anchor, symmetry: Symmetry, options: AlignmentOptions
) -> Iterator[AlignedUpdate]:
    anchor = broadcast
    for update, weight in updates:
        result = _aligned(update, weight, anchor, symmetry, options)
        anchor = Anchor(result.tensors) if anchor is broadcast else anchor
        yield result


def _to_running(
    updates: Updates, broadcast: Anchor, symmetry: Symmetry, options: AlignmentOptions
) -> Iterator[AlignedUpdate]:
    anchor, mean = broadcast, Mean()
    for update, weight in updates:
        result = _aligned(update, weight, anchor, symmetry, options)
        mean.add(result.tensors, weight)
        anchor = Anchor(mean.result())
        yield result


def _to_medoid(
    updates: Updates, broadcast: Anchor, symmetry: Symmetry, options: AlignmentOptions
) -> Iterator[AlignedUpdate]:
    """The client with the least weighted squared distance to the others, after alignment to it.

    Distances are over the tensors that alignment moves. Rotations and permutations are isometries, so
    one direction per pair suffices; ``rescale``, ``ridge`` and ``threshold`` make the two differ a
    little, and then the ranking is approximate.
    """
    replies = list(updates)
    anchors = [Anchor(update) for update, _ in replies]
    spread = [0.0] * len(replies)
    for i, (_, weight_i) in enumerate(replies):
        for j, (update_j, weight_j) in enumerate(replies[:i]):
            after = align(update_j, anchors[i], symmetry, options).report.after
            spread[i] += weight_j * after
            spread[j] += weight_i * after
    if not replies:
        return
    medoid = min(range(len(replies)), key=spread.__getitem__)
    centre = _aligned(*replies[medoid], broadcast, symmetry, options)
    anchor = Anchor(centre.tensors)
    for index, (update, weight) in enumerate(replies):
        if index == medoid:
            yield centre
        else:
            yield _aligned(update, weight, anchor, symmetry, options)


def _to_consensus(
    updates: Updates, broadcast: Anchor, symmetry: Symmetry, options: AlignmentOptions
) -> Iterator[AlignedUpdate]:
    """Generalised Procrustes: align to the mean of the aligned, from the running mean onwards."""
    replies = list(updates)
    results = list(_to_running(replies, broadcast, symmetry, options))
    previous = float("inf")
    for _ in range(CONSENSUS_PASSES if len(results) > 1 else 0):
        mean = Mean()
        for result in results:
            mean.add(result.tensors, result.weight)
        anchor = Anchor(mean.result())
        results = [_aligned(u, w, anchor, symmetry, options) for u, w in replies]
        total = sum(r.weight * r.alignment.report.after for r in results)
        if total >= previous * (1 - CONSENSUS_TOLERANCE):
            break
        previous = total
    yield from results


#: The anchors by name.
ANCHORS: dict[str, _Round] = {
    "global": _to_global,
    "running": _to_running,
    "consensus": _to_consensus,
    "first": _to_first,
    "medoid": _to_medoid,
}


def align_round(
    updates: Updates,
    broadcast: Tensors,
    symmetry: Symmetry,
    options: AlignmentOptions | None = None,
    anchor: str = "global",
) -> Iterator[AlignedUpdate]:
    """Align a round's updates, in order.

    Args:
        updates: pairs of tensors and positive weight.
        broadcast: the model the clients received.
        symmetry: from ``symmetry_of``.
        options: see ``AlignmentOptions``.
        anchor: ``global`` (the broadcast model), ``running`` (the weighted mean of what came before),
            ``first`` (the first update), ``medoid`` (the update closest to all others, over what
            alignment moves) or ``consensus`` (generalised Procrustes). The first three read
            ``updates`` lazily and hold one at a time; the last two hold them all.

    Raises:
        FedrotError: the anchor is unknown.
        UpdateError: see ``align``.
    """
    if anchor not in ANCHORS:
        raise FedrotError(f"Unknown anchor '{anchor}'; choose from {', '.join(ANCHORS)}.")
    return ANCHORS[anchor](updates, Anchor(broadcast), symmetry, options or AlignmentOptions())
