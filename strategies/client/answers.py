"""``answer_with_sums``: a client's answers to requests about a task head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from torch import nn

from fedrot.errors import FedrotError
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
from fedrot.strategies.wire.label_names import LABELS, labels_record
from fedrot.task_head.labelled_rows import as_batch
from fedrot.task_head.losses import TaskHeads, collect_losses, compare_losses
from fedrot.task_head.outputs import OUTPUT_KINDS
from fedrot.task_head.sums import collect_classes
from fedrot.tensors import Tensors

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

Batches = Iterable[Tensors]


@dataclass(frozen=True)
class LabelledRows:
    """The model and the rows that a client answers with.

    A client without training rows, or without held-out rows, returns an empty list.
    An iterator has to be a new one in each call.

    Attributes:
        build: returns a ``transformers`` classifier, or a PEFT model, of which the
            active adapter is used.
        training: returns the client's training rows: keyword arguments of forward, with
            ``labels`` (a tensor, an array or a list).
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
    """Let a ``ClientApp`` answer ``evaluate_at_clients`` and ``fit_task_head``.

    Args:
        app: the client's app.
        setup: returns the model and the rows; called for every request.
        folder: where the client keeps up to three received models between requests, so
            that they are sent once: in a folder ``fedrot-bodies`` there; None is the
            user's folder of caches.

    Example: ``answer_with_sums(app, lambda message, context: rows)``, with the
    client's ``rows = LabelledRows(build, training, held_out)``
    """

    @app.query(ACTION)
    def answer(message: Message, context: Context) -> Message:
        # Building models and drawing batches must not change the random numbers of
        # training.
        with torch.random.fork_rng(devices=[]):
            content = _Request(message.content, folder, context.run_id).answer(
                setup(message, context)
            )
        return Message(content, reply_to=message)


class _Request:
    """A request as a client reads it."""

    def __init__(
        self, content: RecordDict, folder: str | Path | None, run: int
    ) -> None:
        (self._config,) = content.config_records.values()
        self._arrays = content.array_records
        self._task_head = str(self._config[TASK_HEAD])
        self._problem_type = str(self._config[PROBLEM_TYPE])
        self._shelf = Shelf(folder, run, self._task_head)

    def answer(self, data: LabelledRows) -> RecordDict:
        """Return the answer."""
        stage = self._config[STAGE]
        if stage == COUNT:
            counts = {
                name: self._labelled(_read(data, name))
                for name in ("training", "held_out")
            }
            content = RecordDict({ROWS: MetricRecord({**counts})})
            if self._config.get(LABELS):
                content[LABELS] = labels_record(data.build())
            return content
        if not self._task_head:
            model = _loaded(data.build(), from_arrays(self._arrays[MODEL]))
            losses = collect_losses(model, _read(data, "held_out"))
            return RecordDict(
                {LOSSES: to_arrays(vars(losses)), LABELS: labels_record(model)}
            )
        bodies = self._bodies()
        if bodies is None:
            return RecordDict({LACKS: ConfigRecord()})
        model = data.build()
        # One model receives the bodies one after the other.
        models = (_loaded(model, body) for body in bodies)
        if stage == SUM:
            sums = collect_classes(
                next(models),
                _read(data, "training"),
                self._task_head,
                self._problem_type,
            )
            return RecordDict({SUMS: to_arrays(sums.packed())})
        heads = [
            TaskHeads(**from_arrays(self._arrays[f"{TASK_HEADS}-{place}"]))
            for place in range(len(bodies))
        ]
        losses = compare_losses(
            models,
            [*_read(data, "held_out")],
            self._task_head,
            heads,
            self._problem_type,
        )
        return RecordDict({LOSSES: to_arrays(vars(losses))})

    def _bodies(self) -> list[Tensors] | None:
        """Return the request's bodies, sent or kept; None if one is lacking."""
        between = self._keys(BETWEEN)
        bodies = []
        for place, key in enumerate(self._keys(BODIES)):
            sent = self._arrays.get(f"{MODEL}-{place}")
            if sent is None:
                bodies.append(self._shelf.read(key, between))
            else:
                bodies.append(self._shelf.keep(key, from_arrays(sent)))
        self._shelf.drop_others(self._keys(KEEP))
        held = [body for body in bodies if body is not None]
        return held if len(held) == len(bodies) else None

    def _keys(self, name: str) -> list[str]:
        # Flower sends an empty list as another type.
        keys = self._config[name]
        return [str(key) for key in keys] if isinstance(keys, list) else []

    def _labelled(self, batches: Batches) -> int:
        """Return how many rows have a label.

        Requests for sums and losses say what is wrong with others.
        """
        has_label = OUTPUT_KINDS[self._problem_type].has_label
        labels = (batch["labels"] for batch in batches if "labels" in batch)
        return sum(int(has_label(of_batch).sum()) for of_batch in labels)


def _read(data: LabelledRows, name: str) -> Iterator[Tensors]:
    """Yield the batches of training or held-out rows.

    Raises:
        FedrotError: the batches are an iterator that was read before.
    """
    rows: Callable[[], Batches] = getattr(data, name)
    batches = rows()
    empty = True
    for batch in batches:
        empty = False
        yield as_batch(batch)
    if empty and isinstance(batches, Iterator) and rows() is batches:
        raise FedrotError(
            f"{name} of LabelledRows returns the same iterator in each call, and it is "
            "used up. Return a list, a DataLoader, or a new iterator: "
            f"{name}=lambda: iter(loader)."
        )


def _loaded(model: nn.Module, tensors: Tensors) -> nn.Module:
    """Return the model with other tensors; an adapter keeps its ranks."""
    if hasattr(model, "peft_config"):
        load_as_sent(model, tensors)
    else:
        model.load_state_dict({**tensors})
    return model
