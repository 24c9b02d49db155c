"""The task head of a finished model, fitted to the rows of all clients.

The server sends the model and asks for sums (``held_out``). It fits the task head, sends the model with
the fitted head, and asks for the losses on the clients' held-out rows. The head with the smaller loss is
kept, at its best temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from logging import INFO, WARNING

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid

from fedrot.errors import FedrotError
from fedrot.head import check_shrinkage, fit_head, head_of, with_head
from fedrot.strategies.round.outbox import as_sent
from fedrot.strategies.sums.held_out import ask, losses_at, total
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.temperature import LossSums, best_temperature, with_temperature
from fedrot.tensors import Tensors

#: With fewer held-out rows of all clients together, a warning is logged.
FEW = 100


@dataclass(frozen=True)
class FittedHead:
    """A model with its task head, and the losses on held-out rows.

    Attributes:
        arrays: the model, with the better of the two task heads at its best temperature.
        fitted: whether the fitted head is the better one.
        temperature: the divisor of the logits.
        losses: mean cross entropy on the held-out rows of all clients: of the given model, of the given
            model at its best temperature, and of the fitted head at its best temperature.
        rows: number of held-out rows.
        clients: number of clients that answered both requests.
    """

    arrays: ArrayRecord
    fitted: bool
    temperature: float
    losses: tuple[float, float, float]
    rows: float
    clients: int

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics of a round: whether the head is fitted, temperature and loss."""
        return {
            "fedrot-head-fitted": int(self.fitted),
            "fedrot-head-temperature": self.temperature,
            "fedrot-head-loss": min(self.losses[1:]),
        }


def named_head(head: str | None, model_config: object, tensors: Tensors) -> str:
    """Return the name of a model's task head; raises ``FedrotError`` if the model lacks it."""
    found = head or head_of(model_config, tensors)
    if f"{found}.weight" not in tensors:
        raise FedrotError(f"The model has no layer '{found}'; see fedrot.head.head_of.")
    return found


def fit_task_head(
    grid: Grid,
    arrays: ArrayRecord,
    model_config: object,
    *,
    head: str | None = None,
    shrinkage: float = 0.1,
    config: ConfigRecord | None = None,
    timeout: float = 3600,
    wire: torch.dtype | None = None,
) -> FittedHead:
    """Fit the task head of a finished model to the rows of all connected clients.

    Every client receives the model, and answers with sums over its rows. Clients with held-out rows
    receive the model again, with the fitted head. The server sees each client's sums; for a class with
    one row these are the row's features. Wrong sums of a client change the total as they change a mean.
    The task head is fitted by linear discriminant analysis (``fedrot.head.fit_head``). It is kept only
    if its loss over all held-out rows is smaller than the given head's, each at its best temperature.

    Args:
        grid: of the server app. Clients need ``answer_with_sums`` on their ``ClientApp``.
        arrays: the model, such as ``strategy.start(...).arrays``.
        model_config: the model's transformers configuration, or its dictionary.
        head: the name of the model's last linear layer; ``fedrot.head.head_of`` if None.
        shrinkage: see ``fedrot.head.fit_head``.
        config: sent with both requests, like ``train_config`` in a round.
        timeout: seconds to wait for the answers to each of the two requests.
        wire: precision of the model that is sent to the clients, as in ``Server``.

    Example: ``final = fit_task_head(grid, strategy.start(grid, arrays).arrays, model.config).arrays``

    Raises:
        FedrotError: the shrinkage is not from 0 to 1; the model has no such layer; no client has
            held-out rows; or no client gives a usable answer, with the last reason.
    """
    check_shrinkage(shrinkage)
    tensors = from_arrays(arrays)
    head = named_head(head, model_config, tensors)
    asked = partial(ask, grid, config=config or ConfigRecord(), timeout=timeout)
    shape = tuple(tensors[f"{head}.weight"].shape)
    first = asked([*grid.get_node_ids()], _sent(arrays, wire), head, shape)
    judges = [node for node, answer in first.items() if answer.losses is not None]
    if not judges:
        raise FedrotError("Task head: no client has held-out rows to choose the head by.")
    fitted, second = tensors, {node: first[node] for node in judges}
    try:
        sums = total(answer.sums for answer in first.values())
        fitted = with_head(tensors, head, *fit_head(sums, shrinkage, bias=f"{head}.bias" in tensors))
    except FedrotError as error:
        log(WARNING, "The task head cannot be fitted and is not changed. %s", error)
    else:
        second = asked(judges, _sent(as_sent({**fitted}, arrays), wire), "", None)
    before = total(first[node].losses for node in second)
    after = total(answer.losses for answer in second.values())
    better = _loss(after) < _loss(before)
    chosen, losses = (fitted, after) if better else (tensors, before)
    temperature = best_temperature(losses)
    result = as_sent({**with_temperature(chosen, head, temperature)}, arrays)
    all_losses = losses_at(before, 1.0), _loss(before), _loss(after)
    found = FittedHead(result, better, temperature, all_losses, before.rows, len(second))
    if before.rows < FEW:
        log(
            WARNING,
            "Task head: with %g held-out rows, the choice of head and temperature may be noise. Let "
            "clients hold out more rows.",
            before.rows,
        )
    log(
        INFO,
        "Task head: %d clients, %g held-out rows; loss of the old head %.4g, at its best temperature "
        "%.4g, of the fitted head %.4g: the %s head is kept, temperature %.3g.",
        *(found.clients, found.rows, *found.losses, "fitted" if better else "old", temperature),
    )
    return found


def _sent(arrays: ArrayRecord, wire: torch.dtype | None) -> ArrayRecord:
    return arrays if wire is None else to_arrays(from_arrays(arrays), wire)


def _loss(sums: LossSums) -> float:
    """Return the mean loss at the best temperature."""
    return losses_at(sums, best_temperature(sums))
