"""What a check of a model found: as plain data, and as tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


@dataclass(frozen=True)
class GroupFound:
    """A group of the model.

    Attributes:
        layer: None where the group acts on the whole model.
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
    """What moving all groups of one kind and part did.

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
    """What a check found; ``dataclasses.asdict`` is what ``--json`` prints.

    Attributes:
        architecture: the class that was loaded.
        parts: what was moved.
        refused: parts that cannot be moved in this model, with the reason.
        change: of everything moved together, like that of ``KindChecked``.
        holds: whether that and the changes of all kinds are at most ``tolerance``.
        suspects: if not, the first group of each part that changes the outputs, with its tensors.
        notes: what was out of the ordinary, in sentences.
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


def tables(report: CheckReport) -> Iterator[Table]:
    """Yield the groups by layer, and what moving each kind did; layers that are alike share lines."""
    groups = _table(
        f"{report.architecture} ({report.model_type}), family {report.family}",
        ("layer", "part", "group", "kind", "units", "tensors"),
    )
    for layers, lines in _alike(report.groups):
        for line in lines:
            groups.add_row(layers, *map(str, line))
            layers = ""
        groups.add_section()
    yield groups
    kinds = _table("Largest change of an output", ("part", "kind", "groups", "change", ""))
    for kind in report.kinds:
        kinds.add_row(kind.part, kind.kind, str(kind.groups), *_judged(kind.change, kind.holds))
    kinds.add_section()
    together = report.change is not None and report.change <= report.tolerance
    kinds.add_row("together", "", str(len(report.groups)), *_judged(report.change, together))
    yield kinds


def verdict(report: CheckReport) -> str:
    """Return in a sentence whether the model has the symmetry, and what to do if not."""
    if report.holds:
        return f"The function is preserved: outputs change by {report.change:.1e} of their size at most."
    return f"The outputs of '{report.model}' change. {report.suspects}"


def families_table(families: Mapping[str, Iterable[str]]) -> Table:
    """Return a line per supported family with its model types."""
    found = _table("Supported families", ("family", "model_type"))
    for family, model_types in families.items():
        found.add_row(family, ", ".join(model_types))
    return found


def _judged(change: float | None, holds: bool) -> tuple[str, Text]:
    from rich.text import Text

    shown = "not finite" if change is None else f"{change:.1e}"
    return shown, Text("" if holds else "BROKEN", style="red")


Line = tuple[str, str, str, int, int]


def _alike(groups: Iterable[GroupFound]) -> Iterator[tuple[str, list[Line]]]:
    """Yield stretches of layers that have the same groups, such as ``0-5``, with these."""
    by_layer: dict[int | None, list[Line]] = {}
    for g in groups:
        # Layers are alike if their names are but for the number; those of two stacks are not.
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", g.name)
        by_layer.setdefault(g.layer, []).append((g.part, name, g.kind, g.units, g.tensors))
    for lines, stretch in groupby(by_layer, key=by_layer.__getitem__):
        first, *rest = stretch
        shown = "model" if first is None else str(first)
        yield (f"{shown}-{rest[-1]}" if rest else shown), lines


def _table(title: str, columns: Iterable[str]) -> Table:
    from rich.table import Table

    found = Table(title=title, title_justify="left")
    for column in columns:
        numbers = column in ("units", "tensors", "groups", "change")
        found.add_column(column, justify="right" if numbers else "left", overflow="fold")
    return found
