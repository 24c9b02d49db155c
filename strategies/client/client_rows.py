"""``LabelledRows``: the model and the rows that a client answers with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fedrot.errors import FedrotError
from fedrot.strategies.arguments import check_functions
from fedrot.task_head.labelled_rows import as_batch
from fedrot.tensors import Tensors

Batches = Iterable[Tensors]

#: Returns a model.
Builds = Callable[[], nn.Module]

#: Returns rows of a client.
ReadsRows = Callable[[], Batches]


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

    build: Builds
    training: ReadsRows
    held_out: ReadsRows
    test: ReadsRows | None = None
    name: str = ""
    report: bool = True

    def __post_init__(self) -> None:
        check_functions(self, "build", "training", "held_out", "test")


def labels_of(batches: Batches) -> Iterator[Tensor]:
    """Yield the labels of batches; requests say what is wrong with those without."""
    return (batch["labels"] for batch in batches if "labels" in batch)


def read_rows(data: LabelledRows, name: str) -> Iterator[Tensors]:
    """Yield the batches of training or held-out rows.

    Raises:
        FedrotError: the batches are an iterator that was read before.
    """
    rows: ReadsRows = getattr(data, name)
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
