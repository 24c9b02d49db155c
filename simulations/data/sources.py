"""Tables of data sets: bundled, in files (see ``READERS``), or from the Hugging Face hub."""

from __future__ import annotations

import io
import json
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq
from huggingface_hub import constants

from fedrot._io import refuse_pointer, shallow
from fedrot.errors import FedrotError
from fedrot.simulations.data import BUNDLED

# A folder of splits is as in GLUE, whose test labels are mostly hidden. A single file with a column
# ``split`` is as in the emotion corpora, whose test split is the published one.
HELD_OUT_OF_FOLDER = ("validation", "validation_matched", "test")
HELD_OUT_OF_FILE = ("test", "validation")
#: One in this number of rows is held out if a data set has no splits.
HELD_OUT_SHARE = 5
SPLIT_SEED = 0
LIMIT_SEED = 0
#: Largest numbers of columns and of cells, and of bytes of a decoded Parquet file or 20 times its size.
MOST_COLUMNS, MOST_CELLS, LARGEST, RATIO = 10_000, 2**28, 10 * 2**28, 20
#: Number of rows or names that a message lists, and of characters of each.
_WRITTEN_OUT, _LONGEST = 10, 80

#: What to do with rows without a text or a label.
Missing: TypeAlias = Literal["error", "drop", "keep"]

#: Delimiters of columns, and their names in messages.
_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "vertical bars", ",": "commas"}


class DataError(FedrotError):
    """A data set is unknown or unreadable, or lacks a column, a split or values."""


def listed(values: Iterable[object]) -> str:
    """Return values separated by commas; of many values, only the first ones and their number."""
    found = [*values]
    more = f" and {len(found) - _WRITTEN_OUT} more" if len(found) > _WRITTEN_OUT else ""
    return ", ".join(f"{value!s:.{_LONGEST}}" for value in found[:_WRITTEN_OUT]) + more


def _bound(what: str, number: int, most: int) -> None:
    if number > most:
        raise pa.ArrowInvalid(f"it has {number} {what}, above {most}: leave some out")


def _parquet(path: Path) -> pa.Table:
    """Read a file that is small when decoded, too: a text may stand for many rows, and is read once."""
    file, most = pq.ParquetFile(path), max(LARGEST, RATIO * path.stat().st_size)
    about = file.metadata  # its columns are left alone: pyarrow ends the process if one is damaged
    groups = [about.row_group(group) for group in range(about.num_row_groups)]
    _bound("cells", sum(group.num_rows for group in groups) * about.num_columns, MOST_CELLS)
    _bound("bytes", sum(group.total_byte_size for group in groups), most)
    paths = [file.schema.column(place).path for place in range(about.num_columns)]
    try:
        table = pq.read_table(path, read_dictionary=paths)
    except (OSError, pa.ArrowException):  # texts that are parts of others, or above 2 GiB
        table = pq.read_table(path)
    _bound("bytes", sum(_decoded_size(part) for column in table.columns for part in column.chunks), most)
    # Polars writes texts as views; pyarrow can neither filter them nor take rows of them.
    views = {"string_view": pa.string(), "binary_view": pa.binary()}
    return table.cast(pa.schema([(f.name, views.get(str(f.type), f.type)) for f in file.schema_arrow]))


def _decoded_size(values: pa.Array) -> int:
    """Return the number of bytes of values; those of a dictionary count once for each row."""
    if pa.types.is_dictionary(values.type) and not pa.types.is_primitive(values.type.value_type):
        return pc.sum(pc.binary_length(values.dictionary).take(values.indices)).as_py() or 0
    if pa.types.is_nested(values.type):
        found = values.flatten()  # of structs, several
        return sum(map(_decoded_size, found if isinstance(found, list) else [found]))
    return int(values.nbytes)


def _block(size: int) -> int:
    return min(max(size, 2**20), 2**31 - 1)  # pyarrow refuses a row longer than a block


def _first_line(path: Path) -> str:
    """Return a file's first line; raises ``pa.ArrowInvalid`` if the file is in UTF-16."""
    with path.open("rb") as file:
        line = file.readline()
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line:
        raise pa.ArrowInvalid("it is in UTF-16; save it in UTF-8")
    return line.decode("utf-8", "replace")


def _csv(path: Path, delimiter: str = ",") -> pa.Table:
    head = _first_line(path)
    found = next((name for mark, name in _DELIMITERS.items() if mark in head), None)
    if found and delimiter not in head:
        wanted = _DELIMITERS[delimiter]
        raise pa.ArrowInvalid(f"its columns are separated by {found}; separate them by {wanted}")
    table = pa_csv.read_csv(
        path,
        pa_csv.ReadOptions(block_size=_block(path.stat().st_size)),
        # Texts may have several lines.
        pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
    )
    columns = table.columns
    for place, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if pa.types.is_binary(column.type):
            raise pa.ArrowInvalid(f"the column '{name}' is not UTF-8")
        if pa.types.is_string(column.type):  # an empty cell is a missing text
            columns[place] = pc.if_else(pc.equal(column, ""), None, column)
    return pa.table(columns, names=table.column_names)


def _json(path: Path) -> pa.Table:
    """Read one object per line, or a list of objects."""
    first, data = _first_line(path), shallow(path.read_bytes())
    if first.lstrip("\ufeff \t\r\n").startswith("["):
        rows = json.loads(data)
        if not all(isinstance(row, dict) for row in rows):
            raise pa.ArrowInvalid("its list has items that are not objects")
        data = "\n".join(map(json.dumps, rows)).encode()
    table = pa_json.read_json(io.BytesIO(data), pa_json.ReadOptions(block_size=_block(len(data))))
    table.validate(full=True)
    return table


def _plain_text(path: Path) -> pa.Table:
    """Return the paragraphs of a text file, which are separated by empty lines."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"it is not UTF-8: {error}") from error
    paragraphs = (paragraph.strip() for paragraph in re.split(r"\n\s*\n", text))
    return pa.table({"text": pa.array(filter(None, paragraphs), pa.string())})


# Files are read by pyarrow, because ``datasets`` reads CSV with other results: a column of integers with
# an empty cell becomes floats, a row with a cell too many is accepted, and a second column of the same
# name is renamed. In CSV and JSON it refuses columns whose type changes after the first block. It
# interprets brackets in a path as a pattern.
#: The name and the reader of each file format, by suffix.
READERS: Mapping[str, tuple[str, Callable[[Path], pa.Table]]] = {
    ".parquet": ("Parquet", _parquet),
    ".csv": ("CSV", _csv),
    ".tsv": ("TSV", partial(_csv, delimiter="\t")),
    ".jsonl": ("JSON lines", _json),
    ".json": ("JSON", _json),
    ".txt": ("plain text", _plain_text),
}


def read_table(path: Path) -> pa.Table:
    """Read a file in one of the formats of ``READERS``; raises ``DataError`` if it cannot be read.

    Spaces around the names of columns are removed.
    """
    format_name, read = READERS[path.suffix.lower()]
    try:
        refuse_pointer(path)
        table = read(path)
        _bound("columns", table.num_columns, MOST_COLUMNS)
        table = table.rename_columns([name.strip() for name in table.column_names])
        if len(set(table.column_names)) < table.num_columns:
            raise pa.ArrowInvalid(f"two columns have equal names among {listed(table.column_names)}")
        return table
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as {format_name} ({error}); save it again, or choose another file"
        ) from error


class Selection(TypedDict, total=False):
    """Columns and rows of a data set.

    Attributes:
        text_column: column of texts (``"first,second"`` for pairs), lists of words, or images; None:
            the first known name.
        label_column: column of integer or string classes, float scores or lists of tags; None: the
            first known name. Without such a column, boolean columns are the labels: single label if
            every row has exactly one True, else multi-label.
        label_kind: ``single``, ``multi`` or ``regression``; empty: by the type of the labels.
        missing: what to do with rows without a text or a label; see ``labels.complete``.
        train_limit, test_limit: maximum number of rows, which are the first of a fixed shuffle.
    """

    text_column: str | None
    label_column: str | None
    label_kind: Literal["", "single", "multi", "regression"]
    missing: Missing
    train_limit: int | None
    test_limit: int | None


@dataclass(frozen=True)
class Content:
    """A kind of column.

    Attributes:
        name, wanted: for messages: what the column holds, and which values it should have.
        known: usual names of such columns.
        option: the option with which the user names the column.
        fits: returns whether values of a type are allowed.
    """

    name: str
    wanted: str
    known: Sequence[str]
    option: str
    fits: Callable[[pa.DataType], bool]


@dataclass(frozen=True)
class Source:
    """Tables of a data set.

    Attributes:
        task: the last part of the name, such as ``cola``; known tasks have class names and metrics.
        tables: training and held-out rows, or one table of all rows, by origin.
        class_names: the hub's names for the classes of integer columns, by column.
        note: a sentence about how the rows were divided, if there were no splits.
        said: sentences about rows that were left out.
    """

    task: str
    tables: Mapping[str, pa.Table]
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    note: str = ""
    said: str = ""

    @property
    def train(self) -> pa.Table:
        return next(iter(self.tables.values()))

    @property
    def test(self) -> pa.Table:
        return [*self.tables.values()][-1]

    @property
    def where(self) -> str:
        """The origin of the tables, for messages."""
        return " and ".join(self.tables)

    @property
    def columns(self) -> list[str]:
        """The columns that all tables have."""
        held_out = set(self.test.column_names)
        return [column for column in self.train.column_names if column in held_out]

    def column(self, content: Content, wanted: str | None) -> str:
        """Return the wanted column, or the first with a known name; raises ``DataError``."""
        names = content.known if wanted is None else [wanted.strip()]
        found = next((name for name in names if name in self.columns), None)
        if found is None:
            raise DataError(
                f"{self.where}: no {content.name} column {' or '.join(map(repr, names))}; columns are "
                f"{listed(self.columns)}; choose one with {content.option}"
            )
        for where, table in self.tables.items():
            kind = table.schema.field(found).type
            if not content.fits(kind):
                raise DataError(
                    f"{where}: {content.name} column {found!r} holds {kind}; give {content.wanted}"
                )
        return found

    def divided(self, labels: Sequence[str] = ()) -> Source:
        """Return training and held-out rows; a single table is divided by its column ``split``.

        Without this column, one row in five of every class in the label column is held out, always the
        same rows. Without classes (not one label column, scores, or no value twice), one in five of all
        rows is held out. Raises ``DataError`` if there are too few rows, or if ``split`` has missing or
        wrong values.
        """
        if len(self.tables) > 1:
            return self
        ((where, table),) = self.tables.items()
        if "split" in table.column_names:
            return replace(self, tables=_by_column(table, where))
        tables, note = _drawn(table, where, labels)
        return replace(self, tables=tables, note=note)

    def limited(self, name: str, selection: Selection) -> Source:
        """Return the selected rows; raises ``DataError`` if there are no rows, or a limit is below 1."""
        limits = {"train": selection.get("train_limit"), "held-out": selection.get("test_limit")}
        both = zip(limits.items(), self.tables.values(), strict=True)
        tables = {split: _limited(rows, f"{name} ({split})", limit) for (split, limit), rows in both}
        return replace(self, tables=tables)


def other_columns(table: pa.Table, *used: str) -> dict[str, list[object]]:
    """Return the values of all columns except the used ones and ``split``, by name."""
    return {c: table[c].to_pylist() for c in table.column_names if c not in (*used, "split")}


def _limited(table: pa.Table, where: str, limit: int | None) -> pa.Table:
    if table.num_rows == 0:
        raise DataError(f"{where} has no rows; check the file or choose another data set")
    if limit is None or limit >= table.num_rows:
        return table
    if limit < 1:
        raise DataError(f"the limit for {where} is {limit}; it must be at least 1")
    return table.take(np.random.default_rng(LIMIT_SEED).permutation(table.num_rows)[:limit])


def bundled_texts() -> Source:
    with resources.as_file(resources.files("fedrot.simulations.data") / "bundled") as folder:
        files = [folder / f"{BUNDLED}_{split}.parquet" for split in ("train", "test")]
        return Source(BUNDLED, {file.stem: read_table(file) for file in files})


@dataclass(frozen=True)
class Catalogue:
    """Folders below a data folder for data sets of one kind, and bundled data sets, by name."""

    folders: tuple[str, ...]
    bundled: Mapping[str, Callable[[], Source]] = field(default_factory=dict)

    def roots(self, data_dir: Path | None) -> list[Path]:
        return [data_dir / folder for folder in self.folders] if data_dir else []


TEXTS = Catalogue((".", "glue", "emotion", "embedded"), {BUNDLED: bundled_texts})


def find(name: str, data_dir: Path | None, catalogue: Catalogue = TEXTS) -> Source:
    """Look ``name`` up in ``data_dir``, then among the bundled data, then on the hub.

    A name that ends in one of ``READERS`` is a file, in ``data_dir`` or at a path. The rows of a single
    file are not divided yet. See ``load_text_data`` for errors.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise DataError(f"data folder {data_dir} does not exist; check its path")
    roots = catalogue.roots(data_dir)
    if Path(name).suffix.lower() in READERS:
        places = [*(root / name for root in roots), Path(name)]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            where = f", nor below {data_dir}" if data_dir else ""
            raise DataError(f"there is no file {name}{where}; check its path")
        return _from_files(file.stem, file)
    if Path(name).is_file() or (Path(name).is_absolute() and Path(name).is_dir()):
        raise DataError(
            f"{name} has no known format: files end in {', '.join(READERS)}; save the rows in one of "
            "these. A folder with train.parquet and test.parquet is found by name in --data-dir"
        )
    for root in roots:
        if (root / f"{name}.parquet").is_file():
            return _from_files(Path(name).name, root / f"{name}.parquet")
        for train in (root / name / "train.parquet", root / f"{name}_train.parquet"):
            if train.is_file():
                return _from_files(Path(name).name, train, _held_out_beside(train))
    if name in catalogue.bundled:
        return catalogue.bundled[name]()
    return _from_hub(name, data_dir, catalogue)


def _from_files(task: str, *files: Path) -> Source:
    return Source(task, {str(file): read_table(file) for file in files})


def _held_out_beside(train: Path) -> Path:
    prefix = train.name.removesuffix("train.parquet")
    files = [train.with_name(f"{prefix}{split}.parquet") for split in HELD_OUT_OF_FOLDER]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        wanted = ", ".join(file.name for file in files)
        raise DataError(f"{train} has no held-out split next to it; add one of {wanted}")
    return found


def _by_column(table: pa.Table, where: str) -> dict[str, pa.Table]:
    splits = table["split"]
    if pa.types.is_string(splits.type):
        splits = pc.utf8_trim_whitespace(splits)
    present = set(splits.to_pylist())
    if None in present:
        empty = 1 + pc.index(splits.is_null(), True).as_py()
        raise DataError(f"the 'split' column of {where} has no value in row {empty}, counted from 1")
    held_out = next((split for split in HELD_OUT_OF_FILE if split in present), None)
    if "train" not in present or held_out is None:
        raise DataError(
            f"the 'split' column of {where} has {listed(sorted(present))}; it needs 'train' and "
            "one of 'test', 'validation'"
        )
    return {split: table.filter(pc.equal(splits, split)) for split in ("train", held_out)}


def _drawn(table: pa.Table, where: str, labels: Sequence[str]) -> tuple[dict[str, pa.Table], str]:
    """Return training and held-out rows, and a sentence about the division."""
    classes = _classes(table, labels)
    rng = np.random.default_rng(SPLIT_SEED)
    held_out = np.zeros(table.num_rows, dtype=bool)
    order = np.argsort(classes, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(classes[order])) + 1):
        held_out[rng.permutation(rows)[: round(len(rows) / HELD_OUT_SHARE)]] = True
    of_each = " of each class" if classes.any() else ""
    if not held_out.any():
        raise DataError(
            f"{where} has {table.num_rows} rows, too few to hold one in {HELD_OUT_SHARE}{of_each} out; "
            "give a training and a test split, or more rows"
        )
    note = (
        f"{where} has no splits: of {table.num_rows} rows {held_out.sum()} are held out, one in "
        f"{HELD_OUT_SHARE}{of_each}, drawn with seed {SPLIT_SEED}."
    )
    return {"train": table.filter(~held_out), "held-out": table.filter(held_out)}, note


def _classes(table: pa.Table, labels: Sequence[str]) -> np.ndarray:
    """Return the class of each row, int64 ``[rows]``; 0 for all rows if no column has classes."""
    column = table[labels[0]] if len(labels) == 1 else None
    values = [] if column is None or pa.types.is_floating(column.type) else column.to_pylist()
    found = sorted(set(values))
    if len(found) in (0, table.num_rows):
        return np.zeros(table.num_rows, dtype=int)
    places = {value: place for place, value in enumerate(found)}
    return np.array([places[value] for value in values])


def _from_hub(name: str, data_dir: Path | None, catalogue: Catalogue) -> Source:
    import datasets

    path, _, configuration = name.partition(":")
    unknown = f"data set {name!r} is not available: it is not on this machine, and"
    if _offline():
        raise DataError(
            f"{unknown} there is no network for the hub (with HF_HUB_OFFLINE=1, a copy in the hub's "
            f"cache is used). Available: {_available(data_dir, catalogue)}"
        )
    try:
        loaded = datasets.load_dataset(path, configuration or None)
        held_out = next((s for s in HELD_OUT_OF_FOLDER if s in loaded), "a held-out split")
        features = loaded["train"].features
        tables = {f"{name} ({s})": loaded[s].with_format("arrow")[:] for s in ("train", held_out)}
    except Exception as error:  # the hub client raises many unrelated kinds
        raise DataError(
            f"{unknown} loading it from the hub failed (offline, or no such data set: "
            f"{type(error).__name__}: {error}). Available: {_available(data_dir, catalogue)}"
        ) from error
    # A column of tags is a list of classes.
    kinds = {column: getattr(feature, "feature", feature) for column, feature in features.items()}
    named = {n: tuple(k.names) for n, k in kinds.items() if isinstance(k, datasets.ClassLabel)}
    return Source((configuration or path).split("/")[-1], tables, named)


def _offline() -> bool:
    """Return whether the hub's host cannot be resolved; its client would retry for half a minute."""
    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return False  # the cache may have it, or a proxy resolves the name
    try:
        return not socket.getaddrinfo(urllib.parse.urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True


def _available(data_dir: Path | None, catalogue: Catalogue) -> str:
    names = set(catalogue.bundled)
    for root in catalogue.roots(data_dir):
        names.update(path.parent.name for path in root.glob("*/train.parquet"))
        names.update(path.stem.removesuffix("_train") for path in root.glob("*.parquet"))
    where = f"bundled or in {data_dir}" if data_dir else "bundled; give --data-dir for more"
    return f"{', '.join(sorted(names)) or 'nothing'} ({where})"
