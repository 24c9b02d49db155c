"""``noted``: a record's line about an answer, and its check against earlier lines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging import WARNING
from typing import Any

from flwr.app import ConfigRecord, Context
from flwr.common import log
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.strategies.client.answer_record import Line, Record
from fedrot.strategies.client.client_rows import Batches
from fedrot.strategies.client.ledger import release_of
from fedrot.strategies.client.privacy import Privacy, labelled_texts
from fedrot.strategies.wire.arrays import model_hash
from fedrot.task_head.outputs import OutputKind
from fedrot.tensors import Tensors

#: A record of the client's state in a run: how many lines the run has written.
_STATE = "fedrot-record"


@contextmanager
def noted(
    privacy: Privacy, context: Context, about: Callable[[bytes], Line]
) -> Iterator[Line]:
    """Yield the line about an answer; it is written if the block succeeds.

    Without a record, the line is empty.

    Args:
        about: returns what the line says of the answer, given the record's salt.

    Raises:
        BudgetSpent: the epsilon does not allow the answer.
        FedrotError: the record is damaged, or shorter than the run knows; or ``once``
            refuses the answer.
    """
    if privacy.record is None:
        yield {}
        return
    record = Record(privacy.record)
    state: Any = context.state
    with record.locked():
        lines = record.lines()
        count = sum(line.get("run") == context.run_id for line in lines)
        known = state[_STATE]["lines"] if _STATE in state else 0
        if count < known:
            raise FedrotError(
                f"The record '{record.path}' was removed or cut: it has {count} of the "
                f"{known} lines of this run. Nothing is sent. Restore it from a copy."
            )
        line = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": context.run_id,
            **about(record.salt()),
        }
        # Noise hides rows that come or go.
        if privacy.epsilon is None and any(_other_rows(line, old) for old in lines):
            line["again"] = True
            what = (
                f"This was asked about the same model before, says '{record.path}', "
                "and the client has other rows now. The difference of the two answers "
                "tells about the rows by which they differ."
            )
            if privacy.once:
                raise FedrotError(f"{what} once=True refuses the second answer.")
            log(WARNING, "%s Privacy(..., once=True) refuses second answers.", what)
        if privacy.epsilon is not None:
            line |= release_of(privacy, lines)
        yield line
        record.append(line)
        state[_STATE] = ConfigRecord({"lines": count + 1})


def _other_rows(line: Line, other: Line) -> bool:
    """Return whether two answers tell about one body and different rows."""
    # A server may name a stage otherwise; the rows are those of the answer.
    return (
        line["of"] == other.get("of")
        and line["digest"] != other.get("digest")
        and bool({*line["bodies"]} & {*other.get("bodies", ())})
    )


def rows_noted(batches: Batches, kind: OutputKind, salt: bytes) -> Line:
    """Return the number of rows with a label, their classes, and their digest.

    The digest, 64 hex digits, is the sum of the rows' hashes modulo 2**256: it depends
    on no order, batching or padding.
    """
    hashes = list[int]()
    classes = set[int]()
    for batch in batches:
        if "labels" not in batch:
            continue
        labels = batch["labels"]
        rows = labelled_texts(kind, labels).nonzero().flatten().tolist()
        hashes += [_hash_of_row(batch, row, salt) for row in rows]
        if kind.has_classes:
            places = (labels == 1).nonzero()[:, -1]
            classes |= {*(labels[labels >= 0] if kind.by_class else places).tolist()}
    return {
        "rows": len(hashes),
        "classes": classes,
        "digest": f"{sum(hashes) % 2**256:064x}",
    }


def _hash_of_row(batch: Tensors, row: int, salt: bytes) -> int:
    """Return the hash of a row's tensors, without padding."""
    tensors = dict[str, Tensor]()
    count = batch["labels"].shape[:1]
    mask = batch.get("attention_mask")
    for name, values in batch.items():
        if not isinstance(values, Tensor) or values.shape[:1] != count:
            continue
        value = values[row]
        # Several labels of a row, which are floats, may be as many as its tokens.
        by_token = name != "labels" or not value.is_floating_point()
        if mask is not None and by_token and values.shape[: mask.ndim] == mask.shape:
            value = value[mask[row].bool()]
        # Exact for all numbers of rows, also of another dtype.
        tensors[name] = value.double()
    return int.from_bytes(hashlib.sha256(salt + model_hash(tensors).encode()).digest())
