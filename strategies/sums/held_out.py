"""Requests to clients with labelled rows: clients evaluate a model and answer with sums over rows.

A client sums losses over its held-out rows (``fedrot.temperature``), and features over its training rows
(``fedrot.head``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from itertools import chain
from logging import WARNING
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.head import ClassSums, collect_classes
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.temperature import TEMPERATURES, LossSums, best_temperature, collect_losses
from fedrot.tensors import Tensors

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

#: The action of the requests, their message type, and the names of their records.
ACTION = "fedrot_sums"
MESSAGE_TYPE = f"query.{ACTION}"
MODEL, SUMS, LOSSES = "fedrot-model", "fedrot-class-sums", "fedrot-losses"

#: Key of a request's configuration: the layer whose inputs are summed; empty asks only for losses.
HEAD = "fedrot-head"

#: The tensors of ``ClassSums``.
_SUMS = ("counts", "sums", "gram")

#: The largest number in an answer, and the largest mean loss: sums over clients stay finite.
_LARGEST, _WORST = 1e100, 1e6

Batches = Iterable[Mapping[str, Tensor]]
_Sums = TypeVar("_Sums", ClassSums, LossSums)


@dataclass(frozen=True)
class LabelledRows:
    """The model and the rows that a client answers with.

    A client without training rows, or without held-out rows, returns an empty list.

    Attributes:
        build: returns a ``transformers`` classifier.
        training: returns the client's training rows: keyword arguments of forward, with ``labels``.
        held_out: returns rows that the client has not trained on, in the same form.
    """

    build: Callable[[], nn.Module]
    training: Callable[[], Batches]
    held_out: Callable[[], Batches]


class Answer(NamedTuple):
    """A client's answer: losses on its held-out rows, and class sums; None without such rows."""

    losses: LossSums | None
    sums: ClassSums | None


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
            content = _answer(message, setup(message, context))
        return Message(content, reply_to=message)


def evaluate_at_clients(
    grid: Grid, config: ConfigRecord | None = None, timeout: float = 3600
) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Return a function that evaluates models on the held-out rows of all connected clients.

    Use it as ``Guard(metric, evaluate=...)``, which then needs no data at the server, and as
    ``evaluate_fn`` of ``start``. Its metrics are the number of ``rows``, the mean ``loss`` and
    ``accuracy``, the best ``temperature`` of the logits, and ``calibrated_loss``, the mean loss at this
    temperature.

    The models of one round are compared on the same rows: only clients that answered about the first
    model are asked about the others. If one of them does not answer again, or if no client has held-out
    rows, a warning is logged, and the metrics are NaN, which is the worst value for a guard. Make a new
    function for every run.

    Args:
        grid: of the server app. Clients need ``answer_with_sums`` on their ``ClientApp``.
        config: sent with every request, like ``train_config`` in a round.
        timeout: seconds to wait for answers.

    Example: ``FedRot(config, guard=Guard("loss", evaluate=evaluate_at_clients(grid)))``
    """
    asked: tuple[int, list[int]] = (-1, [])

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal asked
        again = asked[0] == server_round
        nodes = asked[1] if again else [*grid.get_node_ids()]
        try:
            answers = ask(grid, nodes, arrays, "", None, config or ConfigRecord(), timeout)
        except FedrotError as error:
            log(WARNING, "Round %d: clients did not evaluate. %s", server_round, error)
            answers = {}
        if not again:
            asked = server_round, [*answers]
        elif len(answers) < len(nodes):
            log(WARNING, "Round %d: some clients did not evaluate all models.", server_round)
            answers = {}
        if not answers:
            return MetricRecord(dict.fromkeys(("loss", "accuracy", "calibrated_loss"), math.nan))
        losses = total(answer.losses for answer in answers.values())
        return MetricRecord(
            {
                "loss": losses_at(losses, 1.0),
                "accuracy": losses.correct / losses.rows,
                "calibrated_loss": losses_at(losses, best_temperature(losses)),
                "temperature": best_temperature(losses),
                "rows": losses.rows,
            }
        )

    return evaluate


def ask(
    grid: Grid,
    nodes: list[int],
    arrays: ArrayRecord,
    head: str,
    shape: tuple[int, ...] | None,
    config: ConfigRecord,
    timeout: float,
) -> dict[int, Answer]:
    """Return the usable answers about a model, by node; warnings name the other nodes.

    Args:
        head: the layer whose inputs are summed by class; empty asks only for losses.
        shape: of the layer's weight; None with no layer.

    Raises:
        FedrotError: there is no usable answer.
    """
    requests = [
        Message(
            RecordDict({MODEL: arrays, "config": ConfigRecord({**config, HEAD: head})}),
            dst_node_id=node,
            message_type=MESSAGE_TYPE,
        )
        for node in nodes
    ]
    why, found, silent = "No client is connected.", dict[int, tuple[bytes, Answer]](), set(nodes)
    for answer in grid.send_and_receive(requests, timeout=timeout):
        node = answer.metadata.src_node_id
        if node not in silent:
            continue
        silent.remove(node)
        try:
            if answer.has_error():
                raise UpdateError(
                    f"it failed ({answer.error.reason!r:.200}). Call "
                    "fedrot.strategies.answer_with_sums with its ClientApp."
                )
            read = _read_answer(answer.content, shape)
        except (FedrotError, KeyError, ValueError) as error:
            why = f"Client {node}: {error!s:.300}"
            log(WARNING, "A client's sums are left out. %s", why)
        else:
            found[node] = _digest(answer.content), read
    for node in silent:
        why = f"Client {node}: no answer before the timeout."
        log(WARNING, "A client's sums are left out. %s", why)
    if not found:
        raise FedrotError(f"No client gave a usable answer about the model. {why}")
    # Sums depend neither on the order of arrival nor on the nodes' ids, which are drawn in every run.
    return {node: read for node, (_, read) in sorted(found.items(), key=lambda item: item[1][0])}


def total(given: Iterable[_Sums | None]) -> _Sums:
    """Return the sum over the clients that have rows.

    Raises:
        FedrotError: no client has rows.
    """
    known = [sums for sums in given if sums is not None]
    if not known:
        raise FedrotError("No client has such rows.")
    return reduce(lambda before, sums: before + sums, known)


def losses_at(sums: LossSums, temperature: float) -> float:
    """Return the mean loss of a row at one of the temperatures."""
    return float(sums.losses[sums.temperatures.index(temperature)]) / sums.rows


def _answer(message: Message, data: LabelledRows) -> RecordDict:
    model = data.build()
    model.load_state_dict(from_arrays(message.content.array_records[MODEL]))
    content = RecordDict()
    if held_out := _some(data.held_out()):
        found = collect_losses(model, held_out)
        counts = torch.tensor([found.rows, found.correct], dtype=torch.float64)
        content[LOSSES] = to_arrays({"losses": found.losses, "counts": counts})
    (config,) = message.content.config_records.values()
    head = str(config.get(HEAD, ""))
    if head and (training := _some(data.training())):
        sums = collect_classes(model, training, head)
        content[SUMS] = to_arrays({name: getattr(sums, name) for name in _SUMS})
    return content


def _digest(content: RecordDict) -> bytes:
    """Return a hash of an answer's arrays."""
    found = sha256()
    for record in (SUMS, LOSSES):
        for name, array in content.array_records.get(record, {}).items():
            found.update(f"{record}/{name}".encode())
            found.update(array.data)
    return found.digest()


def _some(batches: Batches) -> Batches | None:
    """Return the batches, None if there are none."""
    left = iter(batches)
    first = next(left, None)
    return None if first is None else chain([first], left)


def _read_answer(content: RecordDict, shape: tuple[int, ...] | None) -> Answer:
    """Return a client's answer; ``shape`` is the task head's, None if class sums were not requested."""
    if shape is None:
        return Answer(_loss_sums(content), None)
    losses = _loss_sums(content) if LOSSES in content else None
    return Answer(losses, _class_sums(content, shape) if SUMS in content or losses is None else None)


def _class_sums(content: RecordDict, shape: tuple[int, ...]) -> ClassSums:
    found = _read(content, SUMS, _SUMS)
    if tuple(found["sums"].shape) != shape:
        raise UpdateError(f"The sums have shape {list(found['sums'].shape)}, the head {list(shape)}.")
    return ClassSums(*(found[name] for name in _SUMS))


def _loss_sums(content: RecordDict) -> LossSums:
    found = _read(content, LOSSES, ("losses", "counts"))
    if tuple(found["counts"].shape) != (2,):
        raise UpdateError(f"The counts of held-out rows have shape {list(found['counts'].shape)}.")
    rows, correct = found["counts"].tolist()
    sums = LossSums(TEMPERATURES, found["losses"], rows, correct)
    if float(sums.losses.max()) > _WORST * rows:
        raise UpdateError(f"The mean loss of a row is above {_WORST:g}.")
    return sums


def _read(content: RecordDict, record: str, names: tuple[str, ...]) -> Tensors:
    given = content.array_records.get(record)
    if given is None or set(given) != set(names):
        raise UpdateError(f"The answer has no ArrayRecord '{record}' with {', '.join(names)}.")
    found = from_arrays(given)
    for name, value in found.items():
        if value.is_floating_point() and bool((value.abs() > _LARGEST).any()):
            raise UpdateError(f"The '{name}' of '{record}' have values above {_LARGEST:g}.")
    return found
