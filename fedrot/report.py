"""What alignment did, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class GroupReport:
    """What happened to one group: squared distances to the anchor, what moved, and why not."""

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
            best = f", {certified} proved to be in place" if certified else ""
            lines.append(
                f"  {part}: {self.share(part):.1%} removed, {moved} of {len(rows)} groups moved{best}"
            )
        return "\n".join(lines)

    def share(self, *parts: str) -> float:
        """Return the share of the squared distance removed by the given parts (all if none)."""
        removed = sum(g.before - g.after for g in self.groups if not parts or g.part in parts)
        return removed / self.before if self.before > 0 else 0.0

    def moved(self, part: str) -> int:
        """Return how many heads or neurons a part moved."""
        return sum(g.moved for g in self.groups if g.part == part)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per group."""
        return [asdict(group) for group in self.groups]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)
