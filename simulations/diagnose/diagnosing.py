"""Diagnosis of saved models and of finished runs, as tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from fedrot.diagnosis import (
    ALIGNED,
    PLAIN,
    ROTATED,
    WHOLE,
    Diagnosis,
    Evidence,
    diagnose,
    diagnosis_of,
    summed,
)
from fedrot.errors import FedrotError
from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.merge.merge_inputs import check_mergeable, check_values
from fedrot.simulations.models.saved_model import open_saved_model
from fedrot.simulations.report.summaries import Row
from fedrot.simulations.report.tables import Table, number_style
from fedrot.symmetry import symmetry_of

#: The file of alignment rows in a run folder.
ALIGNMENT = "alignment.jsonl"

#: Options of ``fedrot merge``, by diagnosis.
_PARTS = {PLAIN: " --parts none", ALIGNED: "", WHOLE: " --parts whole"}


@dataclass(frozen=True)
class Found:
    """A diagnosis of saved models, or of the rounds of one arm with the same recommended average.

    Attributes:
        name: setting, start and arm, if the rows have them; empty for saved models.
        rounds: the numbers of the rounds; empty for saved models.
    """

    name: str
    rounds: tuple[int, ...]
    diagnosis: Diagnosis

    @property
    def title(self) -> str:
        """Name and rounds, in words."""
        several = "rounds" if len(self.rounds) > 1 else "round"
        rounds = f"{several} {_ranges(self.rounds)}" if self.rounds else ""
        return ", ".join(filter(None, [self.name, rounds]))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data for JSON."""
        return {"name": self.name, "rounds": self.rounds, **self.diagnosis.to_dict()}


def diagnose_models(names: Sequence[str]) -> Found:
    """Diagnose saved models; files are memory-mapped and read on demand.

    Args:
        names: folders written by ``save_pretrained`` or names on the hub; the base first.

    Raises:
        FedrotError: a model cannot be opened, or is of another architecture than the base.
    """
    base, *updates = [open_saved_model(name) for name in names]
    for update in updates:
        check_mergeable(base, update)
    ours, *theirs = (model.read() for model in (base, *updates))
    for model, tensors in zip((base, *updates), (ours, *theirs), strict=True):
        check_values(model, tensors)
    return Found("", (), diagnose(ours, theirs, symmetry_of(base.config, ours)))


def merge_command(found: Found, names: Sequence[str]) -> str:
    """Return the recommended merge command; ``names`` as in ``diagnose_models``.

    If there are two models, both are merged; else all but the base.
    """
    merged = names[1:] if len(names) > 2 else names
    return shlex.join(["fedrot", "merge", *merged]) + f"{_PARTS[found.diagnosis.choice]} --out merged"


def diagnose_run(path: Path) -> list[Found]:
    """Diagnose every aligned arm of a run, with one diagnosis for rounds with the same result.

    Args:
        path: a run folder, or the file of ``Reporting(rows=...)``.

    Raises:
        FedrotError: there are no such rows, or they lack the distance that chance removes.
    """
    rows = _rows(path)
    by_arm: dict[str, list[Row]] = {}
    for row in rows:
        named = (str(row[key]) for key in ("setting", "start", "arm") if row.get(key))
        by_arm.setdefault(", ".join(named), []).append(row)
    return [found for name, own in by_arm.items() for found in _by_choice(name, own, path)]


def _rows(path: Path) -> list[Row]:
    file = path / ALIGNMENT if path.is_dir() else path
    try:
        rows: list[Row] = [row for row in read_rows(file.parent, file.name) if "before" in row]
    except FileNotFoundError as error:
        raise FedrotError(
            f"'{path}' is neither a run folder nor a file of rows: it has no {ALIGNMENT}. To diagnose "
            "saved models, give the base and the models that were trained from it."
        ) from error
    except ValueError as error:  # Binary files are not text.
        raise FedrotError(f"'{path}' is no file of rows: {error}") from error
    if not all({"part", "layer", "round", "client"} <= row.keys() for row in rows):
        raise FedrotError(f"'{path}' has other rows than those of Reporting(rows=...).")
    if not rows:
        raise FedrotError(
            f"'{path}' has no rows of an alignment: it is another file, or no arm aligned, or every "
            "reply was dropped."
        )
    if any("found" not in row for row in rows):
        raise FedrotError(
            f"'{path}' was written by an older fedrot: its rows lack the distance that chance removes. "
            "Run it again, or give saved models: the base and those that were trained from it."
        )
    return rows


def _by_choice(name: str, rows: Iterable[Row], path: Path) -> Iterator[Found]:
    """Yield one diagnosis for all rounds with the same choice, in the order of their first round."""
    by_round: dict[int, list[Row]] = {}
    for row in rows:
        by_round.setdefault(int(row["round"]), []).append(row)
    alike: dict[str, list[int]] = {}
    for number in sorted(by_round):
        found = diagnosis_of(by_round[number])
        turned = summed(found.clients, ROTATED)
        if turned.groups and turned.chance is None:
            raise FedrotError(
                f"'{path}' lacks the distance that chance removes in round {number}: the run had "
                "chance=0 or matched activations. Run it with the defaults, or give saved models: the "
                "base and those that were trained from it."
            )
        alike.setdefault(found.choice, []).append(number)
    for numbers in alike.values():
        own = [row for number in numbers for row in by_round[number]]
        yield Found(name, tuple(numbers), diagnosis_of(own))


def tables(found: Found) -> Iterator[Table]:
    """Yield a table per kind of evidence, with a line per part and layer."""
    of_run = bool(found.rounds)
    titles = {
        "clients": found.title if of_run else "Updates compared with the mean of those before",
        "base": "Updates compared with the base",
        "whole": ", ".join(filter(None, [found.title, "updates matched as whole models"])),
    }
    for name, title in titles.items():
        lines: tuple[Evidence, ...] = getattr(found.diagnosis, name)
        if not lines:
            continue
        columns = ("part, layer", "share found", "chance", "ratio", "groups moved")
        # Parts in the order of their names, as layers of one part belong together.
        ordered = sorted(lines, key=lambda line: line.part)
        yield Table(title[0].upper() + title[1:], columns, [*map(_cells, ordered)], columns[:1])


def _cells(line: Evidence) -> tuple[str, ...]:
    where = line.part if line.layer is None else f"{line.part}, {line.layer}"
    chance = "not known" if line.chance_share is None else f"{line.chance_share:.1%}"
    known = 0 < line.ratio < math.inf
    ratio = f"{line.ratio:{number_style(line.ratio, decimals=2)}}" if known else "-"
    return (where, f"{line.share:.1%}", chance, ratio, f"{line.moved} of {line.groups}")


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ``1-2, 5``."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)
