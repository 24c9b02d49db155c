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
from fedrot.strategies.client.site_report import record_alone, site_report
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.strategies.wire.fitting_messages import (
    ACTION,
    ALONE,
    BETWEEN,
    BODIES,
    COUNT,
    COUNT_CLASSES,
    COUNTS,
    FIGURES,
    FIRST,
    KEEP,
    LACKS,
    LACKS_ALONE,
    LOSSES,
    MODEL,
    PROBLEM_TYPE,
    REPORT,
    ROWS,
    SITE,
    STAGE,
    SUM,
    SUMS,
    TASK_HEAD,
    TASK_HEADS,
    WHY_NOT_ALONE,
    WITHHELD,
)
from fedrot.strategies.wire.label_names import LABELS, labels_record
from fedrot.task_head.fit import with_task_head
from fedrot.task_head.labelled_rows import as_batch
from fedrot.task_head.losses import TaskHeads, collect_losses, compare_losses
from fedrot.task_head.outputs import OUTPUT_KINDS
from fedrot.task_head.site_head import collect_counts
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
        test: returns rows that neither train nor choose, on which the site's report is
            measured; the same rows in every call. None takes the held-out rows, and the
            report says that these also chose.
        name: of the site, in reports.
        report: whether the site reports: numbers of its rows by class, and losses,
            accuracies and macro F1 of three heads on its rows (``report_sites``).
    """

    build: Callable[[], nn.Module]
    training: Callable[[], Batches]
    held_out: Callable[[], Batches]
    test: Callable[[], Batches] | None = None
    name: str = ""
    report: bool = True

    def __post_init__(self) -> None:
        check_functions(self, "build", "training", "held_out")
        if self.test is not None:
            check_functions(self, "test")

    @property
    def reported(self) -> str:
        """The name of the rows on which the report is measured."""
        return "held_out" if self.test is None else "test"


def answer_with_sums(
    app: ClientApp,
    setup: Callable[[Message, Context], LabelledRows],
    folder: str | Path | None = None,
) -> None:
    """Let a ``ClientApp`` answer ``fit_task_head``, ``report_sites`` and others.

    Args:
        app: the client's app.
        setup: returns the model and the rows; called for every request.
        folder: where the client keeps up to three received models between requests, so
            that they are sent once, and the answers of the head that the site fits
            alone: in a folder ``fedrot-bodies`` there; None is the user's folder of
            caches.

    Example: ``answer_with_sums(app, lambda message, context: rows)``, with the
    client's ``rows = LabelledRows(build, training, held_out)``
    """

    @app.query(ACTION)
    def answer(message: Message, context: Context) -> Message:
        # Building models and drawing batches must not change the random numbers of
        # training.
        with torch.random.fork_rng(devices=[]):
            node = message.metadata.dst_node_id
            content = _Request(message.content, folder, context.run_id, node).answer(
                setup(message, context)
            )
        return Message(content, reply_to=message)


class _Request:
    """A request as a client reads it."""

    def __init__(
        self, content: RecordDict, folder: str | Path | None, run: int, node: int
    ) -> None:
        (self._config,) = content.config_records.values()
        self._arrays = content.array_records
        self._task_head = str(self._config[TASK_HEAD])
        self._problem_type = str(self._config[PROBLEM_TYPE])
        self._shelf = Shelf(folder, run, self._task_head)
        self._node = node

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
        if stage == COUNT_CLASSES:
            rows = _read(data, "training")
            by_class = collect_counts(data.build(), rows, self._problem_type)
            return RecordDict({COUNTS: to_arrays({"counts": by_class})})
        if stage in (ALONE, REPORT) and not data.report:
            return RecordDict({WITHHELD: ConfigRecord()})
        if not self._task_head:
            model = _loaded(data.build(), from_arrays(self._arrays[MODEL]))
            losses = collect_losses(model, _read(data, "held_out"))
            return RecordDict(
                {LOSSES: to_arrays(vars(losses)), LABELS: labels_record(model)}
            )
        bodies = self._bodies()
        if bodies is None:
            return RecordDict({LACKS: ConfigRecord()})
        if stage in (ALONE, REPORT):
            # Several clients may share a folder.
            key = f"{self._node} {self._config[FIRST]}"
            respond = self._alone if stage == ALONE else self._report
            return respond(data, bodies[0], key)
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

    def _alone(self, data: LabelledRows, body: Tensors, key: str) -> RecordDict:
        """Note what a head answers that is fitted to the site's rows alone."""
        held_out = [*_read(data, "held_out")]
        try:
            record = record_alone(
                _loaded(data.build(), body),
                _read(data, "training"),
                held_out if self._labelled(held_out) else [],
                _read(data, data.reported),
                (self._task_head, self._problem_type),
            )
        except FedrotError as error:
            return RecordDict({WHY_NOT_ALONE: ConfigRecord({"reason": str(error)})})
        self._shelf.note(key, record)
        return RecordDict()

    def _report(self, data: LabelledRows, body: Tensors, key: str) -> RecordDict:
        """Return the figures of the site's heads."""
        alone = self._shelf.noted(key)
        head = from_arrays(self._arrays[f"{TASK_HEADS}-0"])
        layer = head["weight"], head["bias"]
        figures = alone and site_report(
            _loaded(data.build(), with_task_head(body, self._task_head, *layer)),
            head,
            _read(data, "training"),
            _read(data, data.reported),
            alone,
            (self._task_head, self._problem_type),
        )
        if not figures:
            return RecordDict({LACKS_ALONE: ConfigRecord()})
        site = ConfigRecord({"name": str(data.name), "chose": data.test is None})
        return RecordDict({FIGURES: to_arrays(figures), SITE: site})

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
