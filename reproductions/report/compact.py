"""Compact copies of run folders: the form in which ``docs/results`` keeps published runs.

``python -m reproductions.report.compact runs/one-shot docs/results/one-shot`` writes one. Rows
become Parquet files, and ``partition.json`` loses its spaces. Plots and page are left out: ``fedrot
report`` draws them again.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrot._io import read_json, refuse_links, replacing, write_text
from fedrot.simulations.federation.run_folder import read_rows, rows_file

ROWS = ("rows.jsonl", "alignment.jsonl")
PARTITION = "partition.json"
SMALL = ("config.json", "versions.json", "status.json", "models.jsonl", "summary.md")


def compact(run: Path, out: Path) -> Path:
    """Write a compact copy of a run folder; ``FileNotFoundError`` if it holds no rows."""
    out.mkdir(parents=True, exist_ok=True)
    refuse_links(out)
    for name in ROWS:
        if name == ROWS[0] or rows_file(run, name):
            exact = name == ROWS[0]
            write_parquet((out / name).with_suffix(".parquet"), read_rows(run, name), exact=exact)
    for name in SMALL:
        if (run / name).exists():
            shutil.copyfile(run / name, out / name)
    if (run / PARTITION).exists():
        partition = read_json(run / PARTITION)
        write_text(out / PARTITION, json.dumps(partition, separators=(",", ":")))
    return out


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], *, exact: bool = True) -> None:
    """Write rows as a Parquet file with a column per key; null stands for a key that a row lacks.

    Unless ``exact``, numbers are rounded to float32, for half the size.
    """
    import pyarrow
    from pyarrow import parquet, types

    keys = dict.fromkeys(key for row in rows for key in row)
    present = [{key: math.nan if value is None else value for key, value in row.items()} for row in rows]
    table = pyarrow.table({key: [row.get(key) for row in present] for key in keys})
    numbers = [field.name for field in table.schema if types.is_float64(field.type)]
    for name in [] if exact else numbers:
        place = table.column_names.index(name)
        table = table.set_column(place, name, table[name].cast(pyarrow.float32()))
    with replacing(path) as temporary:
        parquet.write_table(
            table,
            temporary,
            compression="zstd",
            compression_level=19,
            use_dictionary=[name for name in table.column_names if name not in numbers],
            use_byte_stream_split=numbers,
        )


if __name__ == "__main__":
    compact(Path(sys.argv[1]), Path(sys.argv[2]))
