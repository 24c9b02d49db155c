"""Report of a merge, and its table for the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedrot.report import AlignmentReport
from fedrot.simulations.report.tables import terminal_table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class InputReport:
    """The alignment of one model; the anchor's own distances are 0.

    Attributes:
        name: the model's path, or its name on the hub.
        cosine: of its embeddings with the anchor's, see ``fedrot.anchors.base_cosine``.
        before, after: squared distance to the anchor over all tensors.
        seconds: wall time of the matching, activations included.
        alignment: by group.
    """

    name: str
    weight: float
    cosine: float
    before: float
    after: float
    seconds: float
    alignment: AlignmentReport


@dataclass(frozen=True)
class MergeReport:
    """The inputs and the result of a merge.

    Attributes:
        inputs: the anchor first.
        notes: what the user should know, in sentences.
        out: the file or folder that was written, None after a dry run.
        seconds: wall time of everything.
    """

    method: str
    inputs: tuple[InputReport, ...]
    notes: tuple[str, ...]
    out: Path | None
    seconds: float


def table(report: MergeReport) -> Table:
    """Return a line per model and part, and one over all tensors of each model."""
    from rich.text import Text

    columns = ("model", "weight", "part", "squared distance", "after", "moved", "seconds")
    found = terminal_table(f"Merged by {report.method}", columns, ("model", "part"), fold=True)
    names = [Path(given.name).resolve().name for given in report.inputs]
    total = sum(given.weight for given in report.inputs)
    for index, (given, name) in enumerate(zip(report.inputs, names, strict=True)):
        shown = Text(name if names.count(name) == 1 else given.name)
        share = f"{given.weight / total:.3g}"
        for line in _lines(given) if index else [("the anchor",)]:
            found.add_row(shown, share, *line)
            shown, share = Text(""), ""
        found.add_section()
    return found


def _lines(given: InputReport) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for part in dict.fromkeys(group.part for group in given.alignment.groups):
        groups = [group for group in given.alignment.groups if group.part == part]
        before, after = sum(g.before for g in groups), sum(g.after for g in groups)
        moved = f"{sum(g.moved for g in groups)} of {sum(g.of for g in groups)}"
        lines.append((part, f"{before:.4g}", f"{after:.4g}", moved))
    whole = ("all tensors", f"{given.before:.4g}", f"{given.after:.4g}", "", f"{given.seconds:.2f}")
    return [*lines, whole]
