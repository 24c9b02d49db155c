"""``move_optimizer_state``: the state of a client's optimiser follows its factors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapters import pairs_of, shaped, wide_factors
from fedrot.lora.gauges import rotation
from fedrot.lora.peft_model import factor_parameters
from fedrot.tensors import Tensors

#: State that is like a gradient, and state that is like its square, by the names of ``torch.optim``.
LIKE_GRADIENTS = ("exp_avg", "momentum_buffer", "grad_avg")
LIKE_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")


def move_optimizer_state(
    optimizer: torch.optim.Optimizer, model: Any, sent: Tensors, adapter: str = "default"
) -> None:
    """Rotate the optimiser's state of an adapter's factors as the server rotated the factors, in place.

    A client that keeps its optimiser over the rounds calls this after ``load_adapter``. The rotation of
    a pair is the one that moves the factors that the client sent nearest to those that it received:
    ``R = polar(A A_sent^T + B^T B_sent)``. State that is like a gradient (momentum, Adam's first moment)
    moves as the factors do: exactly, if the server did nothing but rotate. State that is like a squared
    gradient moves with the squares of the rotation's entries: exactly for permutations and signs.

    Example: ``load_adapter(model, received); move_optimizer_state(optimizer, model, sent)``.

    Args:
        optimizer: of ``torch.optim``, with the state of the last round.
        model: the ``peft.PeftModel`` that ``optimizer`` trains, with the received adapter.
        sent: the adapter that this client sent last.
        adapter: its name.

    Raises:
        FedrotError: the optimiser keeps a state that is neither like a gradient nor like its square.
        UpdateError: what was sent is not this adapter. No state has been changed then.
    """
    parameters = factor_parameters(model, adapter)
    now = {name: parameter.detach() for name, parameter in parameters.items()}
    changed: list[tuple[Tensor, Tensor]] = []
    for pair in pairs_of(now):
        for name in (pair.a, pair.b):
            if name not in sent or sent[name].shape != now[name].shape:
                raise UpdateError(
                    f"The factor '{name}' that was sent is missing or has another shape than the "
                    "model's. Give the tensors of adapter_tensors(model) after the last training."
                )
        own = {name: sent[name].to(now[name]) for name in (pair.a, pair.b)}
        r = rotation(wide_factors(own, pair), wide_factors(now, pair))
        for name, turn in ((pair.a, lambda m, r: r @ m), (pair.b, lambda m, r: m @ r.mT)):
            parameter = parameters[name]
            for kind, state in optimizer.state.get(parameter, {}).items():
                if not isinstance(state, Tensor) or not state.ndim:
                    continue  # The number of steps.
                by = _by(kind, state, parameter, r)
                moved = turn(state.flatten(1).to(by), by)
                changed.append((state, shaped(moved, state.shape)))
    for state, moved in changed:
        state.copy_(moved)


def _by(kind: str, state: Tensor, parameter: Tensor, r: Tensor) -> Tensor:
    """Return the matrix that moves a state."""
    if state.shape == parameter.shape and kind in LIKE_GRADIENTS:
        return r
    if state.shape == parameter.shape and kind in LIKE_SQUARES:
        return r.square()
    raise FedrotError(
        f"The optimiser's state '{kind}' of shape {list(state.shape)} cannot be rotated. Take SGD, "
        "Adam, AdamW, RMSprop or Adagrad, or begin each round with a new optimiser."
    )
