"""Anchors: the model that each update of a round is aligned to, by name in ``ANCHORS``.

(``matching.anchor.Anchor`` holds such a model's tensors for the solvers.)

``global`` aligns to the broadcast model. ``running`` aligns clients to each other,
because clients that trained long are closer to each other than to the broadcast model.
The first update is aligned to the broadcast model, so that the round stays in the
broadcast model's coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from fedrot.aggregation import Mean
from fedrot.alignment.align import Alignment, align
from fedrot.collect.activations import Activations
from fedrot.errors import FedrotError, UpdateError
from fedrot.matching.anchor import Anchor
from fedrot.options import AlignmentOptions, checked_options
from fedrot.symmetry.canonical import canonical
from fedrot.symmetry.groups import Symmetry, check_symmetry
from fedrot.tensors import Tensors, compute_dtype, full_float32

#: Finds the alignment of an update to an anchor.
Finder = Callable[[Tensors, Anchor], Alignment]

#: Returns the activations of an anchor and an update on the same inputs, see
#: ``probing``.
Evidence = Callable[[Tensors, Tensors], Activations]

#: An update comes from another basis if the cosine of its embeddings with the anchor's
#: is smaller. The cosine of unrelated models is near 0, that of models trained far from
#: a common start at least 0.4.
SAME_BASIS = 0.25

#: Maximum number of entries of one embedding that ``base_cosine`` compares.
_COMPARED = 2**20

#: An update's tensors and its positive weight.
Weighted = tuple[Tensors, float]


@dataclass(frozen=True)
class AlignedUpdate:
    """An update in the round's coordinates, its weight, and the alignment that moved it
    there.
    """

    tensors: Tensors
    weight: float
    alignment: Alignment


class GlobalAnchor:
    """The broadcast model; base class of the other anchors.

    A round calls ``align`` for each update in turn, and ``accept`` with the aligned
    update if the update is merged.

    Attributes:
        current: the anchor of the next update.
    """

    def __init__(self, broadcast: Anchor, find: Finder) -> None:
        self.broadcast = self.current = broadcast
        self.find = find

    def align(self, update: Tensors) -> Alignment:
        """Return the alignment of one update.

        If the update cannot be matched to an anchor made of other clients' updates, it
        is aligned to the broadcast model.

        Raises:
            UpdateError: the update cannot be aligned to the broadcast model.
        """
        try:
            return self.find(update, self.current)
        except UpdateError:
            if self.current is self.broadcast:
                raise
            alignment = self.find(update, self.broadcast)
            self.current.forget()
            return alignment

    def accept(self, aligned: Tensors, weight: float) -> None:
        """Follow an update that ``align`` has aligned and that is part of the round's
        mean.
        """

    def include(self, aligned: Tensors, weight: float) -> None:
        """Follow an update of the round's mean that was aligned at its client."""


class RunningAnchor(GlobalAnchor):
    """The weighted mean of the updates accepted so far.

    Args:
        mean: a mean to which the caller adds each update before ``accept``; if None,
            the anchor adds them to a mean of its own.
    """

    def __init__(
        self, broadcast: Anchor, find: Finder, mean: Mean | None = None
    ) -> None:
        super().__init__(broadcast, find)
        self._shared, self._weight = mean is not None, 0.0
        self.mean = Mean() if mean is None else mean

    def accept(self, aligned: Tensors, weight: float) -> None:
        """Move the anchor towards the update."""
        before = self._weight
        self.include(aligned, weight)
        self.current = self.current.towards_last(
            self.mean.current, 1 - before / self._weight
        )

    def include(self, aligned: Tensors, weight: float) -> None:
        """Add the update to the mean; the anchor follows at the next ``accept``."""
        if not self._shared:
            self.mean.add(aligned, weight)
        self._weight += weight


#: The anchors by name. Plug-ins add theirs.
ANCHORS: dict[str, type[GlobalAnchor]] = {
    "global": GlobalAnchor,
    "running": RunningAnchor,
}


def check_anchor(name: str) -> None:
    """Raise ``FedrotError`` if there is no anchor of this name."""
    if name not in ANCHORS:
        raise FedrotError(f"Unknown anchor '{name}'; choose from {', '.join(ANCHORS)}.")


@full_float32()
def base_cosine(update: Tensors, anchor: Tensors, symmetry: Symmetry) -> float:
    """Return the cosine of two models' embeddings: near 0 if the models have different
    bases.

    Training changes the embeddings of rare tokens little, so that models from one start
    have similar embeddings. Embeddings of models from different starts, or with another
    order of the residual stream, are uncorrelated. Large embeddings are compared in
    evenly spaced rows. The result is 1 if the model has no such embeddings.
    """
    inside = {
        s.tensor for g in symmetry.groups if g.part != "residual" for s in g.slots
    }
    stream = {
        s.tensor for g in symmetry.groups if g.part == "residual" for s in g.slots
    }
    names = [name for name in stream - inside if len(symmetry.shapes[name]) > 1]
    products = []
    for name in names:
        step = math.ceil(math.prod(symmetry.shapes[name]) / _COMPARED)
        u, a = (t[name].detach()[::step] for t in (update, anchor))
        wide = torch.promote_types(compute_dtype(u), compute_dtype(a))
        u, a = (t.to(wide).flatten() for t in (u, a))
        products.append(
            torch.stack([torch.dot(u, a), torch.dot(u, u), torch.dot(a, a)]).double()
        )
    across, ours, theirs = (
        torch.stack(products).sum(0).tolist() if products else (0.0, 0.0, 0.0)
    )
    size = math.sqrt(ours * theirs)
    return across / size if size > 0 else 1.0


def in_other_basis(update: Tensors, anchor: Tensors, symmetry: Symmetry) -> bool:
    """Return whether an update comes from another basis than the anchor's."""
    return base_cosine(update, anchor, symmetry) < SAME_BASIS


def decided(
    options: AlignmentOptions, other_basis: AlignmentOptions | None, symmetry: Symmetry
) -> tuple[AlignmentOptions, AlignmentOptions | None]:
    """Return the options of a round, with ``canonical`` decided for a model.

    If one of the two is canonical, both are: a mean must not mix canonical and other
    tensors.
    """
    options = options.for_model(symmetry)
    if other_basis is None:
        return options, None
    other_basis = other_basis.for_model(symmetry)
    either = bool(options.canonical or other_basis.canonical)
    return replace(options, canonical=either), replace(other_basis, canonical=either)


def finder(
    broadcast: Tensors,
    symmetry: Symmetry,
    options: AlignmentOptions,
    other_basis: AlignmentOptions | None = None,
    evidence: Evidence | None = None,
) -> Finder:
    """Return the function that aligns one update to one anchor; arguments as in
    ``align_round``.
    """

    options, other_basis = decided(options, other_basis, symmetry)

    def far(a: Tensors, b: Tensors) -> bool:
        return in_other_basis(a, b, symmetry)

    def find(update: Tensors, to: Anchor) -> Alignment:
        chosen = options
        # Clients that trained far from one start may be further from each other than
        # from this start.
        if other_basis is not None and far(update, to.tensors):
            chosen = (
                other_basis
                if far(update, broadcast) or far(to.tensors, broadcast)
                else options
            )
        asked = evidence if "residual" in chosen.parts else None
        activations = None
        if asked is not None and chosen.canonical:
            activations = asked(
                canonical(to.tensors, symmetry), canonical(update, symmetry)
            )
        elif asked is not None:
            activations = asked(to.tensors, update)
        return align(update, to, symmetry, chosen, activations)

    return find


def align_round(
    updates: Iterable[Weighted],
    broadcast: Tensors,
    symmetry: Symmetry,
    options: AlignmentOptions | None = None,
    other_basis: AlignmentOptions | None = None,
    evidence: Evidence | None = None,
) -> Iterator[AlignedUpdate]:
    """Align a round's updates, in order.

    Args:
        updates: pairs of tensors and positive weight, which are read one at a time.
        broadcast: the model that the clients received.
        symmetry: from ``symmetry_of``.
        options: see ``AlignmentOptions``. Their anchor is ``running`` (the weighted
            mean of the updates so far) or ``global`` (the broadcast model).
        other_basis: options for an update from another basis than its anchor
            (``base_cosine`` below ``SAME_BASIS``, unless both are near the broadcast
            model); if None, ``options`` hold for it too. If one of the two is
            ``canonical``, both are.
        evidence: returns the activations of an anchor and an update; called wherever
            the residual stream is matched, with canonical tensors where the options say
            so.

    Raises:
        FedrotError: the anchor is unknown.
        UpdateError: see ``align``.
    """
    check_symmetry(symmetry)
    chosen = checked_options(options)
    check_anchor(chosen.anchor)
    find = finder(broadcast, symmetry, chosen, other_basis, evidence)
    rule = ANCHORS[chosen.anchor](Anchor(broadcast), find)

    def aligned(given: Weighted) -> AlignedUpdate:
        update, weight = given
        alignment = rule.align(update)
        result = AlignedUpdate(alignment.apply(update), weight, alignment)
        rule.accept(result.tensors, weight)
        return result

    # Not a generator: its variables would hold the last update until the next one has
    # arrived.
    return map(aligned, updates)
