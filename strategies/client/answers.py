"""``answer_with_sums``: a client's answers to requests about a task head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from flwr.app import (
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from torch import Tensor, nn

from fedrot.lora.peft_model import load_as_sent
from fedrot.strategies.arguments import check_functions
from fedrot.strategies.client.shelf import Shelf
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.strategies.wire.fitting_messages import (
    ACTION,
    BETWEEN,
    BODIES,
    COUNT,
    KEEP,
    LACKS,
    LOSSES,
    MODEL,
    PROBLEM_TYPE,
    ROWS,
    STAGE,
    SUM,
    SUMS,
    TASK_HEAD,
    TASK_HEADS,
)
from fedrot.task_head.losses import TaskHeads, collect_losses, compare_losses
from fedrot.task_head.outputs import OUTPUT_KINDS
from fedrot.task_head.sums import collect_classes

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

Batches = Iterable[Mapping[str, Tensor]]


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


class _Request:
    """A request as a client reads it."""

    def __init__(self, given: RecordDict, folder: str | Path | None, run: int) -> None:
        (self._config,) = given.config_records.values()
        self._given, self._task_head = given.array_records, str(self._config[TASK_HEAD])
        self._shelf = Shelf(folder, run, self._task_head)

    def answer(self, data: LabelledRows) -> RecordDict:
        """Return the answer."""
        step, problem_type = self._config[STAGE], str(self._config[PROBLEM_TYPE])
        if step == COUNT:
            pair = {"training": data.training(), "held_out": data.held_out()}
            counts = {
                name: _labelled(batches, problem_type) for name, batches in pair.items()
            }
            return RecordDict({ROWS: MetricRecord({**counts})})
        if not self._task_head:
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
            sums = collect_classes(
                next(models), data.training(), self._task_head, problem_type
            )
            return RecordDict({SUMS: to_arrays(sums.packed())})
        task_heads = [
            TaskHeads(**from_arrays(self._given[f"{TASK_HEADS}-{i}"]))
            for i in range(len(bodies))
        ]
        losses = compare_losses(
            models, [*data.held_out()], self._task_head, task_heads, problem_type
        )
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


def _labelled(batches: Batches, problem_type: str) -> int:
    """Return how many rows have a label; requests for sums and losses say what is wrong
    with others.
    """
    has_label = OUTPUT_KINDS[problem_type].has_label
    return sum(
        int(has_label(batch["labels"]).sum()) for batch in batches if "labels" in batch
    )
