"""The anchors ``first`` and ``medoid``, which published tables compare with those of fedrot."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from fedrot.alignment import Alignment
from fedrot.anchors import ANCHORS, GlobalAnchor, Weighted
from fedrot.errors import UpdateError
from fedrot.matching.problem import Anchor, Spread
from fedrot.tensors import Tensors


class FirstAnchor(GlobalAnchor):
    """The first update of the round, aligned to the broadcast model."""

    def accept(self, aligned: Tensors, weight: float) -> None:
        """Keep the first."""
        if self.current is self.broadcast:
            self.current = Anchor(aligned, self.broadcast.spread_after(1.0))


class MedoidAnchor(GlobalAnchor):
    """The update with the least weighted squared distance to the others, after alignment to it.

    Distances are over the tensors that alignment moves. Rotations and permutations are isometries, so
    one direction per pair suffices. ``rescale``, ``ridge`` and ``threshold`` make the two directions
    differ a little; then the ranking is approximate.
    """

    needs_all = True

    def prepare(self, updates: Sequence[Weighted]) -> None:
        """Align every pair of updates, and take the update nearest to all others.

        An update that cannot be aligned is nobody's anchor: fewest failures count before distances.
        """
        anchors = [Anchor(update, Spread(1.0)) for update, _ in updates]
        failed, spread = [0] * len(updates), [0.0] * len(updates)
        for i, (_, weight_i) in enumerate(updates):
            for j, (update_j, weight_j) in enumerate(updates[:i]):
                try:
                    after = self.find(update_j, anchors[i]).report.after
                except UpdateError:
                    failed[i], failed[j] = failed[i] + 1, failed[j] + 1
                    continue
                spread[i] += weight_j * after
                spread[j] += weight_i * after
        self._centre, self._of_centre = -1, None
        for place in sorted(range(len(updates)), key=lambda i: (failed[i], spread[i])):
            update = updates[place][0]
            with suppress(UpdateError):
                self._of_centre = self.find(update, self.broadcast)
                self._centre = place
                self.current = Anchor(self._of_centre.apply(update), self.broadcast.spread_after(1.0))
                return

    def align(self, update: Tensors, place: int = 0) -> Alignment:
        """Return the alignment of one update; the medoid itself is aligned to the broadcast model."""
        if place == self._centre and self._of_centre is not None:
            return self._of_centre
        return super().align(update)


ANCHORS |= {"first": FirstAnchor, "medoid": MedoidAnchor}
