"""``verified``: whether checkpoints are those whose hashes a strategy has written."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from fedrot.errors import FedrotError
from fedrot.simulations.folder import read_rows
from fedrot.strategies import Checkpointing, from_arrays, model_hash

_BEFORE, _AFTER = "sha256_before", "sha256_after"


def verified(file: Path, folder: Path) -> str:
    """Return which checkpoints of a folder are those of a file of ``Reporting(rows=..., hashes=True)``.

    Raises:
        RuntimeError: a checkpoint is another one, or a round began with another model than the round
            before ended with.
        ValueError: the file has no hashes, or the folder no checkpoints.
    """
    rows = {row["round"]: row for row in read_rows(file) if row.keys() >= {"round", _BEFORE, _AFTER}}
    checkpoints = Checkpointing(folder)
    numbers = checkpoints.rounds()
    if not rows or not numbers:
        lacking = f"'{folder}' has no checkpoints" if rows else f"'{file}' has no hashes of models"
        raise ValueError(f"{lacking}. Run with Reporting(rows=..., hashes=True) and checkpoints=....")
    wrong = [
        f"Round {after}: '{file}' says that it began with another model than round {before} ended with."
        for before, after in pairwise(sorted(rows))
        if rows[before][_AFTER] != rows[after][_BEFORE]
    ]
    for number in numbers:
        # A round in which no client was asked has no row and leaves the model as it was.
        told = rows.get(max((done for done in rows if done <= number), default=0), {}).get(_AFTER)
        path = folder / f"round-{number:06d}"
        try:
            found = model_hash(from_arrays(checkpoints.read(number).result.arrays))
        except FedrotError as error:
            wrong.append(f"Round {number}: '{path}' cannot be used: {error}")
            continue
        if found != told:
            wrong.append(f"Round {number}: '{path}' has a model with the hash {found}, not {told}.")
    if wrong:
        raise RuntimeError("\n".join(wrong))
    return f"Verified: the models of rounds {', '.join(map(str, numbers))} in '{folder}'."
