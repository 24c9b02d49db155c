"""Reports of an alignment as plain data: one row per group, and sums over rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedrot.symmetry.groups import Group


@dataclass(frozen=True)
class GroupReport:
    """The alignment of one group.

    Attributes:
        group, layer, part: the group's name, its layer, and the part it belongs to.
        before, after: squared distance of the group's weights to the anchor.
        moved: number of heads or neurons that were moved.
        of: number of heads or neurons in the group.
        angle: mean rotation of the moved heads, in degrees.
        certified: True if the order of the neurons was proved optimal without an
            assignment.
        skipped: True if a move was found, but removed less than
            ``AlignmentOptions.chance`` requires.
        found: squared distance that the best element removes, whether the group moved
            or not; or an upper bound of this distance that is below what is required.
        chance: squared distance that chance removes, see ``fedrot.matching.chance``;
            None if unknown.
    """

    group: str
    layer: int
    part: str
    before: float
    after: float
    moved: int
    of: int
    angle: float = 0.0
    certified: bool = False
    skipped: bool = False
    found: float = 0.0
    chance: float | None = None

    @classmethod
    def unmoved(cls, group: Group, before: float) -> GroupReport:
        """Return the report of a group that is not moved."""
        return cls(
            group.name, group.layer, group.part, before, before, 0, group.action.units
        )

    def moved_by(self, group: Group, element: Tensor) -> GroupReport:
        """Return the report with an element's number of moved units and its angle."""
        moved = int(group.action.moved(element).sum())
        return replace(self, moved=moved, angle=group.action.angle(element))


@dataclass(frozen=True)
class AlignmentReport:
    """One ``GroupReport`` per group, and the totals over the tensors that the groups
    act on.

    ``before`` and ``after`` are squared distances to the anchor, ``seconds`` is the
    wall time of the matching.
    """

    groups: tuple[GroupReport, ...] = field(repr=False)
    before: float
    after: float
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"squared distance to the anchor {self.before:.4g} -> {self.after:.4g}, "
            f"{self.share():z.1%} removed in {self.seconds:.2f} s"
        ]
        for part in dict.fromkeys(group.part for group in self.groups):
            rows = self._of([part])
            moved = sum(row.moved > 0 for row in rows)
            certified = sum(row.certified for row in rows)
            best = f", {certified} already in the best order" if certified else ""
            lines.append(
                f"  {part}: {self.share(part):z.1%} removed, {moved} of {len(rows)} "
                f"groups moved{best}"
            )
        return "\n".join(lines)

    def share(self, *parts: str) -> float:
        """Return the share of the squared distance that parts removed; all if none."""
        return self._share(row.before - row.after for row in self._of(parts))

    def found(self, *parts: str) -> float:
        """Return the share that the best elements of parts remove, moved or not."""
        return self._share(row.found for row in self._of(parts))

    def chance(self, *parts: str) -> float | None:
        """Return the share that chance removes, None if unknown for a group."""
        rows = self._of(parts)
        known = [row.chance for row in rows if row.chance is not None]
        return self._share(known) if len(known) == len(rows) else None

    def _of(self, parts: Sequence[str]) -> list[GroupReport]:
        return [group for group in self.groups if not parts or group.part in parts]

    def _share(self, distances: Iterable[float]) -> float:
        return sum(distances) / self.before if self.before > 0 else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per group."""
        return [{**vars(group)} for group in self.groups]
