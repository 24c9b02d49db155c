"""Learned matching beyond rotations: ``GL(d_h)`` in heads, and soft permutations.

Every head gets a matrix ``exp(X)``, with ``X`` skew for rotations and unconstrained for
``GL(d_h)``, and so does a residual stream that is rotated. Every permutation gets a
matrix of scores: the best assignment is applied, and the gradient is that of Sinkhorn
iterations (a straight-through estimator). The cost is ``steps`` training steps of the
model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedrot.alignment.align import Alignment, align, alignment_of
from fedrot.alignment.learning import (
    Learned,
    Loss,
    between,
    descend,
    is_continuous,
    multiplied,
    turned,
)
from fedrot.alignment.learning import initial as initial_of
from fedrot.errors import FedrotError
from fedrot.matching.assignment import best_columns
from fedrot.matching.descent import compact
from fedrot.symmetry.actions import Action, HeadRotation, is_real
from fedrot.symmetry.describe.mixture import ExpertNeurons
from fedrot.symmetry.groups import Group, Move, Slot, Symmetry
from fedrot.symmetry.rotary_actions import RotarySigns
from fedrot.symmetry.signs import SignedPermutation
from fedrot.tensors import Tensors

LEARNED_PARTS = ("attention", "ffn", "residual")

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
class LearningOptions:
    """Settings of ``learn_alignment``.

    Attributes:
        parts: any of ``attention``, ``ffn``, ``residual``; other parts keep their
            elements.
        general: learn ``GL(d_h)`` in place of rotations of the heads. The distance to
            the anchor may grow. The loss of the average falls for two models and rises
            for more.
        steps: gradient steps; 0 returns the start.
        points: where on the line from the anchor (0) to the update (1) the loss is
            taken: evenly drawn between these two for every step. Equal ones are a fixed
            point; 0.5 is the average.
        lr, permutation_lr: Adam's learning rates for the heads' matrices and for the
            permutations' scores; both decay linearly to 0.
        temperature: of the Sinkhorn iterations.
    """

    parts: tuple[str, ...] = ("attention",)
    general: bool = False
    steps: int = 600
    points: tuple[float, float] = (0.5, 0.5)
    lr: float = 1e-2
    permutation_lr: float = 3e-2
    temperature: float = 0.3

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in LEARNED_PARTS:
                known = ", ".join(LEARNED_PARTS)
                raise FedrotError(
                    f"Part '{part}' cannot be learned; choose from {known}."
                )
        sizes = (self.lr, self.permutation_lr, self.temperature)
        if self.steps < 0 or not all(0 < size < float("inf") for size in sizes):
            raise FedrotError(
                "steps must not be negative; rates and temperature must be positive."
            )
        if not 0 <= self.points[0] <= self.points[1] <= 1:
            raise FedrotError(
                f"points are {self.points}; they must ascend, from 0 to 1 at most."
            )


def learn_alignment(
    loss: Loss,
    batches: Iterable[Tensors],
    update: Tensors,
    anchor: Tensors,
    symmetry: Symmetry,
    start: Alignment | None = None,
    options: LearningOptions | None = None,
) -> Learned:
    """Learn the update's group elements that minimise the loss between it and the
    anchor.

    Args:
        loss: a differentiable loss, such as ``loss_of(model)``.
        batches: labelled batches, repeated if there are fewer than ``steps``.
        update, anchor: the client's tensors, and those that they are averaged with.
        symmetry: from ``symmetry_of``.
        start: the alignment to start from; ``align`` with its defaults if None.
        options: the defaults if None.

    Raises:
        FedrotError: there are no batches, or the loss is not finite.
    """
    begin = time.perf_counter()
    options = options or LearningOptions()
    start = start or align(update, anchor, symmetry)
    moved = {name: tensor.detach() for name, tensor in start.apply(update).items()}
    fixed = {name: tensor.detach() for name, tensor in anchor.items()}
    chosen = symmetry.select(options.parts) if options.steps else ()
    # Signs have no gradient, and the neurons of experts no matrix: they stay as they
    # were found.
    kept = (RotarySigns, ExpertNeurons)
    groups = [
        _learnable(group, options)
        for group in chosen
        if not isinstance(group.action, kept)
    ]
    learned = [(group, initial(group.action)) for group in groups]
    heads = [parameter for group, parameter in learned if is_continuous(group.action)]
    orders = [
        parameter for group, parameter in learned if not is_continuous(group.action)
    ]
    optimizer = torch.optim.Adam(
        [
            {"params": heads, "lr": options.lr},
            {"params": orders, "lr": options.permutation_lr},
        ]
    )
    low, high = options.points
    drawn = torch.Generator().manual_seed(0)

    def value(batch: Tensors) -> Tensor:
        point = low + (high - low) * float(torch.rand((), generator=drawn))
        return loss(between(fixed, _moved_by(moved, learned, options), point), batch)

    losses = descend(value, batches, optimizer, options.steps if groups else 0)
    with torch.no_grad():
        found = [
            Move(group, _element(group, parameter)) for group, parameter in learned
        ]
    seconds = time.perf_counter() - begin
    moves = compact([*start.moves, *found])
    return Learned(
        alignment_of(moves, update, anchor, symmetry, seconds), losses, seconds
    )


def _moved_by(
    tensors: Tensors, learned: Iterable[tuple[Group, Tensor]], options: LearningOptions
) -> dict[str, Tensor]:
    """Return tensors moved by the elements so far, differentiably."""
    moved = dict(tensors)
    for group, parameter in learned:
        matrix = _matrix(group, parameter, options)
        for slot in group.slots:
            moved[slot.tensor] = _multiplied(moved[slot.tensor], slot, group, matrix)
    return moved


def _learnable(group: Group, options: LearningOptions) -> Group:
    if options.general and type(group.action) is HeadRotation:
        return replace(group, action=HeadLinear(group.action.heads, group.action.dim))
    return group


def initial(action: Action) -> Tensor:
    """Return the parameter of the identity, of a permutation its scores."""
    if is_continuous(action):
        return initial_of(action)
    return torch.eye(action.units, requires_grad=True)


def _matrix(group: Group, parameter: Tensor, options: LearningOptions) -> Tensor:
    """Return the element in a form that has a gradient: a permutation as a matrix."""
    if is_continuous(group.action):
        return turned(group.action, parameter)
    # A straight-through estimator: the value is the best assignment, the gradient is
    # Sinkhorn's.
    soft = parameter / options.temperature
    for _ in range(_SINKHORN_STEPS):
        soft = soft - soft.logsumexp(1, keepdim=True)
        soft = soft - soft.logsumexp(0, keepdim=True)
    soft = soft.exp()
    hard = torch.eye(len(parameter)).to(parameter)[
        best_columns(parameter.detach()).to(parameter.device)
    ]
    return hard + soft - soft.detach()


def _multiplied(tensor: Tensor, slot: Slot, group: Group, matrix: Tensor) -> Tensor:
    """Return the tensor with one slot moved by an element from ``_matrix``,
    differentiably.
    """
    if is_continuous(group.action):
        return multiplied(tensor, slot, group, matrix)
    units = slot.of(tensor)
    out = tensor.clone()
    moved = torch.tensordot(matrix.to(units), units, ([1], [slot.axis])).movedim(
        0, slot.axis
    )
    slot.slice.write(out, slot.axis, moved)
    return out


def _element(group: Group, parameter: Tensor) -> Tensor:
    if is_continuous(group.action):
        return turned(group.action, parameter.detach().double())
    order = best_columns(parameter.detach())
    return order + 1 if isinstance(group.action, SignedPermutation) else order
