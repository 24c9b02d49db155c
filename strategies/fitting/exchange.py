"""``Exchange``: the requests to clients about one choice of a model and task head."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from logging import WARNING

import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.common import log
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.fitting.ask import Clients, read_losses, read_rows
from fedrot.strategies.fitting.bodies import Body
from fedrot.strategies.fitting.result import FittedTaskHead
from fedrot.strategies.wire.arrays import tensors_in, to_arrays
from fedrot.strategies.wire.fitting_messages import (
    COUNT,
    EVALUATE,
    SUM,
    SUMS,
    TASK_HEADS,
)
from fedrot.task_head.bounds import largest_inputs
from fedrot.task_head.choice import (
    REFERENCE,
    SHRINKAGES,
    Candidate,
    Choice,
    choose,
    keep_absent,
    reference_among,
    with_fitted_task_heads,
)
from fedrot.task_head.outputs import OUTPUT_KINDS
from fedrot.task_head.sums import ClassSums
from fedrot.task_head.totals import LONGEST, Groups, Totals, total_without
from fedrot.task_head.votes import FEWEST, Votes, centre, in_order
from fedrot.tensors import compute_dtype, spare_threads

#: A model with one of its task heads.
BodyAndHead = Candidate[Body]

#: Candidates by how much of a round's change their bodies have.
ByShare = dict[float, list[BodyAndHead]]


class Exchange:
    """The requests to clients about one choice.

    Args:
        clients: to ask.
        old: the model that is kept unless a candidate is better.

    Raises:
        FedrotError: no client gives a usable answer, or none has held-out rows.
    """

    def __init__(self, clients: Clients, old: Body) -> None:
        self._clients = clients
        self._old = old
        counts = clients.ask(clients.grid.get_node_ids(), COUNT, read_rows)
        self._training = {
            node: rows.training for node, rows in counts.items() if rows.training
        }
        self._held_out = [node for node, rows in counts.items() if rows.held_out]
        #: The groups of the clients that have sent sums.
        self._group = dict[int, int]()
        #: Why no head fits the first body.
        self._reason = ""
        #: Of the labels, for losses.
        self._units = torch.ones(1)
        if not self._held_out:
            raise FedrotError(
                "Task head: no client has held-out rows with 'labels' to choose by, or "
                "none has as many as its Privacy asks for: usually 5, of classes with "
                "5 training rows."
            )

    def best(self, bodies: Mapping[float, Body]) -> FittedTaskHead:
        """Return the best of the old model and of bodies with fitted heads.

        Args:
            bodies: by their shares of a round's change; the first decides which
                clients' sums are left out.

        Raises:
            FedrotError: no head can be fitted to the first body, or no client compares
                heads.
        """
        if not self._training:
            raise UpdateError(
                "No client sends sums: none has training rows with 'labels', or none "
                "has as many as its Privacy asks for (usually 10, and 5 of a class)."
            )
        old = self._old.unfitted(0.0)
        sums = {
            share: self._sums(body, bodies.values()) for share, body in bodies.items()
        }
        fitted = self._all_fitted(bodies, sums)
        reference = reference_among(next(iter(fitted.values())))
        groups = next(iter(sums.values()))
        candidates = [*chain.from_iterable(fitted.values())]
        votes, harmful = self._first_votes([old, *candidates], reference, groups)
        if harmful:
            kept = list[BodyAndHead]()
            for share, before in fitted.items():
                kept += self._fitted(before, sums[share], harmful)
            second = self._votes([old, reference, *kept], reference)
            if not reference.fitted or second.pays(reference_among(kept), reference):
                log(
                    WARNING,
                    "Task head: left out are the sums of %s (%d of %d groups): without "
                    "them it is better. Their rows may be unlike the others', or their "
                    "labels in another order. If all sites trust each other, "
                    "trusted=True, beside fit_head=True or in fit_task_head, keeps all "
                    "sums.",
                    self._named(harmful),
                    len(harmful),
                    len(groups),
                )
                return self._taken(choose(second, old, kept), second)
        if not reference.fitted:
            raise UpdateError(self._reason)
        return self._taken(choose(votes, old, candidates), votes)

    def _all_fitted(
        self, bodies: Mapping[float, Body], sums: Mapping[float, Groups]
    ) -> ByShare:
        """Return candidates by share; keep the reason if no head fits the first body.

        The first body is then compared with its own head, since it may have a fitted
        one without some groups. Another body without a fitted head is no candidate.
        """
        fitted: ByShare = {}
        for share, body in bodies.items():
            unfitted = [body.unfitted(share)]
            try:
                fitted[share] = self._fitted(unfitted, sums[share])
            except FedrotError as error:
                if not fitted:
                    fitted[share] = unfitted
                    self._reason = str(error)
        return fitted

    def _first_votes(
        self,
        candidates: Sequence[BodyAndHead],
        reference: BodyAndHead,
        groups: Groups,
    ) -> tuple[Votes, list[int]]:
        """Return the losses of candidates, and the groups whose sums are harmful.

        Harmful groups are those without which the ``reference`` would be better.
        """
        counts = torch.stack([sums.counts for sums in groups.values()])
        # Of regressions the first count is that of all rows.
        shares = centre(counts / counts[:, :1], counts[:, 0])
        self._units = OUTPUT_KINDS[self._clients.problem_type].units(shares)
        without = self._without_each(reference, groups, counts.sum(0))
        votes = self._votes(
            [*candidates, *without.values()], reference, without.values()
        )
        return votes, votes.harmful(reference, without)

    def _taken(self, choice: Choice[Body], votes: Votes) -> FittedTaskHead:
        """Return the model that is taken, with its head at its best temperature."""
        taken = choice.taken
        weight = taken.weight / choice.temperature
        arrays = taken.body.with_task_head(weight, taken.bias / choice.temperature)
        priors = () if taken.priors is None else tuple(taken.priors.tolist())
        return FittedTaskHead(
            arrays,
            fitted=taken.fitted,
            temperature=choice.temperature * taken.divisor,
            losses=votes.losses(choice.best),
            rows=float(votes.rows.sum()),
            clients=len(votes.weights),
            share=taken.share,
            shrinkage=taken.shrinkage,
            change=choice.change.decisive,
            error=choice.change.error,
            priors=priors,
        )

    def _sums(self, body: Body, bodies: Iterable[Body]) -> Groups:
        """Return the sums of features that clients compute with a body."""
        clients = self._clients
        weight = body.unfitted(0.0).weight
        outputs = len(weight)
        largest = None
        if clients.described is not None:
            largest = largest_inputs(clients.described, body.tensors, clients.task_head)
        totals = Totals(self._training, largest)
        sent = torch.zeros(outputs, dtype=torch.bool)

        @spare_threads(1)
        def read(node: int, content: RecordDict) -> None:
            sums = ClassSums.unpacked(
                tensors_in(content, SUMS), weight.shape, clients.problem_type
            )
            totals.add(node, sums)
            # Of several labels the first count is that of all rows.
            sent.logical_or_(sums.counts[-outputs:] > 0)

        answers = clients.ask(
            self._training, SUM, read, bodies=[body], keep=(self._old, *bodies)
        )
        if OUTPUT_KINDS[clients.problem_type].has_classes:
            clients.say_unsent((~sent).nonzero().flatten().tolist(), outputs)
        group = {node: totals.group[node] for node in answers}
        self._group |= group
        groups = totals.groups()
        if odd := {*group.values()} - groups.keys():
            log(
                WARNING,
                "Task head: left out are the sums of %s: their features are %.1f times "
                "as large as the others', or more. Do they build the same model?",
                self._named(odd),
                LONGEST**0.5,
            )
        return groups

    def _named(self, groups: Collection[int]) -> str:
        """Return the ids of the clients in some groups: ``clients 7, 12``."""
        nodes = [node for node, group in self._group.items() if group in groups]
        return f"clients {', '.join(map(str, sorted(nodes)))}"

    def _fitted(
        self,
        before: Sequence[BodyAndHead],
        groups: Groups,
        left_out: Sequence[int] = (),
        shrinkages: Sequence[float] = SHRINKAGES,
        priors: Tensor | None = None,
    ) -> list[BodyAndHead]:
        """Return a body with heads that are fitted to the sums of all groups but some.

        Args:
            before: candidates with this body. Labels that only the groups ``left_out``
                have shown keep the weights of these heads.
        """
        like = before[0]
        total = total_without(left_out, groups)
        candidates = with_fitted_task_heads(
            like, total, shrinkages, like.body.has_bias, priors
        )
        if left_out:
            keep_absent(candidates, before, total.absent)
        return candidates

    def _without_each(
        self, like: BodyAndHead, groups: Groups, priors: Tensor
    ) -> dict[int, BodyAndHead]:
        """Return candidates without the sums of one group each, by group.

        There are none if all sites trust each other, or if one group is more than a
        quarter. The ``priors`` are those of all sums, so that a head is not better or
        worse for other priors alone.
        """
        candidates = dict[int, BodyAndHead]()
        if self._clients.trusted or len(groups) < FEWEST:
            return candidates
        for group in groups:
            with suppress(FedrotError):
                (candidates[group],) = self._fitted(
                    [like], groups, [group], [REFERENCE], priors
                )
        return candidates

    def _votes(
        self,
        candidates: Sequence[BodyAndHead],
        reference: BodyAndHead,
        without: Collection[BodyAndHead] = (),
    ) -> Votes:
        """Return the clients' losses of candidates.

        The squares of the candidates ``without`` a group are differences from the
        candidate ``reference``, which has the same body.
        """
        # Heads of one body stand together in requests and answers.
        by_body = dict[Body, list[BodyAndHead]]()
        for candidate in candidates:
            by_body.setdefault(candidate.body, []).append(candidate)
        content = dict[str, ArrayRecord]()
        for place, heads in enumerate(by_body.values()):
            partners = [
                heads.index(reference) if candidate in without else -1
                for candidate in heads
            ]
            dtype = compute_dtype(heads[0].weight)
            tensors = {
                "weight": torch.stack([head.weight.to(dtype) for head in heads]),
                "bias": torch.stack([head.bias.to(dtype) for head in heads]),
                "partner": torch.tensor(partners),
                "units": self._units,
            }
            content[f"{TASK_HEADS}-{place}"] = to_arrays(tensors)
        read = partial(read_losses, heads=len(candidates))
        answers = self._clients.ask(self._held_out, EVALUATE, read, content, [*by_body])
        return Votes(
            [*in_order(answers).values()], [*chain.from_iterable(by_body.values())]
        )
