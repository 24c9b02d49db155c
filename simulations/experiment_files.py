"""``read_experiments``: TOML files of experiments, given by path or bundled under ``experiments/``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedrot.errors import FedrotError
from fedrot.simulations.settings import Experiment


def read_experiments(path: Path, given: Mapping[str, Any]) -> list[Experiment]:
    """Return the experiments of a file, with the given values in place of its own.

    ``[base]`` has the values that all ``[[experiment]]`` tables share. ``strategies`` may name tables
    ``[[strategy]]``; without this key, an experiment has ``fedavg`` and all such tables, if there are
    any.

    Args:
        path: path of a TOML file, or the name of a bundled file, such as ``demo``.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no such bundled file, no valid TOML, or a wrong table or value.
    """
    try:
        described = tomllib.loads(_text(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FedrotError(f"'{path}' is no TOML: {error}") from error
    base, found, own = (described.pop(n, {}) for n in ("base", "experiment", "strategy"))
    tables = [base, *found, *own]
    if described or not found or not all(isinstance(table, dict) for table in tables):
        other = f", but no '{min(described)}'" if described else ""
        raise FedrotError(
            f"'{path}' needs a table [[experiment]] for each experiment; it may have [base], with the "
            f"values of all, and [[strategy]]{other}."
        )
    known = {str(table.get("name", "")): table for table in own}
    experiments = []
    for table in found:
        fields = {**base, **table, **given}
        chosen = fields.get("strategies", ["fedavg", *known] if known else [])
        if isinstance(chosen, str):
            chosen = [name.strip() for name in chosen.split(",")]
        if isinstance(chosen, list):
            fields["strategies"] = [known.get(s, s) if isinstance(s, str) else s for s in chosen]
        experiments.append(Experiment.from_flat(fields))
    names = [experiment.name for experiment in experiments]
    if len(set(names)) < len(names) or len(known) < len(own):
        said = ", ".join([*names, *known])
        raise FedrotError(f"'{path}': each [[experiment]] and [[strategy]] needs its own name: {said}.")
    return experiments


def _text(path: Path) -> str:
    if path.is_file() or path.suffix or path.parent.name:
        return path.read_text("utf-8")
    folder = resources.files("fedrot.simulations") / "experiments"
    bundled = {Path(file.name).stem: file for file in folder.iterdir()}
    if str(path) not in bundled:
        raise FedrotError(
            f"There is no bundled file '{path}'. Give the path of a TOML file, or one of "
            f"{', '.join(sorted(bundled))}."
        )
    return bundled[str(path)].read_text("utf-8")
