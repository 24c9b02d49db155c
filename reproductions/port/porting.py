"""The port of a fine-tuning from the base that it was trained from to another base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fedrot.alignment import Alignment, align
from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport
from fedrot.simulations.models.alike import check_alike
from fedrot.simulations.models.model_files import refuse_filled
from fedrot.symmetry import WHOLE_MODEL, Symmetry
from fedrot.symmetry.canonical import canonical
from fedrot.symmetry.moves import Move, apply_moves
from fedrot.tensors import Tensors, widened
from reproductions.port.port_settings import PortSettings
from reproductions.port.rewriting import Separate, write

#: How the two bases are matched, by name; None is not at all.
MATCHES: Mapping[str, AlignmentOptions | None] = {
    "rotation": AlignmentOptions(WHOLE_MODEL),
    "permutation": AlignmentOptions(WHOLE_MODEL, canonical=False),
    "none": None,
}


@dataclass(frozen=True)
class PortReport:
    """What was carried over.

    Attributes:
        rotated: whether the residual stream was rotated.
        matched: the report of the alignment, of the old base to the new one; None without.
        taken: tensors of the fine-tuned model that the bases lack; they are moved as a whole.
        still: the parts that cannot be moved in this model, with the reason.
    """

    rotated: bool
    matched: AlignmentReport | None
    taken: tuple[str, ...]
    still: Mapping[str, str]


def port(
    base: str, tuned: str, new_base: str, out: Path, settings: PortSettings | None = None
) -> PortReport:
    """Carry the difference between a base and its fine-tuning over to another base; write the result.

    The old base is aligned to the new one, and ``new base + scale * moved (tuned - base)`` is written
    as a model of the tuned one's class. Where the residual stream is rotated, all three models are
    brought to canonical form first, and so is the result.

    Source: the moved task vector of Rinaldi et al. 2025 (TransFusion), there with permutations.

    Raises:
        FedrotError: the models differ in architecture or vocabulary, or cannot be loaded.
        FileExistsError: there is something at ``out``.
    """
    settings = settings or PortSettings()
    if settings.match not in MATCHES:
        raise FedrotError(f"Unknown match '{settings.match}'; choose from {', '.join(MATCHES)}.")
    refuse_filled(out)
    old, fine, new = (Separate.load(name) for name in (base, tuned, new_base))
    for one, other in combinations((old, fine, new), 2):
        check_alike(one.saved, other.saved)
    options = MATCHES[settings.match]
    if options is not None:
        if reason := old.symmetry.refused.get("residual"):
            raise FedrotError(
                f"'{base}' cannot be matched to another base: {reason.rstrip('.')}. Port it with "
                "--match none."
            )
        options = options.movable(old.symmetry)
    tensors, taken, alignment = ported(old, fine, new, options, settings.scale)
    write(fine.holding(tensors), fine.saved.path, out)
    report = alignment.report if alignment is not None else None
    still = {} if options is None else old.symmetry.refused
    still = {part: reason for part, reason in still.items() if part in WHOLE_MODEL}
    return PortReport(alignment is not None and alignment.canonical, report, taken, still)


class Described(Protocol):
    """The tensors of a model whose tables are separate, and their symmetry."""

    @property
    def tensors(self) -> Tensors: ...

    @property
    def symmetry(self) -> Symmetry: ...


def ported(
    old: Described,
    fine: Described,
    new: Described,
    options: AlignmentOptions | None,
    scale: float = 1.0,
) -> tuple[dict[str, Tensor], tuple[str, ...], Alignment | None]:
    """Return the tensors of the port, the names of those that the bases lack, and the alignment."""
    before, after, there = old.tensors, fine.tensors, new.tensors
    alignment = None
    if options is not None:
        bases = (widened(before), widened(there), old.symmetry, replace(options, chance=0))
        alignment = align(*bases)
        if alignment.canonical:
            there = canonical(widened(there), new.symmetry)
        before = alignment.apply(widened(before))
        after = _moved_alike(widened(after), fine.symmetry, alignment)
    result, taken = {}, []
    for name, tensor in fine.tensors.items():
        if not tensor.is_floating_point():
            result[name] = tensor
        elif name in before and before[name].shape == tensor.shape:
            difference = after[name].float() - before[name].float()
            result[name] = (there[name].float() + scale * difference).to(tensor.dtype)
        else:
            taken.append(name)
            result[name] = after[name].to(tensor.dtype)
    return result, tuple(taken), alignment


def _moved_alike(tensors: Tensors, symmetry: Symmetry, alignment: Alignment) -> dict[str, Tensor]:
    """Return the tensors of another class, moved as the groups of the same names were."""
    if alignment.canonical:
        tensors, symmetry = canonical(tensors, symmetry), symmetry.rotated
    groups = {group.name: group for group in symmetry.groups}
    moves = [
        Move(groups[move.group.name], move.element)
        for move in alignment.moves
        if move.group.name in groups
    ]
    return apply_moves(tensors, moves)
