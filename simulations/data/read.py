"""Tables of data sets: bundled, in files and folders (see ``READERS``), or from the
Hugging Face hub.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedrot._io import refuse_pointer, shallow
from fedrot.errors import FedrotError
from fedrot.simulations.data import BUNDLED, DIGITS

#: Held-out rows beside ``train``, the first that there is: the test labels of GLUE are
#: hidden.
HELD_OUT = ("validation", "validation_matched", "val", "valid", "test")
_IMAGE = re.compile(r"\.(bmp|gif|jpe?g|p[bgnp]m|png|tiff?|webp)", re.IGNORECASE)


class DataError(FedrotError):
    """A data set is unknown or unreadable, or lacks a column, a split or values."""


def refuse(where: object, what: str, advice: str) -> NoReturn:
    """Raise ``DataError``: where, what is wrong, and what to do."""
    raise DataError(f"{where} {what}; {advice}")


def listed(values: Iterable[object]) -> str:
    """Return the first ten values, of 80 characters, separated by commas, and the
    number of others.
    """
    found = [*values]
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return ", ".join(f"{value!s:.80}" for value in found[:10]) + more


def _csv(path: Path, delimiters: str = ",;\t|") -> pa.Table:
    """Read every cell as a text, with the first of the delimiters that the first line
    has.

    Empty cells are missing. Excel's first line ``sep=,`` is left out.
    """
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        mark = next((mark for mark in delimiters if mark in first), ",")
        if not first.lower().startswith("sep="):
            file.seek(0)
        rows = [row for row in csv.reader(file, delimiter=mark, strict=True) if row]
    for number, row in enumerate(rows, start=1):
        several = mark == "\t" and any("\t" in cell and "\n" in cell for cell in row)
        if several or len(row) != len(rows[0]):
            has = f"row {number} has {len(row)} cells, and the first {len(rows[0])}"
            raise ValueError(f"{has}; or a quotation mark is not closed")
    columns = [*zip(*rows, strict=True)]
    cells = [
        pa.array([cell or None for cell in column[1:]], pa.string())
        for column in columns
    ]
    return pa.table(cells, [column[0] for column in columns])


def _json(path: Path) -> pa.Table:
    """Read objects, or a list of objects."""
    # Not pyarrow's reader: it makes dates of texts, and floats of large integers.
    text, rows, end = shallow(path.read_bytes()).decode("utf-8-sig"), [], 0
    while start := re.compile(r"\S").search(text, end):
        row, end = json.JSONDecoder().raw_decode(text, start.start())
        rows.append(row)
    rows = rows[0] if len(rows) == 1 and isinstance(rows[0], list) else rows
    objects = all(isinstance(row, dict) for row in rows)
    if not objects or (
        len(rows) == 1 and all(isinstance(v, dict | list) for v in rows[0].values())
    ):
        raise ValueError(
            "it needs an object for each row: DataFrame.to_json with orient='records'"
        )
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def _plain_text(path: Path) -> pa.Table:
    """Return the paragraphs of a text file, which are separated by empty lines."""
    paragraphs = (
        part.strip() for part in re.split(r"\n\s*\n", path.read_text("utf-8-sig"))
    )
    return pa.table({"text": pa.array(filter(None, paragraphs), pa.string())})


# Not read by ``datasets``: it makes floats of integers beside an empty cell, and
# renames columns.
READERS: Mapping[str, Callable[[Path], pa.Table]] = {
    ".parquet": pq.read_table,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiters="\t,;|"),
    ".jsonl": _json,
    ".json": _json,
    ".txt": _plain_text,
}


def read_table(path: Path) -> pa.Table:
    """Read a file in one of the formats of ``READERS``; raises ``DataError`` if it
    cannot be read.

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
        return _usable(read(path))
    except (OSError, ValueError, OverflowError, csv.Error, pa.ArrowException) as error:
        advice = (
            "save or export it as Parquet, or as CSV or JSON in UTF-8, not compressed"
        )
        refuse(path, f"cannot be read ({error})", advice)


def _usable(table: pa.Table) -> pa.Table:
    """Return the columns with a name, trimmed; raises an error of pyarrow if it can
    take no rows.
    """
    names = [name.strip() for name in table.column_names]
    table = table.rename_columns(names).select(
        [place for place, name in enumerate(names) if name]
    )
    if len(set(table.column_names)) < table.num_columns:
        raise ValueError(
            f"two columns have equal names among {listed(table.column_names)}"
        )
    table.take(pa.array([], pa.int64()))
    return table


#: A kind of column: its name, usual names, and whether a type fits.
Content: TypeAlias = tuple[str, tuple[str, ...], Callable[[pa.DataType], bool]]


@dataclass(frozen=True)
class Source:
    """Tables of a data set.

    Attributes:
        tables: training and held-out rows, or one table of all rows, by origin.
        class_names: the hub's names for the classes of integer columns, by column.
        said: a sentence about files that were left out.
    """

    tables: Mapping[str, pa.Table]
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    said: str = ""

    @property
    def columns(self) -> list[str]:
        """The columns that all tables have."""
        first, *others = (table.column_names for table in self.tables.values())
        return [column for column in first if all(column in names for names in others)]

    def column(self, content: Content, wanted: str | None) -> str:
        """Return the wanted column, or the first with a known name.

        Raises ``DataError`` without such a column, or if values are missing or of a
        wrong type.
        """
        name, known, fits = content
        names = known if wanted is None else [wanted.strip()]
        found = next((column for column in names if column in self.columns), "")
        if not found:
            where = (
                f"{' and '.join(self.tables)}: no {name} column "
                f"{' or '.join(map(repr, names))}"
            )
            advice = "choose one with --text-column or --label-column"
            refuse(where, f"among {listed(self.columns)}", advice)
        for origin, table in self.tables.items():
            kind, where = (
                table.schema.field(found).type,
                f"{origin}: {name} column {found!r}",
            )
            if not fits(kind):
                refuse(where, f"holds {kind}, no {name}s", "choose another column")
            refuse_rows(
                where, "no value", [_missing(cell.as_py()) for cell in table[found]]
            )
        return found


def _missing(value: Any) -> bool:
    """Return whether a value is null, NaN, blank, or a list with a null."""
    if isinstance(value, str | list):
        return not value.strip() if isinstance(value, str) else None in value
    return value is None or value != value


def refuse_rows(where: str, what: str, wrong: Sequence[bool]) -> None:
    """Raise ``DataError`` with the numbers of the wrong rows, if there are any."""
    if any(wrong):
        rows = f"row(s) {listed(np.flatnonzero(wrong) + 1)}, counted from 1"
        what = f"has {what} in {sum(wrong)} of {len(wrong)} rows: {rows}"
        refuse(where, what, "correct or delete these rows")


def find(name: str, data_dir: Path | None) -> Source:
    """Look ``name`` up in ``data_dir`` and the folders in it, among the bundled data,
    here, on the hub.

    A name stands for ``NAME``, ``NAME.parquet``, or for a folder: of ``train.parquet``
    beside a held-out split (in any format), saved by ``datasets``, or of images. Names
    of the hub are ``owner/name`` and ``owner/name:configuration``. Raises
    ``DataError``.
    """
    if data_dir is not None and not data_dir.is_dir():
        refuse(f"data folder {data_dir}", "does not exist", "check its path")
    roots = [data_dir, *sorted(data_dir.glob("*/"))] if data_dir else []
    bundled = {BUNDLED: [Path(__file__).with_name("bundled") / BUNDLED], DIGITS: []}
    places = [*(root / name for root in roots), *bundled.get(name, [Path(name)])]
    for place in places:
        if source := _at(place):
            return source
    if (
        name == DIGITS
    ):  # 1,797 grey images of 8 x 8 pixels, here as PGM files of 17 shades
        from sklearn.datasets import load_digits

        found = load_digits()
        files = [
            b"P5 8 8 16\n" + image.astype(np.uint8).tobytes() for image in found.images
        ]
        return Source({DIGITS: pa.table({"image": files, "label": found.target})})
    names = sorted(
        {*bundled, *(path.name for root in roots for path in root.glob("*"))}
    )
    unknown = f"is not available, or has no known format. Available: {', '.join(names)}"
    if (
        name.count("/") != 1
        or Path(name).suffix.lower() in READERS
        or any(map(Path.exists, places))
    ):
        advice = (
            f"check --data-dir, the path and the format, one of {', '.join(READERS)}"
        )
        refuse(
            f"data set {name!r}", unknown, f"{advice}; names of the hub are owner/name"
        )
    from datasets import load_dataset

    path, _, configuration = name.partition(":")
    load = partial(load_dataset, path, configuration or None)
    return _loaded(name, load, f"{unknown}; the hub failed")


def _at(place: Path) -> Source | None:
    for file in (place, Path(f"{place}.parquet")):
        if file.is_file() and file.suffix.lower() in READERS:
            return Source({str(file): read_table(file)})
    for train in (place / f"train{suffix}" for suffix in READERS):
        if train.is_file():
            files = train, _held_out(train)
            return Source({str(file): read_table(file) for file in files})
    if any((place / name).is_file() for name in ("dataset_dict.json", "state.json")):
        from datasets import load_from_disk

        load = partial(load_from_disk, str(place))
        return _loaded(str(place), load, "cannot be read as saved by 'datasets'")
    return _images(place) if place.is_dir() else None


def _held_out(train: Path) -> Path:
    names = [f"{split}{train.suffix}" for split in HELD_OUT]
    if found := next((name for name in names if (train.parent / name).exists()), ""):
        return train.parent / found
    refuse(train, "has no held-out split next to it", f"add one of {', '.join(names)}")


def _loaded(name: str, load: Callable[[], Any], failed: str) -> Source:
    """Return the training and held-out rows, or all rows, of a data set of
    ``datasets``.
    """
    import datasets

    try:
        found = load()
        splits = found if isinstance(found, dict) else {"train": found}
        chosen = ("train", *[split for split in HELD_OUT if split in splits][:1])
        features = splits["train"].features
        tables = {
            f"{name} ({s})": _usable(splits[s].with_format("arrow")[:]) for s in chosen
        }
    except Exception as error:  # the hub's client raises many unrelated kinds
        advice = "check the name, the files, its split 'train' and the connection"
        refuse(
            f"data set {name!r}", f"{failed} ({type(error).__name__}: {error})", advice
        )
    # A column of tags is a list of classes.
    kinds = {
        column: getattr(feature, "feature", feature)
        for column, feature in features.items()
    }
    named = {
        n: tuple(k.names)
        for n, k in kinds.items()
        if isinstance(k, datasets.ClassLabel)
    }
    return Source(tables, named)


def _images(folder: Path) -> Source:
    """Return the paths and classes of files ``CLASS/IMAGE``, perhaps below ``train``
    and ``test``.
    """
    train, tables, left_out = folder / "train", {}, []
    for part in [train, _held_out(train)] if train.is_dir() else [folder]:
        seen = [place for place in part.glob("[!.]*") if place.name != "__MACOSX"]
        below = sorted(file for place in seen for file in (place, *place.rglob("*")))
        files = {file: file.relative_to(part).parts for file in below if file.is_file()}
        images = {
            file: parts[0]
            for file, parts in files.items()
            if len(parts) > 1
            and _IMAGE.fullmatch(file.suffix)
            and "/." not in "/".join(parts)
        }
        rows = [
            {"image": {"bytes": None, "path": str(f)}, "label": name}
            for f, name in images.items()
        ]
        left_out += [file.name for file in files if file not in images]
        empty = {place.name for place in seen if place.is_dir()} - {*images.values()}
        if empty or not images:
            advice = (
                "images lie in a folder for each class, as in "
                f"{folder.name}/CLASS/IMAGE.png"
            )
            refuse(
                part,
                f"has no images, nor train.parquet, in {listed(empty or '.')}",
                advice,
            )
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        tables[str(part)] = pa.Table.from_pylist(
            rows, pa.schema({"image": kind, "label": pa.string()})
        )
    said = (
        f"{len(left_out)} file(s) of {folder} left out, hidden or no images: "
        f"{listed(left_out)}."
    )
    return Source(tables, said=said if left_out else "")
