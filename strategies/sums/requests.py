"""Requests to clients with labelled rows, and the clients' answers.

Three steps: a client counts its rows, sums the features of its training rows by class
(``fedrot.head``), and evaluates heads of one or several bodies on its held-out rows
(``losses``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError, legible, refusal
from fedrot.head import ClassSums, collect_classes
from fedrot.lora.peft_model import load_as_sent
from fedrot.problems import PROBLEMS, SINGLE
from fedrot.strategies.arguments import check_functions
from fedrot.strategies.flower_compat import failure_of
from fedrot.strategies.lazy_grid import LazyGrid
from fedrot.strategies.round.inbox import Asked
from fedrot.strategies.sums.bodies import Body, Shelf
from fedrot.strategies.wire.arrays import from_arrays, of_kind, to_arrays
from fedrot.temperature import Heads, LossSums, collect_losses, compare_losses

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

#: The action of the requests, their message type, and the names of their records. A
#: body and its heads have the names ``MODEL`` and ``HEADS`` with a place among the
#: request's bodies.
ACTION = "fedrot_sums"
MESSAGE_TYPE = f"query.{ACTION}"
MODEL, HEADS = "fedrot-model", "fedrot-heads"
ROWS, SUMS, LOSSES, LACKS = (
    "fedrot-rows",
    "fedrot-class-sums",
    "fedrot-losses",
    "fedrot-lacks",
)

#: Keys of a request's configuration: the step; the task head and its problem (empty
#: evaluates the model itself); the keys of the bodies, of all that the client shall
#: keep, and of those that a body is half way between.
STEP, HEAD, PROBLEM = "fedrot-step", "fedrot-head", "fedrot-problem"
BODIES, KEEP, BETWEEN = "fedrot-bodies", "fedrot-keep", "fedrot-between"
COUNT, SUM, EVALUATE = "count", "sum", "evaluate"

Batches = Iterable[Mapping[str, Tensor]]
T = TypeVar("T")


@dataclass(frozen=True)
class LabelledRows:
    """The model and the rows that a client answers with.

    A client without training rows, or without held-out rows, returns an empty list.

    Attributes:
        build: returns a ``transformers`` classifier.
        training: returns the client's training rows: keyword arguments of forward, with
            ``labels``.
        held_out: returns rows that the client has not trained on, in the same form; the
            same rows in every call.
    """

    build: Callable[[], nn.Module]
    training: Callable[[], Batches]
    held_out: Callable[[], Batches]

    def __post_init__(self) -> None:
        check_functions(self, "build", "training", "held_out")


class Rows(NamedTuple):
    """Numbers of a client's rows with a label."""

    training: int
    held_out: int


def answer_with_sums(
    app: ClientApp,
    setup: Callable[[Message, Context], LabelledRows],
    folder: str | Path | None = None,
) -> None:
    """Add an action to a ``ClientApp`` that answers ``evaluate_at_clients`` and
    ``fit_task_head``.

    Args:
        app: the client's app.
        setup: returns the model and the rows; called for every request.
        folder: where the client keeps up to three received models between requests, so
            that they are sent once: in a folder ``fedrot-bodies`` there; None is the
            user's folder of caches.

    Example: ``answer_with_sums(app, lambda message, context: LabelledRows(build,
    training, held_out))``
    """

    @app.query(ACTION)
    def answer(message: Message, context: Context) -> Message:
        # Building models and drawing batches must not change the random numbers of
        # training.
        with torch.random.fork_rng(devices=[]):
            request = _Request(message.content, folder, context.run_id)
            content = request.answer(setup(message, context))
        return Message(content, reply_to=message)


@dataclass(eq=False)
class Clients:
    """Whom a server asks about a task head, and how.

    Attributes:
        grid: of the server app.
        head: the name of the task head.
        problem: one of ``fedrot.problems.PROBLEMS``.
        config: sent with all requests.
        timeout: seconds to wait for the answers to each request.
        described: the model's configuration; None for an adapter.
    """

    grid: Grid
    head: str = ""
    problem: str = SINGLE
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
            if LACKS in of_kind(content, ConfigRecord):
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
        about = {STEP: step, HEAD: self.head, PROBLEM: self.problem}
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
                asked.check(answer)
                found[node] = read(node, answer.content)
            except Exception as error:
                leave_out(node, refusal(error))
        for node in asked.silent:
            leave_out(node, "no answer before the timeout.")
        if not found:
            raise FedrotError(f"No client gave a usable answer. {why}")
        return found


def read_rows(node: int, content: RecordDict) -> Rows:
    """Return the numbers of a client's rows."""
    found = Rows(**of_kind(content, MetricRecord)[ROWS])  # type: ignore[arg-type]
    if any(type(count) is not int or not 0 <= count <= 10**12 for count in found):
        raise UpdateError(f"The numbers of rows are {tuple(found)!r:.100}.")
    return found


def read_sums(content: RecordDict, shape: tuple[int, int], problem: str) -> ClassSums:
    """Return a client's class sums; ``shape`` is the task head's."""
    return ClassSums.unpacked(from_arrays(_record(content, SUMS)), shape, problem)


def read_losses(node: int, content: RecordDict, heads: int) -> LossSums:
    """Return a client's losses of so many heads."""
    given, names = _record(content, LOSSES), [field.name for field in fields(LossSums)]
    if set(given) != set(names):
        raise UpdateError(
            f"The ArrayRecord '{LOSSES}' does not have {', '.join(names)}."
        )
    found = LossSums(**from_arrays(given))
    if (
        len(found.counts) != 1 + heads
        or not found.rows.is_integer()
        or found.rows > 10**12
    ):
        raise UpdateError(
            f"The losses are of {len(found.counts) - 1} heads and {found.rows:g} rows."
        )
    return found


def _record(content: RecordDict, name: str) -> ArrayRecord:
    given = of_kind(content, ArrayRecord).get(name)
    if given is None:
        raise UpdateError(f"The answer has no ArrayRecord '{name}'.")
    return given


class _Request:
    """A request as a client reads it."""

    def __init__(self, given: RecordDict, folder: str | Path | None, run: int) -> None:
        (self._config,) = given.config_records.values()
        self._given, self._head = given.array_records, str(self._config[HEAD])
        self._shelf = Shelf(folder, run, self._head)

    def answer(self, data: LabelledRows) -> RecordDict:
        """Return the answer."""
        step, problem = self._config[STEP], str(self._config[PROBLEM])
        if step == COUNT:
            pair = {"training": data.training(), "held_out": data.held_out()}
            counts = {
                name: _labelled(batches, problem) for name, batches in pair.items()
            }
            return RecordDict({ROWS: MetricRecord({**counts})})
        if not self._head:
            losses = collect_losses(
                _loaded(data.build(), from_arrays(self._given[MODEL])), data.held_out()
            )
            return RecordDict({LOSSES: to_arrays(vars(losses))})
        bodies = self._bodies()
        if any(body is None for body in bodies):
            return RecordDict({LACKS: ConfigRecord()})
        model = data.build()
        models = (_loaded(model, body) for body in bodies if body is not None)
        if step == SUM:
            sums = collect_classes(next(models), data.training(), self._head, problem)
            return RecordDict({SUMS: to_arrays(sums.packed())})
        heads = [
            Heads(**from_arrays(self._given[f"{HEADS}-{i}"]))
            for i in range(len(bodies))
        ]
        losses = compare_losses(models, [*data.held_out()], self._head, heads, problem)
        return RecordDict({LOSSES: to_arrays(vars(losses))})

    def _bodies(self) -> list[Mapping[str, Tensor] | None]:
        """Return the request's bodies: those that came with it, and those that were
        kept.
        """
        keys, between = self._keys(BODIES), self._keys(BETWEEN)
        found: list[Mapping[str, Tensor] | None] = []
        for place, key in enumerate(keys):
            sent = self._given.get(f"{MODEL}-{place}")
            found.append(
                self._shelf.read(key, between)
                if sent is None
                else self._shelf.keep(key, from_arrays(sent))
            )
        self._shelf.drop_others(self._keys(KEEP))
        return found

    def _keys(self, name: str) -> list[str]:
        found = self._config[name]
        return [str(key) for key in found] if isinstance(found, list) else []


def _loaded(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the model with other tensors; an adapter keeps its ranks."""
    if hasattr(model, "peft_config"):
        load_as_sent(model, tensors)
    else:
        model.load_state_dict({**tensors})
    return model


def _labelled(batches: Batches, problem: str) -> int:
    """Return how many rows have a label; requests for sums and losses say what is wrong
    with others.
    """
    has_label = PROBLEMS[problem].has_label
    return sum(
        int(has_label(batch["labels"]).sum()) for batch in batches if "labels" in batch
    )
