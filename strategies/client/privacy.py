"""``Privacy``: what a client's answers about a task head may tell of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.strategies.client.client_rows import LabelledRows, labels_of, read_rows
from fedrot.task_head.outputs import OUTPUT_KINDS, OutputKind
from fedrot.tensors import Tensors


@dataclass(frozen=True)
class Privacy:
    """What a client's answers about a task head may tell about its rows.

    It is a setting of the client, and no request changes it. The server does not learn
    what was left out: the client answers as if it did not have these rows.

    With an ``epsilon`` the client answers requests for noisy sums alone (``public`` of
    ``fit_task_head``), and always in the same form. Every row counts then, since the
    noise bounds what each of them tells: ``min_class_rows`` and ``min_rows`` leave none
    out. The guarantee is that of (epsilon, delta) differential privacy, for data sets
    that differ by one *row* more or less: several rows of one patient are not hidden as
    one. It covers these answers, and no updates of training.

    Attributes:
        min_class_rows: a class with fewer training rows is left out of counts, sums,
            losses and reports. Of several labels, rows that lack a label which nearly
            all rows have are left out, too; combinations of labels, and values of a
            regression, are not counted, and a rare one can be read from sums. Of
            tokens, texts are counted. A report also leaves out classes with fewer rows
            that it is measured on. With fewer held-out rows in all, the client sends no
            losses.
        min_rows: with fewer training rows the client sends no sums and no report. It
            still receives the model of all clients.
        record: the site's file, in which a line is on the disk before an answer is
            sent (``fedrot report`` reads it). It has no values of rows. None: no file.
        once: whether an answer is refused if its difference to an earlier one tells
            about rows: the same was asked about the same model, and the client has
            other rows now. It is only warned about otherwise. Not compared are counts
            and the training rows of reports; a server that changes a model without use
            is not found. It means nothing with an ``epsilon``.
        epsilon: what all noisy sums of the rows may tell together. The ``record``
            counts it before an answer is sent; when it is spent, none is sent. A record
            that is removed between runs forgets what was told. None: sums without
            noise.
        delta: of the guarantee; below one over the number of rows.
        releases: how many answers have the ``epsilon`` together. An answer that is
            lost, late or left out by the server counts, too.

    Raises:
        FedrotError: a number of rows or releases is not a whole number above 0, or
            ``epsilon`` or ``delta`` is none; or ``once`` or ``epsilon`` has no
            ``record`` with an absolute path.

    Example: ``answer_with_sums(app, rows, privacy=Privacy(min_class_rows=10))``; or
    with noise ``Privacy(epsilon=3.0, record="/srv/site/answers.jsonl")``
    """

    min_class_rows: int = 5
    min_rows: int = 10
    record: str | Path | None = None
    once: bool = False
    epsilon: float | None = None
    delta: float = 1e-5
    releases: int = 1

    def __post_init__(self) -> None:
        if (self.once or self.epsilon is not None) and not Path(
            self.record or ""
        ).is_absolute():
            raise FedrotError(
                "Privacy has once=True or an epsilon, and no record with an absolute "
                "path. A client's process may end after each answer, and only a file "
                "knows the earlier ones: Privacy(record='/srv/site/answers.jsonl', "
                "...)."
            )
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise FedrotError(
                f"epsilon of Privacy is {self.epsilon!r}; give a number above 0, like "
                "3.0, or None for sums without noise."
            )
        if not 0 < self.delta < 1:
            raise FedrotError(
                f"delta of Privacy is {self.delta!r}; give a number between 0 and 1, "
                "below one over the number of rows, like 1e-5."
            )
        for name in ("min_class_rows", "min_rows", "releases"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise FedrotError(
                    f"{name} of Privacy is {value!r}; give a whole number above 0."
                )

    def kept(
        self, data: LabelledRows, problem_type: str, reports: bool = False
    ) -> LabelledRows:
        """Return a client's rows without those that it leaves out.

        Args:
            reports: whether the answer is a report, which names classes.
        """
        if self.epsilon is not None:
            return data
        kind = OUTPUT_KINDS[problem_type]
        minimum = self.min_class_rows
        training = _labels(data, "training")
        common = kind.common(training, minimum)
        kept = _with(kind, data, "training", common, self.min_rows)
        measured = "held_out" if data.test is None else "test"
        # Only a report reads test rows.
        for name in {"held_out", measured} if reports else {"held_out"}:
            common = kind.common(_labels(data, name), minimum, training)
            kept = _with(kind, kept, name, common, minimum)
        if reports:
            common = kind.common(_labels(kept, measured), minimum)
            kept = _with(kind, kept, measured, common, minimum)
        return kept


#: What is left out where nothing else is set.
USUAL_PRIVACY = Privacy()


def labelled_texts(kind: OutputKind, labels: Tensor) -> Tensor:
    """Return which rows of a batch have a label, bool ``[rows]``.

    A text counts once, however many of its tokens have labels.
    """
    return kind.has_label(labels).unsqueeze(-1).flatten(1).any(1)


def _labels(data: LabelledRows, name: str) -> list[Tensor]:
    """Return the labels of the rows of this name, by batch."""
    return [*labels_of(read_rows(data, name))]


def _with(
    kind: OutputKind, data: LabelledRows, name: str, common: Tensor, fewest: int
) -> LabelledRows:
    """Return rows of common classes alone under this name; none if fewer are left."""

    def read() -> Iterator[Tensors]:
        for batch in read_rows(data, name):
            if "labels" in batch:
                labels = kind.with_common(batch["labels"], common)
                batch = {**batch, "labels": labels}
            yield batch

    left = sum(int(labelled_texts(kind, labels).sum()) for labels in labels_of(read()))
    rows: dict[str, Any] = {name: read if left >= fewest else list}
    return replace(data, **rows)
