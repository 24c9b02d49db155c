"""``OptimalTransport``: the mean of updates whose units were transported to the
anchor's units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.aggregation.registry import register_aggregation
from fedrot.collect.statistics import TRAINED, Statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.matching.pairs import by_sign, pairs
from fedrot.symmetry.actions import Permutation
from fedrot.symmetry.describe.mixture import ExpertPermutation
from fedrot.symmetry.groups import Group, Symmetry
from fedrot.tensors import Tensors, compute_dtype, full_float32

#: Parts whose units have the same shape and can be mixed.
MIXED = ("heads", "ffn")

#: Sinkhorn's iterations stop at this number, or at this error of the plan's sums.
_ITERATIONS, _TOLERANCE = 2000, 1e-7


@register_aggregation(
    "ot", "the mean after a transport of neurons and heads to the anchor's"
)
class OptimalTransport(Mean):
    """Optimal-transport fusion (Singh & Jaggi 2020, OTFusion); needs the POT library.

    Units are FFN neurons and heads. A transport plan ``T`` ``[n, n]``, whose rows and
    columns sum to 1, replaces the update's units by mixtures ``u_i = sum_j T_ij u_j``,
    in the tensors that write the units and in the tensors that read them; then updates
    are averaged. The plan minimises the squared distance to the anchor's units, divided
    by the largest, plus ``regularisation`` times its negative entropy. Without
    regularisation the plan is a permutation, which preserves the update's function;
    other plans do not. A unit that may change its sign gets the sign nearer to the
    anchor. Align rotations first.

    Args:
        symmetry: from ``symmetry_of``.
        regularisation: weight of the entropy, not negative.
        parts: any of ``heads``, ``ffn``.
        anchor: tensors that updates are transported to; the first update if None.

    Raises:
        FedrotError: a part cannot be mixed, regularisation is negative, or POT is not
            installed.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        regularisation: float = 0.01,
        parts: tuple[str, ...] = MIXED,
        anchor: Tensors | None = None,
    ) -> None:
        unknown = [part for part in parts if part not in MIXED]
        if unknown:
            raise FedrotError(
                f"Part '{unknown[0]}' cannot be mixed; choose from {', '.join(MIXED)}."
            )
        if not 0 <= regularisation < float("inf"):
            raise FedrotError(
                f"regularisation is {regularisation}; it must not be negative."
            )
        _pot()
        super().__init__()
        self.regularisation = regularisation
        # Query heads that share a key head are mixed together with it, not with each
        # other.
        found = [g for g in symmetry.select(parts) if isinstance(g.action, Permutation)]
        experts = [g for g in found if isinstance(g.action, ExpertPermutation)]
        self._groups = [g for g in found if g not in experts]
        self._anchor = anchor
        in_place = (
            "experts are not transported: the neurons of two experts have no common "
            "order"
        )
        #: The groups that are not mixed, and those whose plan had not converged in any
        #: update.
        self.notes: dict[str, str] = dict.fromkeys(
            (group.name for group in experts), in_place
        )

    def add(
        self, update: Tensors, weight: float, statistics: Statistics | None = None
    ) -> None:
        """Transport one update and add it.

        Raises:
            UpdateError: as ``Mean.add``, or a mask of trained rows covers only some
                rows of a tensor whose units are mixed. After an error, nothing has been
                added.
        """
        self.check(update, weight, statistics)
        moved = {
            slot.tensor
            for group in self._groups
            for slot in group.slots
            if slot.axis == 0
        }
        for name, mask in (statistics or {}).get(TRAINED, {}).items():
            if name in moved and bool(mask.any()) and not bool(mask.all()):
                raise UpdateError(
                    f"Only some rows of '{name}' are marked as trained, but its units "
                    "are mixed. Mark all of its rows or none."
                )
        if self._anchor is None:
            self._anchor = dict(update)
        self.fold(self.transported(update), weight, statistics)

    @full_float32()
    def transported(self, update: Tensors) -> dict[str, Tensor]:
        """Return a copy of the update with units transported to the anchor's."""
        moved = dict(update)
        for group in self._groups:
            plan, signs = self._plan(group, moved)
            for slot in group.slots:
                tensor = moved[slot.tensor].detach().clone()
                mixing = plan if slot.unsigned else plan * signs
                slot.slice.write(
                    tensor, slot.axis, _mixed(mixing, slot.of(tensor), slot.axis)
                )
                moved[slot.tensor] = tensor
        return moved

    def _plan(self, group: Group, update: Tensors) -> tuple[Tensor, Tensor]:
        """Return the plan ``[n (anchor), n (update)]``, whose rows sum to 1, and its
        signs; float64.
        """
        assert self._anchor is not None
        n = group.action.units
        cost, negated = torch.zeros(2, n, n, dtype=torch.float64)
        plain, signed = by_sign(group, pairs(group, self._anchor, update))
        for side, sign in ((plain, 1), (signed, -1)):
            for a, c in side:
                ours, theirs = (m.double().cpu().reshape(n, -1) for m in (a, c))
                cost += torch.cdist(ours, theirs).square()
                negated += torch.cdist(ours, sign * theirs).square()
        signs = torch.where(negated < cost, -1.0, 1.0).double()
        cost = torch.minimum(cost, negated)
        cost /= cost.max().clamp_min(torch.finfo(torch.float64).tiny)
        pot = _pot()
        even = torch.full((n,), 1 / n, dtype=torch.float64).numpy()
        if self.regularisation == 0:
            plan = pot.emd(even, even, cost.numpy())
        else:
            plan, log = pot.sinkhorn(
                even,
                even,
                cost.numpy(),
                self.regularisation,
                # In logarithms: exp(-1 / regularisation) may leave float64's range.
                method="sinkhorn_log",
                numItermax=_ITERATIONS,
                stopThr=_TOLERANCE,
                log=True,
                warn=False,
            )
            error = log["err"][-1]
            if error > _TOLERANCE:
                self.notes[group.name] = (
                    f"the sums of the transport plan are wrong by {error:.1g} "
                    f"after {_ITERATIONS} iterations; more regularisation converges "
                    "faster"
                )
        plan = torch.from_numpy(plan)
        # The rows of a plan that has not converged do not sum to 1.
        return plan / plan.sum(1, keepdim=True), signs


def _mixed(plan: Tensor, x: Tensor, axis: int) -> Tensor:
    """Return the plan applied to the units on one axis of ``x``, each a slice of equal
    length.
    """
    units = x.movedim(axis, 0).reshape(len(plan), -1).to(compute_dtype(x))
    mixed = plan.to(units) @ units
    return mixed.reshape(x.movedim(axis, 0).shape).movedim(0, axis).to(x.dtype)


def _pot() -> Any:
    try:
        import ot
    except ImportError as error:
        raise FedrotError(
            "Optimal-transport fusion needs the POT library: pip install POT."
        ) from error
    return ot
