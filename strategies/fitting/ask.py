"""``Clients``: requests to clients about a task head, and how answers are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, NamedTuple, TypeVar

from flwr.app import (
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError, legible, refusal
from fedrot.strategies.fitting.bodies import Body
from fedrot.strategies.round.asked import Asked
from fedrot.strategies.wire.arrays import records_of_type, tensors_in
from fedrot.strategies.wire.fitting_messages import (
    BODIES,
    KEEP,
    LACKS,
    LOSSES,
    MESSAGE_TYPE,
    NOISE_ALONE,
    PARENTS,
    PROBLEM_TYPE,
    REASON,
    ROWS,
    SPENT,
    STAGE,
    TASK_HEAD,
    WITHHELD,
)
from fedrot.strategies.wire.flower_compat import failure_of
from fedrot.strategies.wire.label_names import (
    LABELS,
    Names,
    check_names,
    label_names,
    read_names,
    wanted_names,
)
from fedrot.strategies.wire.lazy_grid import LazyGrid
from fedrot.task_head.losses import LossSums
from fedrot.task_head.outputs import SINGLE

T = TypeVar("T")

#: Why a site with an epsilon does not answer.
_REFUSALS = {
    NOISE_ALONE: "its Privacy has an epsilon, and it answers with noisy sums alone. "
    "Without fit_head, call once: fit_task_head(grid, arrays, model.config, "
    "public=PublicRows(build, batches)). Training is outside of its epsilon.",
    SPENT: "its epsilon is spent.",
}

#: The largest number of rows that a client can have.
LARGEST = 10**12


class RowCounts(NamedTuple):
    """Numbers of a client's rows with a label."""

    training: int
    held_out: int


@dataclass(eq=False)
class Clients:
    """Whom a server asks about a task head, and how.

    Attributes:
        grid: of the server app.
        task_head: the name of the task head.
        problem_type: one of ``fedrot.task_head.outputs.OUTPUT_KINDS``.
        config: sent with all requests.
        timeout: seconds to wait for the answers to each request.
        described: the model's configuration; None for an adapter.
        trusted: whether the sums of all clients are used, also harmful ones.
        without: nodes that are not asked.
        names: of labels, by node; answers of nodes with others are left out.
        unsent: labels of which the log has said that no client sent rows.
    """

    grid: Grid
    task_head: str = ""
    problem_type: str = SINGLE
    config: ConfigRecord | None = None
    timeout: float = 3600
    described: object = None
    trusted: bool = False
    without: Collection[int] = ()
    names: dict[int, Names] = field(default_factory=dict)
    unsent: set[int] = field(default_factory=set)

    def label_names(self, outputs: int) -> list[str]:
        """Return the names of so many labels; their numbers if names are not known."""
        names = [*map(legible, wanted_names(self.described, self.names))]
        return names if len({*names}) == outputs else [*map(str, range(outputs))]

    def say_unsent(self, labels: Iterable[int], outputs: int) -> None:
        """Log once the labels of which no client has sent rows."""
        new = {*labels} - self.unsent
        self.unsent |= new
        names = self.label_names(outputs)
        if new:
            log(
                INFO,
                "Task head: no site sent rows of %s: they keep the directions of their "
                "weights, with the share of half a row. Sites leave out classes with "
                "fewer rows than their Privacy allows.",
                legible(", ".join(repr(names[label]) for label in sorted(new))),
            )

    def ask(
        self,
        nodes: Iterable[int],
        stage: str,
        read: Callable[[int, RecordDict], T],
        content: Mapping[str, Any] | None = None,
        bodies: Sequence[Body] = (),
        keep: Sequence[Body] = (),
    ) -> dict[int, T]:
        """Return what ``read`` makes of each answer, by node.

        Answers are read as they arrive; warnings name the nodes without one, and those
        whose labels mean something else.

        Args:
            content: sent to every node, beside the configuration.
            read: raises an error if an answer cannot be used.
            bodies: that are asked about; nodes that have kept them do not receive them.
            keep: bodies of later requests, which clients shall keep beside these.

        Raises:
            FedrotError: there is no usable answer; the message has the last reason.
        """
        settings = {
            BODIES: [body.key for body in bodies],
            KEEP: [body.key for body in (*bodies, *keep)],
            # All bodies of a request are of one round.
            PARENTS: [*{old.key: 0 for body in bodies for old in body.parents}],
        }
        config = {
            **(self.config or {}),
            STAGE: stage,
            TASK_HEAD: self.task_head,
            PROBLEM_TYPE: self.problem_type,
            **(settings if bodies else {}),
        }

        def request(node: int) -> Message:
            # Asked once, since a client has to build its model for the names.
            asking = {} if node in self.names else {LABELS: True}
            records = {**(content or {}), "config": ConfigRecord({**config, **asking})}
            for place, body in enumerate(bodies):
                records |= body.to_send(node, place)
            return Message(
                RecordDict(records), dst_node_id=node, message_type=MESSAGE_TYPE
            )

        answers: dict[int, T] = {}
        lacking: list[int] = []

        def take(node: int, answer: RecordDict) -> None:
            if bodies and LACKS in answer:
                lacking.append(node)
                return
            answers[node] = read(node, answer)
            for body in bodies:
                body.kept_by.add(node)

        requests = [request(node) for node in nodes if node not in self.without]
        # Without the nodes whose labels mean something else.
        right = {*self._ask(requests, take)}
        if lacking:
            for body in bodies:
                body.lost_by(lacking)
            again = [request(node) for node in lacking]
            with suppress(FedrotError):
                right |= {*self._ask(again, take)}
        answers = {node: answers[node] for node in answers if node in right}
        if not answers:
            raise FedrotError(
                "No client gave a usable answer: all say that they lack the model."
            )
        return answers

    def _ask(
        self, requests: Sequence[Message], read: Callable[[int, RecordDict], T]
    ) -> dict[int, T]:
        asked_for_names = {r.metadata.dst_node_id for r in requests} - self.names.keys()
        lazy = self.grid if isinstance(self.grid, LazyGrid) else LazyGrid(self.grid)
        replies = lazy.send_and_receive(requests, timeout=self.timeout)
        asked = Asked(lazy.sent)
        answers: dict[int, T] = {}
        last_reason = "No client is connected."

        def leave_out(node: int, reason: object) -> None:
            nonlocal last_reason
            last_reason = legible(f"Client {node}: {reason}")
            log(WARNING, "A client's answer is left out. %s", last_reason)

        for reply in replies.stream():
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    node = asked.failed(reply) or node
                    raise UpdateError(
                        failure_of(reply, "fedrot.strategies.answer_with_sums")
                    )
                asked.accept(reply)
                if LABELS in reply.content:
                    self.names.setdefault(node, read_names(reply.content))
                configs = records_of_type(reply.content, ConfigRecord)
                if WITHHELD in configs and (reason := configs[WITHHELD].get(REASON)):
                    raise UpdateError(_REFUSALS[str(reason)])
                # What is read may count at once.
                check_names(self.names.get(node, ()), label_names(self.described))
                answers[node] = read(node, reply.content)
            except Exception as error:
                leave_out(node, refusal(error))
        for node in asked.silent:
            leave_out(node, "no answer before the timeout.")
        wanted = wanted_names(self.described, self.names)
        if asked_for_names and not wanted and len({*self.names.values()} - {()}) > 1:
            log(
                WARNING,
                "Clients' labels differ, and no order is that of most clients: %s",
                legible(str(self.names)),
            )
        for node in [*answers]:
            try:
                check_names(self.names.get(node, ()), wanted)
            except UpdateError as error:
                del answers[node]
                leave_out(node, error)
        if not answers:
            raise FedrotError(f"No client gave a usable answer. {last_reason}")
        return answers


def are_counts(numbers: Tensor) -> Tensor:
    """Return which numbers can be numbers of rows; NaN is none."""
    return (numbers >= 0) & (numbers <= LARGEST) & (numbers == numbers.floor())


def read_rows(node: int, content: RecordDict) -> RowCounts:
    """Return the numbers of a client's rows."""
    record = records_of_type(content, MetricRecord)[ROWS]
    counts = RowCounts(**record)  # type: ignore[arg-type]
    if any(type(count) is not int or not 0 <= count <= LARGEST for count in counts):
        raise UpdateError(f"The numbers of rows are {tuple(counts)!r:.100}.")
    return counts


def read_losses(node: int, content: RecordDict, heads: int) -> LossSums:
    """Return a client's losses of so many heads."""
    losses = LossSums(**tensors_in(content, LOSSES))
    of_heads = len(losses.counts) - 1
    if of_heads != heads or not are_counts(losses.counts).all():
        raise UpdateError(
            f"The losses are of {of_heads} heads and {losses.rows:g} rows."
        )
    return losses
