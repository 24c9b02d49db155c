"""Files of rows: Parquet, CSV and JSON lines, read as Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedrot.errors import FedrotError

if TYPE_CHECKING:
    import pyarrow as pa


class DataError(FedrotError):
    """A data set is unknown or unreadable, or lacks a column, a split or values."""


def _parquet(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.read_table(path)


def _block(path: Path) -> int:
    """Return the bytes read at a time; a row longer than a block is refused."""
    return min(max(path.stat().st_size, 2**20), 2**31 - 1)


def _csv(path: Path) -> pa.Table:
    import pyarrow.csv

    table = pyarrow.csv.read_csv(
        path,
        pyarrow.csv.ReadOptions(block_size=_block(path)),
        pyarrow.csv.ParseOptions(newlines_in_values=True),  # texts of several lines
    )
    # pyarrow reads a column that is not UTF-8 as bytes.
    other = [field.name for field in table.schema if pyarrow.types.is_binary(field.type)]
    if other:
        raise pyarrow.ArrowInvalid(f"the column '{other[0]}' is not UTF-8")
    return table


def _json_lines(path: Path) -> pa.Table:
    import pyarrow.json

    table = pyarrow.json.read_json(path, pyarrow.json.ReadOptions(block_size=_block(path)))
    table.validate(full=True)
    return table


#: The name and the reader of each file format, by suffix.
READERS: Mapping[str, tuple[str, Callable[[Path], pa.Table]]] = {
    ".parquet": ("Parquet", _parquet),
    ".csv": ("CSV", _csv),
    ".jsonl": ("JSON lines", _json_lines),
}


def read_table(path: Path) -> pa.Table:
    """Read a file in one of the formats of ``READERS``.

    Raises:
        DataError: the file cannot be read, or two columns have one name.
    """
    import pyarrow as pa

    format_name, read = READERS[path.suffix]
    try:
        table = read(path)
        if len(set(table.column_names)) < table.num_columns:
            raise pa.ArrowInvalid(f"two columns have one name among {', '.join(table.column_names)}")
        return table
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{path} cannot be read as {format_name} ({error}); save it again, or choose another file"
        ) from error
