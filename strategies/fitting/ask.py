"""``Clients``: requests to clients about a task head, and how answers are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from logging import WARNING
from typing import Any, NamedTuple, TypeVar

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from flwr.serverapp import Grid

from fedrot.errors import FedrotError, UpdateError, legible, refusal
from fedrot.strategies.fitting.bodies import Body
from fedrot.strategies.round.asked import Asked
from fedrot.strategies.wire.arrays import from_arrays, records_of_type
from fedrot.strategies.wire.fitting_messages import (
    BETWEEN,
    BODIES,
    KEEP,
    LACKS,
    LOSSES,
    MESSAGE_TYPE,
    MODEL,
    PROBLEM_TYPE,
    ROWS,
    STAGE,
    SUMS,
    TASK_HEAD,
)
from fedrot.strategies.wire.flower_compat import failure_of
from fedrot.strategies.wire.lazy_grid import LazyGrid
from fedrot.task_head.losses import LossSums
from fedrot.task_head.outputs import SINGLE
from fedrot.task_head.sums import ClassSums

T = TypeVar("T")


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
    """

    grid: Grid
    task_head: str = ""
    problem_type: str = SINGLE
    config: ConfigRecord | None = None
    timeout: float = 3600
    described: object = None

    def ask(
        self,
        nodes: Iterable[int],
        step: str,
        read: Callable[[int, RecordDict], T],
        content: Mapping[str, Any] | None = None,
    ) -> dict[int, T]:
        """Return what ``read`` makes of each answer, by node; warnings name the nodes
        without one.

        Answers are read as they arrive.

        Args:
            content: sent to every node, beside the configuration.
            read: raises an error if an answer cannot be used.

        Raises:
            FedrotError: there is no usable answer; the message has the last reason.
        """
        return self._ask(dict.fromkeys(nodes, self._content(step, content or {})), read)

    def ask_about(
        self,
        bodies: Sequence[Body],
        nodes: Iterable[int],
        step: str,
        read: Callable[[int, RecordDict], T],
        content: Mapping[str, Any] | None = None,
        keep: Sequence[Body] = (),
    ) -> dict[int, T]:
        """``ask`` about ``bodies``, which are sent to the nodes that have not kept
        them.

        Args:
            keep: bodies of later requests, which clients shall keep beside these.
        """
        lacking: list[int] = []

        def read_kept(node: int, content: RecordDict) -> list[T]:
            if LACKS in records_of_type(content, ConfigRecord):
                lacking.append(node)
                return []
            found = read(node, content)
            for body in bodies:
                body.kept_by.add(node)
            return [found]

        settings = {
            BODIES: [body.key for body in bodies],
            KEEP: [body.key for body in (*bodies, *keep)],
            BETWEEN: [half.key for body in bodies for half in body.between],
        }
        contents: dict[frozenset[int], RecordDict] = {}

        def content_for(kept: frozenset[int]) -> RecordDict:
            if kept not in contents:
                sent = {
                    f"{MODEL}-{i}": b.sent
                    for i, b in enumerate(bodies)
                    if i not in kept
                }
                contents[kept] = self._content(
                    step, {**(content or {}), **sent}, settings
                )
            return contents[kept]

        has = {n: frozenset(i for i, b in enumerate(bodies) if b.has(n)) for n in nodes}
        found = self._ask(
            {node: content_for(own) for node, own in has.items()}, read_kept
        )
        if lacking:
            for lost in (one for body in bodies for one in (body, *body.between)):
                lost.kept_by.difference_update(lacking)
            with suppress(FedrotError):
                found |= self._ask(
                    dict.fromkeys(lacking, content_for(frozenset())), read_kept
                )
        answers = {node: one for node, own in found.items() for one in own}
        if not answers:
            raise FedrotError(
                "No client gave a usable answer: all say that they lack the model."
            )
        return answers

    def _content(
        self,
        step: str,
        content: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
    ) -> RecordDict:
        about = {
            STAGE: step,
            TASK_HEAD: self.task_head,
            PROBLEM_TYPE: self.problem_type,
        }
        config = ConfigRecord({**(self.config or {}), **about, **(settings or {})})
        return RecordDict({**content, "config": config})

    def _ask(
        self, contents: Mapping[int, RecordDict], read: Callable[[int, RecordDict], T]
    ) -> dict[int, T]:
        requests = [
            Message(
                RecordDict({**content}), dst_node_id=node, message_type=MESSAGE_TYPE
            )
            for node, content in contents.items()
        ]
        lazy = self.grid if isinstance(self.grid, LazyGrid) else LazyGrid(self.grid)
        replies = lazy.send_and_receive(requests, timeout=self.timeout)
        asked, found, why = Asked(lazy.sent), dict[int, T](), "No client is connected."

        def leave_out(node: int, reason: object) -> None:
            nonlocal why
            why = legible(f"Client {node}: {reason}")
            log(WARNING, "A client's answer is left out. %s", why)

        for answer in replies.stream():
            node = answer.metadata.src_node_id
            try:
                if answer.has_error():
                    node = asked.failed(answer) or node
                    raise UpdateError(
                        failure_of(answer, "fedrot.strategies.answer_with_sums")
                    )
                asked.accept(answer)
                found[node] = read(node, answer.content)
            except Exception as error:
                leave_out(node, refusal(error))
        for node in asked.silent:
            leave_out(node, "no answer before the timeout.")
        if not found:
            raise FedrotError(f"No client gave a usable answer. {why}")
        return found


def read_rows(node: int, content: RecordDict) -> RowCounts:
    """Return the numbers of a client's rows."""
    found = RowCounts(**records_of_type(content, MetricRecord)[ROWS])  # type: ignore[arg-type]
    if any(type(count) is not int or not 0 <= count <= 10**12 for count in found):
        raise UpdateError(f"The numbers of rows are {tuple(found)!r:.100}.")
    return found


def read_sums(
    content: RecordDict, shape: tuple[int, int], problem_type: str
) -> ClassSums:
    """Return a client's class sums; ``shape`` is the task head's."""
    return ClassSums.unpacked(from_arrays(_record(content, SUMS)), shape, problem_type)


def read_losses(node: int, content: RecordDict, task_heads: int) -> LossSums:
    """Return a client's losses of so many heads."""
    given, names = _record(content, LOSSES), [field.name for field in fields(LossSums)]
    if set(given) != set(names):
        raise UpdateError(
            f"The ArrayRecord '{LOSSES}' does not have {', '.join(names)}."
        )
    found = LossSums(**from_arrays(given))
    if (
        len(found.counts) != 1 + task_heads
        or not found.rows.is_integer()
        or found.rows > 10**12
    ):
        raise UpdateError(
            f"The losses are of {len(found.counts) - 1} heads and {found.rows:g} rows."
        )
    return found


def _record(content: RecordDict, name: str) -> ArrayRecord:
    given = records_of_type(content, ArrayRecord).get(name)
    if given is None:
        raise UpdateError(f"The answer has no ArrayRecord '{name}'.")
    return given
