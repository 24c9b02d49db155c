"""Report of a check of a model, and its tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from fedrot.simulations.report.tables import terminal_table

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


@dataclass(frozen=True)
class GroupFound:
    """A group of the model.

    Attributes:
        layer: None if the group acts on the whole model.
        units: heads or neurons that it acts on.
        tensors: how many tensors it moves.
    """

    name: str
    layer: int | None
    part: str
    kind: str
    units: int
    tensors: int


@dataclass(frozen=True)
class KindChecked:
    """The change of the outputs when all groups of one kind and part are moved.

    Attributes:
        change: largest change of an output relative to its largest entry, None if it is not finite.
    """

    part: str
    kind: str
    groups: int
    change: float | None
    holds: bool


@dataclass(frozen=True)
class CheckReport:
    """The result of a check; ``dataclasses.asdict`` is what ``--json`` prints.

    Attributes:
        architecture: the class that was loaded.
        parts: the parts that were moved.
        refused: parts that cannot be moved in this model, with the reason.
        change: of all parts moved together, as in ``KindChecked``.
        holds: whether that and the changes of all kinds are at most ``tolerance``.
        suspects: if not, the first group of each part that changes the outputs, with its tensors.
        notes: what the user should know about the files, in sentences.
        seconds: wall time of everything, loading included.
    """

    model: str
    model_type: str
    family: str
    architecture: str
    seed: int
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


_TEXTS = ("layer", "part", "group", "kind", "", "family", "model_type")


def tables(report: CheckReport) -> Iterator[Table]:
    """Yield a table of the groups by layer, equal layers in one line, and one of the output changes."""
    groups = terminal_table(
        f"{report.architecture} ({report.model_type}), family {report.family}",
        ("layer", "part", "group", "kind", "units", "tensors"),
        _TEXTS,
        fold=True,
    )
    for layers, lines in _alike(report.groups):
        for line in lines:
            groups.add_row(layers, *map(str, line))
            layers = ""
        groups.add_section()
    yield groups
    columns = ("part", "kind", "groups", "change", "")
    kinds = terminal_table("Largest change of an output", columns, _TEXTS, fold=True)
    for kind in report.kinds:
        kinds.add_row(kind.part, kind.kind, str(kind.groups), *_judged(kind.change, kind.holds))
    kinds.add_section()
    together = report.change is not None and report.change <= report.tolerance
    kinds.add_row("together", "", str(len(report.groups)), *_judged(report.change, together))
    yield kinds


def verdict(report: CheckReport) -> str:
    """Return a sentence: whether the model has the symmetry, and what to do if not."""
    if report.holds:
        return f"The function is preserved: outputs change by {report.change:.1e} of their size at most."
    return f"The outputs of '{report.model}' change. {report.suspects}"


def families_table(families: Mapping[str, Iterable[str]]) -> Table:
    """Return a line per supported family with its model types."""
    found = terminal_table("Supported families", ("family", "model_type"), _TEXTS, fold=True)
    for family, model_types in families.items():
        found.add_row(family, ", ".join(model_types))
    return found


def _judged(change: float | None, holds: bool) -> tuple[str, Text]:
    from rich.text import Text

    shown = "not finite" if change is None else f"{change:.1e}"
    return shown, Text("" if holds else "BROKEN", style="red")


#: Part, name, kind, units and tensors of a group.
GroupCells = tuple[str, str, str, int, int]


def _alike(groups: Iterable[GroupFound]) -> Iterator[tuple[str, list[GroupCells]]]:
    """Yield ranges of consecutive layers with equal groups, such as ``0-5``, and these groups."""
    by_layer: dict[int | None, list[GroupCells]] = {}
    for g in groups:
        # The number of the layer does not count, but the rest of the name does: it may name a stack.
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", g.name)
        by_layer.setdefault(g.layer, []).append((g.part, name, g.kind, g.units, g.tensors))
    for cells, layers in groupby(by_layer, key=by_layer.__getitem__):
        first, *rest = layers
        shown = "model" if first is None else str(first)
        yield (f"{shown}-{rest[-1]}" if rest else shown), cells
