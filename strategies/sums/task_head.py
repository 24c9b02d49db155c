"""The task head of a finished model, fitted to the rows of all clients.

The server asks for the numbers of rows, then for sums over the training rows (``requests``). It fits the
task head, and clients evaluate the old head and the fitted one on their held-out rows. A quarter of the
clients cannot turn the choice (``losses``).
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from logging import INFO, WARNING

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.head import ClassSums, check_shrinkage, fit_head, head_of, largest_inputs, with_head
from fedrot.strategies.round.outbox import as_sent
from fedrot.strategies.sums.losses import FEWEST, FITTED, OLD, Ballot, in_order
from fedrot.strategies.sums.requests import (
    COUNT,
    EVALUATE,
    HEADS,
    MODEL,
    SUM,
    ask,
    read_losses,
    read_rows,
    read_sums,
)
from fedrot.strategies.sums.totals import Totals
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.temperature import LARGEST_LOSS, TEMPERATURES, with_temperature
from fedrot.tensors import Tensors, compute_dtype

#: With fewer held-out rows of all clients together, a warning is logged.
FEW = 100


@dataclass(frozen=True)
class FittedHead:
    """A model with its task head, and the losses on held-out rows.

    If no head can be fitted or compared, the model is the given one.

    Attributes:
        arrays: the model, with the better of the two task heads at its best temperature.
        fitted: whether the fitted head is the better one.
        temperature: the divisor of the logits.
        losses: cross entropy of a held-out row: of the given model, of the given model at its best
            temperature, and of the fitted head at its best temperature; means with fewer than four
            clients, else centres (``sums.losses``). NaN if no head could be fitted or compared.
        rows: number of held-out rows that count.
        clients: number of clients that evaluated both heads.
    """

    arrays: ArrayRecord
    fitted: bool
    temperature: float
    losses: tuple[float, float, float]
    rows: float
    clients: int

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics of a round: whether the head is fitted, temperature, and loss if known."""
        kept = {"fedrot-head-fitted": int(self.fitted), "fedrot-head-temperature": self.temperature}
        return {**kept, "fedrot-head-loss": min(self.losses[1:])} if self.clients else {**kept}


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

    Clients tell how many rows they have. Then they receive the model, and answer with sums over their
    training rows. Clients with held-out rows receive it again, with the heads to compare. The server
    sees each client's sums; for a class with one row these are the row's features. The task head is
    fitted by linear discriminant analysis (``fedrot.head.fit_head``). It is kept only if its loss on
    held-out rows is smaller than the given head's, each at its best temperature.

    Up to a quarter of the clients may lie. A client's rows count at most 1.5 times as much as the
    median client's, sums without which the head is better are left out, and no quarter of the clients
    turns a choice (``sums.losses``).

    Args:
        grid: of the server app. Clients need ``answer_with_sums`` on their ``ClientApp``.
        arrays: the model, such as ``strategy.start(...).arrays``.
        model_config: the model's transformers configuration, or its dictionary.
        head: the name of the model's last linear layer; ``fedrot.head.head_of`` if None.
        shrinkage: see ``fedrot.head.fit_head``.
        config: sent with all requests, like ``train_config`` in a round.
        timeout: seconds to wait for the answers to each request.
        wire: precision of the model that is sent to the clients, as in ``Server``.

    Example: ``final = fit_task_head(grid, strategy.start(grid, arrays).arrays, model.config).arrays``

    Raises:
        FedrotError: the shrinkage is not from 0 to 1; the model has no such layer; no client has
            held-out rows; or no client gives a usable answer, with the last reason.
    """
    check_shrinkage(shrinkage)
    tensors = from_arrays(arrays)
    head = named_head(head, model_config, tensors)
    asked = partial(ask, grid, config=config, timeout=timeout, head=head)
    rows = asked([*grid.get_node_ids()], COUNT, RecordDict(), read_rows)
    held_out = [node for node, own in rows.items() if own.held_out]
    if not held_out:
        raise FedrotError("Task head: no client has held-out rows with 'labels' to choose the head by.")
    model = RecordDict({MODEL: arrays if wire is None else to_arrays(tensors, wire)})
    classes, inputs = tensors[f"{head}.weight"].shape
    announced = {node: own.training for node, own in rows.items() if own.training}
    totals = Totals(announced, (classes, inputs), largest_inputs(model_config, tensors, head))
    fits = _Fits(tensors, head, shrinkage, totals)

    def read(node: int, content: RecordDict) -> None:
        totals.add(node, read_sums(content, totals.shape))

    def compared(*models: Tensors) -> Ballot:
        content = RecordDict({**model, HEADS: to_arrays(fits.stacked(tensors, *models))})
        answers = asked(held_out, EVALUATE, content, partial(read_losses, heads=1 + len(models)))
        return Ballot([*in_order(answers).values()])

    try:
        if not announced:
            raise UpdateError("No client has training rows with 'labels'.")
        asked(announced, SUM, model, read)
        fitted, why = fits.all()
        without = fits.without_each(fitted)
        ballot = compared(fitted, *without.values())
        if groups := ballot.harmful([*without]):
            message = "Task head: it is better without %d of %d groups of clients, which are left out."
            log(WARNING, message, len(groups), len(totals.groups))
            fitted = fits.without(groups, fitted)
            ballot = compared(fitted)
        elif why:
            raise UpdateError(why)
    except FedrotError as error:
        log(WARNING, "The task head cannot be fitted and is not changed. %s", error)
        return FittedHead(arrays, False, 1.0, (math.nan, math.nan, math.nan), 0, 0)
    return _chosen(ballot, tensors, fitted, head, arrays)


def _chosen(
    ballot: Ballot, tensors: Tensors, fitted: Tensors, head: str, arrays: ArrayRecord
) -> FittedHead:
    """Return the model with the head that the clients' losses prefer, and log the choice."""
    better = ballot.better
    temperature = TEMPERATURES[ballot.temperature(FITTED if better else OLD)]
    kept = with_temperature(fitted if better else tensors, head, temperature)
    losses, rows, clients = ballot.losses(), float(ballot.weights.sum()), len(ballot.weights)
    found = FittedHead(as_sent({**kept}, arrays), better, temperature, losses, rows, clients)
    if found.rows < FEW:
        log(
            WARNING,
            "Task head: with %g held-out rows, the choice of head and temperature may be noise. Let "
            "clients hold out more rows.",
            found.rows,
        )
    log(
        INFO,
        "Task head: %d clients, %g held-out rows; loss of the old head %.4g, at its best temperature "
        "%.4g, of the fitted head %.4g: the %s head is kept, temperature %.3g.",
        *(found.clients, found.rows, *found.losses, "fitted" if found.fitted else "old", temperature),
    )
    return found


class _Fits:
    """Models with a task head that is fitted to clients' sums."""

    def __init__(self, tensors: Tensors, head: str, shrinkage: float, totals: Totals) -> None:
        self._tensors, self._shrinkage, self._totals = tensors, shrinkage, totals
        self._head = head
        self._names = [name for name in (f"{head}.weight", f"{head}.bias") if name in tensors]

    def all(self) -> tuple[Tensors, str]:
        """Return the model with the head that is fitted to all sums; else the old one, and why."""
        try:
            return self._fitted(self._totals.without()), ""
        except FedrotError as error:
            return self._tensors, str(error)

    def without_each(self, fitted: Tensors) -> dict[int, Tensors]:
        """Return models without the sums of one group each; none if one is more than a quarter."""
        groups, counts = self._totals.groups, self._totals.counts
        found: dict[int, Tensors] = {}
        for group in groups if len(groups) >= FEWEST else ():
            with suppress(FedrotError):
                found[group] = self.without([group], fitted, counts)
        return found

    def without(self, groups: list[int], fitted: Tensors, priors: Tensor | None = None) -> Tensors:
        """Return the model with a head that is fitted without the sums of some groups.

        Classes that only these groups have keep the weights of the ``fitted`` head, so that a client
        with classes of its own is not left out together with them. With the ``priors`` of all sums, the
        two heads differ in what the groups' sums say about the classes of others.
        """
        rest = self._totals.without(groups)
        found, theirs = self._fitted(rest, priors), rest.counts == 0
        for name in self._names:
            found[name][theirs] = fitted[name][theirs]
        return found

    def stacked(self, *models: Tensors) -> dict[str, Tensor]:
        """Return the heads of models, for ``fedrot.temperature.collect_losses``."""
        weight, *biases = (torch.stack([model[name] for model in models]) for name in self._names)
        bias = biases[0] if biases else torch.zeros(weight.shape[:2])
        return {"weight": weight.to(compute_dtype(weight)), "bias": bias.to(compute_dtype(weight))}

    def _fitted(self, sums: ClassSums, priors: Tensor | None = None) -> Tensors:
        weight, bias = fit_head(sums, self._shrinkage, len(self._names) > 1, priors)
        logits = (sums.means() @ weight.mT + bias)[sums.counts > 0]
        if not bool((logits.abs() <= LARGEST_LOSS).all()):
            raise UpdateError(f"The logits of a class's mean are absurd, above {LARGEST_LOSS:g}.")
        return with_head(self._tensors, self._head, weight, bias)
