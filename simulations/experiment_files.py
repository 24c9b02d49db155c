"""Files of experiments: TOML files, given by path or bundled under ``experiments/``."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedrot.errors import FedrotError

#: Folders of bundled files. Plug-ins add theirs.
FOLDERS: list[Traversable] = [resources.files("fedrot.simulations") / "experiments"]
#: The tables of a file, apart from its entries.
_TABLES = ("base", "matrix", "quick")


def bundled_files(entries: str = "experiment") -> dict[str, str]:
    """Return the text of each bundled file of ``[[entries]]`` tables, by name."""
    files = sorted((file for folder in FOLDERS for file in folder.iterdir()), key=lambda file: file.name)
    texts = {Path(file.name).stem: file.read_text("utf-8") for file in files}
    return {name: text for name, text in texts.items() if f"\n[[{entries}]]" in text}


def read_experiments(path: Path, *, quick: bool = False) -> list[dict[str, Any]]:
    """Return the fields of the experiments of a file, with the strategies that its tables describe.

    ``strategies`` may name tables ``[[strategy]]``. Without this key an experiment has ``fedavg`` and
    all tables. The other arguments and errors are those of ``read_entries``.
    """
    found = read_entries(path, "experiment", quick=quick)
    tables = tomllib.loads(_text(path, "experiment")).get("strategy", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise FedrotError(f"'{path}': write strategies as tables [[strategy]].")
    known = {str(table.get("name", "")): table for table in tables}
    if len(known) < len(tables) or "" in known:
        raise FedrotError(f"'{path}': every [[strategy]] needs a name of its own.")
    for fields in found:
        chosen = fields.get("strategies") or (["fedavg", *known] if known else [])
        if not isinstance(chosen, list):
            raise FedrotError(f"'{path}': strategies is {chosen!r}; give a list of names.")
        fields["strategies"] = [known.get(one, one) if isinstance(one, str) else one for one in chosen]
    return found


def read_entries(path: Path, entries: str, *, quick: bool = False) -> list[dict[str, Any]]:
    """Return the ``[[entries]]`` tables of a file, with the values of its other tables filled in.

    ``[base]`` has the values that entries share. ``[matrix]`` has a list of values for each key: every
    entry stands for all combinations, and each name has its values. An entry may have its own
    ``matrix``, or one value in place of a list. ``[quick]`` is the small variant: its values, also
    ``matrix``, replace those of all entries, and ``only`` lists the names that are kept.

    Args:
        path: path of a TOML file, or the name of a bundled file, such as ``demo``.
        entries: the name of the tables, ``experiment`` for ``fedrot simulate``.
        quick: return the small variant.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no such bundled file, no valid TOML or tables, or no small variant.
    """
    text = _text(path, entries)
    try:
        described = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FedrotError(f"'{path}' is no TOML: {error}") from error
    base, matrix, small = (described.get(name, {}) for name in _TABLES)
    found = described.get(entries, [])
    tables = isinstance(found, list) and all(isinstance(table, dict) for table in (base, small, *found))
    if (
        not found
        or not tables
        or "matrix" in base
        or not all(map(_has_matrix, (described, small, *found)))
    ):
        raise FedrotError(
            f"'{path}' has no experiments; write a table [base] and a table [[{entries}]] for each of "
            "them; [matrix] has a list of values for each key"
        )
    unknown = described.keys() - {*_TABLES, "experiment", "task", "strategy"}
    if unknown:
        raise FedrotError(
            f"'{path}' has an unknown table '{min(unknown)}'; tables are {', '.join(_TABLES)}, strategy "
            f"and {entries}."
        )
    if quick and not small:
        raise FedrotError(f"'{path}' has no small variant; write one as the table [quick].")
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
    known = [str(entry.get("name", "")) for entry in found]
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
    """Yield the fields of an entry, one for each combination of its matrix."""
    merged = {**base, "matrix": matrix, **entry, **changes}
    single = entry.keys() | changes.keys()
    lists = {key: values for key, values in merged.pop("matrix").items() if key not in single}
    for values in itertools.product(*lists.values()):
        point = dict(zip(lists, values, strict=True))
        parts = (f"{key.replace('_', ' ')} {value}" for key, value in point.items())
        name = ", ".join([*filter(None, [entry.get("name")]), *parts])
        yield {**merged, **point, **({"name": name} if point else {})}


def _text(path: Path, entries: str) -> str:
    if path.is_file() or path.suffix or path.parent.name:
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise FedrotError(f"'{path}' is no TOML: it is not UTF-8 text ({error})") from error
    bundled = bundled_files(entries)
    if str(path) not in bundled:
        raise FedrotError(
            f"There is no bundled file '{path}'. Give the path of a TOML file, or one of "
            f"{', '.join(bundled)}."
        )
    return bundled[str(path)]
