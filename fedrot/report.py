"""Reports of an alignment as plain data: one row per group, and shares summed over rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from fedrot.symmetry.groups import Group

#: A group that moves is beyond chance if its element removes more than this many times what chance
#: removes. The default of ``AlignmentOptions.chance`` requires less.
TIMES_CHANCE = 1.5

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class GroupReport:
    """The alignment of one group.

    Attributes:
        group, layer, part: the group's name, its layer, and the part it belongs to.
        before, after: squared distance of the group's weights to the anchor.
        moved: number of heads or neurons that were moved.
        of: number of heads or neurons in the group.
        angle: mean rotation of the moved heads, in degrees.
        certified: True if the order of the neurons was proved optimal without an assignment.
        skipped: True if a move was found, but removed less than ``AlignmentOptions.chance`` requires.
        found: squared distance that the best element removes, whether the group moved or not; or an
            upper bound of this distance that is below what is required.
        chance: squared distance that chance removes, see ``fedrot.matching.chance``; None if unknown.
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
        return cls(group.name, group.layer, group.part, before, before, 0, group.kind.units)

    def moved_by(self, group: Group, element: Tensor) -> GroupReport:
        """Return the report with the number of moved units and the angle of an element."""
        moved = int(group.kind.moved(element).sum())
        return replace(self, moved=moved, angle=group.kind.angle(element))


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
            best = f", {certified} already in the best order" if certified else ""
            lines.append(
                f"  {part}: {self.share(part):.1%} removed, {moved} of {len(rows)} groups moved{best}"
            )
        return "\n".join(lines)

    def share(self, *parts: str) -> float:
        """Return the share of the squared distance removed by the given parts (all if none)."""
        return self._share(g.before - g.after for g in self._of(parts))

    def found(self, *parts: str) -> float:
        """Return the share that the best elements of the given parts remove, whether moved or not."""
        return self._share(g.found for g in self._of(parts))

    def chance(self, *parts: str) -> float | None:
        """Return the share that chance removes, None if it is unknown for one of the groups."""
        known = [g.chance for g in self._of(parts) if g.chance is not None]
        return self._share(known) if len(known) == len(self._of(parts)) else None

    def _of(self, parts: Sequence[str]) -> list[GroupReport]:
        return [group for group in self.groups if not parts or group.part in parts]

    def _share(self, distances: Iterable[float]) -> float:
        return sum(distances) / self.before if self.before > 0 else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per group."""
        return [asdict(group) for group in self.groups]


@dataclass(frozen=True)
class Shares:
    """What alignment found in some rows of groups: squared distances, and shares of them.

    Attributes:
        before: squared distance to the anchor.
        removed: squared distance that alignment removed.
        found: squared distance that the best elements remove, moved or not.
        chance: squared distance that chance removes; None without rows, or if unknown for a row (parts
            that depend on each other).
        groups, moved, beyond: number of groups, of moved groups, and of moved groups that remove more
            than ``TIMES_CHANCE`` times chance.
    """

    before: float = 0.0
    removed: float = 0.0
    found: float = 0.0
    chance: float | None = None
    groups: int = 0
    moved: int = 0
    beyond: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Shares:
        """Return the shares of one row, see ``AlignmentReport.rows``."""
        before, moved, chance = float(row["before"]), row["moved"] > 0, row.get("chance")
        known = None if chance is None or math.isnan(chance) else float(chance)
        one = cls(before, before - float(row["after"]), float(row["found"]), known, 1, int(moved))
        return replace(one, beyond=int(moved and one.exceeds(TIMES_CHANCE)))

    @property
    def share(self) -> float:
        """The share found, or the share removed if chance is unknown.

        Chance is unknown for parts that depend on each other; their ``found`` counts distances twice.
        """
        found = self.removed if self.chance is None else self.found
        return found / self.before if self.before > 0 else 0.0

    @property
    def chance_share(self) -> float | None:
        """The share that chance removes, None if unknown."""
        if self.chance is None:
            return None
        return self.chance / self.before if self.before > 0 else 0.0

    @property
    def ratio(self) -> float:
        """``found / chance``: 0 if both are 0, NaN if chance is unknown."""
        if self.chance is None:
            return math.nan
        if self.chance == 0:
            return math.inf if self.found > 0 else 0.0
        return self.found / self.chance

    def exceeds(self, times: float) -> bool:
        """Return whether ``found`` exceeds ``times`` chance; False if chance is unknown."""
        return self.chance is not None and self.found > times * self.chance


def total(given: Iterable[Shares]) -> Shares:
    """Return the shares of all rows together."""
    parts = list(given)
    chances = [part.chance for part in parts if part.chance is not None]
    chance = sum(chances) if chances and len(chances) == len(parts) else None
    added = ("before", "removed", "found", "groups", "moved", "beyond")
    return Shares(chance=chance, **{name: sum(getattr(part, name) for part in parts) for name in added})


def shares_by(
    rows: Iterable[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], Key]
) -> dict[Key, Shares]:
    """Return the sums over the rows of each key, in the order of the rows.

    Rows of dropped replies have no distances and are skipped.
    """
    found: dict[Key, list[Shares]] = {}
    for row in rows:
        if "before" in row:
            found.setdefault(key(row), []).append(Shares.of(row))
    return {own: total(shares) for own, shares in found.items()}
