"""Requests to clients with labelled rows, and the clients' answers.

Three steps: a client counts its rows, sums the features of its training rows by class
(``fedrot.head``), and evaluates heads on its held-out rows (``losses``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from logging import WARNING
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError, legible
from fedrot.head import ClassSums, collect_classes
from fedrot.strategies.flower_compat import failure_of
from fedrot.strategies.lazy_grid import LazyGrid
from fedrot.strategies.round.inbox import Asked, refusal
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.temperature import LossSums, collect_losses

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

#: The action of the requests, their message type, and the names of their records.
ACTION = "fedrot_sums"
MESSAGE_TYPE = f"query.{ACTION}"
MODEL, HEADS = "fedrot-model", "fedrot-heads"
ROWS, SUMS, LOSSES = "fedrot-rows", "fedrot-class-sums", "fedrot-losses"

#: Keys of a request's configuration: the step; the task head (empty evaluates the model itself).
STEP, HEAD = "fedrot-step", "fedrot-head"
COUNT, SUM, EVALUATE = "count", "sum", "evaluate"

Batches = Iterable[Mapping[str, Tensor]]
T = TypeVar("T")


@dataclass(frozen=True)
class LabelledRows:
    """The model and the rows that a client answers with.

    A client without training rows, or without held-out rows, returns an empty list.

    Attributes:
        build: returns a ``transformers`` classifier.
        training: returns the client's training rows: keyword arguments of forward, with ``labels``.
        held_out: returns rows that the client has not trained on, in the same form; the same rows in
            every call.
    """

    build: Callable[[], nn.Module]
    training: Callable[[], Batches]
    held_out: Callable[[], Batches]


class Rows(NamedTuple):
    """Numbers of a client's rows with a label."""

    training: int
    held_out: int


def answer_with_sums(app: ClientApp, setup: Callable[[Message, Context], LabelledRows]) -> None:
    """Add an action to a ``ClientApp`` that answers ``evaluate_at_clients`` and ``fit_task_head``.

    Args:
        app: the client's app.
        setup: returns the model and the rows; called for every request.

    Example: ``answer_with_sums(app, lambda message, context: LabelledRows(build, training, held_out))``
    """

    @app.query(ACTION)
    def answer(message: Message, context: Context) -> Message:
        # Building models and drawing batches must not change the random numbers of training.
        with torch.random.fork_rng(devices=[]):
            content = _answer(message.content, setup(message, context))
        return Message(content, reply_to=message)


def ask(
    grid: Grid,
    nodes: Iterable[int],
    step: str,
    content: RecordDict,
    read: Callable[[int, RecordDict], T],
    config: ConfigRecord | None,
    timeout: float,
    head: str = "",
) -> dict[int, T]:
    """Return what ``read`` makes of each answer, by node; warnings name the nodes without one.

    Answers are read as they arrive.

    Args:
        content: sent to every node, beside the configuration.
        read: raises an error if an answer cannot be used.

    Raises:
        FedrotError: there is no usable answer; the message has the last reason.
    """
    settings = ConfigRecord({**(config or {}), STEP: step, HEAD: head})
    requests = [
        Message(RecordDict({**content, "config": settings}), dst_node_id=node, message_type=MESSAGE_TYPE)
        for node in nodes
    ]
    lazy = grid if isinstance(grid, LazyGrid) else LazyGrid(grid)
    replies = lazy.send_and_receive(requests, timeout=timeout)
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
                raise UpdateError(failure_of(answer, "fedrot.strategies.answer_with_sums"))
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
    found = Rows(**content.metric_records[ROWS])  # type: ignore[arg-type]
    if any(type(count) is not int or not 0 <= count <= 10**12 for count in found):
        raise UpdateError(f"The numbers of rows are {tuple(found)!r:.100}.")
    return found


def read_sums(content: RecordDict, shape: tuple[int, int]) -> ClassSums:
    """Return a client's class sums; ``shape`` is the task head's."""
    found = _read(content, SUMS, ClassSums)
    if tuple(found["sums"].shape) != shape:
        raise UpdateError(f"The sums have shape {list(found['sums'].shape)}, the head {list(shape)}.")
    return ClassSums(**found)


def read_losses(node: int, content: RecordDict, heads: int) -> LossSums:
    """Return a client's losses of so many heads."""
    found = LossSums(**_read(content, LOSSES, LossSums))
    if len(found.counts) != 1 + heads or not found.rows.is_integer() or found.rows > 10**12:
        raise UpdateError(f"The losses are of {len(found.counts) - 1} heads and {found.rows:g} rows.")
    return found


def _answer(given: RecordDict, data: LabelledRows) -> RecordDict:
    (config,) = given.config_records.values()
    step, head = str(config[STEP]), str(config[HEAD])
    if step == COUNT:
        counts = {"training": _labelled(data.training()), "held_out": _labelled(data.held_out())}
        return RecordDict({ROWS: MetricRecord({**counts})})
    model = data.build()
    model.load_state_dict(from_arrays(given.array_records[MODEL]))
    if step == SUM:
        sums = collect_classes(model, data.training(), head)
        return RecordDict({SUMS: to_arrays(vars(sums))})
    heads = from_arrays(given.array_records[HEADS]) if head else None
    pair = (heads["weight"], heads["bias"]) if heads else None
    losses = collect_losses(model, data.held_out(), head, pair)
    return RecordDict({LOSSES: to_arrays(vars(losses))})


def _labelled(batches: Batches) -> int:
    """Return how many rows have a label; requests for sums and losses say what is wrong with others."""
    return sum(int((batch["labels"] >= 0).sum()) for batch in batches if "labels" in batch)


def _read(content: RecordDict, record: str, kind: type[ClassSums | LossSums]) -> dict[str, Tensor]:
    """Return the arrays of a record that has the fields of a class."""
    given, names = content.array_records.get(record), [field.name for field in fields(kind)]
    if given is None or set(given) != set(names):
        raise UpdateError(f"The answer has no ArrayRecord '{record}' with {', '.join(names)}.")
    return from_arrays(given)
