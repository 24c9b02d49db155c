"""``align`` finds the moves into an anchor's coordinates; ``Alignment`` holds them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedrot.collect.activations import Activations
from fedrot.collect.statistics import TRAINED, transport_statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.matching.anchor import Anchor, Side
from fedrot.matching.descent import solve
from fedrot.matching.pairs import squared_distance
from fedrot.matching.problem import Problem
from fedrot.options import AlignmentOptions, checked_options
from fedrot.report import AlignmentReport, GroupReport
from fedrot.symmetry.canonical import CanonicalView, canonical, check_folded
from fedrot.symmetry.groups import (
    DEFAULT_PARTS,
    Group,
    Move,
    Symmetry,
    apply_moves,
    check_symmetry,
)
from fedrot.tensors import TensorDict, Tensors, check_update, full_float32


@dataclass(frozen=True)
class Alignment:
    """The moves that bring an update near an anchor, and their report.

    ``print(alignment)`` shows the share of the distance that each part removes.
    """

    symmetry: Symmetry = field(repr=False)
    moves: tuple[Move, ...] = field(repr=False)
    report: AlignmentReport
    canonical: bool = False

    def __str__(self) -> str:
        model = f"a {self.symmetry.family} model of {self.symmetry.layers} layers"
        return f"Alignment of {model}\n{self.report}"

    @property
    def moved(self) -> dict[str, bool]:
        """Whether each of the groups is moved, by name."""
        names = {move.group.name for move in self.moves}
        return {row.group: row.group in names for row in self.report.groups}

    def apply(self, tensors: Tensors) -> TensorDict:
        """Return a new dictionary with the moves applied.

        It is canonical if ``options.canonical`` was set. The input is not changed.
        Tensors outside every group are returned as the same objects.

        Raises:
            UpdateError: a tensor is missing, extra or misshapen; or the stream is
                rotated and the gains of the norms are not folded (only after
                ``inverse``).
        """
        check_update(tensors, self.symmetry.shapes)
        return self.move(tensors)

    def move(self, tensors: Tensors) -> TensorDict:
        """Return the same as ``apply``, for checked tensors."""
        if self.canonical:
            tensors = canonical(tensors, self.symmetry)
        elif self.symmetry.rotates:
            check_folded(tensors, self.symmetry)
        return apply_moves(tensors, self.moves)

    def inverse(self) -> Alignment:
        """Return the alignment that undoes this one; it has the same report."""
        undone = tuple(move.inverse for move in reversed(self.moves))
        return Alignment(self.symmetry, undone, self.report)

    def transport(self, statistics: Mapping[str, Tensors]) -> dict[str, TensorDict]:
        """Move statistics by the same elements as the weights they belong to.

        Args:
            statistics: by kind, then by tensor name. ``gram``, ``gram_conv1d``:
                uncentred Gram matrices of a layer's inputs, ``[in, in]``. ``fisher``:
                in the shape of the tensor. ``trained``: masks ``[rows]``. Other kinds:
                see ``fedrot.collect.statistics``.

        Raises:
            FedrotError: an unknown kind; or a Fisher of a tensor that was rotated,
                because a diagonal does not determine the rotated one (compute it after
                aligning, or align by permutations only, ``parts=("heads", "ffn")``); or
                the alignment is ``canonical``: the canonical form has other inputs and
                gradients than the model that the statistics are of.
        """
        changes = self.symmetry.redundant_biases or self.symmetry.folds
        fixed = statistics.keys() - {TRAINED}
        if self.canonical and changes and fixed:
            raise FedrotError(
                f"The statistics '{min(fixed)}' cannot be brought to canonical form. "
                "Apply fedrot.canonical to the model before the statistics are "
                "computed and before it is aligned, or align with canonical=False."
            )
        return transport_statistics(statistics, self.moves, self.symmetry.shapes)


def alignment_of(
    moves: Iterable[Move],
    update: Tensors,
    anchor: Tensors,
    symmetry: Symmetry,
    seconds: float = 0.0,
) -> Alignment:
    """Return an alignment of these moves, one per group.

    ``seconds`` is for its report.
    """
    applied = tuple(moves)
    groups = [move.group for move in applied]
    problem = Problem(Anchor(anchor), update, symmetry, AlignmentOptions())
    before = problem.total(groups)
    rows = []
    for group, move in zip(groups, applied, strict=True):
        distance = float(squared_distance(problem.pairs(group)))
        row = GroupReport.unmoved(group, distance).moved_by(group, move.element)
        problem = problem.moved([move])
        rows.append(replace(row, after=float(squared_distance(problem.pairs(group)))))
    report = AlignmentReport(tuple(rows), before, problem.total(groups), seconds)
    return Alignment(symmetry, applied, report)


def align(
    update: Tensors,
    anchor: Tensors | Anchor,
    symmetry: Symmetry,
    options: AlignmentOptions | None = None,
    activations: Activations | None = None,
) -> Alignment:
    """Find the group element that brings ``update`` closest to ``anchor``.

    The stages (``fedrot.matching.problem.STAGES``) run in a fixed order. Each is solved
    in closed form, given the stages before: the residual stream and the output layer if
    they are among the parts, heads and queries, what is inside the heads (rotations:
    Zhang et al. 2025, Eq. 8-10), experts, neurons (Eq. 7). No stage increases the
    squared distance to the anchor beyond rounding.

    Args:
        update: the client's tensors, float64, float32, float16 or bfloat16, on any
            device.
        anchor: tensors of the same names and shapes on the same device. An ``Anchor``
            stores bounds, so that they are computed once for all clients of a round.
        symmetry: from ``symmetry_of``.
        options: defaults to rotation of the heads and permutation of the neurons.
        activations: of both models on the same inputs, from ``collect_activations``.
            ``options.activation_weight`` is their share of the similarity.

    Raises:
        UpdateError: a tensor is missing, extra or misshapen; or a tensor that a chosen
            group acts on is not floating-point, not finite, or on another device than
            the anchor's; or matching fails, for example because a canonical form
            overflows.
        SymmetryError: ``symmetry`` is not a ``Symmetry``, a part cannot be moved in
            this model, or no solver is registered for a group's action.
        FedrotError: ``options`` is not an ``AlignmentOptions``.
    """
    check_symmetry(symmetry)
    options = checked_options(options)
    anchor = anchor if isinstance(anchor, Anchor) else Anchor(anchor)
    for tensors in (update, anchor.tensors):
        check_update(tensors, symmetry.shapes)
    return align_checked(update, anchor, symmetry, options, activations)


@full_float32()
def align_checked(
    update: Tensors,
    anchor: Anchor,
    symmetry: Symmetry,
    options: AlignmentOptions,
    activations: Activations | None = None,
) -> Alignment:
    """Align as ``align``, an update and an Anchor that were checked for the symmetry.

    Raises:
        UpdateError, SymmetryError: see ``align``, but for names and shapes.
    """
    start = time.perf_counter()
    options = options.for_model(symmetry)
    if options.rotates:
        symmetry = symmetry.rotated
    groups = options.groups(symmetry)
    _check_tensors(update, anchor.tensors, groups)
    side: Side = anchor
    if options.canonical:
        # If only the stream is matched, each tensor is read once: a view folds it when
        # it is read.
        form = CanonicalView if {*options.parts} == {"residual"} else canonical
        side = anchor.in_canonical_form(form(anchor.tensors, symmetry))
        update = form(update, symmetry)
    elif symmetry.rotates:
        check_folded(anchor.tensors, symmetry)
        check_folded(update, symmetry)
    problem = Problem(side, update, symmetry, options, activations)
    try:
        with torch.no_grad():
            solution = solve(problem, groups)
    except (FedrotError, torch.cuda.OutOfMemoryError):
        raise
    except (ArithmeticError, ValueError, RuntimeError) as error:
        raise UpdateError(
            f"The update cannot be matched to its anchor: {error}."
        ) from error
    report = replace(solution.report, seconds=time.perf_counter() - start)
    alignment = Alignment(symmetry, solution.moves, report, bool(options.canonical))
    # The next anchor of the round is derived from how this update was aligned.
    anchor.note(alignment.moved, solution.certified)
    return alignment


def _check_tensors(update: Tensors, anchor: Tensors, groups: Iterable[Group]) -> None:
    for name in sorted({slot.tensor for group in groups for slot in group.slots}):
        u = update[name]
        a = anchor[name]
        for tensor in (u, a):
            if not isinstance(tensor, Tensor):
                raise UpdateError(
                    f"'{name}' is a {type(tensor).__name__}, not a torch tensor; "
                    "convert it with torch.as_tensor."
                )
        if not (u.is_floating_point() and a.is_floating_point()):
            raise UpdateError(
                f"The tensor '{name}' is {u.dtype} (anchor: {a.dtype}); only "
                "floating-point weights can be moved. Dequantise the model first."
            )
        if u.device != a.device:
            raise UpdateError(
                f"The tensor '{name}' is on {u.device}, the anchor's on {a.device}. "
                "Move both to one device."
            )


def random_equivalent(
    tensors: Tensors,
    symmetry: Symmetry,
    seed: int = 0,
    parts: tuple[str, ...] = DEFAULT_PARTS,
) -> TensorDict:
    """Return an equivalent model: tensors moved by a random element of some parts.

    The input is not changed. The same seed gives the same element on every device.

    Raises:
        UpdateError: a tensor is missing, extra or misshapen; or the symmetry rotates
            the residual stream (``symmetry.rotated``) and the tensors are not
            canonical.
        SymmetryError: ``symmetry`` is not a ``Symmetry``, or a part cannot be moved in
            this model.
    """
    check_symmetry(symmetry)
    check_update(tensors, symmetry.shapes)
    check_folded(tensors, symmetry)
    groups = symmetry.select(AlignmentOptions(parts=parts).parts)
    generator = torch.Generator().manual_seed(seed)
    return apply_moves(
        tensors, [Move(group, group.action.random(generator)) for group in groups]
    )
