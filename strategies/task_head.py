"""The task head of a finished model, fitted to all clients' rows: requests, answers, and the choice.

The server sends the model and asks for sums (``fedrot.head``). It fits the head, sends the model with
it, and asks for the losses of both on rows that the clients have held out (``fedrot.temperature``). It
keeps the better one, at its best temperature. Only sums leave a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from logging import INFO, WARNING
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.head import (
    ClassSums,
    check_shrinkage,
    collect_classes,
    fit_head,
    head_of,
    with_head,
)
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.strategies.wire.records import replace_changed
from fedrot.temperature import (
    TEMPERATURES,
    LossSums,
    best_temperature,
    collect_losses,
    with_temperature,
)
from fedrot.tensors import Tensors

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

#: The action of the requests, their message type, and the names of their records.
ACTION = "fedrot_head"
MESSAGE_TYPE = f"query.{ACTION}"
MODEL, SUMS, LOSSES = "fedrot-model", "fedrot-class-sums", "fedrot-losses"

#: Key of a request's configuration: the name of the layer to fit; none asks for losses alone.
HEAD = "fedrot-head"

#: So many held-out rows of all clients together choose reliably enough.
FEW = 100

#: The tensors of ``ClassSums``.
_SUMS = ("counts", "sums", "gram")

#: The largest number in an answer, and the largest loss of one row: sums over clients stay finite.
_LARGEST, _WORST = 1e100, 1e6

Batches = Iterable[Mapping[str, Tensor]]
_Sums = TypeVar("_Sums", ClassSums, LossSums)


@dataclass(frozen=True)
class HeadData:
    """The model and the rows with which a client answers about the task head.

    Attributes:
        build: returns a ``transformers`` classifier.
        training: returns the rows that the head is fitted to: keyword arguments of forward, with
            ``labels``.
        held_out: returns rows that the client has not trained on, in the same form.

    A client without training rows, or without held-out ones, returns an empty list of them.
    """

    build: Callable[[], nn.Module]
    training: Callable[[], Batches]
    held_out: Callable[[], Batches]


@dataclass(frozen=True)
class FittedHead:
    """A model with its task head, and what is known about it.

    Attributes:
        arrays: the model, with the better of the two heads at its best temperature.
        fitted: whether that is the fitted head.
        temperature: what the logits were divided by.
        losses: mean cross entropy on the held-out rows of all clients: of the model as it was, of the
            model as it was at its best temperature, and of the fitted head at its best temperature.
        rows: held-out rows.
        clients: clients that answered both requests.
    """

    arrays: ArrayRecord
    fitted: bool
    temperature: float
    losses: tuple[float, float, float]
    rows: float
    clients: int


class _Answer(NamedTuple):
    """What a client answers: losses on its held-out rows and class sums, None where it has no rows."""

    losses: LossSums | None
    sums: ClassSums | None


def answer_for_head(app: ClientApp, setup: Callable[[Message, Context], HeadData]) -> None:
    """Add an action to a ``ClientApp`` that answers the requests of ``fit_task_head``.

    Args:
        app: the client's app.
        setup: returns the model and the rows to answer with; called for every request.

    Example: ``answer_for_head(app, lambda message, context: HeadData(build, training, held_out))``
    """

    @app.query(ACTION)
    def answer(message: Message, context: Context) -> Message:
        # Building models and drawing batches must not change the random numbers of training.
        with torch.random.fork_rng(devices=[]):
            content = _answer(message, setup(message, context))
        return Message(content, reply_to=message)


def _answer(message: Message, data: HeadData) -> RecordDict:
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


def _some(batches: Batches) -> Batches | None:
    """Return the batches, None if there is none."""
    left = iter(batches)
    first = next(left, None)
    return None if first is None else chain([first], left)


def fit_task_head(
    grid: Grid,
    arrays: ArrayRecord,
    model_config: object,
    *,
    head: str | None = None,
    shrinkage: float = 0.1,
    config: ConfigRecord | None = None,
    timeout: float = 3600,
) -> FittedHead:
    """Fit the task head of a finished model to the rows of all connected clients.

    Every client receives the model, and answers with sums over its rows. Clients with held-out rows
    receive it once more, with the fitted head. The server sees each client's sums. Of a class with one
    row these are the row's features. A client that lies moves the sums as it moves a mean. The head is
    fitted by linear discriminant analysis (``fedrot.head.fit_head``). It is kept only if its loss over
    all held-out rows is smaller than that of the head as it was, each at its best temperature.

    Args:
        grid: of the server app.
        arrays: the model, such as ``strategy.start(...).arrays``.
        model_config: the model's transformers configuration, or its dictionary.
        head: the name of the model's last linear layer; None finds it.
        shrinkage: see ``fedrot.head.fit_head``.
        config: is sent along with both requests, as ``train_config`` is with a round's.
        timeout: seconds to wait for the answers to each of the two requests.

    Example: ``final = fit_task_head(grid, strategy.start(grid, arrays).arrays, model.config).arrays``

    Raises:
        FedrotError: the shrinkage is not from 0 to 1; the model has no such layer; no client has
            held-out rows; or no client gives a usable answer (it needs ``answer_for_head`` on its
            ``ClientApp``), with the last reason.
    """
    check_shrinkage(shrinkage)
    tensors = from_arrays(arrays)
    head = head or head_of(model_config, tensors)
    if f"{head}.weight" not in tensors:
        raise FedrotError(f"The model has no layer '{head}'; see fedrot.head.head_of.")
    shape = tuple(tensors[f"{head}.weight"].shape)
    ask = partial(_asked, grid, shape=shape, config=config or ConfigRecord(), timeout=timeout)
    first = ask([*grid.get_node_ids()], arrays, head)
    judges = [node for node, answer in first.items() if answer.losses is not None]
    if not judges:
        raise FedrotError("Task head: no client has held-out rows, so that no head can be chosen.")
    fitted, second = tensors, first
    try:
        sums = _total(answer.sums for answer in first.values())
        fitted = with_head(tensors, head, *fit_head(sums, shrinkage, bias=f"{head}.bias" in tensors))
    except FedrotError as error:
        log(WARNING, "Task head: it cannot be fitted, and stays as it is. %s", error)
    else:
        second = ask(judges, replace_changed(arrays, tensors, fitted), "")
    before = _total(first[node].losses for node in second)
    after = _total(answer.losses for answer in second.values())
    better = _loss(after) < _loss(before)
    chosen, losses = (fitted, after) if better else (tensors, before)
    temperature = best_temperature(losses)
    result = replace_changed(arrays, tensors, with_temperature(chosen, head, temperature))
    as_it_was = float(before.losses[before.temperatures.index(1.0)]) / before.rows
    found = FittedHead(
        result, better, temperature, (as_it_was, _loss(before), _loss(after)), before.rows, len(second)
    )
    if before.rows < FEW:
        log(
            WARNING,
            "Task head: %g held-out rows are few; the choice of head and temperature may be noise. Let "
            "clients hold out more.",
            before.rows,
        )
    log(
        INFO,
        "Task head: %d clients, %g held-out rows; loss %.4g as it was, %.4g at its best temperature, "
        "%.4g fitted: the %s head is kept, temperature %.3g.",
        *(found.clients, found.rows, *found.losses, "fitted" if better else "old", temperature),
    )
    return found


def _asked(
    grid: Grid,
    nodes: list[int],
    arrays: ArrayRecord,
    head: str,
    *,
    shape: tuple[int, ...],
    config: ConfigRecord,
    timeout: float,
) -> dict[int, _Answer]:
    """Return the usable answers by node; the others are named in warnings.

    Raises:
        FedrotError: there is none.
    """
    requests = [
        Message(
            RecordDict({MODEL: arrays, "config": ConfigRecord({**config, HEAD: head})}),
            dst_node_id=node,
            message_type=MESSAGE_TYPE,
        )
        for node in nodes
    ]
    why, found, silent = "No client is connected.", dict[int, _Answer](), set(nodes)
    for answer in grid.send_and_receive(requests, timeout=timeout):
        node = answer.metadata.src_node_id
        if node not in silent:
            continue
        silent.remove(node)
        try:
            if answer.has_error():
                raise UpdateError(
                    f"it failed ({answer.error.reason!r:.200}); it needs "
                    "fedrot.strategies.answer_for_head on its ClientApp."
                )
            read = _read_answer(answer.content, shape if head else None)
        except (FedrotError, KeyError, ValueError) as error:
            why = f"Client {node}: {error!s:.300}"
            log(WARNING, "Task head: an answer is left out. %s", why)
        else:
            found[node] = read
    for node in silent:
        why = f"Client {node}: no answer came in time."
        log(WARNING, "Task head: %s", why)
    if not found:
        raise FedrotError(f"No client gave a usable answer about the task head. {why}")
    return found


def _read_answer(content: RecordDict, shape: tuple[int, ...] | None) -> _Answer:
    """Return a client's answer; ``shape`` is that of the head, None if no class sums are asked for."""
    if shape is None:
        return _Answer(_loss_sums(content), None)
    losses = _loss_sums(content) if LOSSES in content else None
    return _Answer(losses, _class_sums(content, shape) if SUMS in content or losses is None else None)


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
        raise UpdateError(f"The losses are larger than {_WORST:g} a row.")
    return sums


def _read(content: RecordDict, record: str, names: tuple[str, ...]) -> Tensors:
    given = content.array_records.get(record)
    if given is None or set(given) != set(names):
        raise UpdateError(f"The answer has no ArrayRecord '{record}' of {', '.join(names)}.")
    found = from_arrays(given)
    for name, value in found.items():
        if value.is_floating_point() and bool((value.abs() > _LARGEST).any()):
            raise UpdateError(f"The '{name}' of '{record}' have values above {_LARGEST:g}.")
    return found


def _total(given: Iterable[_Sums | None]) -> _Sums:
    """Return the sum over the clients that have rows.

    Raises:
        FedrotError: there is none.
    """
    known = [sums for sums in given if sums is not None]
    if not known:
        raise FedrotError("No client has rows for it.")
    return reduce(lambda total, sums: total + sums, known)


def _loss(sums: LossSums) -> float:
    """Return the mean loss at the best temperature."""
    return float(sums.losses[sums.temperatures.index(best_temperature(sums))]) / sums.rows
