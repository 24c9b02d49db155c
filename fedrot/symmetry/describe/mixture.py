"""A mixture of experts: its block, and the actions on experts and on their neurons."""

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
from fedrot.tensors import Shape


@dataclass(frozen=True)
class ExpertPermutation(Permutation):
    """The orders of ``n`` experts and of the router's rows."""

    stage: ClassVar[str] = "experts"


@dataclass(frozen=True)
class ExpertNeurons(SignedOrders):
    """The orders and signs of the ``n`` gated neurons inside each expert.

    An element is ``[experts, n]``; row ``i`` is an element of ``SignedPermutation`` for
    expert ``i``. Axis 0 of the tensors is the number of the expert.
    """

    stage: ClassVar[str] = "ffn"

    experts: int
    n: int

    @property
    def shape(self) -> Shape:
        return (self.experts, self.n)

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        shape = [1] * x.ndim
        shape[0] = self.experts
        shape[axis] = self.n
        index = (element.abs() - 1).to(x.device).reshape(shape)
        signs = element.sign().to(x).reshape(shape)
        return torch.take_along_dim(x, index, axis) * signs


def mixture(
    name: str, experts: int, neurons: int, router: str, gate_up: str, down: str
) -> Block:
    """Return a mixture of gated experts whose weights are stored as one tensor.

    The experts and the router's rows are permuted together. The neurons inside each
    expert are permuted with signs.

    Source: Jiang et al. 2024.

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
    first = Slice(0, neurons)
    second = Slice(neurons, 2 * neurons)
    units = (
        # The activation is on the gate, so the sign of a neuron does not reach it.
        Slot(gate_up, 1, first, unsigned=True, experts=True),
        Slot(gate_up, 1, second, experts=True),
        Slot(down, 2, first, contravariant=True, experts=True),
    )
    order = Group(f"{name}experts", NO_LAYER, "ffn", ExpertPermutation(experts), whole)
    action = ExpertNeurons(experts, neurons)
    inside = Group(f"{name}ffn", NO_LAYER, "ffn", action, units, within=order.name)
    stream = read(RESIDUAL)
    axes = {
        router: (None, stream),
        gate_up: (None, None, stream),
        down: (None, RESIDUAL, None),
    }
    return Block((order, inside), axes)
