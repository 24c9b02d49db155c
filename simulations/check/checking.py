"""Check of a saved model: its outputs before and after random elements of its symmetry group."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import nn

from fedrot.check import TOLERANCE, output_change, suspects
from fedrot.errors import FedrotError
from fedrot.simulations.models.saved_model import open_saved_model
from fedrot.simulations.report.tables import Table
from fedrot.symmetry import NO_LAYER, PARTS, Group, Symmetry, symmetry_of

if TYPE_CHECKING:
    from fedrot.symmetry.describe.family import Family


@dataclass(frozen=True)
class GroupFound:
    """A group of the model, its number of ``units`` (heads or neurons) and of ``tensors`` that it moves.

    ``layer`` is None if the group acts on the whole model.
    """

    name: str
    layer: int | None
    part: str
    kind: str
    units: int
    tensors: int


@dataclass(frozen=True)
class KindChecked:
    """The largest relative ``change`` of an output when all groups of one kind and part are moved.

    ``change`` is None if it is not finite. ``holds``: it is at most the tolerance.
    """

    part: str
    kind: str
    groups: int
    change: float | None
    holds: bool


@dataclass(frozen=True)
class CheckReport:
    """The result of a check; ``--json`` prints its ``dataclasses.asdict``.

    Attributes:
        architecture: the class that was loaded.
        parts: the parts that were moved.
        refused: parts that cannot be moved in this model, with the reason.
        change: the change with all parts moved together, as in ``KindChecked``.
        holds: whether this change and those of all kinds are at most ``tolerance``.
        suspects: if not, the first group of each part that changes the outputs, with its tensors.
        notes: sentences for the user about the files and the residual stream.
        seconds: wall time of the check, with the loading of the model.
    """

    model: str
    model_type: str
    family: str
    architecture: str
    parts: tuple[str, ...]
    refused: Mapping[str, str]
    groups: tuple[GroupFound, ...]
    kinds: tuple[KindChecked, ...]
    change: float | None
    tolerance: float
    holds: bool
    suspects: str
    notes: tuple[str, ...]
    seconds: float


def check_model(name: str, parts: Sequence[str] | None = None) -> CheckReport:
    """Load a model, move it by random elements of every group, and compare its outputs.

    Args:
        name: a folder of a saved model, or a name on the hub.
        parts: parts to move; None: all parts that can be moved.

    Raises:
        FedrotError: the model cannot be loaded, a part cannot be moved, or the model does not run on
            random inputs.
    """
    start = time.perf_counter()
    model, notes = _loaded(name)
    config: Any = model.config
    symmetry = symmetry_of(config, model.state_dict())
    movable = {group.part for group in symmetry.groups}
    chosen = tuple(part for part in PARTS if part in movable) if parts is None else parts
    groups = symmetry.select(chosen)
    if not groups:
        raise FedrotError(f"'{name}' has no groups of the parts {', '.join(chosen) or '(none)'}.")
    change = output_change(model, config, symmetry, chosen)

    def checked(key: tuple[str, str]) -> KindChecked:
        found = change(lambda group: _key(group) == key)
        count = sum(_key(group) == key for group in groups)
        return KindChecked(*key, count, _finite(found), found <= TOLERANCE)

    kinds = tuple(map(checked, dict.fromkeys(map(_key, groups))))
    together = change(lambda group: True)
    broken = dict.fromkeys(kind.part for kind in kinds if not kind.holds)
    holds = together <= TOLERANCE and not broken
    suspicion = "" if holds else suspects(symmetry, change, tuple(broken))
    if holds and "residual" in chosen:
        stream, note = _rotated(model, config, symmetry)
        if not all(kind.holds for kind in stream):
            holds, suspicion = False, _NOT_FOLDED
        kinds, notes = (*kinds, *stream), (*notes, note)
    return CheckReport(
        model=name,
        model_type=config.model_type,
        family=symmetry.family,
        architecture=type(model).__name__,
        parts=tuple(chosen),
        refused=symmetry.refused,
        groups=tuple(map(_found, groups)),
        kinds=kinds,
        change=_finite(together),
        tolerance=TOLERANCE,
        holds=holds,
        suspects=suspicion,
        notes=notes,
        seconds=time.perf_counter() - start,
    )


#: Sentence for models whose function is preserved by permutations of the stream, but not by rotations.
_NOT_FOLDED = (
    "Rotations of its residual stream change them: a module takes the stream without the norm that the "
    "family describes before it. Align with canonical=False."
)


def _rotated(model: nn.Module, config: Any, symmetry: Symmetry) -> tuple[tuple[KindChecked, ...], str]:
    """Check rotations of the residual stream if there are any; return a note about them."""
    if not symmetry.folds:
        reason = next(iter(symmetry.unfolded.values()), "")
        return (), f"Its residual stream is permuted, not rotated: {reason}."
    if symmetry.untied:
        names = " and ".join(symmetry.untied[0])
        return (), f"With untied tables, {names}, its residual stream could be rotated."
    change = output_change(model, config, symmetry.rotated, ("residual",))(lambda _: True)
    groups = [group for group in symmetry.rotated.groups if group.part == "residual"]
    found = KindChecked(*_key(groups[0]), len(groups), _finite(change), change <= TOLERANCE)
    return (found,), "Its residual stream can be rotated: AlignmentOptions(canonical=True)."


def _loaded(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Load a model as the class in its configuration; also return notes about its tensors."""
    saved = open_saved_model(name)
    model, missing, unknown = saved.load(saved.model_class)
    class_name = type(model).__name__
    if 2 * len(missing) > len(model.state_dict()):
        raise FedrotError(
            f"'{name}' lacks {len(missing)} tensors of a {class_name}, the first is '{missing[0]}': "
            "most of the model would be random. Save it, without wrappers, with save_pretrained."
        )
    notes = [f"Not stored, therefore random: {', '.join(missing)}"] if missing else []
    notes += [f"Not part of a {class_name}, left out: {', '.join(unknown)}"] if unknown else []
    return model, tuple(notes)


def _key(group: Group) -> tuple[str, str]:
    return group.part, type(group.kind).__name__


def _found(group: Group) -> GroupFound:
    layer = None if group.layer == NO_LAYER else group.layer
    tensors = len({slot.tensor for slot in group.slots})
    return GroupFound(group.name, layer, *_key(group), group.kind.units, tensors)


def _finite(change: float) -> float | None:
    return change if math.isfinite(change) else None


def tables(report: CheckReport) -> Iterator[Table]:
    """Yield a table of the groups by layer, with one line for equal layers, and one of the changes."""
    lines = [
        [layers if index == 0 else "", part, group, kind, str(units)]
        for layers, own in _alike(report.groups)
        for index, (part, group, kind, units) in enumerate(own)
    ]
    title = f"{report.architecture} ({report.model_type}), family {report.family}"
    yield _table(title, ("layer", "part", "group", "kind", "units"), lines)
    together = report.change is not None and report.change <= report.tolerance
    kinds = [(k.part, k.kind, str(k.groups), *_judged(k.change, k.holds)) for k in report.kinds]
    kinds.append(("together", "", str(len(report.groups)), *_judged(report.change, together)))
    yield _table("Largest change of an output", ("part", "kind", "groups", "change", ""), kinds)


def verdict(report: CheckReport) -> str:
    """Return a sentence about whether the model has the symmetry, and what to do if not."""
    if report.holds:
        return (
            f"The function is preserved: the largest relative change of outputs is {report.change:.1e}."
        )
    return f"The outputs of '{report.model}' change. {report.suspects}"


def families_table(families: Iterable[Family]) -> Table:
    """Return a table with a line per supported family: model types, and symmetry of the stream."""
    lines = [(family.name, ", ".join(family.model_types), family.stream) for family in families]
    return _table("Supported families", ("family", "model_type", "residual stream"), lines)


def _table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    texts = ("layer", "part", "group", "kind", "", "family", "model_type", "residual stream")
    return Table(title, columns, lines, texts)


def _judged(change: float | None, holds: bool) -> tuple[str, str]:
    return "not finite" if change is None else f"{change:.1e}", "" if holds else "BROKEN"


def _alike(groups: Iterable[GroupFound]) -> Iterator[tuple[str, list[tuple[str, str, str, int]]]]:
    """Yield ranges of consecutive layers with equal groups, such as ``0-5``, and these groups."""
    by_layer: dict[int | None, list[tuple[str, str, str, int]]] = {}
    for g in groups:
        # Names are compared without the layer's number; the rest may name the encoder or the decoder.
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", g.name)
        by_layer.setdefault(g.layer, []).append((g.part, name, g.kind, g.units))
    for cells, layers in groupby(by_layer, key=by_layer.__getitem__):
        first, *rest = layers
        shown = "model" if first is None else str(first)
        yield (f"{shown}-{rest[-1]}" if rest else shown), cells
