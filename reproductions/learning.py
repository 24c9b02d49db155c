"""Learned matching beyond rotations: ``GL(d_h)`` in heads, and soft permutations.

Every head gets a matrix ``exp(X)``, with ``X`` skew for rotations and unconstrained for
``GL(d_h)``, and so does a residual stream that is rotated. Every permutation gets a
matrix of scores: the best assignment is applied, and the gradient is that of Sinkhorn
iterations (a straight-through estimator). ``LearningOptions`` is an argument of
``fedrot.alignment.learning.learn_alignment``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedrot.alignment import learning
from fedrot.alignment.learning import Learnable
from fedrot.errors import FedrotError
from fedrot.matching.assignment import best_columns
from fedrot.symmetry.actions import HeadRotation, is_real
from fedrot.symmetry.describe.mixture import ExpertNeurons
from fedrot.symmetry.groups import Group, Move, Slot
from fedrot.symmetry.rotary_actions import RotarySigns
from fedrot.symmetry.signs import SignedPermutation

_SINKHORN_STEPS = 10


@dataclass(frozen=True)
class HeadLinear(HeadRotation):
    """``GL(dim)`` in each head, the full symmetry of a head; an element is ``[heads,
    dim, dim]``.

    The contravariant side moves by the inverse transpose. The action is no isometry and
    changes what weight decay and Adam see: learned matching may use it, alignment in
    rounds does not.

    Source: Zhang et al. 2025, Theorem 4.1.
    """

    @property
    def free(self) -> int:
        return self.heads * self.dim**2

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        return super().act(
            torch.linalg.inv(element).mT if contravariant else element, x, axis
        )

    def inverse(self, element: Tensor) -> Tensor:
        return torch.linalg.inv(element)

    def random(self, generator: torch.Generator) -> Tensor:
        shape = (self.heads, self.dim, self.dim)
        small = torch.randn(shape, generator=generator, dtype=torch.float64) / (
            2 * self.dim**0.5
        )
        return super().random(generator) @ torch.matrix_exp(small)

    def exponential(self, parameter: Tensor) -> Tensor:
        return torch.matrix_exp(parameter)

    def contains(self, element: Tensor) -> bool:
        if not is_real(element, (self.heads, self.dim, self.dim)):
            return False
        scales = torch.linalg.svdvals(element.double())
        return bool(((scales <= 1e3) & (scales >= 1 / 1e3)).all())


@dataclass(frozen=True)
class SoftPermutation(Learnable):
    """A permutation as a matrix of scores; ``temperature`` is Sinkhorn's."""

    temperature: float = 0.3

    def element(self, parameter: Tensor) -> Tensor:
        """Return the permutation as a matrix that has a gradient."""
        # A straight-through estimator: the value is the best assignment, the gradient
        # is Sinkhorn's.
        soft = parameter / self.temperature
        for _ in range(_SINKHORN_STEPS):
            soft = soft - soft.logsumexp(1, keepdim=True)
            soft = soft - soft.logsumexp(0, keepdim=True)
        soft = soft.exp()
        order = best_columns(parameter.detach()).to(parameter.device)
        hard = torch.eye(len(parameter)).to(parameter)[order]
        return hard + soft - soft.detach()

    def act(self, element: Tensor, units: Tensor, slot: Slot) -> Tensor:
        mixed = torch.tensordot(element.to(units), units, ([1], [slot.axis]))
        return mixed.movedim(0, slot.axis)

    def move(self) -> Move:
        order = best_columns(self.parameter.detach())
        # Elements of a signed permutation count from 1, so that each can have a sign.
        signed = isinstance(self.group.action, SignedPermutation)
        return Move(self.group, order + 1 if signed else order)


@dataclass(frozen=True)
class LearningOptions(learning.LearningOptions):
    """Settings of ``learn_alignment`` beyond fedrot's.

    Attributes:
        parts: any of ``attention``, ``ffn``, ``residual``; other parts keep their
            elements.
        steps: gradient steps; 0 returns the start.
        general: learn ``GL(d_h)`` in place of rotations of the heads. The distance to
            the anchor may grow. The loss of the average falls for two models and rises
            for more.
        points: where on the line from the anchor (0) to the update (1) the loss is
            taken: evenly drawn between these two for every step. Equal ones are a fixed
            point; 0.5 is the average.
        lr, permutation_lr: Adam's learning rates for the heads' matrices and for the
            permutations' scores; both decay linearly to 0.
        temperature: of the Sinkhorn iterations.
    """

    parts: tuple[str, ...] = ("attention",)
    steps: int = 600
    general: bool = False
    points: tuple[float, float] = (0.5, 0.5)
    lr: float = 1e-2
    permutation_lr: float = 3e-2
    temperature: float = 0.3

    known_parts = ("attention", "ffn", "residual")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.lr, self.permutation_lr, self.temperature)
        if not all(0 < size < float("inf") for size in sizes):
            raise FedrotError("rates and temperature must be positive.")
        if not 0 <= self.points[0] <= self.points[1] <= 1:
            raise FedrotError(
                f"points are {self.points}; they must ascend, from 0 to 1 at most."
            )

    def learnable(self, group: Group) -> Learnable | None:
        action = group.action
        # Signs have no gradient, and the neurons of experts no matrix: they stay as
        # they were found.
        if isinstance(action, RotarySigns | ExpertNeurons):
            return None
        if self.general and type(action) is HeadRotation:
            group = replace(group, action=HeadLinear(action.heads, action.dim))
        scores = torch.eye(action.units, requires_grad=True)
        return Learnable.of(group, self.lr) or SoftPermutation(
            group, scores, self.permutation_lr, self.temperature
        )
