"""A mixture of experts: its block, and the actions on the order of experts and on their
neurons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrot.symmetry.actions import Permutation
from fedrot.symmetry.describe.layers import Block
from fedrot.symmetry.describe.spaces import RESIDUAL, read
from fedrot.symmetry.groups import NO_LAYER, Group, Slice, Slot
from fedrot.symmetry.signs import SignedOrders


@dataclass(frozen=True)
class ExpertPermutation(Permutation):
    """The orders of ``n`` experts and of the router's rows."""

    stage: ClassVar[str] = "experts"


@dataclass(frozen=True)
class ExpertNeurons(SignedOrders):
    """The orders and signs of the ``n`` gated neurons inside each of ``experts``
    experts.

    An element is ``[experts, n]``; row ``i`` is an element of ``SignedPermutation`` for
    expert ``i``. Axis 0 of the tensors is the number of the expert.
    """

    stage: ClassVar[str] = "ffn"

    experts: int
    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.experts, self.n)

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        shape = [{0: self.experts, axis: self.n}.get(d, 1) for d in range(x.ndim)]
        index, signs = (element.abs() - 1).to(x.device), element.sign().to(x)
        return torch.take_along_dim(x, index.reshape(shape), axis) * signs.reshape(
            shape
        )


def mixture(
    name: str, experts: int, neurons: int, router: str, gate_up: str, down: str
) -> Block:
    """Return a mixture of gated experts (Jiang et al. 2024) whose weights are stored as
    one tensor.

    The experts and the router's rows are permuted together. The neurons inside each
    expert are permuted with signs.

    Args:
        name: prefix of the groups' names.
        experts: number of experts.
        neurons: number of neurons of each expert.
        router: the tensor ``[experts, in]``.
        gate_up: the tensor ``[experts, 2 * neurons, in]``, rows of the gate first.
        down: the tensor ``[experts, out, neurons]``.
    """
    whole = tuple(
        Slot(tensor, 0, Slice(0, experts)) for tensor in (router, gate_up, down)
    )
    first, second = Slice(0, neurons), Slice(neurons, 2 * neurons)
    units = (
        Slot(gate_up, 1, first, unsigned=True, experts=True),
        Slot(gate_up, 1, second, experts=True),
        Slot(down, 2, first, contravariant=True, experts=True),
    )
    order = Group(f"{name}experts", NO_LAYER, "ffn", ExpertPermutation(experts), whole)
    action = ExpertNeurons(experts, neurons)
    inside = Group(f"{name}ffn", NO_LAYER, "ffn", action, units, within=order.name)
    inputs, written = (None, None, read(RESIDUAL)), (None, RESIDUAL, None)
    return Block(
        (order, inside),
        {router: (None, read(RESIDUAL)), gate_up: inputs, down: written},
    )
