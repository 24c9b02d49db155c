"""What alignment did, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class GroupReport:
    """What happened to one group: squared distances to the anchor, what moved, and why not.

    Attributes:
        units: which of its heads or neurons were moved, unit ``i`` as bit ``i``.
        of: how many heads or neurons the group has.
        angle: in degrees, by how much it turned what it moved, on average.
        within: the head permutation that moves this group's heads as a whole, if any: groups of one
            layer that share it act on the same heads.
    """

    group: str
    layer: int
    part: str
    before: float
    after: float
    units: int
    of: int
    angle: float = 0.0
    certified: bool = False
    skipped: bool = False
    within: str = ""

    @property
    def moved(self) -> int:
        """How many heads or neurons were moved."""
        return self.units.bit_count()

    def row(self) -> dict[str, Any]:
        """Return what there is to read: the number of units that moved, and not which."""
        row = {("moved" if key == "units" else key): value for key, value in asdict(self).items()}
        del row["within"]
        return {**row, "moved": self.moved}


@dataclass(frozen=True)
class AlignmentReport:
    """The rows of all groups, and the totals over the tensors they act on.

    ``before`` and ``after`` are squared distances to the anchor; ``after`` never exceeds ``before``
    by more than rounding. ``seconds`` is the wall time of the matching.
    """

    groups: tuple[GroupReport, ...] = field(repr=False)
    before: float
    after: float
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"squared distance to the anchor {self.before:.4g} -> {self.after:.4g}, "
            f"{self.share():.1%} removed in {self.seconds:.2f} s"
        ]
        for part in dict.fromkeys(group.part for group in self.groups):
            rows = [group for group in self.groups if group.part == part]
            moved, certified = sum(r.moved > 0 for r in rows), sum(r.certified for r in rows)
            best = f", {certified} in the best order already" if certified else ""
            lines.append(
                f"  {part}: {self.share(part):.1%} removed, {moved} of {len(rows)} groups moved{best}"
            )
        return "\n".join(lines)

    def share(self, *parts: str) -> float:
        """Return the share of the squared distance removed by the given parts (all if none)."""
        removed = sum(g.before - g.after for g in self.groups if not parts or g.part in parts)
        return removed / self.before if self.before > 0 else 0.0

    def moved(self, part: str) -> int:
        """Return how many heads or neurons a part moved, see ``moved_units``."""
        return moved_units([self], part)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per group."""
        return [group.row() for group in self.groups]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {**asdict(self), "groups": self.rows()}


def moved_units(reports: Iterable[AlignmentReport], part: str) -> int:
    """Return how many heads, neurons or hidden units a part moved in at least one of the reports.

    A head counts once, whichever of its groups was moved (queries with keys, values with the output
    projection). Where query heads share a key head, ``heads`` counts query heads: a key head that
    trades places takes all of its query heads along.
    """
    groups = [group for report in reports for group in report.groups if group.part == part]
    most, moved = defaultdict[tuple[str, int], int](int), defaultdict[tuple[str, int], int](int)
    for group in groups:
        key = (group.within or group.group, group.layer)
        most[key] = max(most[key], group.of)
    for group in groups:
        key = (group.within or group.group, group.layer)
        moved[key] |= _repeated(group.units, most[key] // group.of)
    return sum(units.bit_count() for units in moved.values())


def as_bits(units: Tensor) -> int:
    """Return a mask of units, bool ``[units]``, as an integer, unit ``i`` as bit ``i``."""
    return int.from_bytes(np.packbits(units.cpu().numpy(), bitorder="little").tobytes(), "little")


def _repeated(bits: int, times: int) -> int:
    """Return bits with each of them written so many times."""
    if times == 1:
        return bits
    block = (1 << times) - 1
    return sum(block << i * times for i in range(bits.bit_length()) if bits >> i & 1)
