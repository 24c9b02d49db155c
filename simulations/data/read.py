"""Tables of data sets: bundled, in files and folders, or from the Hugging Face hub."""

from __future__ import annotations

import csv
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import Table

from fedrot._io import inner, read_json, refuse_pointer, shallow
from fedrot.errors import FedrotError
from fedrot.simulations.data import BUNDLED, DIGITS, Names

#: Held-out rows beside ``train``, the first that there is: the test labels of GLUE are
#: hidden.
HELD_OUT = ("validation", "validation_matched", "val", "valid", "dev", "test")
_IMAGE_ROWS = pa.schema(
    {
        "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        "label": pa.string(),
    }
)
_VISIBLE = re.compile(r"\S")
_IMAGE = re.compile(
    r"\.(apng|avif|bmp|dib|gif|jfif|jp[2e]|jpe?g|p[bgnp]m|png|tiff?|webp)",
    re.IGNORECASE,
)
#: What may be a name of the hub. A dot before a letter belongs to a file (a.csv, a.7z),
#: before other digits to a version (a-1.5b).
_OF_HUB = re.compile(
    r"(?!.*\.(7z|[a-z_]))[a-z0-9][\w.-]*/[a-z0-9][\w.-]*",
    re.IGNORECASE | re.ASCII,
)
#: Types of Arrow that pyarrow cannot take rows of, and equal ones that it can.
_VIEWS = {"string_view": pa.string(), "binary_view": pa.binary()}


class DataError(FedrotError):
    """A data set is unknown or unreadable, or lacks a column, a split or values."""


def refuse(
    where: object,
    what: str,
    advice: str,
) -> NoReturn:
    """Raise ``DataError``: where, what is wrong, and what to do."""
    raise DataError(f"{where} {what}; {advice}")


def listed(values: Iterable[object]) -> str:
    """Return the first ten values with commas, and the number of others.

    A value has at most 80 characters.
    """
    texts = [f"{value!s:.80}" for value in values]
    text = ", ".join(texts[:10])
    if len(texts) > 10:
        text += f" and {len(texts) - 10} more"
    return text


def clean(text: object) -> str:
    """Return a text without spaces around it and in Unicode's composed form (NFC)."""
    return unicodedata.normalize("NFC", str(text)).strip()


def _csv(path: Path, delimiters: str = ",;\t|") -> Table:
    """Read every cell as a text.

    Cells are divided by the first of the delimiters that the first line has.

    Empty cells are missing. Excel's first line ``sep=,`` is left out.
    """
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        mark = next((mark for mark in delimiters if mark in first), ",")
        if not first.lower().startswith("sep="):
            file.seek(0)
        rows = []
        try:
            for row in filter(None, csv.reader(file, delimiter=mark, strict=True)):
                rows.append(row)
        except csv.Error as error:
            raise ValueError(
                f"row {len(rows) + 1}, counted from the names of columns: {error}; "
                "inside of a quoted cell a quotation mark is written twice"
            ) from error
    for number, row in enumerate(rows, start=1):
        # A cell of several rows: its quotation mark is not closed.
        several = mark == "\t" and any("\t" in cell and "\n" in cell for cell in row)
        if several or len(row) != len(rows[0]):
            raise ValueError(
                f"row {number} has {len(row)} cells, and the first {len(rows[0])}; or "
                "a quotation mark is not closed"
            )
    names = []
    columns = []
    for name, *cells in zip(*rows, strict=True):
        names.append(name)
        columns.append(pa.array([cell or None for cell in cells], pa.string()))
    return pa.table(columns, names)


def _array(name: str, values: Sequence[Any]) -> pa.Array:
    """Return a column of JSON; raises ``ValueError`` if its values have two types."""
    first: dict[type, int] = {}
    for row, value in enumerate(values):
        if value is not None:
            first.setdefault(float if type(value) is int else type(value), row)
    places = [f"{values[row]!r:.80} in row {row + 1}" for row in first.values()]
    if len(places) > 1:
        raise ValueError(f"the column {name!r} has two types: {' and '.join(places)}")
    try:
        return pa.array(values)
    except (OverflowError, pa.ArrowException) as error:
        raise ValueError(f"the column {name!r}: {error}") from error


def _json(path: Path) -> Table:
    """Read objects, or a list of objects."""
    # Not pyarrow's reader: it makes dates of texts, and floats of large integers.
    text = shallow(path.read_bytes()).decode("utf-8-sig")
    decoder = json.JSONDecoder()
    rows = []
    end = 0
    while start := _VISIBLE.search(text, end):
        row, end = decoder.raw_decode(text, start.start())
        rows.append(row)
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    objects = all(isinstance(row, dict) for row in rows)
    # A single object of lists or objects is a table by columns.
    if not objects or (
        len(rows) == 1
        and all(isinstance(value, dict | list) for value in rows[0].values())
    ):
        raise ValueError(
            "it needs an object for each row: DataFrame.to_json with orient='records'"
        )
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = _array(name, [row.get(name) for row in rows])
    return pa.table(columns)


def _plain_text(path: Path) -> Table:
    """Return the paragraphs of a text file, which are separated by empty lines."""
    parts = re.split(r"\n\s*\n", path.read_text("utf-8-sig"))
    paragraphs = filter(None, map(str.strip, parts))
    return pa.table({"text": pa.array(paragraphs, pa.string())})


# Not read by ``datasets``: it makes floats of integers beside an empty cell, and
# renames columns.
READERS: Mapping[str, Callable[[Path], Table]] = {
    ".parquet": pq.read_table,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiters="\t,;|"),
    ".jsonl": _json,
    ".json": _json,
    ".txt": _plain_text,
}


def read_table(path: Path) -> Table:
    """Read a file in one of the formats of ``READERS``; raises ``DataError``.

    Cells of CSV and TSV are texts; other formats keep their types. Parquet may have any
    suffix.
    """
    read = READERS[path.suffix.lower()]
    try:
        refuse_pointer(path)
        with path.open("rb") as file:
            head = file.readline(2**16)
        if head.startswith(b"PAR1"):
            read = pq.read_table
        elif b"\0" in head and read is not pq.read_table:
            raise ValueError(
                "it is no text in UTF-8: a gzip or zip file, a workbook, Arrow, UTF-16?"
            )
        return _usable(path, read(path))
    except DataError:
        raise
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        refuse(
            path,
            f"cannot be read ({error})",
            "save or export it as Parquet, or as CSV or JSON in UTF-8, not compressed",
        )


def _usable(where: object, table: Table) -> Table:
    """Return the columns with a name, trimmed.

    Raises ``DataError`` without one or if names are equal, and an error of pyarrow if
    it can take no rows.
    """
    names = [name.strip() for name in table.column_names]
    named = [place for place, name in enumerate(names) if name]
    if not named:
        refuse(where, "is empty: it has no columns", "check the file")
    table = table.rename_columns(names).select(named)
    for name, count in Counter(table.column_names).items():
        if count > 1:
            refuse(where, f"has {count} columns of the name {name!r}", "rename one")
    # Polars writes views.
    plain = [
        field.with_type(_VIEWS.get(str(field.type), field.type))
        for field in table.schema
    ]
    table = table.cast(pa.schema(plain))
    # Some types of columns cannot be taken from; better now than after the labels.
    table.take(pa.array([], pa.int64()))
    return table


#: A kind of column: its name, usual names, whether a type fits, and what does.
Content = tuple[str, Names, Callable[[pa.DataType], bool], str]


@dataclass(frozen=True)
class Source:
    """Tables of a data set.

    Attributes:
        tables: training and held-out rows, or one table of all rows, by origin.
        class_names: the hub's names for the classes of integer columns, by column.
        remarks: a sentence about files that were left out.
    """

    tables: Mapping[str, Table]
    class_names: Mapping[str, Names] = field(default_factory=dict)
    remarks: str = ""

    @property
    def columns(self) -> list[str]:
        """The columns that all tables have."""
        first, *others = (table.column_names for table in self.tables.values())
        common = set(first).intersection(*others)
        return [column for column in first if column in common]

    def column(
        self,
        content: Content,
        wanted: str | None,
    ) -> str:
        """Return the wanted column, or the first with a known name.

        Raises ``DataError`` without such a column, or if values are missing or of a
        wrong type.
        """
        name, known, fits, example = content
        names = known if wanted is None else [wanted.strip()]
        chosen = next((column for column in names if column in self.columns), "")
        if not chosen:
            refuse(
                f"{' and '.join(self.tables)}: no {name} column "
                f"{' or '.join(map(repr, names))}",
                f"among {listed(self.columns)}",
                "choose one with --text-column or --label-column",
            )
        for origin, table in self.tables.items():
            where = f"{origin}: {name} column {chosen!r}"
            column = table[chosen]
            if not fits(column.type):
                refuse(
                    where,
                    f"holds {column.type!s:.80}, no {name}s",
                    f"choose another column, or give {example}",
                )
            refuse_rows(
                where,
                "no value",
                [missing(cell.as_py()) for cell in column],
            )
        return chosen


def missing(value: Any) -> bool:
    """Return whether a value is null, NaN, blank, or a list with a null."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, list):
        return None in value
    return value is None or value != value


def refuse_rows(
    where: str,
    what: str,
    wrong: Sequence[bool],
) -> None:
    """Raise ``DataError`` with the numbers of the wrong rows, if there are any."""
    if any(wrong):
        numbers = listed(np.flatnonzero(wrong) + 1)
        refuse(
            where,
            f"has {what} in {sum(wrong)} of {len(wrong)} rows: row(s) {numbers}, "
            "counted from 1",
            "correct or delete these rows",
        )


def find(name: str, data_dir: Path | None) -> Source:
    """Return the data set of a name.

    It is looked up in ``data_dir`` and the folders in it, among the bundled data, here,
    and on the hub.

    A name stands for ``NAME``, ``NAME.parquet``, or for a folder: of ``train.parquet``
    beside a held-out split (in any format), saved by ``datasets``, or of images. Names
    of the hub are ``owner/name`` and ``owner/name:configuration``. Raises
    ``DataError``.
    """
    roots = []
    if data_dir:
        if not data_dir.is_dir():
            refuse(
                f"data folder {data_dir}",
                "does not exist",
                "check its path",
            )
        roots = [data_dir, *sorted(data_dir.glob("*/"))]
    places = [root / name for root in roots]
    if name == BUNDLED:
        places.append(Path(__file__).with_name("bundled") / BUNDLED)
    elif name != DIGITS:
        places.append(Path(name))
    for place in places:
        source = _at(place)
        if source:
            return source
    if name == DIGITS:
        return _digits()
    names = {BUNDLED, DIGITS}
    for root in roots:
        names |= {path.name for path in root.glob("*")}
    unknown = (
        "is not available, or has no known format. Available: "
        f"{', '.join(sorted(names))}"
    )
    path, _, configuration = name.partition(":")
    # A part of what looks like a path shall not leave the machine.
    if not _OF_HUB.fullmatch(path) or any(
        place.exists() or place.parent.is_dir() for place in places
    ):
        refuse(
            f"data set {name!r}",
            unknown,
            f"check --data-dir, the path and the format, one of {', '.join(READERS)}; "
            "names of the hub are owner/name, without a file's ending, where there is "
            "no folder owner",
        )
    from datasets import load_dataset

    return _loaded(
        name,
        f"{unknown}; the hub failed",
        load_dataset,
        path,
        configuration or None,
    )


def _digits() -> Source:
    """Return 1,797 grey images of 8 x 8 pixels, as PGM files of 17 shades."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    files = [
        b"P5 8 8 16\n" + image.tobytes() for image in digits.images.astype(np.uint8)
    ]
    return Source({DIGITS: pa.table({"image": files, "label": digits.target})})


def _at(place: Path) -> Source | None:
    for file in (place, Path(f"{place}.parquet")):
        if file.is_file() and file.suffix.lower() in READERS:
            return _from_files(file)
    for suffix in READERS:
        train = place / f"train{suffix}"
        if train.is_file():
            return _from_files(train, _held_out(train))
    if any((place / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _loaded(
            str(place),
            "cannot be read as saved by 'datasets'",
            _saved,
            place,
        )
    return _images(place) if place.is_dir() else None


def _saved(folder: Path) -> Any:
    """Return what ``datasets`` saved; raises ``FedrotError`` if a file is not in it."""
    from datasets import load_from_disk

    splits = folder / "dataset_dict.json"
    names = read_json(splits)["splits"] if splits.is_file() else []
    for name in ("", *names):
        state = folder / inner(name, splits) / "state.json"
        if state.is_file():
            for file in read_json(state)["_data_files"]:
                inner(file["filename"], state)
    return load_from_disk(str(folder))


def _from_files(*files: Path) -> Source:
    return Source({str(file): read_table(file) for file in files})


def _held_out(train: Path) -> Path:
    places = [train.with_name(f"{split}{train.suffix}") for split in HELD_OUT]
    for place in places:
        if place.exists():
            return place
    refuse(
        train,
        "has no held-out split next to it",
        f"add one of {', '.join(place.name for place in places)}",
    )


def _loaded(
    name: str,
    failed: str,
    load: Callable[..., Any],
    *arguments: object,
) -> Source:
    """Return training and held-out rows, or all rows, of a data set of ``datasets``.

    ``failed`` is a sentence's start, for the case that ``load`` fails.
    """
    import datasets

    tables = {}
    try:
        splits = load(*arguments)
        if not isinstance(splits, dict):
            splits = {"train": splits}
        features = splits["train"].features
        held_out = [split for split in HELD_OUT if split in splits]
        for split in ("train", *held_out[:1]):
            where = f"{name} ({split})"
            tables[where] = _usable(where, splits[split].with_format("arrow")[:])
    except Exception as error:  # the hub's client raises many unrelated kinds
        refuse(
            f"data set {name!r}",
            f"{failed} ({type(error).__name__}: {error})",
            "check the name, the files, its split 'train' and the connection",
        )
    class_names = {}
    for column, feature in features.items():
        # A column of tags is a list of classes.
        kind = getattr(feature, "feature", feature)
        if isinstance(kind, datasets.ClassLabel):
            class_names[column] = tuple(kind.names)
    return Source(tables, class_names)


def _images(folder: Path) -> Source:
    """Return the paths and classes of files ``CLASS/IMAGE``.

    They may lie below ``train`` and ``test``.
    """
    train = folder / "train"
    tables = {}
    left_out = []
    for part in [train, _held_out(train)] if train.is_dir() else [folder]:
        # Archives of macOS have a folder of their own.
        places = [path for path in part.glob("[!.]*") if path.name != "__MACOSX"]
        empty = {place.name for place in places if place.is_dir()}
        paths = [*places]
        for place in places:
            paths += place.rglob("*")
        rows = []
        for file in sorted(filter(Path.is_file, paths)):
            name, *below = file.relative_to(part).parts
            hidden = any(inner.startswith(".") for inner in below)
            if below and not hidden and _IMAGE.fullmatch(file.suffix):
                rows.append(
                    {
                        "image": {"bytes": None, "path": str(file)},
                        "label": name,
                    }
                )
                empty.discard(name)
            else:
                left_out.append(file.name)
        if empty or not rows:
            refuse(
                part,
                f"has no images, nor train.parquet, in {listed(empty or '.')}",
                "images lie in a folder for each class, as in "
                f"{folder.name}/CLASS/IMAGE.png, and of other files here are "
                f"{listed(left_out) or 'none'}",
            )
        tables[str(part)] = Table.from_pylist(rows, _IMAGE_ROWS)
    note = (
        f"{len(left_out)} file(s) of {folder} left out, hidden or no images: "
        f"{listed(left_out)}."
    )
    return Source(tables, remarks=note if left_out else "")
