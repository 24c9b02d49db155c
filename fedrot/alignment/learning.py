"""Learned matching: gradient descent over rotations on the loss between two models.

The rotation of a head, or of the residual stream, is ``exp(X)`` with a skew-symmetric
``X``. Heads with rotary positions have phases instead. The cost is ``steps`` training
steps of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor, nn

from fedrot.alignment.align import Alignment, align, alignment_of
from fedrot.errors import FedrotError
from fedrot.matching.descent import compact
from fedrot.symmetry.actions import Action, HeadRotation
from fedrot.symmetry.groups import Group, Move, Slot, Symmetry
from fedrot.symmetry.rotary_actions import RotaryPhases
from fedrot.tensors import Tensors

#: Differentiable loss of a model's tensors on one batch.
Loss = Callable[[Tensors, Tensors], Tensor]

LEARNED_PARTS = ("attention", "residual")
#: Adam's learning rate, which decays linearly to 0.
LR = 1e-3
#: The loss is computed on the line from the anchor (0) to the update (1). Each step
#: draws its position on this line uniformly between these two.
POINTS = (0.2, 0.8)


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

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in LEARNED_PARTS:
                known = ", ".join(LEARNED_PARTS)
                raise FedrotError(
                    f"Part '{part}' cannot be learned; choose from {known}."
                )
        if self.steps < 0:
            raise FedrotError(f"steps is {self.steps}; it must not be negative.")


@dataclass(frozen=True)
class Learned:
    """A learned alignment, the loss before each step, at its point, and the wall time
    in seconds.
    """

    alignment: Alignment
    losses: tuple[float, ...]
    seconds: float


def loss_of(model: nn.Module) -> Loss:
    """Return the loss of a ``transformers`` model as a function of its parameters and a
    batch.

    Batches are keyword arguments of its forward, labels included. The model is not
    changed; put it into evaluation mode for a loss without dropout.
    """
    names = {name for name, _ in model.named_parameters()}

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
    learned = [
        (group, initial(group.action))
        for group in chosen
        if is_continuous(group.action)
    ]

    low, high = POINTS
    drawn = torch.Generator().manual_seed(0)

    def value(batch: Tensors) -> Tensor:
        point = low + (high - low) * float(torch.rand((), generator=drawn))
        found = dict(moved)
        for group, parameter in learned:
            element = turned(group.action, parameter)
            for slot in group.slots:
                found[slot.tensor] = multiplied(
                    found[slot.tensor], slot, group, element
                )
        return loss(between(fixed, found, point), batch)

    losses: tuple[float, ...] = ()
    if learned:
        optimizer = torch.optim.Adam([parameter for _, parameter in learned], lr=LR)
        losses = descend(value, batches, optimizer, options.steps)
    with torch.no_grad():
        elements = [
            Move(group, turned(group.action, p.detach().double()))
            for group, p in learned
        ]
    seconds = time.perf_counter() - begin
    moves = compact([*start.moves, *elements])
    return Learned(
        alignment_of(moves, update, anchor, symmetry, seconds), losses, seconds
    )


def descend(
    value: Callable[[Tensors], Tensor],
    batches: Iterable[Tensors],
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> tuple[float, ...]:
    """Minimise a value of batches; return the value before every step. Learning rates
    decay to 0.

    Raises:
        FedrotError: there are no batches, or the value is not finite.
    """
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max(steps, 1))
    losses: list[float] = []
    for batch in islice(cycle(batches), steps):
        found = value(batch)
        losses.append(float(found.detach()))
        if not torch.isfinite(found):
            raise FedrotError(
                f"The loss is {losses[-1]} at step {len(losses)}. Check the models and "
                "the batches, or lower the learning rate if you chose it."
            )
        optimizer.zero_grad(set_to_none=True)
        found.backward()
        optimizer.step()
        decay.step()
    if steps and not losses:
        raise FedrotError("No batches were given; pass at least one labelled batch.")
    return tuple(losses)


def between(fixed: Tensors, moved: Tensors, point: float) -> dict[str, Tensor]:
    """Return a point of the line between two models."""
    return {
        name: torch.lerp(fixed[name], tensor, point)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in moved.items()
    }


def is_continuous(action: Action) -> bool:
    """Whether elements of an action can be learned by gradients: rotations and
    phases.
    """
    return isinstance(action, HeadRotation | RotaryPhases)


def initial(action: Action) -> Tensor:
    """Return the parameter of the identity."""
    assert isinstance(action, HeadRotation | RotaryPhases)
    own = (
        (action.dim // 2,)
        if isinstance(action, RotaryPhases)
        else (action.dim, action.dim)
    )
    return torch.zeros(action.heads, *own, requires_grad=True)


def turned(action: Action, parameter: Tensor) -> Tensor:
    """Return the element of a parameter, differentiably."""
    if isinstance(action, RotaryPhases):
        return parameter
    assert isinstance(action, HeadRotation)
    return action.exponential(parameter)


def multiplied(tensor: Tensor, slot: Slot, group: Group, element: Tensor) -> Tensor:
    """Return the tensor with one slot moved by an element, differentiably."""
    out = tensor.clone()
    units = slot.of(tensor)
    slot.slice.write(
        out, slot.axis, group.action.act(element, units, slot.axis, slot.contravariant)
    )
    return out
