"""Files of experiments: TOML files, given by path or bundled under ``experiments/``."""

from __future__ import annotations

import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedrot.errors import FedrotError

#: Folders of bundled files. Plug-ins add theirs.
FOLDERS: list[Traversable] = [resources.files("fedrot.simulations") / "experiments"]


def bundled_files(entries: str = "experiment") -> dict[str, str]:
    """Return the text of each bundled file of ``[[entries]]`` tables, by name."""
    files = sorted((file for folder in FOLDERS for file in folder.iterdir()), key=lambda file: file.name)
    texts = {Path(file.name).stem: file.read_text("utf-8") for file in files}
    return {name: text for name, text in texts.items() if f"\n[[{entries}]]" in text}


def read_experiments(
    path: Path, *, quick: bool = False, entries: str = "experiment"
) -> list[dict[str, Any]]:
    """Return the fields of a file's experiments.

    ``[base]`` has the values that all ``[[experiment]]`` tables share. ``[quick]`` is the small variant:
    its values replace those of all. ``strategies`` may name tables ``[[strategy]]``; without this key,
    an experiment has ``fedavg`` and all such tables, if there are any.

    Args:
        path: path of a TOML file, or the name of a bundled file, such as ``demo``.
        quick: return the small variant.
        entries: the name of the tables.

    Raises:
        OSError: the file cannot be read.
        FedrotError: there is no such bundled file, no valid TOML or tables, or no small variant.
    """
    try:
        described = tomllib.loads(_text(path, entries))
    except (ValueError, RecursionError) as error:
        raise FedrotError(f"'{path}' is no TOML: {error}") from error
    base, small = (described.pop(name, {}) for name in ("base", "quick"))
    found, own = (described.pop(name, []) for name in (entries, "strategy"))
    whole = all(isinstance(listed, list) for listed in (found, own))
    if not found or not whole or not all(isinstance(t, dict) for t in (base, small, *found, *own)):
        raise FedrotError(
            f"'{path}' has no experiments; write a table [[{entries}]] for each, and [base] for all"
        )
    if described:
        raise FedrotError(
            f"'{path}' has an unknown table '{min(described)}'; tables are base, quick, strategy and "
            f"{entries}."
        )
    if quick and not small:
        raise FedrotError(f"'{path}' has no small variant; write one as the table [quick].")
    known = {str(table.get("name", "")): table for table in own}
    if len(known) < len(own) or "" in known:
        raise FedrotError(f"'{path}': every [[strategy]] needs a name of its own.")
    tables = [{**base, **entry, **(small if quick else {})} for entry in found]
    for table in tables:
        chosen = table.get("strategies", ["fedavg", *known] if known else [])
        if entries == "experiment" and isinstance(chosen, list):
            table["strategies"] = [known.get(s, s) if isinstance(s, str) else s for s in chosen]
    return tables


def _text(path: Path, entries: str) -> str:
    if path.is_file() or path.suffix or path.parent.name:
        return path.read_text("utf-8")
    bundled = bundled_files(entries)
    if str(path) not in bundled:
        raise FedrotError(
            f"There is no bundled file '{path}'. Give the path of a TOML file, or one of "
            f"{', '.join(bundled)}."
        )
    return bundled[str(path)]
