"""The choice among a model and models with fitted heads, by the losses of clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO, WARNING

import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.common import log
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.fitting.ask import Clients, read_losses, read_rows, read_sums
from fedrot.strategies.fitting.bodies import Body
from fedrot.strategies.wire.arrays import to_arrays
from fedrot.strategies.wire.fitting_messages import COUNT, EVALUATE, SUM, TASK_HEADS
from fedrot.task_head.bounds import largest_inputs
from fedrot.task_head.fit import fitted_task_heads, with_task_head
from fedrot.task_head.losses import LARGEST_LOSS, TEMPERATURES
from fedrot.task_head.names import task_head_names
from fedrot.task_head.totals import Groups, Totals, total_without
from fedrot.task_head.votes import FEWEST, OLD, Votes, in_order
from fedrot.tensors import compute_dtype


@dataclass(frozen=True, eq=False)
class Candidate:
    """A body with a task head.

    Attributes:
        step: how much of a round's change of the body it has.
        body: the body.
        weight: of the head, ``[classes, inputs]``.
        bias: of the head, ``[classes]``.
        shrinkage: of a fitted head; NaN for a model's own head.
    """

    step: float
    body: Body
    weight: Tensor
    bias: Tensor
    shrinkage: float = math.nan


#: With fewer held-out rows of all clients together, a warning is logged.
FEW = 100

#: Shrinkages of the covariance among which held-out rows choose, and the one at which
#: groups of clients are compared.
SHRINKAGES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
REFERENCE = 0.3

#: What is taken of a round's change.
_TAKEN = {1.0: "the new model", 0.5: "the mean of the old and the new model"}


@dataclass(frozen=True)
class FittedTaskHead:
    """A model with its task head, and the losses on held-out rows.

    If no head can be fitted or compared, the model is the given one.

    Attributes:
        arrays: the model that is taken, with the head and the temperature of the lowest
            loss.
        fitted: whether its head is a fitted one.
        temperature: the divisor of the logits.
        losses: loss of a held-out row: of the old model, of the old model at its best
            temperature, and of the best model with a fitted head at its best
            temperature; means with fewer than four clients, else centres
            (``fedrot.task_head.votes``). NaN if no head could be fitted or compared.
        rows: number of held-out rows that count.
        clients: number of clients that evaluated the models.
        step: how much of a round's change of the body is taken: 0, 0.5 or 1.
        shrinkage: of the fitted head; NaN for the old head.
        change: of the loss, from the old model to the best with a fitted head; negative
            is better.
        error: the standard error of ``change``, from the differences of rows.
    """

    arrays: ArrayRecord
    fitted: bool = False
    temperature: float = 1.0
    losses: tuple[float, ...] = (math.nan,) * 3
    rows: float = 0
    clients: int = 0
    step: float = 1.0
    shrinkage: float = math.nan
    change: float = math.nan
    error: float = math.nan

    @property
    def loss(self) -> float:
        """The loss of the model that is taken; NaN if unknown."""
        return self.losses[2] if self.fitted else self.losses[1]

    def after(self, loss: float) -> FittedTaskHead:
        """Return the same with losses from another loss of the old model on, unless
        that is NaN.

        Centres of losses and of their changes do not add up: losses of successive
        rounds have one scale if each continues the one before.
        """
        shift = loss - self.losses[0] if not math.isnan(loss) else 0.0
        return replace(self, losses=tuple(one + shift for one in self.losses))

    def log(self, when: str) -> None:
        """Log in a sentence what was taken, by how much its loss is lower, and how
        surely.
        """
        if not self.clients:
            return
        sure = (
            "standard error"
            if abs(self.change) > 2 * self.error
            else "standard error: within noise"
        )
        taken = (
            f"{_TAKEN[self.step]} with a fitted head"
            if self.fitted
            else "the model before"
        )
        log(
            INFO,
            "%s, %d clients, %g held-out rows: taken is %s. The loss of the best model "
            "with a fitted head is %.4g, %s than before by %.2g ± %.1g (%s); %s.",
            *(when, self.clients, self.rows, taken),
            *(
                self.losses[2],
                "lower" if self.change < 0 else "higher",
                abs(self.change),
                self.error,
            ),
            *(sure, temperature_in_words(self.temperature)),
        )
        if self.rows < FEW:
            log(
                WARNING,
                "%g held-out rows are few: the choice may be noise. Hold out more.",
                self.rows,
            )

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics of a round; of the losses only if they are known."""
        kept = {
            "fedrot-head-fitted": int(self.fitted),
            "fedrot-head-temperature": self.temperature,
        }
        if not self.clients:
            return {**kept}
        change = {"fedrot-head-change": self.change, "fedrot-head-error": self.error}
        return {
            **kept,
            "fedrot-head-loss": self.loss,
            "fedrot-head-step": self.step,
            **change,
        }


def temperature_in_words(temperature: float) -> str:
    """Return ``temperature 6.17 (over-confident before; logits are divided by it)``,
    for a log.
    """
    how = (
        f"{'over' if temperature > 1 else 'under'}-confident before; logits are "
        "divided by it"
    )
    near = 0.8 <= temperature <= 1.25
    return (
        f"temperature {temperature:.2f} "
        f"({'near 1: no correction was needed' if near else how})"
    )


class Exchange:
    """The exchanges with clients about one choice.

    Args:
        clients: to ask.
        old: the model that is kept unless a candidate is better.

    Raises:
        FedrotError: no client gives a usable answer, or none has held-out rows.
    """

    def __init__(self, clients: Clients, old: Body) -> None:
        self._clients, self._old = clients, old
        rows = clients.ask([*clients.grid.get_node_ids()], COUNT, read_rows)
        self._training = {
            node: own.training for node, own in rows.items() if own.training
        }
        self._held_out = [node for node, own in rows.items() if own.held_out]
        if not self._held_out:
            raise FedrotError(
                "Task head: no client has held-out rows with 'labels' to choose by."
            )

    def best(self, bodies: Mapping[float, Body]) -> FittedTaskHead:
        """Return the best of the old model and of the ``bodies`` with fitted heads, by
        their steps.

        Raises:
            FedrotError: no head can be fitted to the first body, or no client compares
                heads.
        """
        candidates, ballot = self._compared(bodies)
        changes = {
            place: ballot.from_old(place) for place in candidates if place != OLD
        }
        found = min(changes, key=lambda place: changes[place].decisive)
        change = changes[found]
        place = found if change.decisive < 0 else OLD
        temperature, taken = TEMPERATURES[ballot.temperature(place)], candidates[place]
        name, body = self._clients.task_head, taken.body
        own = {
            one: body.tensors[one]
            for one in task_head_names(name)
            if one in body.tensors
        }
        task_head = with_task_head(
            own, name, taken.weight / temperature, taken.bias / temperature
        )
        return FittedTaskHead(
            ArrayRecord({**body.arrays, **to_arrays(task_head)}),
            fitted=not math.isnan(taken.shrinkage),
            temperature=temperature,
            losses=ballot.losses(found),
            rows=float(ballot.weights.sum()),
            clients=len(ballot.weights),
            step=taken.step,
            shrinkage=taken.shrinkage,
            change=change.decisive,
            error=change.error,
        )

    def _compared(
        self, bodies: Mapping[float, Body]
    ) -> tuple[dict[int, Candidate], Votes]:
        """Return the candidates, by their places among the heads of the ballot, and the
        ballot.

        Groups of clients without whose sums the first body's head is better are left
        out, if it is also better without all of them.
        """
        if not self._training:
            raise UpdateError("No client has training rows with 'labels'.")
        old = Candidate(0.0, self._old, *self._own_task_head(self._old))
        sums = {
            step: self._sums(body, bodies.values()) for step, body in bodies.items()
        }
        fitted, why = dict[float, list[Candidate]](), ""
        for step, body in bodies.items():
            try:
                fitted[step] = self._fitted(step, body, sums[step], SHRINKAGES)
            except FedrotError as error:
                fitted[step], why = (
                    [Candidate(step, body, *self._own_task_head(body))],
                    str(error),
                )
        (first, own), *others = fitted.items()
        judged = next((one for one in own if one.shrinkage == REFERENCE), own[0])
        without = self._without_each(judged, sums[first])
        # Candidates with one body stand together.
        task_heads = [
            old,
            *own,
            *without.values(),
            *(one for _, rest in others for one in rest),
        ]
        places = {group: task_heads.index(one) for group, one in without.items()}
        ballot = self._ballot(task_heads, task_heads.index(judged), [*places.values()])
        left_out, fits = (
            ballot.harmful(task_heads.index(judged), places),
            not math.isnan(judged.shrinkage),
        )
        if left_out:
            kept = {
                step: self._fitted(
                    step, body, sums[step], SHRINKAGES, left_out, fitted[step]
                )
                for step, body in bodies.items()
            }
            again = [old, judged, *(one for own in kept.values() for one in own)]
            second = self._ballot(again, OLD)
            like = next(one for one in kept[first] if one.shrinkage == REFERENCE)
            if not fits or second.pays(again.index(like), again.index(judged)):
                message = (
                    "Task head: without the sums of %d of %d groups of clients it is "
                    "better: left out."
                )
                log(WARNING, message, len(left_out), len(sums[first]))
                return {
                    i: one for i, one in enumerate(again) if one is not judged
                }, second
        if not fits:
            raise UpdateError(why)
        return {
            i: one for i, one in enumerate(task_heads) if one not in without.values()
        }, ballot

    def _sums(self, body: Body, bodies: Iterable[Body]) -> Groups:
        """Return the sums of features that clients compute with a body."""
        task_head, (outputs, inputs) = (
            self._clients.task_head,
            self._own_task_head(body)[0].shape,
        )
        described = self._clients.described
        largest = (
            None
            if described is None
            else largest_inputs(described, body.tensors, task_head)
        )
        totals = Totals(self._training, largest)

        def read(node: int, content: RecordDict) -> None:
            totals.add(
                node, read_sums(content, (outputs, inputs), self._clients.problem_type)
            )

        keep = (self._old, *bodies)
        self._clients.ask_about([body], self._training, SUM, read, keep=keep)
        return totals.groups()

    def _fitted(
        self,
        step: float,
        body: Body,
        groups: Groups,
        shrinkages: Sequence[float],
        left_out: Sequence[int] = (),
        like: Sequence[Candidate] = (),
        priors: Tensor | None = None,
    ) -> list[Candidate]:
        """Return a body with heads of all shrinkages that are fitted without the sums
        of some groups.

        Labels that only these groups have shown keep the weights of the heads ``like``.
        With the ``priors`` of all sums, the heads differ in what the groups' sums say
        about others' classes.
        """
        total = total_without(left_out, groups)
        biased = task_head_names(self._clients.task_head)[1] in body.tensors
        weights, biases = fitted_task_heads(total, shrinkages, biased, priors)
        logits = total.means() @ weights.mT + biases.unsqueeze(1)
        if not bool((logits.abs() <= LARGEST_LOSS).all()):
            raise UpdateError(
                f"The logits of a class's mean are too large, above {LARGEST_LOSS:g}."
            )
        for name, own in {"weight": weights, "bias": biases}.items() if like else ():
            theirs = torch.stack([getattr(one, name) for one in like]).to(own)
            own[:, total.absent] = theirs[:, total.absent]
        return [
            Candidate(step, body, *task_head)
            for task_head in zip(weights, biases, shrinkages, strict=True)
        ]

    def _without_each(self, like: Candidate, groups: Groups) -> dict[int, Candidate]:
        """Return candidates without the sums of one group each; none if one is more
        than a quarter.
        """
        found = dict[int, Candidate]()
        priors = torch.stack([sums.counts for sums in groups.values()]).sum(0)
        for group in groups if len(groups) >= FEWEST else ():
            with suppress(FedrotError):
                at = (REFERENCE,)
                (found[group],) = self._fitted(
                    like.step, like.body, groups, at, [group], [like], priors
                )
        return found

    def _ballot(
        self, candidates: Sequence[Candidate], like: int, without: Sequence[int] = ()
    ) -> Votes:
        """Return the clients' losses of candidates, of which those with one body stand
        together.

        The squares of the candidates ``without`` a group are differences from the
        candidate ``like``.
        """
        bodies = list(dict.fromkeys(one.body for one in candidates))
        content, first = dict[str, ArrayRecord](), 0
        for place, body in enumerate(bodies):
            own = [one for one in candidates if one.body is body]
            partners = [
                like - first if first + i in without else -1 for i in range(len(own))
            ]
            dtype = compute_dtype(own[0].weight)
            task_heads = {
                "weight": torch.stack([one.weight.to(dtype) for one in own]),
                "bias": torch.stack([one.bias.to(dtype) for one in own]),
                "partner": torch.tensor(partners),
            }
            content[f"{TASK_HEADS}-{place}"] = to_arrays(task_heads)
            first += len(own)
        read = partial(read_losses, task_heads=len(candidates))
        answers = self._clients.ask_about(
            bodies, self._held_out, EVALUATE, read, content
        )
        return Votes([*in_order(answers).values()])

    def _own_task_head(self, body: Body) -> tuple[Tensor, Tensor]:
        weight, bias = (
            body.tensors.get(name) for name in task_head_names(self._clients.task_head)
        )
        assert weight is not None  # from TaskHeads.asked
        return weight, torch.zeros(len(weight)).to(weight) if bias is None else bias
