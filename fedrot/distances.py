"""Shares of the distance that alignment found, removed, and finds by chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

#: A group that moves is beyond chance if its element removes more than this many times
#: what chance removes. The default of ``AlignmentOptions.chance`` requires less.
TIMES_CHANCE = 1.5

#: A group's row, see ``AlignmentReport.rows``.
Row = Mapping[str, Any]

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Shares:
    """What alignment found in some rows of groups: squared distances, and shares.

    Attributes:
        before: squared distance to the anchor.
        removed: squared distance that alignment removed.
        found: squared distance that the best elements remove, moved or not.
        chance: squared distance that chance removes; None without rows, or if unknown
            for a row (parts that depend on each other).
        groups, moved, beyond: number of groups, of moved groups, and of moved groups
            that remove more than ``TIMES_CHANCE`` times chance.
    """

    before: float = 0.0
    removed: float = 0.0
    found: float = 0.0
    chance: float | None = None
    groups: int = 0
    moved: int = 0
    beyond: int = 0

    @classmethod
    def of(cls, row: Row) -> Shares:
        """Return the shares of one row."""
        before = float(row["before"])
        chance = row.get("chance")
        # Tables of pandas have NaN where a row has no value.
        known = None if chance is None or math.isnan(chance) else float(chance)
        moved = row["moved"] > 0
        shares = cls(
            before=before,
            removed=before - float(row["after"]),
            found=float(row["found"]),
            chance=known,
            groups=1,
            moved=int(moved),
        )
        return replace(shares, beyond=int(moved and shares.exceeds(TIMES_CHANCE)))

    @property
    def share(self) -> float:
        """The share found, or the share removed if chance is unknown.

        Chance is unknown for parts that depend on each other; their ``found`` counts
        distances twice.
        """
        return self._of_before(self.removed if self.chance is None else self.found)

    @property
    def chance_share(self) -> float | None:
        """The share that chance removes, None if unknown."""
        return None if self.chance is None else self._of_before(self.chance)

    def _of_before(self, distance: float) -> float:
        return distance / self.before if self.before > 0 else 0.0

    @property
    def ratio(self) -> float:
        """``found / chance``: 0 if both are 0, NaN if chance is unknown."""
        if self.chance is None:
            return math.nan
        if self.chance == 0:
            return math.inf if self.found > 0 else 0.0
        return self.found / self.chance

    def exceeds(self, times: float) -> bool:
        """Return whether ``found`` exceeds ``times`` chance; False if unknown."""
        return self.chance is not None and self.found > times * self.chance


def total(shares: Iterable[Shares]) -> Shares:
    """Return the shares of all rows together."""
    rows = list(shares)
    chances = [row.chance for row in rows if row.chance is not None]
    chance = sum(chances) if chances and len(chances) == len(rows) else None
    names = ("before", "removed", "found", "groups", "moved", "beyond")
    sums = {name: sum(getattr(row, name) for row in rows) for name in names}
    return Shares(chance=chance, **sums)


def shares_by(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, Shares]:
    """Return the sums over the rows of each key, in the order of the rows.

    Rows of dropped replies have no distances and are skipped.
    """
    by_key: dict[Key, list[Shares]] = {}
    for row in rows:
        if "before" in row:
            by_key.setdefault(key(row), []).append(Shares.of(row))
    return {name: total(shares) for name, shares in by_key.items()}
