"""Where data sets come from: the bundled files, a folder of Parquet files, or a hub."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from fedrot.errors import FedrotError

if TYPE_CHECKING:
    import pyarrow as pa

BUNDLED = "goemotions_ekman"

# Folders of the shared data layout, searched in this order for a bare name.
FOLDERS = (".", "glue", "emotion", "embedded")
# A folder of splits follows GLUE, whose test labels are mostly hidden; a single file with a split
# column follows the emotion corpora, whose test split is the published one.
HELD_OUT_OF_FOLDER = ("validation", "validation_matched", "test")
HELD_OUT_OF_FILE = ("test", "validation")


class DataError(FedrotError):
    """A data set is unknown or unreadable, or lacks a column, a split or values."""


@dataclass(frozen=True)
class Source:
    """Raw tables of a data set.

    Attributes:
        task: the last part of the name, such as ``cola``; known tasks have class names and metrics.
        class_names: what a hub calls the classes of an integer label column, if it says so.
    """

    task: str
    train: pa.Table
    test: pa.Table
    class_names: tuple[str, ...] | None = None


def find(name: str, data_dir: Path | None) -> Source:
    """Look ``name`` up in ``data_dir``, then among the bundled data, then on the hub.

    Raises:
        DataError: if it is in none of them (what is available is listed), if ``data_dir`` does not
            exist, if a file cannot be read, or if there is no training or no held-out split.
    """
    if data_dir is not None:
        if not data_dir.is_dir():
            raise DataError(f"data folder {data_dir} does not exist; check its path")
        found = _find_locally(name, data_dir)
        if found is not None:
            return found
    if name == BUNDLED:
        with resources.as_file(resources.files("fedrot.simulations") / "bundled") as folder:
            return Source(
                BUNDLED,
                _read(folder / f"{BUNDLED}_train.parquet"),
                _read(folder / f"{BUNDLED}_test.parquet"),
            )
    return _from_hub(name, data_dir)


def _find_locally(name: str, data_dir: Path) -> Source | None:
    task = Path(name).name
    for root in (data_dir / folder for folder in FOLDERS):
        single_file = root / f"{name}.parquet"
        if single_file.is_file():
            return _from_single_file(task, single_file)
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


def _from_single_file(task: str, path: Path) -> Source:
    import pyarrow.compute as pc

    table = _read(path)
    if "split" not in table.column_names:
        raise DataError(
            f"{path} has no 'split' column to tell training from held-out rows; its columns are "
            f"{', '.join(table.column_names)}"
        )
    present = set(table["split"].to_pylist())
    held_out = next((split for split in HELD_OUT_OF_FILE if split in present), None)
    if "train" not in present or held_out is None:
        raise DataError(
            f"the 'split' column of {path} holds {sorted(map(str, present))}; it needs 'train' and "
            "one of 'test', 'validation'"
        )
    train, test = (table.filter(pc.equal(table["split"], s)) for s in ("train", held_out))
    return Source(task, train, test)


def _from_hub(name: str, data_dir: Path | None) -> Source:
    import datasets

    path, _, configuration = name.partition(":")
    if _offline():
        raise DataError(
            f"data set {name!r} is not available: it is unknown here, and there is no network to "
            "ask a hub (a copy in the hub's cache is used if HF_HUB_OFFLINE=1 is set). "
            f"Available: {_available(data_dir)}"
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
            f"Available: {_available(data_dir)}"
        ) from error
    named = [f.names for f in features.values() if isinstance(f, datasets.ClassLabel)]
    class_names = tuple(named[0]) if len(named) == 1 else None
    return Source((configuration or path).split("/")[-1], train, test, class_names)


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


def _read(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _available(data_dir: Path | None) -> str:
    """Names that would load, for an error message."""
    names = {BUNDLED}
    for root in (data_dir / folder for folder in FOLDERS) if data_dir else ():
        names.update(path.parent.name for path in root.glob("*/train.parquet"))
        for path in root.glob("*.parquet"):
            if path.stem.endswith("_train"):
                names.add(path.stem.removesuffix("_train"))
            elif "split" in _column_names(path):
                names.add(path.stem)
    where = f"bundled or in {data_dir}" if data_dir else "bundled; give a data folder for more"
    return f"{', '.join(sorted(names))} ({where})"


def _column_names(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except (OSError, pa.ArrowInvalid):
        return []
