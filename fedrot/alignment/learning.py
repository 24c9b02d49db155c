"""Learned matching: gradient descent over rotations on the loss between two models.

The rotation of a head, or of the residual stream, is ``exp(X)`` with a skew-symmetric
``X``. Heads with rotary positions have phases instead. The cost is ``steps`` training
steps of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor, nn

from fedrot.alignment.align import Alignment, align, alignment_of
from fedrot.errors import FedrotError
from fedrot.matching.descent import compact
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.groups import Group, Move, Slot, Symmetry
from fedrot.symmetry.rotary_actions import RotaryPhases
from fedrot.tensors import Shape, TensorDict, Tensors

#: Differentiable loss of a model's tensors on one batch.
Loss = Callable[[Tensors, Tensors], Tensor]

LEARNED_PARTS = ("attention", "residual")
#: Adam's learning rate, which decays linearly to 0.
LR = 1e-3
#: The loss is computed on the line from the anchor (0) to the update (1). Each step
#: draws its position on this line uniformly between these two.
POINTS = (0.2, 0.8)


@dataclass(frozen=True)
class Learnable:
    """A group, and the parameter that determines its element.

    Elements are rotations of heads or of the stream, or phases. ``lr`` is Adam's
    learning rate.
    """

    group: Group
    parameter: Tensor
    lr: float = LR

    @classmethod
    def of(cls, group: Group, lr: float = LR) -> Learnable | None:
        """Return a group at the identity; None if its elements have no gradient."""
        action = group.action
        if isinstance(action, RotaryPhases):
            shape: Shape = (action.heads, action.dim // 2)
        elif isinstance(action, HeadRotation):
            shape = (action.heads, action.dim, action.dim)
        else:
            return None
        return cls(group, torch.zeros(shape, requires_grad=True), lr)

    def element(self, parameter: Tensor) -> Tensor:
        """Return the element of a parameter, differentiably."""
        action = self.group.action
        return (
            action.exponential(parameter)
            if isinstance(action, HeadRotation)
            else parameter
        )

    def act(self, element: Tensor, units: Tensor, slot: Slot) -> Tensor:
        """Return a slot's units, moved by an element."""
        return self.group.action.act(element, units, slot.axis, slot.contravariant)

    def multiplied(self, tensor: Tensor, slot: Slot, element: Tensor) -> Tensor:
        """Return the tensor with one slot moved by an element, differentiably."""
        out = tensor.clone()
        moved = self.act(element, slot.of(tensor), slot)
        slot.slice.write(out, slot.axis, moved)
        return out

    def move(self) -> Move:
        """Return the move that was learned, in float64."""
        return Move(self.group, self.element(self.parameter.detach().double()))


@dataclass(frozen=True)
class LearningOptions:
    """Settings of ``learn_alignment``.

    Attributes:
        parts: any of ``attention``, ``residual`` (if the stream is rotated); the
            elements of other parts stay as in ``start``.
        steps: gradient steps; 0 returns ``start``. The default is small, because in a
            federation the other clients learn at the same time.
    """

    parts: tuple[str, ...] = ("residual", "attention")
    steps: int = 8

    # Constants here, fields of the subclass with which ``reproductions`` compares them.
    known_parts = LEARNED_PARTS
    points = POINTS

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in self.known_parts:
                known = ", ".join(self.known_parts)
                raise FedrotError(
                    f"Part '{part}' cannot be learned; choose from {known}."
                )
        if self.steps < 0:
            raise FedrotError(f"steps is {self.steps}; it must not be negative.")

    def learnable(self, group: Group) -> Learnable | None:
        """Return a group with its parameter, None if its element stays."""
        return Learnable.of(group)


@dataclass(frozen=True)
class Learned:
    """A learned alignment, the loss before each step, and the wall time in seconds."""

    alignment: Alignment
    losses: tuple[float, ...]
    seconds: float


def loss_of(model: nn.Module) -> Loss:
    """Return a ``transformers`` model's loss as a function of parameters and batch.

    Batches are keyword arguments of its forward, labels included. The model is not
    changed; put it into evaluation mode for a loss without dropout.
    """
    names = dict(model.named_parameters()).keys()

    def loss(tensors: Tensors, batch: Tensors) -> Tensor:
        parameters = {name: tensors[name] for name in names}
        value = torch.func.functional_call(model, parameters, (), dict(batch)).loss
        if value is None:
            raise FedrotError(
                "The model returns no loss; put 'labels' into the batches."
            )
        return value

    return loss


def learn_alignment(
    loss: Loss,
    batches: Iterable[Tensors],
    update: Tensors,
    anchor: Tensors,
    symmetry: Symmetry,
    start: Alignment | None = None,
    options: LearningOptions | None = None,
) -> Learned:
    """Learn the update's rotations that minimise the loss between it and the anchor.

    Args:
        loss: a differentiable loss, such as ``loss_of(model)``.
        batches: labelled batches, repeated if there are fewer than ``steps``.
        update: the client's tensors.
        anchor: the tensors that ``update`` is averaged with.
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
    learned = [each for each in map(options.learnable, chosen) if each is not None]
    losses = _descend(loss, batches, fixed, moved, learned, options) if learned else ()
    elements = [each.move() for each in learned]
    seconds = time.perf_counter() - begin
    moves = compact([*start.moves, *elements])
    return Learned(
        alignment_of(moves, update, anchor, symmetry, seconds), losses, seconds
    )


def _descend(
    loss: Loss,
    batches: Iterable[Tensors],
    fixed: Tensors,
    moved: Tensors,
    learned: Sequence[Learnable],
    options: LearningOptions,
) -> tuple[float, ...]:
    """Minimise the loss over the parameters; return it before every step."""
    rates = [{"params": [each.parameter], "lr": each.lr} for each in learned]
    optimizer = torch.optim.Adam(rates)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.steps)
    low, high = options.points
    drawn = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for batch in islice(cycle(batches), options.steps):
        point = low + (high - low) * float(torch.rand((), generator=drawn))
        tensors = dict(moved)
        for each in learned:
            element = each.element(each.parameter)
            for slot in each.group.slots:
                tensor = tensors[slot.tensor]
                tensors[slot.tensor] = each.multiplied(tensor, slot, element)
        current = loss(between(fixed, tensors, point), batch)
        losses.append(float(current.detach()))
        if not torch.isfinite(current):
            raise FedrotError(
                f"The loss is {losses[-1]} at step {len(losses)}. Check the models and "
                "the batches, or lower the learning rate if you chose it."
            )
        optimizer.zero_grad(set_to_none=True)
        current.backward()
        optimizer.step()
        decay.step()
    if not losses:
        raise FedrotError("No batches were given; pass at least one labelled batch.")
    return tuple(losses)


def between(fixed: Tensors, moved: Tensors, point: float) -> TensorDict:
    """Return a point of the line between two models."""
    return {
        name: torch.lerp(fixed[name], tensor, point)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in moved.items()
    }
