"""Small files of data, and experiments that read them."""

import csv
import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path
from time import process_time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedrot.simulations.experiment import Experiment

ROWS = 40
TEXTS = [f'story "{row}", and\nan end' for row in range(ROWS)]


def chosen(data, data_dir=None, **fields):
    return Experiment.model_validate(
        {"data": str(data), "data_dir": data_dir, "max_length": 32, **fields}
    )


def write(path, **columns):
    """Write a table in the format of the suffix, where None is an empty cell, with
    other libraries.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        dict(zip(columns, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            lines.writerows([[*columns], *([*row.values()] for row in rows)])
    return path


@contextmanager
def bounded():
    """At most five seconds of work and a GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = process_time()
    yield
    assert process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


def repeated(labels, rows=ROWS):
    return [labels[row % len(labels)] for row in range(rows)]


def by_text(data):
    """Return the labels of training and held-out rows by their texts."""
    return {
        text: label
        for split in (data.train, data.test)
        for text, label in zip(split.inputs, split.labels, strict=True)
    }


def classes(data):
    """Return the name of each text's class."""
    return {text: data.label_names[label] for text, label in by_text(data).items()}


def shared_data():
    default = Path(__file__).parents[3].parent / "shared" / "data"
    folder = Path(os.environ.get("FEDROT_DATA", default))
    if not folder.is_dir():
        pytest.skip(
            "shared/data is not present: set FEDROT_DATA to the folder with glue/ and "
            "emotion/"
        )
    return folder
