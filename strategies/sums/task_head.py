"""The task head of a classifier, fitted to the rows of all clients, and the choice of a round's model.

The server asks for the numbers of rows, then for sums over the training rows (``requests``). It fits
heads, and clients evaluate the old model and those with fitted heads on their held-out rows. The lowest
loss wins; a quarter of the clients cannot turn the choice (``losses``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from logging import INFO, WARNING

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid

from fedrot.errors import FedrotError
from fedrot.head import adapter_head_of, check_shrinkage, head_of, with_head
from fedrot.problems import REGRESSION, SINGLE, problem_of
from fedrot.strategies.round.outbox import as_sent
from fedrot.strategies.sums.bodies import Body, half_way, hash_of
from fedrot.strategies.sums.choice import Exchange
from fedrot.strategies.sums.requests import Clients
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.tensors import Tensors

#: With fewer held-out rows of all clients together, a warning is logged.
FEW = 100

#: Shrinkages of the covariance among which held-out rows choose, and the one at which groups of clients
#: are compared.
SHRINKAGES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
REFERENCE = 0.3


#: What is taken after a round, by its step.
_TAKEN = {1.0: "the new model with a fitted head", 0.5: "the model half way, with a fitted head"}


@dataclass(frozen=True)
class FittedHead:
    """A model with its task head, and the losses on held-out rows.

    If no head can be fitted or compared, the model is the given one.

    Attributes:
        arrays: the model that is taken, with the head and the temperature of the lowest loss.
        fitted: whether its head is a fitted one.
        temperature: the divisor of the logits.
        losses: loss of a held-out row: of the old model, of the old model at its best temperature, and
            of the best model with a fitted head at its best temperature; means with fewer than four
            clients, else centres (``sums.losses``). NaN if no head could be fitted or compared.
        rows: number of held-out rows that count.
        clients: number of clients that evaluated the models.
        step: how much of a round's change of the body is taken: 0, 0.5 or 1.
        shrinkage: of the fitted head; NaN for the old head.
        change: of the loss, from the old model to the best other one; negative is better.
        error: the standard error of ``change``, from the differences of rows.
    """

    arrays: ArrayRecord
    fitted: bool = False
    temperature: float = 1.0
    losses: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    rows: float = 0
    clients: int = 0
    step: float = 1.0
    shrinkage: float = math.nan
    change: float = math.nan
    error: float = math.nan

    def log(self, when: str) -> None:
        """Log in a sentence what was taken, by how much its loss is lower, and how surely."""
        if not self.clients:
            return
        judged = f"{when}, {self.clients} clients, {self.rows:g} held-out rows"
        what = _TAKEN[self.step] if self.fitted else "the model before, whose head is not fitted anew"
        beyond = abs(self.change) > 2 * self.error
        log(
            INFO,
            "%s: taken is %s. Loss of the best model with a fitted head %.4g, %s than before by %.2g "
            "± %.1g (standard error%s).",
            *(judged, what, self.losses[2], "lower" if self.change < 0 else "higher"),
            *(abs(self.change), self.error, "" if beyond else ": within noise"),
        )

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics of a round; of the losses only if they are known."""
        kept = {"fedrot-head-fitted": int(self.fitted), "fedrot-head-temperature": self.temperature}
        if not self.clients:
            return {**kept}
        loss = self.losses[2] if self.fitted else self.losses[1]
        change = {"fedrot-head-change": self.change, "fedrot-head-error": self.error}
        return {**kept, "fedrot-head-loss": loss, "fedrot-head-step": self.step, **change}


def fit_task_head(
    grid: Grid,
    arrays: ArrayRecord,
    model_config: object,
    *,
    head: str | None = None,
    shrinkage: float | None = None,
    config: ConfigRecord | None = None,
    timeout: float = 3600,
    wire: torch.dtype | None = None,
) -> FittedHead:
    """Fit the task head of a model to the rows of all connected clients; nobody trains.

    Clients tell how many rows they have. Then they receive the model, and answer with sums over their
    training rows. Clients with held-out rows receive the heads to compare. The server sees each client's
    sums; for a class with one row these are the row's features. The task head is fitted by linear
    discriminant analysis, or by ridge regression (``fedrot.head.fit_heads``). It is kept only if its
    loss on held-out rows is smaller than the given head's, each at its best temperature.

    Up to a quarter of the clients may lie. A client's rows count at most 1.5 times as much as the
    median client's, sums without which the head is better are left out, and no quarter of the clients
    turns a choice (``sums.losses``).

    Args:
        grid: of the server app. Clients need ``answer_with_sums`` on their ``ClientApp``.
        arrays: the model, such as ``strategy.start(...).arrays`` or a pretrained one; or an adapter with
            its task head, from ``fedrot.lora.adapter_tensors``.
        model_config: the model's transformers configuration, or its dictionary; of an adapter its
            ``LoraConfig``.
        head: the name of the model's last linear layer; None finds it (``fedrot.head.head_of``).
        shrinkage: see ``fedrot.head.fit_head``; None chooses among ``SHRINKAGES`` by held-out rows.
        config: sent with all requests, like ``train_config`` in a round.
        timeout: seconds to wait for the answers to each request.
        wire: precision of the model that is sent to the clients, as in ``Server``.

    Example: ``final = fit_task_head(grid, strategy.start(grid, arrays).arrays, model.config).arrays``

    Raises:
        FedrotError: the shrinkage is not from 0 to 1; the model has no such layer; no client has
            held-out rows; or no client gives a usable answer, with the last reason.
    """
    if shrinkage is not None:
        check_shrinkage(shrinkage)
    heads = TaskHeads(model_config, head, SHRINKAGES if shrinkage is None else (shrinkage,), wire)
    found = heads.first(heads.clients(grid, arrays, config, timeout), arrays)
    losses = "loss of the old head %.4g, at its best temperature %.4g, of the fitted head %.4g"
    if found.clients:
        message = f"Task head: %d clients, %g held-out rows; {losses}: the %s head is kept, %s."
        kept = f"shrinkage {found.shrinkage:g}, " if found.fitted else ""
        which, kept = "fitted" if found.fitted else "old", f"{kept}temperature {found.temperature:.3g}"
        log(INFO, message, found.clients, found.rows, *found.losses, which, kept)
    return found


class TaskHeads:
    """Fits the task heads of one run's models.

    Args:
        described: the model's configuration; of an adapter its ``LoraConfig``.
        head: the name of the task head; None finds it.
        shrinkages: to choose among.
        wire: as in ``Server``.
    """

    def __init__(
        self,
        described: object,
        head: str | None = None,
        shrinkages: Sequence[float] = SHRINKAGES,
        wire: torch.dtype | None = None,
    ) -> None:
        self._described, self._head, self._wire = described, head, wire
        self._shrinkages = tuple(shrinkages)
        self._reference = REFERENCE if REFERENCE in shrinkages else self._shrinkages[0]
        self._kept_by = dict[str, set[int]]()

    def name_in(self, arrays: ArrayRecord) -> str:
        """Return the name of a model's task head; raises ``FedrotError`` if the model lacks it."""
        tensors = from_arrays(arrays)
        adapter = _is_adapter(tensors)
        head = self._head or (adapter_head_of(tensors) if adapter else head_of(self._described, tensors))
        if f"{head}.weight" not in tensors:
            raise FedrotError(f"The model has no layer '{head}'; see fedrot.head.head_of.")
        return head

    def clients(
        self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord | None, timeout: float
    ) -> Clients:
        """Return the clients, to be asked about models like the given one."""
        head, tensors = self.name_in(arrays), from_arrays(arrays)
        one_output = len(tensors[f"{head}.weight"]) == 1
        of_adapter = REGRESSION if one_output else SINGLE
        problem = of_adapter if _is_adapter(tensors) else problem_of(self._described)
        return Clients(grid, head, problem, config, timeout)

    def first(self, clients: Clients, arrays: ArrayRecord) -> FittedHead:
        """Return a model with the better of its own head and a fitted one."""
        own = self._body(arrays, from_arrays(arrays), clients.head)
        return self._best(clients, own, {1.0: own}, arrays)

    def after_round(
        self, clients: Clients, old: ArrayRecord, new: ArrayRecord, half: bool = True
    ) -> FittedHead:
        """Return the best of three models: the old one, and the new one and the one half way.

        The last two have fitted heads.

        Args:
            old: the model before the round, with its head.
            new: the round's model.
            half: whether the model half way is a candidate.
        """
        before, after = (self._body(one, from_arrays(one), clients.head) for one in (old, new))
        bodies = {1.0: after}
        if half:
            between = as_sent(half_way(before.tensors, after.tensors), new)
            bodies[0.5] = self._body(between, from_arrays(between), clients.head)
            # Clients have rounded bodies, whose mean is not the rounded mean.
            bodies[0.5].between = () if self._wire else (before, after)
        return self._best(clients, before, bodies, new)

    def _body(self, arrays: ArrayRecord, tensors: Tensors, head: str) -> Body:
        sent = arrays if self._wire is None else to_arrays(tensors, self._wire)
        key = hash_of(from_arrays(sent), head)
        return Body(sent, tensors, key, kept_by=self._kept_by.setdefault(key, set()))

    def _best(
        self, clients: Clients, old: Body, bodies: dict[float, Body], like: ArrayRecord
    ) -> FittedHead:
        """Return the best model, encoded ``like`` a round's new one, which it is if all fails."""
        described = None if _is_adapter(old.tensors) else self._described
        exchange = Exchange(clients, described, self._shrinkages, self._reference, old)
        try:
            choice = exchange.choose(bodies)
        except FedrotError as error:
            log(WARNING, "The task head cannot be fitted and is not changed. %s", error)
            return FittedHead(like)
        taken, temperature = choice.taken, choice.temperature
        self._kept_by = {body.key: body.kept_by for body in (old, *bodies.values())}
        if choice.rows < FEW:
            log(
                WARNING,
                "Task head: with %g held-out rows, the choice of head and temperature may be noise. Let "
                "clients hold out more rows.",
                choice.rows,
            )
        tensors = with_head(
            taken.body.tensors, clients.head, taken.weight / temperature, taken.bias / temperature
        )
        change = choice.change
        return FittedHead(
            as_sent(tensors, like),
            fitted=not math.isnan(taken.shrinkage),
            temperature=temperature,
            losses=choice.losses,
            rows=choice.rows,
            clients=choice.clients,
            step=taken.step,
            shrinkage=taken.shrinkage,
            change=change.decisive,
            error=change.error,
        )


def _is_adapter(tensors: Tensors) -> bool:
    return any(".lora_" in name for name in tensors)
