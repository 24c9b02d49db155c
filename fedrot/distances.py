"""Shares of the distance that alignment found, removed, and finds by chance, summed
over groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

#: A group that moves is beyond chance if its element removes more than this many times
#: what chance removes. The default of ``AlignmentOptions.chance`` requires less.
TIMES_CHANCE = 1.5


Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Shares:
    """What alignment found in some rows of groups: squared distances, and shares of
    them.

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
    def of(cls, row: Mapping[str, Any]) -> Shares:
        """Return the shares of one row, see ``AlignmentReport.rows``."""
        before, moved, chance = (
            float(row["before"]),
            row["moved"] > 0,
            row.get("chance"),
        )
        known = None if chance is None or math.isnan(chance) else float(chance)
        one = cls(
            before,
            before - float(row["after"]),
            float(row["found"]),
            known,
            1,
            int(moved),
        )
        return replace(one, beyond=int(moved and one.exceeds(TIMES_CHANCE)))

    @property
    def share(self) -> float:
        """The share found, or the share removed if chance is unknown.

        Chance is unknown for parts that depend on each other; their ``found`` counts
        distances twice.
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
        """Return whether ``found`` exceeds ``times`` chance; False if chance is
        unknown.
        """
        return self.chance is not None and self.found > times * self.chance


def total(given: Iterable[Shares]) -> Shares:
    """Return the shares of all rows together."""
    parts = list(given)
    chances = [part.chance for part in parts if part.chance is not None]
    chance = sum(chances) if chances and len(chances) == len(parts) else None
    added = ("before", "removed", "found", "groups", "moved", "beyond")
    return Shares(
        chance=chance,
        **{name: sum(getattr(part, name) for part in parts) for name in added},
    )


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
