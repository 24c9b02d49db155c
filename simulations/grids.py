"""Grids of experiments: TOML files, given by path or bundled under ``experiments/``."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedrot.errors import FedrotError

#: The tables of a grid, apart from its entries.
TABLES = ("base", "matrix", "quick")


#: Folders of bundled grids. Plug-ins add theirs.
FOLDERS: list[Traversable] = [resources.files("fedrot.simulations") / "experiments"]


def bundled_grids(entries: str) -> dict[str, str]:
    """Return the text of each bundled grid of ``[[entries]]`` tables, by name."""
    files = sorted((file for folder in FOLDERS for file in folder.iterdir()), key=lambda file: file.name)
    texts = {Path(file.name).stem: file.read_text("utf-8") for file in files}
    return {name: text for name, text in texts.items() if f"\n[[{entries}]]" in text}


def read_grid(grid: Path, entries: str, *, quick: bool = False) -> list[dict[str, Any]]:
    """Return the ``[[entries]]`` tables of a grid, with the values of its other tables filled in.

    ``[base]`` has the values that entries share. ``[matrix]`` has a list of values for each key: every
    entry stands for all combinations, and each name has its values. An entry may have its own
    ``matrix``, or one value in place of a list. ``[quick]`` is the small variant: its values, also
    ``matrix``, replace those of all entries, and ``only`` lists the settings that are kept.

    Args:
        grid: path of a TOML file, or the name of a bundled grid, such as ``one-shot``.
        entries: the name of the tables, ``setting`` for ``fedrot simulate``.
        quick: return the small variant.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no such bundled grid, no valid TOML or tables, or no small variant.
    """
    text = _text(grid, entries)
    try:
        described = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FedrotError(f"'{grid}' is no TOML: {error}") from error
    base, matrix, small = (described.get(name, {}) for name in ("base", "matrix", "quick"))
    found = described.get(entries, [])
    tables = isinstance(found, list) and all(isinstance(table, dict) for table in (base, small, *found))
    if not tables or "matrix" in base or not all(map(_has_matrix, (described, small, *found))):
        raise ValueError(
            f"'{grid}' is no grid; write a table [base] and a table [[{entries}]] for each {entries}; "
            "[matrix] has a list of values for each key"
        )
    unknown = described.keys() - {*TABLES, "setting", "task"}
    if unknown:
        raise FedrotError(
            f"'{grid}' has an unknown table '{min(unknown)}'; tables are {', '.join(TABLES)}, {entries}."
        )
    if quick and not small:
        raise FedrotError(f"'{grid}' has no small variant; write one as the table [quick].")
    changes = {**small} if quick else {}
    chosen = _only(found, changes.pop("only", None))
    return [complete for entry in chosen for complete in _completed(base, matrix, entry, changes)]


def _has_matrix(table: Mapping[str, Any]) -> bool:
    matrix = table.get("matrix", {})
    return isinstance(matrix, dict) and all(
        values and isinstance(values, list) for values in matrix.values()
    )


def _only(found: Sequence[dict[str, Any]], names: object) -> list[dict[str, Any]]:
    """Return the entries with these names; all entries if ``names`` is None."""
    known = [str(entry.get("setting", "")) for entry in found]
    if names is None:
        return list(found)
    wanted = names if isinstance(names, list) else [names]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise FedrotError(
            f"[quick] keeps only {wanted}; give a list of names among {', '.join(map(repr, known))}."
        )
    return [entry for name, entry in zip(known, found, strict=True) if name in wanted]


def _completed(
    base: Mapping[str, Any],
    matrix: Mapping[str, Sequence[Any]],
    entry: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yield the settings of an entry, one for each combination of its matrix."""
    merged = {**base, "matrix": matrix, **entry, **changes}
    single = entry.keys() | changes.keys()
    lists = {key: values for key, values in merged.pop("matrix").items() if key not in single}
    for values in itertools.product(*lists.values()):
        point = dict(zip(lists, values, strict=True))
        yield {**merged, **point, **_named(entry, point)}


def _named(entry: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of an entry at a point of the matrix, as a setting; empty without a matrix."""
    parts = (f"{key.replace('_', ' ')} {value}" for key, value in point.items())
    return {"setting": ", ".join([*filter(None, [entry.get("setting")]), *parts])} if point else {}


def _text(grid: Path, entries: str) -> str:
    if grid.is_file() or grid.suffix or grid.parent.name:
        try:
            return grid.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise FedrotError(f"'{grid}' is no TOML: it is not UTF-8 text ({error})") from error
    bundled = bundled_grids(entries)
    if str(grid) not in bundled:
        raise FedrotError(
            f"There is no bundled grid '{grid}'. Give the path of a TOML file, or one of "
            f"{', '.join(bundled)}."
        )
    return bundled[str(grid)]
