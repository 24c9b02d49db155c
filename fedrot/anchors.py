"""Whom a round's updates are aligned to.

Aligning to the broadcast model is the cheapest choice, but clients that trained far from it agree
with each other more than with it. The other anchors make the clients agree with each other; the
round as a whole stays in the broadcast model's coordinates, because whoever comes first is aligned
to the broadcast model before anybody is aligned to it. Moving all clients by one common element
does not change the function of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from fedrot.aggregation import Mean
from fedrot.alignment import Alignment, align
from fedrot.collect.activations import Activations
from fedrot.errors import FedrotError
from fedrot.matching.stages import Anchor
from fedrot.options import AlignmentOptions
from fedrot.precision import full_float32
from fedrot.symmetry.groups import Symmetry, check_symmetry
from fedrot.tensors import Tensors, compute_dtype

#: Finds the alignment of an update to an anchor.
Aligner = Callable[[Tensors, Anchor], Alignment]

#: Returns what is known beside the weights of an anchor and an update, see ``probing``.
Evidence = Callable[[Tensors, Tensors], Activations]

#: Updates whose embeddings' cosine with the anchor's is below this come from another basis.
SAME_BASE = 0.5

#: So many entries of a matrix are enough to tell two bases apart.
_COMPARED = 2**20

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

#: Aligns a round's updates. What it has yielded it forgets before it asks for the next one, so that no
#: two updates are held at a time.
_Round = Callable[[Updates, Anchor, Aligner], Iterator[AlignedUpdate]]


@full_float32()
def base_cosine(update: Tensors, anchor: Tensors, symmetry: Symmetry) -> float:
    """Return the cosine of the two models' embeddings: near 0 if their residual streams differ.

    Models that were trained from one start keep much of it in the embeddings of rare tokens; models
    from different starts, or in different orders of the residual stream, share nothing. 1 where
    nothing but the residual stream moves a matrix, so that there is nothing to compare. Of large
    embeddings an even selection of rows is compared.
    """
    inside = {s.tensor for g in symmetry.groups if g.part != "residual" for s in g.slots}
    stream = {s.tensor for g in symmetry.groups if g.part == "residual" for s in g.slots}
    names = [name for name in stream - inside if len(symmetry.shapes[name]) > 1]
    products = []
    for name in names:
        step = math.ceil(math.prod(symmetry.shapes[name]) / _COMPARED)
        u, a = (t[name].detach()[::step] for t in (update, anchor))
        u, a = (t.to(compute_dtype(t)).flatten() for t in (u, a))
        products.append(torch.stack([torch.dot(u, a), torch.dot(u, u), torch.dot(a, a)]).double())
    across, ours, theirs = torch.stack(products).sum(0).tolist() if products else (0.0, 0.0, 0.0)
    size = math.sqrt(ours * theirs)
    return across / size if size > 0 else 1.0


def _aligned(update: Tensors, weight: float, anchor: Anchor, align_one: Aligner) -> AlignedUpdate:
    alignment = align_one(update, anchor)
    return AlignedUpdate(alignment.apply(update), weight, alignment)


def _to_global(updates: Updates, broadcast: Anchor, align_one: Aligner) -> Iterator[AlignedUpdate]:
    for update, weight in updates:
        yield _aligned(update, weight, broadcast, align_one)
        del update


def _to_first(updates: Updates, broadcast: Anchor, align_one: Aligner) -> Iterator[AlignedUpdate]:
    anchor = broadcast
    for update, weight in updates:
        result = _aligned(update, weight, anchor, align_one)
        anchor = Anchor(result.tensors) if anchor is broadcast else anchor
        yield result
        del update, result


def _to_running(updates: Updates, broadcast: Anchor, align_one: Aligner) -> Iterator[AlignedUpdate]:
    mean = Mean()
    for result in _to_mean(updates, broadcast, align_one, mean):
        mean.add(result.tensors, result.weight)
        yield result
        del result


def _to_mean(
    updates: Updates, broadcast: Anchor, align_one: Aligner, mean: Mean
) -> Iterator[AlignedUpdate]:
    """Align every update to a mean that somebody else folds them into, once there is one."""
    anchor = broadcast
    for update, weight in updates:
        before = mean.weight
        yield _aligned(update, weight, anchor, align_one)
        del update
        if mean.weight > before:
            anchor = anchor.towards_last(mean.current, 1 - before / mean.weight)


def _to_medoid(updates: Updates, broadcast: Anchor, align_one: Aligner) -> Iterator[AlignedUpdate]:
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
            after = align_one(update_j, anchors[i]).report.after
            spread[i] += weight_j * after
            spread[j] += weight_i * after
    if not replies:
        return
    medoid = min(range(len(replies)), key=spread.__getitem__)
    centre = _aligned(*replies[medoid], broadcast, align_one)
    anchor = Anchor(centre.tensors)
    for index, (update, weight) in enumerate(replies):
        if index == medoid:
            yield centre
        else:
            yield _aligned(update, weight, anchor, align_one)


def _to_consensus(updates: Updates, broadcast: Anchor, align_one: Aligner) -> Iterator[AlignedUpdate]:
    """Generalised Procrustes: align to the mean of the aligned, from the running mean onwards.

    The running mean starts with the heaviest update, and of equal weights with the smallest norm, so
    that the result does not depend on the order in which updates come.
    """
    given = list(updates)
    order = sorted(range(len(given)), key=lambda i: (-given[i][1], _norm(given[i][0])))
    replies = [given[i] for i in order]
    # Alignments are small, moved models are not: they are moved again where they are needed.
    found = [result.alignment for result in _to_running(replies, broadcast, align_one)]
    previous = float("inf")
    for _ in range(CONSENSUS_PASSES if len(found) > 1 else 0):
        mean = Mean()
        for (update, weight), alignment in zip(replies, found, strict=True):
            mean.add(alignment.apply(update), weight)
        anchor = Anchor(mean.current)
        found = [align_one(update, anchor) for update, _ in replies]
        total = sum(w * a.report.after for (_, w), a in zip(replies, found, strict=True))
        if total >= previous * (1 - CONSENSUS_TOLERANCE):
            break
        previous = total
    for index, (update, weight) in enumerate(given):
        alignment = found[order.index(index)]
        yield AlignedUpdate(alignment.apply(update), weight, alignment)


def _norm(update: Tensors) -> float:
    squares = (
        torch.linalg.vector_norm(t.double()) ** 2 for t in update.values() if t.is_floating_point()
    )
    return float(sum(squares))


#: Anchors that are known only once all updates are.
OF_ALL = ("consensus", "medoid")

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
    other_basis: AlignmentOptions | None = None,
    evidence: Evidence | None = None,
    running: Mean | None = None,
) -> Iterator[AlignedUpdate]:
    """Align a round's updates, in order.

    Args:
        updates: pairs of tensors and positive weight.
        broadcast: the model the clients received.
        symmetry: from ``symmetry_of``.
        options: see ``AlignmentOptions``.
        anchor: ``global`` (the broadcast model), ``running`` (the weighted mean of what came before),
            ``first`` (the first update), ``medoid`` (the update closest to all others, over what
            alignment moves) or ``consensus`` (generalised Procrustes, whatever the order of the
            updates). The first three read ``updates`` lazily and hold one at a time; the last two
            hold them all, as they were given.
        other_basis: options for an update from another basis than its anchor (``base_cosine`` below
            ``SAME_BASE``, and not both near the broadcast model); None treats it like the others.
        evidence: gives the activations of an anchor and an update, asked for wherever the residual
            stream is matched.
        running: the mean that the caller folds every aligned update into before asking for the next
            one; with ``anchor="running"`` it is the anchor, which is then not held twice.

    Raises:
        FedrotError: the anchor is unknown.
        UpdateError: see ``align``.
    """
    check_symmetry(symmetry)
    if anchor not in ANCHORS:
        raise FedrotError(f"Unknown anchor '{anchor}'; choose from {', '.join(ANCHORS)}.")
    usual = options or AlignmentOptions()

    def same_base(update: Tensors, to: Tensors) -> bool:
        """Clients that trained far from one start may be further from each other than from it."""

        def near(a: Tensors, b: Tensors) -> bool:
            return base_cosine(a, b, symmetry) >= SAME_BASE

        return near(update, to) or (near(update, broadcast) and near(to, broadcast))

    def align_one(update: Tensors, to: Anchor) -> Alignment:
        chosen = usual
        if other_basis is not None and not same_base(update, to.tensors):
            chosen = other_basis
        asked = evidence is not None and "residual" in chosen.parts
        activations = evidence(to.tensors, update) if asked and evidence is not None else None
        return align(update, to, symmetry, chosen, activations)

    if anchor == "running" and running is not None:
        return _to_mean(updates, Anchor(broadcast), align_one, running)
    return ANCHORS[anchor](updates, Anchor(broadcast), align_one)
