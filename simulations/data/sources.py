"""Where data sets come from: the bundled files, a file, a folder of Parquet files, or a hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedrot.errors import FedrotError

if TYPE_CHECKING:
    import pyarrow as pa

#: The texts that come with the package, and the images that come with scikit-learn.
BUNDLED, DIGITS = "goemotions_ekman", "digits"

# A folder of splits follows GLUE, whose test labels are mostly hidden; a single file with a split
# column follows the emotion corpora, whose test split is the published one.
HELD_OUT_OF_FOLDER = ("validation", "validation_matched", "test")
HELD_OUT_OF_FILE = ("test", "validation")
# Of rows without a split of their own, one in so many is held out.
HELD_OUT_SHARE = 5
SPLIT_SEED = 0


class DataError(FedrotError):
    """A data set is unknown or unreadable, or lacks a column, a split or values."""


@dataclass(frozen=True)
class Source:
    """Raw tables of a data set.

    Attributes:
        task: the last part of the name, such as ``cola``; known tasks have class names and metrics.
        class_names: what a hub calls the classes of integer columns, by column.
        note: how the rows were divided, in a sentence, if the data set has no splits of its own.
    """

    task: str
    train: pa.Table
    test: pa.Table
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    note: str = ""


def bundled_texts() -> Source:
    """The data set that comes with the package."""
    with resources.as_file(resources.files("fedrot.simulations.data") / "bundled") as folder:
        return Source(
            BUNDLED,
            _read(folder / f"{BUNDLED}_train.parquet"),
            _read(folder / f"{BUNDLED}_test.parquet"),
        )


@dataclass(frozen=True)
class Catalogue:
    """Where data sets of one kind are looked for.

    Attributes:
        folders: of the shared data layout, below a data folder, in this order for a bare name.
        bundled: data sets that need no data folder, by name.
    """

    folders: tuple[str, ...]
    bundled: Mapping[str, Callable[[], Source]] = field(default_factory=dict)


TEXTS = Catalogue((".", "glue", "emotion", "embedded"), {BUNDLED: bundled_texts})


def find(
    name: str, data_dir: Path | None, catalogue: Catalogue = TEXTS, label: str | None = None
) -> Source:
    """Look ``name`` up in ``data_dir``, then among the bundled data, then on the hub.

    A name that ends in one of ``READERS`` is that of a file, in ``data_dir`` or anywhere. A file with
    a ``split`` column has its own splits; the rows of another one are divided by ``divided``, by the
    classes in the column ``label`` (of this name, if None).

    Raises:
        DataError: if it is in none of them (what is available is listed), if ``data_dir`` does not
            exist, if a file cannot be read, or if there is no training or no held-out split.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise DataError(f"data folder {data_dir} does not exist; check its path")
    if Path(name).suffix in READERS:
        return _from_file(_file(name, data_dir, catalogue), label)
    if data_dir is not None:
        found = _find_locally(name, data_dir, catalogue, label)
        if found is not None:
            return found
    if name in catalogue.bundled:
        return catalogue.bundled[name]()
    return _from_hub(name, data_dir, catalogue)


def divided(task: str, table: pa.Table, where: object, label: str = "label") -> Source:
    """Hold one row in five of every class in the label column out, always the same ones.

    Where there is no such column, or it holds no classes (numbers of rows, say), one in five of all rows
    is held out.

    Args:
        task: the name of the data set.
        table: all rows.
        where: the rows are from, for messages.
        label: the column of classes.

    Raises:
        DataError: there are too few rows for two splits.
    """
    classes = _classes(table, label)
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
        f"{where} has no splits of its own: of {table.num_rows} rows {held_out.sum()} are held out, one "
        f"in {HELD_OUT_SHARE}{of_each}, drawn with seed {SPLIT_SEED}."
    )
    return Source(task, table.filter(~held_out), table.filter(held_out), note=note)


def _classes(table: pa.Table, label: str) -> np.ndarray:
    """Return the class of each row, int ``[rows]``; 0 for all where the column holds no classes."""
    import pyarrow.types as types

    none = np.zeros(table.num_rows, dtype=int)
    if label not in table.column_names:
        return none
    kind = table.schema.field(label).type
    if types.is_floating(kind) or types.is_nested(kind):
        return none
    labels = table[label].to_pylist()
    found = sorted(set(labels), key=lambda value: (value is None, value))
    if len(found) == table.num_rows:
        return none
    places = {value: place for place, value in enumerate(found)}
    return np.array([places[value] for value in labels])


def _file(name: str, data_dir: Path | None, catalogue: Catalogue) -> Path:
    folders = [data_dir / folder for folder in catalogue.folders] if data_dir else []
    places = [*(folder / name for folder in folders), Path(name)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        where = f", nor below {data_dir}" if data_dir else ""
        raise DataError(f"there is no file {name}{where}; check its path")
    return found


def _find_locally(name: str, data_dir: Path, catalogue: Catalogue, label: str | None) -> Source | None:
    task = Path(name).name
    for root in (data_dir / folder for folder in catalogue.folders):
        single_file = root / f"{name}.parquet"
        if single_file.is_file():
            return _from_file(single_file, label)
        for train in (root / name / "train.parquet", root / f"{name}_train.parquet"):
            if train.is_file():
                prefix = train.name.removesuffix("train.parquet")
                held_out = [train.with_name(f"{prefix}{s}.parquet") for s in HELD_OUT_OF_FOLDER]
                test = next((path for path in held_out if path.is_file()), None)
                if test is None:
                    wanted = ", ".join(path.name for path in held_out)
                    raise DataError(f"{train} has no held-out split beside it; add one of {wanted}")
                return Source(task, _read(train), _read(test))
    return None


def _from_file(path: Path, label: str | None) -> Source:
    import pyarrow.compute as pc

    table = _read(path)
    if "split" not in table.column_names:
        return divided(path.stem, table, path, label or "label")
    present = set(table["split"].to_pylist())
    held_out = next((split for split in HELD_OUT_OF_FILE if split in present), None)
    if "train" not in present or held_out is None:
        raise DataError(
            f"the 'split' column of {path} holds {sorted(map(str, present))}; it needs 'train' and "
            "one of 'test', 'validation'"
        )
    train, test = (table.filter(pc.equal(table["split"], s)) for s in ("train", held_out))
    return Source(path.stem, train, test)


def _from_hub(name: str, data_dir: Path | None, catalogue: Catalogue) -> Source:
    import datasets

    path, _, configuration = name.partition(":")
    if _offline():
        raise DataError(
            f"data set {name!r} is not available: it is unknown here, and there is no network to "
            "ask a hub (a copy in the hub's cache is used if HF_HUB_OFFLINE=1 is set). "
            f"Available: {_available(data_dir, catalogue)}"
        )
    try:
        loaded = datasets.load_dataset(path, configuration or None)
        held_out = next((s for s in HELD_OUT_OF_FOLDER if s in loaded), "a held-out split")
        features = loaded["train"].features
        train, test = (loaded[s].with_format("arrow")[:] for s in ("train", held_out))
    except Exception as error:  # the hub client raises many unrelated kinds
        raise DataError(
            f"data set {name!r} is not available: it is unknown here, and loading it from the hub "
            f"failed (offline, or no such data set: {type(error).__name__}: {error}). "
            f"Available: {_available(data_dir, catalogue)}"
        ) from error
    # A column of tags is a list of classes.
    kinds = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    named = {n: tuple(k.names) for n, k in kinds.items() if isinstance(k, datasets.ClassLabel)}
    return Source((configuration or path).split("/")[-1], train, test, named)


def _offline() -> bool:
    """Whether the hub's name cannot be resolved; its client would retry for half a minute."""
    import socket
    import urllib.parse
    import urllib.request

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return False  # the cache may answer, or a proxy resolves the name
    try:
        socket.getaddrinfo(urllib.parse.urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


def _parquet(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.read_table(path)


def _block(path: Path) -> int:
    """Return how many bytes are read at a time: a row that is longer than a block is refused."""
    return min(max(path.stat().st_size, 2**20), 2**31 - 1)


def _csv(path: Path) -> pa.Table:
    import pyarrow.csv

    table = pyarrow.csv.read_csv(
        path,
        pyarrow.csv.ReadOptions(block_size=_block(path)),
        # Texts go over several lines.
        pyarrow.csv.ParseOptions(newlines_in_values=True),
    )
    # What is not UTF-8 is read as bytes.
    other = [field.name for field in table.schema if pyarrow.types.is_binary(field.type)]
    if other:
        raise pyarrow.ArrowInvalid(f"the column '{other[0]}' is not UTF-8")
    return table


def _json_lines(path: Path) -> pa.Table:
    import pyarrow.json

    table = pyarrow.json.read_json(path, pyarrow.json.ReadOptions(block_size=_block(path)))
    table.validate(full=True)
    return table


#: Files of rows by what their names end in: the format's name, and how it is read.
READERS: Mapping[str, tuple[str, Callable[[Path], pa.Table]]] = {
    ".parquet": ("Parquet", _parquet),
    ".csv": ("CSV", _csv),
    ".jsonl": ("JSON lines", _json_lines),
}


def _read(path: Path) -> pa.Table:
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


def _available(data_dir: Path | None, catalogue: Catalogue) -> str:
    """Names that would load, for an error message."""
    names = set(catalogue.bundled)
    for root in (data_dir / folder for folder in catalogue.folders) if data_dir else ():
        names.update(path.parent.name for path in root.glob("*/train.parquet"))
        for path in root.glob("*.parquet"):
            if path.stem.endswith("_train"):
                names.add(path.stem.removesuffix("_train"))
            else:
                names.add(path.stem)
    where = f"bundled or in {data_dir}" if data_dir else "bundled; give a data folder for more"
    return f"{', '.join(sorted(names)) or 'nothing'} ({where})"
