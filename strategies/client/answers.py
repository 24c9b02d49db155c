"""``answer_with_sums``: a client's answers to requests about a task head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from logging import ERROR, WARNING
from pathlib import Path

import torch
from flwr.app import (
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common import log
from torch import nn

from fedrot.changes import with_change
from fedrot.errors import FedrotError
from fedrot.strategies.client.answer_line import noted, rows_noted
from fedrot.strategies.client.answer_record import Line
from fedrot.strategies.client.client_rows import (
    Batches,
    LabelledRows,
    labels_of,
    read_rows,
)
from fedrot.strategies.client.ledger import BudgetSpent
from fedrot.strategies.client.privacy import USUAL_PRIVACY, Privacy
from fedrot.strategies.client.shelf import Shelf
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.strategies.wire.fitting_messages import (
    ACTION,
    BODIES,
    CHANGE,
    COUNT,
    COUNT_CLASSES,
    COUNTS,
    FIGURES,
    KEEP,
    LACKS,
    LOSSES,
    MODEL,
    NOISE_ALONE,
    NOISY_SUM,
    NOISY_SUMS,
    PARENTS,
    PROBLEM_TYPE,
    PUBLIC,
    REASON,
    REPORT,
    ROWS,
    SITE,
    SPENT,
    STAGE,
    SUM,
    SUMS,
    TASK_HEAD,
    TASK_HEADS,
    WITHHELD,
    hash_of,
)
from fedrot.strategies.wire.label_names import LABELS, labels_record
from fedrot.strategies.wire.loaded_model import loaded, tensors_of
from fedrot.task_head.fit import with_task_head
from fedrot.task_head.losses import TaskHeads, collect_losses, compare_losses
from fedrot.task_head.noisy.noisy_sums import noisy_sums
from fedrot.task_head.noisy.public_features import Clipping
from fedrot.task_head.outputs import OUTPUT_KINDS, usual_problem_type
from fedrot.task_head.site_figures import site_figures
from fedrot.task_head.site_head import collect_counts
from fedrot.task_head.sums import ClassSums, collect_classes
from fedrot.tensors import Tensors

#: Runs with a warning that few rows are summed.
_WARNED = set[int]()


def answer_with_sums(
    app: ClientApp,
    setup: Callable[[Message, Context], LabelledRows],
    folder: str | Path | None = None,
    privacy: Privacy = USUAL_PRIVACY,
) -> None:
    """Let a ``ClientApp`` answer ``fit_task_head``, ``report_sites`` and others.

    Args:
        app: the client's app.
        setup: returns the model and the rows; called for every request.
        folder: where the client keeps up to three models between requests, so that
            only what has changed is sent: in a folder ``fedrot-bodies`` there; None is
            the user's folder of caches.
        privacy: which rows the client leaves out of all answers, by default classes
            with fewer than 5 rows, and all sums of fewer than 10 rows; and its record.

    Example: ``answer_with_sums(app, lambda message, context: rows)``, with the
    client's ``rows = LabelledRows(build, training, held_out)``
    """

    @app.query(ACTION)
    def answer(message: Message, context: Context) -> Message:
        request = _Request(message.content, folder, context.run_id)
        try:
            # Building models and drawing batches must not change the random numbers of
            # training.
            with torch.random.fork_rng(devices=[]):
                rows = setup(message, context)
                # Built before the answer is counted, so that a failure costs nothing.
                model = rows.build()
                content = _content(request, rows, model, privacy, context)
                # The server does not know the names of the client's labels.
                if LABELS in request.config:
                    content[LABELS] = labels_record(model)
        except Exception:
            if privacy.epsilon is None:
                raise
            # The message may tell about rows, and Flower sends it.
            log(ERROR, "No answer with noise could be made.", exc_info=True)
            raise FedrotError(
                "A site with an epsilon could not answer; its own log says why."
            ) from None
        return Message(content, reply_to=message)


def _content(
    request: _Request,
    rows: LabelledRows,
    model: nn.Module,
    privacy: Privacy,
    context: Context,
) -> RecordDict:
    """Return what a client answers, or that it does not."""
    stage = request.config[STAGE]
    if privacy.epsilon is not None and stage != NOISY_SUM:
        # A report may be withheld by every site.
        return _withheld("" if stage == REPORT else NOISE_ALONE)
    kept = privacy.kept(rows, request.kind_of(model), stage == REPORT)
    bodies = request.bodies(rows, model)
    if bodies is None:
        return RecordDict({LACKS: ConfigRecord()})
    try:
        with noted(privacy, context, partial(request.line, rows, kept, bodies)) as line:
            noise = 0.0 if privacy.epsilon is None else line["multiplier"]
            return request.answer(model, kept, bodies, noise)
    except BudgetSpent as spent:
        log(WARNING, "%s", spent)
        return _withheld(SPENT)


class _Request:
    """A request as a client reads it."""

    def __init__(
        self, content: RecordDict, folder: str | Path | None, run: int
    ) -> None:
        (self.config,) = content.config_records.values()
        self._arrays = content.array_records
        self._run = run
        self._task_head = str(self.config[TASK_HEAD])
        self._problem_type = str(self.config[PROBLEM_TYPE])
        self._shelf = Shelf(folder, run, self._task_head)

    def kind_of(self, model: nn.Module) -> str:
        """Return the problem type, which decides which rows are left out.

        It is that of the client's model.

        Raises:
            FedrotError: a request about a task head names another one.
        """
        config = getattr(model, "config", None)
        # As problem_type_of reads it, of any model. A server must not choose it.
        of_model = getattr(config, "problem_type", None) or usual_problem_type(
            getattr(config, "num_labels", 2)
        )
        if self._task_head and of_model != self._problem_type:
            raise FedrotError(
                f"The server asks about a {self._problem_type}, and the problem_type "
                f"of the client's model is {of_model}. Set the same one in both "
                "configurations."
            )
        self._problem_type = of_model
        return of_model

    def silent(self, data: LabelledRows) -> bool:
        """Return whether a report is asked for that the site does not give."""
        return self.config[STAGE] == REPORT and not data.report

    def bodies(self, data: LabelledRows, model: nn.Module) -> Sequence[Tensors] | None:
        """Return the models of which the answer tells; None if one is lacking.

        Args:
            data: the client's rows.
            model: as the client builds it.
        """
        if self.config[STAGE] in (COUNT, COUNT_CLASSES) or self.silent(data):
            return ()
        if not self._task_head:
            return [from_arrays(self._arrays[MODEL])]
        bodies = list[Tensors]()
        for place, key in enumerate(self._keys(BODIES)):
            body = self._body(place, key, model)
            if body is None:
                return None
            bodies.append(body)
        self._shelf.drop_others(self._keys(KEEP))
        return bodies

    def _body(self, place: int, key: str, model: nn.Module) -> Tensors | None:
        shelf = self._shelf
        parents = self._keys(PARENTS)
        sent = self._arrays.get(f"{MODEL}-{place}")
        if sent is not None:
            return shelf.keep(key, from_arrays(sent))
        change = self._arrays.get(f"{CHANGE}-{place}")
        if change is None:
            kept = shelf.read(key, parents)
            return kept or shelf.keep_right(key, tensors_of(model))
        old = shelf.read(parents[0])
        # Without the old body the client lacks the new one, too.
        return old and shelf.keep_right(key, with_change(old, from_arrays(change)))

    def line(
        self,
        data: LabelledRows,
        kept: LabelledRows,
        bodies: Sequence[Tensors],
        salt: bytes,
    ) -> Line:
        """Return what a record says about the answer.

        Args:
            data: the client's rows.
            kept: those that are not left out.
        """
        stage = self.config[STAGE]
        name = "held_out"
        if not bodies or stage in (SUM, NOISY_SUM):
            name = "training"
        if stage == REPORT and data.test is not None:
            name = "test"
        sent, every = (
            rows_noted(read_rows(rows, name), OUTPUT_KINDS[self._problem_type], salt)
            for rows in (kept, data)
        )
        left_out = {
            "rows": every["rows"] - sent["rows"],
            "classes": len(every["classes"] - sent["classes"]),
        }
        # A server may name a body otherwise.
        hashes = [hash_of(body, self._task_head)[:16] for body in bodies]
        return {
            "round": self.config.get("server-round"),
            "stage": stage,
            "of": name,
            **sent,
            "classes": len(sent["classes"]),
            "bodies": hashes,
            "left_out": left_out,
            "withheld": self.silent(data) or sent["rows"] < 1 <= every["rows"],
        }

    def answer(
        self,
        model: nn.Module,
        data: LabelledRows,
        bodies: Sequence[Tensors],
        noise: float,
    ) -> RecordDict:
        """Return the answer about ``bodies``.

        Args:
            model: receives them.
            data: the rows that are not left out.
            bodies: that are asked about.
            noise: the multiplier of noisy sums; see ``noisy_sums``.
        """
        stage = self.config[STAGE]
        training = read_rows(data, "training")
        held_out = read_rows(data, "held_out")
        if stage == COUNT:
            return RecordDict(
                {
                    ROWS: MetricRecord(
                        {
                            "training": self._labelled(training),
                            "held_out": self._labelled(held_out),
                        }
                    )
                }
            )
        if stage == COUNT_CLASSES:
            counts = collect_counts(model, training, self._problem_type)
            return RecordDict({COUNTS: to_arrays({"counts": counts})})
        if stage == REPORT:
            return self._report(model, data, bodies) if data.report else _withheld()
        # One model receives the bodies one after the other.
        models = (loaded(model, body) for body in bodies)
        if stage == NOISY_SUM:
            noisy = noisy_sums(
                next(models),
                training,
                self._task_head,
                Clipping(**from_arrays(self._arrays[PUBLIC])),
                noise,
            )
            return RecordDict({NOISY_SUMS: to_arrays(noisy.packed())})
        if stage == SUM:
            sums = collect_classes(
                next(models), training, self._task_head, self._problem_type
            )
            _warn_of_few(self._run, sums)
            return RecordDict({SUMS: to_arrays(sums.packed())})
        if self._task_head:
            task_heads = [
                TaskHeads(**from_arrays(self._arrays[name]))
                for name in sorted(self._arrays)
                if TASK_HEADS in name
            ]
            losses = compare_losses(
                models, [*held_out], self._task_head, task_heads, self._problem_type
            )
        else:
            losses = collect_losses(next(models), held_out)
        return RecordDict({LOSSES: to_arrays(vars(losses))})

    def _report(
        self, model: nn.Module, data: LabelledRows, bodies: Sequence[Tensors]
    ) -> RecordDict:
        """Return ``site_figures`` of the first and of the last body, with its head.

        They are withheld if no row of training, or of the report, has a label.
        """
        training = partial(read_rows, data, "training")
        chosen_by = [*read_rows(data, "held_out")]
        test = chosen_by if data.test is None else [*read_rows(data, "test")]
        if not (self._labelled(training()) and self._labelled(test)):
            return _withheld()
        head = from_arrays(self._arrays[f"{TASK_HEADS}-0"])
        last = with_task_head(bodies[-1], self._task_head, head["weight"], head["bias"])
        figures = site_figures(
            (loaded(model, body) for body in (bodies[0], last)),
            head["priors"],
            training,
            chosen_by if self._labelled(chosen_by) else [],
            test,
            self._task_head,
            self._problem_type,
        )
        return RecordDict(
            {
                FIGURES: to_arrays(figures),
                SITE: ConfigRecord(
                    {"name": str(data.name), "chose": test is chosen_by}
                ),
            }
        )

    def _keys(self, name: str) -> list[str]:
        # Flower sends an empty list as another type.
        keys = self.config[name]
        return [str(key) for key in keys] if isinstance(keys, list) else []

    def _labelled(self, batches: Batches) -> int:
        """Return how many rows have a label."""
        kind = OUTPUT_KINDS[self._problem_type]
        return sum(int(kind.has_label(labels).sum()) for labels in labels_of(batches))


def _warn_of_few(run: int, sums: ClassSums) -> None:
    """Say once a run whether sums are over so few rows that they tell about one."""
    width = sums.sums.shape[1]
    if run not in _WARNED and sums.rows < 3 * width:
        _WARNED.add(run)
        log(
            WARNING,
            "The sums are over %g rows, fewer than three times their width, %d. From "
            "them, whoever knows a text can tell whether it is among the rows.",
            sums.rows,
            width,
        )


def _withheld(reason: str = "") -> RecordDict:
    """Return the answer of a client that does not answer."""
    return RecordDict({WITHHELD: ConfigRecord({REASON: reason})})
