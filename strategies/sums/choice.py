"""The choice among a model and models with fitted heads, by the losses of clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from logging import WARNING

import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.common import log
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.head import ClassSums, fit_heads, largest_inputs
from fedrot.problems import SINGLE
from fedrot.strategies.sums.bodies import Body, head_names
from fedrot.strategies.sums.losses import FEWEST, OLD, Ballot, Change, in_order
from fedrot.strategies.sums.requests import (
    COUNT,
    EVALUATE,
    HEADS,
    SUM,
    Clients,
    read_losses,
    read_rows,
    read_sums,
)
from fedrot.strategies.sums.totals import Groups, Totals
from fedrot.strategies.wire.arrays import to_arrays
from fedrot.temperature import LARGEST_LOSS, TEMPERATURES
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


@dataclass(frozen=True)
class Choice:
    """What clients' losses say.

    Attributes:
        taken: the old model, or the best candidate.
        temperature: the divisor of its logits.
        losses: of the old model, of the old model at its best temperature, and of the best candidate.
        change: of the loss from the old model at its best temperature to the best candidate.
        rows: number of held-out rows that count.
        clients: number of clients that have evaluated all candidates.
    """

    taken: Candidate
    temperature: float
    losses: tuple[float, float, float]
    change: Change
    rows: float
    clients: int


class Exchange:
    """The exchanges with clients about one choice.

    Args:
        clients: to ask.
        described: the model's configuration; None for an adapter.
        shrinkages: of the heads to choose among.
        reference: the shrinkage at which groups of clients are compared.
        old: the model that is kept unless a candidate is better.

    Raises:
        FedrotError: no client gives a usable answer, or none has held-out rows.
    """

    def __init__(
        self,
        clients: Clients,
        described: object,
        shrinkages: Sequence[float],
        reference: float,
        old: Body,
    ) -> None:
        self._clients, self._described, self._old = clients, described, old
        self._shrinkages, self._reference = shrinkages, reference
        rows = clients.ask([*clients.grid.get_node_ids()], COUNT, read_rows)
        self._training = {node: own.training for node, own in rows.items() if own.training}
        self._held_out = [node for node, own in rows.items() if own.held_out]
        if not self._held_out:
            raise FedrotError("Task head: no client has held-out rows with 'labels' to choose by.")

    def choose(self, bodies: Mapping[float, Body]) -> Choice:
        """Return the best of the old model and of the ``bodies`` with fitted heads, by their steps.

        Raises:
            FedrotError: no head can be fitted to the first body, or no client compares heads.
        """
        if not self._training:
            raise UpdateError("No client has training rows with 'labels'.")
        old = Candidate(0.0, self._old, *self._own_head(self._old))
        sums = {step: self._sums(body, bodies.values()) for step, body in bodies.items()}
        fitted, why = list[Candidate](), ""
        for step, body in bodies.items():
            try:
                fitted += self._fitted(step, body, sums[step], self._shrinkages)
            except FedrotError as error:
                fitted.append(Candidate(step, body, *self._own_head(body)))
                why = str(error)
        of_first = [one for one in fitted if one.step == fitted[0].step]
        like = next((one for one in of_first if one.shrinkage == self._reference), of_first[0])
        groups = sums[like.step]
        without = self._without_each(like, groups)
        # Candidates with one body stand together.
        candidates = [old, *of_first, *without.values(), *fitted[len(of_first) :]]
        reference = candidates.index(like)
        places = {group: candidates.index(one) for group, one in without.items()}
        ballot = self._ballot(candidates, reference, [*places.values()])
        if left_out := ballot.harmful(reference, places):
            message = "Task head: it is better without %d of %d groups of clients, which are left out."
            log(WARNING, message, len(left_out), len(groups))
            candidates, places = [old], {}
            for step, body in bodies.items():
                own = [one for one in fitted if one.step == step]
                candidates += self._fitted(step, body, sums[step], self._shrinkages, left_out, own)
            ballot = self._ballot(candidates, OLD)
        elif math.isnan(like.shrinkage):
            raise UpdateError(why)
        return _chosen(ballot, candidates, {*range(1, len(candidates))} - {*places.values()})

    def _sums(self, body: Body, bodies: Iterable[Body]) -> Groups:
        """Return the sums of features that clients compute with a body."""
        shape, head = tuple(self._own_head(body)[0].shape), self._clients.head
        of_adapter = self._described is None
        largest = None if of_adapter else largest_inputs(self._described, body.tensors, head)
        totals = Totals(self._training, largest)

        def read(node: int, content: RecordDict) -> None:
            totals.add(node, read_sums(content, shape, self._clients.problem))

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
        """Return a body with heads of all shrinkages that are fitted without the sums of some groups.

        Outputs that only these groups have shown keep the weights of the heads ``like``, so that a
        client with classes of its own is not left out together with them. With the ``priors`` of all
        sums, the heads differ in what the groups' sums say about the classes of others.
        """
        total = groups.without(left_out)
        biased = head_names(self._clients.head)[1] in body.tensors
        weights, biases = fit_heads(total, shrinkages, biased, priors)
        _check_logits(total, weights, biases)
        for name, own in {"weight": weights, "bias": biases}.items() if like else ():
            theirs = torch.stack([getattr(one, name) for one in like]).to(own)
            own[:, total.absent] = theirs[:, total.absent]
        heads = zip(weights, biases, shrinkages, strict=True)
        return [Candidate(step, body, *head) for head in heads]

    def _without_each(self, like: Candidate, groups: Groups) -> dict[int, Candidate]:
        """Return candidates without the sums of one group each; none if one is more than a quarter."""
        found = dict[int, Candidate]()
        priors = groups.counts if self._clients.problem == SINGLE else None
        for group in groups if len(groups) >= FEWEST else ():
            with suppress(FedrotError):
                at = (self._reference,)
                (found[group],) = self._fitted(like.step, like.body, groups, at, [group], [like], priors)
        return found

    def _ballot(self, candidates: Sequence[Candidate], like: int, without: Sequence[int] = ()) -> Ballot:
        """Return the clients' losses of candidates, of which those with one body stand together.

        The squares of the candidates ``without`` a group are differences from the candidate ``like``.
        """
        bodies = list(dict.fromkeys(one.body for one in candidates))
        content, first = dict[str, ArrayRecord](), 0
        for place, body in enumerate(bodies):
            own = [one for one in candidates if one.body is body]
            partners = [like - first if first + i in without else -1 for i in range(len(own))]
            dtype = compute_dtype(own[0].weight)
            heads = {
                "weight": torch.stack([one.weight.to(dtype) for one in own]),
                "bias": torch.stack([one.bias.to(dtype) for one in own]),
                "partner": torch.tensor(partners),
            }
            content[f"{HEADS}-{place}"] = to_arrays(heads)
            first += len(own)
        read = partial(read_losses, heads=len(candidates))
        answers = self._clients.ask_about(bodies, self._held_out, EVALUATE, read, content)
        return Ballot([*in_order(answers).values()])

    def _own_head(self, body: Body) -> tuple[Tensor, Tensor]:
        weight, bias = (body.tensors.get(name) for name in head_names(self._clients.head))
        assert weight is not None  # from TaskHeads.name_in
        return weight, torch.zeros(len(weight)).to(weight) if bias is None else bias


def _check_logits(total: ClassSums, weights: Tensor, biases: Tensor) -> None:
    """Raise ``UpdateError`` if the logits at a class's mean are absurd."""
    logits = total.means() @ weights.mT + biases.unsqueeze(1)
    if not bool((logits.abs() <= LARGEST_LOSS).all()):
        raise UpdateError(f"The logits of a class's mean are absurd, above {LARGEST_LOSS:g}.")


def _chosen(ballot: Ballot, candidates: Sequence[Candidate], places: Iterable[int]) -> Choice:
    """Return the best candidate at one of the ``places``, if it is better than the old model."""
    changes = {place: ballot.from_old(place) for place in sorted(places)}
    best = min(changes, key=lambda place: changes[place].decisive)
    taken = best if changes[best].decisive < 0 else OLD
    temperature = TEMPERATURES[ballot.temperature(taken)]
    rows, clients = float(ballot.weights.sum()), len(ballot.weights)
    losses = ballot.losses(best)
    return Choice(candidates[taken], temperature, losses, changes[best], rows, clients)
