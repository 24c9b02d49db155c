"""Anchors: the model that each update of a round is aligned to.

``ANCHORS`` holds the rules by name; a rule chooses the anchor of the next update.
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
from functools import partial

import torch

from fedrot.aggregation import Mean
from fedrot.alignment.align import Alignment, align_checked
from fedrot.collect.activations import Activations
from fedrot.errors import FedrotError, UpdateError
from fedrot.matching.anchor import Anchor
from fedrot.options import AlignmentOptions, checked_options
from fedrot.symmetry.canonical import canonical
from fedrot.symmetry.groups import Symmetry, check_symmetry
from fedrot.tensors import Tensors, check_update, compute_dtype, full_float32

#: Finds the alignment of a checked update to an anchor.
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
    """An update in the round's coordinates, its weight, and its alignment."""

    tensors: Tensors
    weight: float
    alignment: Alignment


class AnchorRule:
    """Chooses the anchor of each update of a round; base class of a user's own.

    A round calls ``align`` for each update in turn, and ``accept`` with the aligned
    update if the update is merged. A rule overrides ``accept``, and sets ``current``.

    Attributes:
        follows_mean: the rule reads ``mean``. The round shares the mean to which it
            adds each update before ``accept`` and ``include``; without one, the
            methods of this class add the updates.
        by_layers: ``accept`` and ``include`` read the weight and ``mean`` alone: the
            round may align updates layer by layer on a GPU, and ``aligned`` is then
            empty.
        current: the anchor of the next update.
        mean: the weighted mean of the round's updates so far.

    Args:
        broadcast: the model that the clients received, checked.
        find: returns the alignment of an update to an anchor, see ``finder``.
        mean: the shared mean.
    """

    follows_mean: bool = False
    by_layers: bool = False

    def __init__(
        self,
        broadcast: Anchor,
        find: Finder,
        mean: Mean | None = None,
    ) -> None:
        self.broadcast = self.current = broadcast
        self.find = find
        self.mean = mean or Mean()
        self._adds = self.follows_mean and mean is None

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
        """Follow an update of the round's mean that ``align`` has aligned."""
        self.include(aligned, weight)

    def include(self, aligned: Tensors, weight: float) -> None:
        """Follow an update of the round's mean that was aligned at its client."""
        if self._adds:
            self.mean.add(aligned, weight)


class GlobalAnchor(AnchorRule):
    """The broadcast model, for every update."""

    by_layers = True


class RunningAnchor(AnchorRule):
    """The weighted mean of the updates accepted so far."""

    follows_mean = True
    by_layers = True
    _weight = 0.0

    def accept(self, aligned: Tensors, weight: float) -> None:
        """Move the anchor towards the update, the last one that it was matched to."""
        self._follow(aligned, weight)

    def include(self, aligned: Tensors, weight: float) -> None:
        """Move the anchor towards the update, to which it was not matched."""
        # The anchor's movement is not known: its bounds hold no longer.
        self.current.forget()
        self._follow(aligned, weight)

    def _follow(self, aligned: Tensors, weight: float) -> None:
        before = self._weight
        super().include(aligned, weight)
        self._weight = before + weight
        share = 1 - before / self._weight
        self.current = self.current.towards_last(self.mean.current, share)


#: The rules by name. Plug-ins add theirs.
ANCHORS: dict[str, type[AnchorRule]] = {
    "global": GlobalAnchor,
    "running": RunningAnchor,
}


def check_anchor(name: str) -> None:
    """Raise ``FedrotError`` if there is no anchor of this name."""
    if name not in ANCHORS:
        raise FedrotError(f"Unknown anchor '{name}'; choose from {', '.join(ANCHORS)}.")


@full_float32()
def base_cosine(update: Tensors, anchor: Tensors, symmetry: Symmetry) -> float:
    """Return the cosine of two models' embeddings: near 0 for different bases.

    Training changes the embeddings of rare tokens little, so that models from one start
    have similar embeddings. Embeddings of models from different starts, or with another
    order of the residual stream, are uncorrelated. Large embeddings are compared in
    evenly spaced rows. The result is 1 if the model has no such embeddings.
    """
    # Embeddings are the tensors of the stream that no head or neuron acts on.
    stream: set[str] = set()
    inside: set[str] = set()
    for group in symmetry.groups:
        names = stream if group.part == "residual" else inside
        names.update(slot.tensor for slot in group.slots)
    products = []
    for name in stream - inside:
        shape = symmetry.shapes[name]
        if len(shape) < 2:
            continue
        every = math.ceil(math.prod(shape) / _COMPARED)
        u, a = (t[name].detach()[::every] for t in (update, anchor))
        wide = torch.promote_types(compute_dtype(u), compute_dtype(a))
        u, a = (t.to(wide).flatten() for t in (u, a))
        dots = torch.stack([u @ a, u @ u, a @ a])
        products.append(dots.double())
    if not products:
        return 1.0
    across, of_update, of_anchor = torch.stack(products).sum(0).tolist()
    size = math.sqrt(of_update * of_anchor)
    return across / size if size > 0 else 1.0


def in_other_basis(update: Tensors, anchor: Tensors, symmetry: Symmetry) -> bool:
    """Return whether an update comes from another basis than the anchor's."""
    return base_cosine(update, anchor, symmetry) < SAME_BASIS


def decided(
    options: AlignmentOptions,
    other_basis: AlignmentOptions | None,
    symmetry: Symmetry,
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
    """Return the function that aligns one checked update to one anchor.

    Arguments are those of ``align_round``; the broadcast model was checked before.
    """
    options, other_basis = decided(options, other_basis, symmetry)
    far = partial(in_other_basis, symmetry=symmetry)

    def find(update: Tensors, to: Anchor) -> Alignment:
        chosen = options
        # Clients that trained far from one start may be further from each other than
        # from this start.
        if (
            other_basis is not None
            and far(update, to.tensors)
            and (far(update, broadcast) or far(to.tensors, broadcast))
        ):
            chosen = other_basis
        activations = None
        if evidence is not None and "residual" in chosen.parts:
            models: list[Tensors] = [to.tensors, update]
            if chosen.canonical:
                models = [canonical(tensors, symmetry) for tensors in models]
            activations = evidence(*models)
        return align_checked(update, to, symmetry, chosen, activations)

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
    check_update(broadcast, symmetry.shapes)
    find = finder(broadcast, symmetry, chosen, other_basis, evidence)
    rule = ANCHORS[chosen.anchor](Anchor(broadcast), find)

    def aligned(weighted: Weighted) -> AlignedUpdate:
        update, weight = weighted
        check_update(update, symmetry.shapes)
        alignment = rule.align(update)
        tensors = alignment.move(update)
        rule.accept(tensors, weight)
        return AlignedUpdate(tensors, weight, alignment)

    # Not a generator: its variables would hold the last update until the next one has
    # arrived.
    return map(aligned, updates)
