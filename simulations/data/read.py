"""Tables of data sets: bundled, in files and folders (see ``READERS``), or from the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pyarrow.types as types

from fedrot._io import refuse_pointer, shallow
from fedrot.errors import FedrotError
from fedrot.simulations.data import BUNDLED, DIGITS

#: Held-out rows beside ``train``, the first that there is: the test labels of GLUE are hidden.
HELD_OUT = ("validation", "validation_matched", "test")
#: The same of folders of images, and folders below a data folder.
HELD_OUT_FOLDERS = ("test", "validation", "val", "valid")
FOLDERS = (".", "glue", "emotion", "embedded", "ner", "images")
IMAGE_SUFFIXES = (
    ".bmp",
    ".gif",
    ".jpeg",
    ".jpg",
    ".pbm",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
#: Largest numbers of columns, of cells, and of bytes of a decoded Parquet file or 20 times its size.
MOST_COLUMNS, MOST_CELLS, LARGEST, RATIO = 10_000, 2**28, 10 * 2**28, 20
_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "vertical bars", ",": "commas"}
#: First bytes of other files, and what to do.
_OTHER_FILES = {
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"PK\3\4": "an Excel workbook or a zip archive: export it as CSV, or unpack it",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook: export it as CSV",
    b"ARROW1": "an Arrow (Feather) file: save it as Parquet",
    b"<!": "a web page: download the file itself",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "in UTF-16: save it in UTF-8"),
}


class DataError(FedrotError):
    """A data set is unknown or unreadable, or lacks a column, a split or values."""


def refuse(where: object, what: str, advice: str) -> NoReturn:
    """Raise ``DataError``: where, what is wrong, and what to do."""
    raise DataError(f"{where} {what}; {advice}")


def listed(values: Iterable[object]) -> str:
    """Return the first ten values, of 80 characters, separated by commas, and the number of others."""
    found = [*values]
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return ", ".join(f"{value!s:.80}" for value in found[:10]) + more


def _bound(what: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"it has {number} {what}, above {most}: leave some out")


def _parquet(path: Path) -> pa.Table:
    about = pq.ParquetFile(path).metadata  # not its columns: pyarrow ends the process if one is damaged
    groups = [about.row_group(group) for group in range(about.num_row_groups)]
    most = max(LARGEST, RATIO * path.stat().st_size)
    _bound("cells", sum(group.num_rows for group in groups) * about.num_columns, MOST_CELLS)
    _bound("bytes", sum(group.total_byte_size for group in groups), most)
    return pq.read_table(path)


def _csv(path: Path, delimiter: str = ",") -> pa.Table:
    """Read every cell as a text; empty cells are missing. Excel's first line ``sep=,`` is left out."""
    content = path.read_bytes()
    head = content[: content.find(b"\n")].decode("utf-8-sig", "replace").strip("\r").lower()
    found = next((name for mark, name in _DELIMITERS.items() if mark in head), "")
    if found and delimiter not in head:
        wanted = _DELIMITERS[delimiter]
        raise ValueError(f"its columns are separated by {found}; separate them by {wanted}")
    texts = {f"f{place}": pa.string() for place in range(MOST_COLUMNS)}
    read = pa_csv.ReadOptions(
        autogenerate_column_names=True,
        skip_rows=int(head == f"sep={delimiter}"),
        block_size=min(max(len(content), 2**20), 2**31 - 1),  # the longest row
        use_threads=False,  # for the number of a wrong row
    )
    parse = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    cells = pa_csv.ConvertOptions(column_types=texts, null_values=[""], strings_can_be_null=True)
    table = pa_csv.read_csv(path, read, parse, cells)
    _bound("columns", table.num_columns, MOST_COLUMNS)
    for column in table.columns:
        ends = content.count(b'"') % 2 and "\n" in (column[-1].as_py() or "")
        rows = delimiter == "\t" and pc.any(pc.match_substring_regex(column, r"\t[^\n]*\n")).as_py()
        if ends or rows:
            raise ValueError("a quotation mark is not closed: a cell goes over several rows")
    return table.slice(1).rename_columns([column[0].as_py() or "" for column in table.columns])


def _json(path: Path) -> pa.Table:
    """Read objects, or a list of objects. Columns with larger integers than int64 are texts."""
    # Not pyarrow's reader: it makes dates of texts, and floats of large integers.
    text, rows, end = shallow(path.read_bytes()).decode("utf-8-sig"), [], 0
    while start := re.compile(r"\S").search(text, end):
        row, end = json.JSONDecoder().raw_decode(text, start.start())
        rows.append(row)
    rows = rows[0] if len(rows) == 1 and isinstance(rows[0], list) else rows
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("it has items that are not objects")
    if len(rows) == 1 and all(isinstance(value, dict | list) for value in rows[0].values()):
        raise ValueError("it is one object of columns: DataFrame.to_json needs orient='records'")
    columns = dict.fromkeys(name for row in rows for name in row)
    _bound("cells", len(columns) * len(rows), MOST_CELLS)
    for name in columns:
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (ValueError, TypeError, OverflowError) as error:
            if not {*map(type, values)} <= {int, type(None)}:
                raise ValueError(f"the column '{name}' has values of several types: {error}") from error
            columns[name] = pa.array([value if value is None else str(value) for value in values])
    return pa.table(columns)


def _plain_text(path: Path) -> pa.Table:
    """Return the paragraphs of a text file, which are separated by empty lines."""
    paragraphs = (part.strip() for part in re.split(r"\n\s*\n", path.read_text("utf-8-sig")))
    return pa.table({"text": pa.array(filter(None, paragraphs), pa.string())})


# Not read by ``datasets``: in CSV it makes floats of integers beside an empty cell and renames a second
# column of the same name; in CSV and JSON it refuses types that change after the first block.
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

    Cells of CSV and TSV are texts; other formats keep their types. Parquet may have any suffix.
    """
    format_name, read = READERS[path.suffix.lower()]
    try:
        refuse_pointer(path)
        with path.open("rb") as file:
            head = file.readline(2**16)
        other = [said for start, said in _OTHER_FILES.items() if head.startswith(start)]
        if head.startswith(b"PAR1"):
            read = _parquet
        elif other or (b"\0" in head and read is not _parquet):
            raise ValueError(f"it is {[*other, 'no text, or in UTF-16: save it in UTF-8'][0]}")
        return _usable(read(path))
    except (OSError, ValueError, pa.ArrowException) as error:
        what = f"cannot be read as {format_name} ({error})"
        refuse(path, what, "save it again, or choose another file")


def _usable(table: pa.Table) -> pa.Table:
    """Return the columns with a name, trimmed, without views, of which pyarrow can take no rows."""
    _bound("columns", table.num_columns, MOST_COLUMNS)
    views = {"string_view": pa.string(), "binary_view": pa.binary()}
    kinds = [getattr(kind, "storage_type", kind) for kind in table.schema.types]
    fields = [(n.strip(), views.get(str(k), k)) for n, k in zip(table.column_names, kinds, strict=True)]
    table = table.rename_columns([name for name, _ in fields]).cast(pa.schema(fields))
    table = table.select([place for place, (name, _) in enumerate(fields) if name])
    if len(set(table.column_names)) < table.num_columns:
        raise ValueError(f"two columns have equal names among {listed(table.column_names)}")
    return table


class Content(NamedTuple):
    """A kind of column: its name, usual names, the option that chooses it, and its values in words."""

    name: str
    known: tuple[str, ...]
    option: str
    wanted: str
    fits: Callable[[pa.DataType], bool]


@dataclass(frozen=True)
class Source:
    """Tables of a data set.

    Attributes:
        task: the last part of the name, such as ``cola``; known tasks have metrics of their own.
        tables: training and held-out rows, or one table of all rows, by origin.
        class_names: the hub's names for the classes of integer columns, by column.
        said: a sentence about files that were left out.
    """

    task: str
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

        Raises ``DataError`` without such a column, or if values are missing or of a wrong type.
        """
        names = content.known if wanted is None else [wanted.strip()]
        found = next((name for name in names if name in self.columns), "")
        if not found:
            where = f"{' and '.join(self.tables)}: no {content.name} column"
            what = f"{' or '.join(map(repr, names))}; columns are {listed(self.columns)}"
            refuse(where, what, f"choose one with {content.option}")
        for origin, table in self.tables.items():
            kind, where = table.schema.field(found).type, f"{origin}: {content.name} column {found!r}"
            if not content.fits(kind):
                refuse(where, f"holds {kind}", f"give {content.wanted}")
            refuse_rows(where, "no value", _missing(table[found]))
        return found


def _missing(values: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Return which rows are null, NaN, blank, or a list with a null, ``[rows]``."""
    missing: npt.NDArray[np.bool_] = values.is_null(nan_is_null=True).to_numpy().copy()
    if is_list(values.type):
        holes = pc.list_parent_indices(values).filter(pc.list_flatten(values).is_null())
        missing[holes.to_numpy()] = True
    if types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if types.is_string(values.type) or types.is_large_string(values.type):
        missing |= pc.equal(pc.utf8_trim_whitespace(values), "").fill_null(False).to_numpy()
    return missing


def is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind)


def is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind)


def refuse_rows(where: str, what: str, wrong: npt.NDArray[np.bool_]) -> None:
    """Raise ``DataError`` with the numbers of the wrong rows, if there are any."""
    if wrong.any():
        rows = f"row(s) {listed(np.flatnonzero(wrong) + 1)}, counted from 1"
        what = f"has {what} in {wrong.sum()} of {len(wrong)} rows: {rows}"
        refuse(where, what, "correct or delete these rows")


def find(name: str, data_dir: Path | None) -> Source:
    """Look ``name`` up in ``data_dir`` and its ``FOLDERS``, among the bundled data, here, on the hub.

    A name stands for ``NAME``, ``NAME.parquet``, or for a folder: of ``train.parquet`` beside a held-out
    split (or ``NAME_train.parquet``; in any format), saved by ``datasets``, or of images. Names of the
    hub are ``owner/name`` and ``owner/name:configuration``. Raises ``DataError``.
    """
    if data_dir is not None and not data_dir.is_dir():
        refuse(f"data folder {data_dir}", "does not exist", "check its path")
    roots = [data_dir / folder for folder in FOLDERS] if data_dir else []
    bundled = {BUNDLED: [Path(__file__).with_name("bundled") / BUNDLED], DIGITS: []}
    places = [*(root / name for root in roots), *bundled.get(name, [Path(name)])]
    for place in places:
        if source := _at(place):
            return source
    if name == DIGITS:
        return _digits()
    if there := next((place for place in places if place.exists()), None):
        refuse(there, "has no known format", f"save it as one of {', '.join(READERS)}")
    names = sorted({*bundled, *(path.name for root in roots for path in root.glob("*"))})
    where = f"bundled or in {data_dir}" if data_dir else "bundled; give --data-dir for more"
    unknown = f"is not available. Available: {', '.join(names)} ({where})"
    if "/" not in name or Path(name).is_absolute() or Path(name).suffix.lower() in READERS:
        refuse(f"data set {name!r}", unknown, "check the path; names of the hub are owner/name")
    from datasets import load_dataset

    path, _, configuration = name.partition(":")
    load = partial(load_dataset, path, configuration or None)
    return _loaded(name, (configuration or path).split("/")[-1], load, f"{unknown}; the hub failed")


def _at(place: Path) -> Source | None:
    for file in (place, Path(f"{place}.parquet")):
        if file.is_file() and file.suffix.lower() in READERS:
            return Source(file.stem, {str(file): read_table(file)})
    for suffix in READERS:
        for train in (place / f"train{suffix}", Path(f"{place}_train{suffix}")):
            if train.is_file():
                prefix = train.stem.removesuffix("train")
                files = [train, _held_out(train, [f"{prefix}{split}{suffix}" for split in HELD_OUT])]
                return Source(place.name, {str(file): read_table(file) for file in files})
    if any((place / name).is_file() for name in ("dataset_dict.json", "state.json")):
        from datasets import load_from_disk

        load = partial(load_from_disk, str(place))
        return _loaded(str(place), place.name, load, "cannot be read as saved by 'datasets'")
    return _images(place) if place.is_dir() else None


def _held_out(train: Path, names: Sequence[str]) -> Path:
    found = next((name for name in names if (train.parent / name).exists()), "")
    if not found:
        refuse(train, "has no held-out split next to it", f"add one of {', '.join(names)}")
    return train.parent / found


def _loaded(name: str, task: str, load: Callable[[], Any], failed: str) -> Source:
    """Return the training and held-out rows, or all rows, of a data set of ``datasets``."""
    import datasets

    try:
        found = load()
        splits = found if isinstance(found, dict) else {"train": found}
        if "train" not in splits:
            raise ValueError(f"it needs a split 'train' and has {listed(splits)}")
        chosen = ("train", *[split for split in HELD_OUT if split in splits][:1])
        features = splits["train"].features
        tables = {f"{name} ({s})": _usable(splits[s].with_format("arrow")[:]) for s in chosen}
    except Exception as error:  # the hub's client raises many unrelated kinds
        advice = "check the name, the files and the connection"
        refuse(f"data set {name!r}", f"{failed} ({type(error).__name__}: {error})", advice)
    # A column of tags is a list of classes.
    kinds = {column: getattr(feature, "feature", feature) for column, feature in features.items()}
    named = {n: tuple(k.names) for n, k in kinds.items() if isinstance(k, datasets.ClassLabel)}
    return Source(task, tables, named)


def _digits() -> Source:
    """Return scikit-learn's 1,797 grey images of handwritten digits, 8 x 8 pixels, as PGM files."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)
    files = [b"P5 8 8 255\n" + image.tobytes() for image in pixels]
    return Source(DIGITS, {DIGITS: pa.table({"image": files, "label": found.target})})


def _images(folder: Path) -> Source:
    """Return the paths and classes of files ``CLASS/IMAGE``, perhaps below ``train`` and ``test``."""
    train, tables, left_out = folder / "train", {}, []
    for part in [train, _held_out(train, HELD_OUT_FOLDERS)] if train.is_dir() else [folder]:
        beside, rows = sorted(part.iterdir()), []
        classes = [p for p in beside if p.is_dir() and not p.name.startswith((".", "__MACOSX"))]
        left_out += [path.name for path in beside if path.is_file()]
        for place in classes or [part]:
            files = [file for file in sorted(place.rglob("*")) if file.is_file()]
            images = [file for file in files if classes and _is_image(file.relative_to(place))]
            left_out += [file.name for file in files if not _is_image(file.relative_to(place))]
            if not images:
                advice = f"images lie in a folder for each class, as in {folder.name}/CLASS/IMAGE.png"
                refuse(place, "has no images, nor train.parquet", advice)
            rows += [{"image": {"bytes": None, "path": str(f)}, "label": place.name} for f in images]
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        tables[str(part)] = pa.Table.from_pylist(rows, pa.schema({"image": kind, "label": pa.string()}))
    said = f"{len(left_out)} file(s) of {folder} left out, hidden or no images: {listed(left_out)}."
    return Source(folder.name, tables, said=said if left_out else "")


def _is_image(file: Path) -> bool:
    hidden = any(name.startswith(".") for name in file.parts)
    return file.suffix.lower() in IMAGE_SUFFIXES and not hidden
