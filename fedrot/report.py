"""Reports of an alignment as plain data: one row per group, and totals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedrot.symmetry.groups import Group


@dataclass(frozen=True)
class GroupReport:
    """The alignment of one group.

    Attributes:
        group, layer, part: the group's name, its layer, and the part it belongs to.
        before, after: squared distance of the group's weights to the anchor.
        units: the heads or neurons that were moved, unit ``i`` as bit ``i``.
        of: number of heads or neurons in the group.
        angle: mean rotation of the moved heads, in degrees.
        certified: True if the order of the neurons was proved optimal without an assignment.
        skipped: True if a move was found, but removed less than ``AlignmentOptions.chance`` requires.
        found: squared distance that the best element removes, moved or not; an upper bound where that is
            below what is required.
        chance: squared distance that chance removes, see ``fedrot.matching.chance``; None if unknown.
        within: name of the head permutation that moves this group's heads as a whole, if any.
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
    found: float = 0.0
    chance: float | None = None

    @classmethod
    def unmoved(cls, group: Group, before: float) -> GroupReport:
        """Return the report of a group that is not moved."""
        units = group.kind.units
        return cls(group.name, group.layer, group.part, before, before, 0, units, within=group.within)

    def moved_by(self, group: Group, element: Tensor) -> GroupReport:
        """Return the report with the units and the angle of an element."""
        units = np.packbits(group.kind.moved(element).cpu().numpy(), bitorder="little").tobytes()
        return replace(self, units=int.from_bytes(units, "little"), angle=group.kind.angle(element))

    @property
    def moved(self) -> int:
        """Number of heads or neurons that were moved."""
        return self.units.bit_count()

    def row(self) -> dict[str, Any]:
        """Return a flat row; ``moved`` is the number of moved units."""
        row = {("moved" if key == "units" else key): value for key, value in asdict(self).items()}
        return {key: value for key, value in row.items() if key != "within"} | {"moved": self.moved}


@dataclass(frozen=True)
class AlignmentReport:
    """One ``GroupReport`` per group, and the totals over the tensors that the groups act on.

    ``before`` and ``after`` are squared distances to the anchor, ``seconds`` is the wall time of the
    matching.
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
        return self._share(g.before - g.after for g in self._of(parts))

    def found(self, *parts: str) -> float:
        """Return the share that the best elements of the given parts remove, moved or not."""
        return self._share(g.found for g in self._of(parts))

    def chance(self, *parts: str) -> float | None:
        """Return the share that chance removes, None if it is not known of one of the groups."""
        known = [g.chance for g in self._of(parts) if g.chance is not None]
        return self._share(known) if len(known) == len(self._of(parts)) else None

    def _of(self, parts: Sequence[str]) -> list[GroupReport]:
        return [group for group in self.groups if not parts or group.part in parts]

    def _share(self, distances: Iterable[float]) -> float:
        return sum(distances) / self.before if self.before > 0 else 0.0

    def moved(self, part: str) -> int:
        """Return the number of heads or neurons that a part moved, see ``moved_units``."""
        return moved_units([self], part)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per group."""
        return [group.row() for group in self.groups]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        totals = {"before": self.before, "after": self.after, "seconds": self.seconds}
        return {"groups": self.rows(), **totals}


def moved_units(reports: Iterable[AlignmentReport], part: str) -> int:
    """Return the number of heads, neurons or hidden units that a part moved in at least one report.

    A head counts once even if several of its groups were moved (queries with keys, values with the
    output projection). Where query heads share a key head, ``heads`` counts query heads: a key head
    takes all of its query heads along.
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


def _repeated(bits: int, times: int) -> int:
    """Return an integer with every bit of ``bits`` repeated."""
    if times == 1:
        return bits
    block = (1 << times) - 1
    return sum(block << i * times for i in range(bits.bit_length()) if bits >> i & 1)
