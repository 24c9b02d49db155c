"""``verified``: whether checkpoints have the hashes that a strategy wrote."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from fedrot.errors import FedrotError
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import Checkpointing, from_arrays, model_hash

#: Fields of a row with hashes.
_FIELDS = {"round", "sha256_before", "sha256_after"}


def verified(file: Path, folder: Path) -> str:
    """Return which checkpoints have the hashes of a file of rows.

    The file is of ``Reporting(rows=..., hashes=True)``.

    Raises:
        RuntimeError: models differ. ValueError: there are no hashes, or no checkpoints.
    """
    rows = [row for row in read_rows(file) if row.keys() >= _FIELDS]
    if not rows:
        raise ValueError(
            f"'{file}' has no hashes of models: there is nothing to verify."
        )
    checkpoints = Checkpointing(folder)
    rounds = checkpoints.rounds()
    if not rounds:
        raise ValueError(f"'{folder}' has no checkpoints: there is nothing to verify.")
    wrong = [
        f"Round {after['round']} did not begin with round {before['round']}'s model."
        for before, after in pairwise(rows)
        if before["sha256_after"] != after["sha256_before"]
    ]
    first = rows[0]
    known = f"'{file}', with rounds {first['round']} to {rows[-1]['round']}"
    others = {*folder.glob("round-*")} - {*map(checkpoints.path, rounds)}
    wrong += [f"'{path}' is no checkpoint." for path in sorted(others)]
    for round_ in rounds:
        # A round in which nobody was asked has no row, and leaves the model as it was.
        after = [row["sha256_after"] for row in rows if row["round"] <= round_]
        expected = [first["sha256_before"], *after][-1]
        where = f"Round {round_}: the checkpoint '{checkpoints.path(round_)}'"
        try:
            arrays = checkpoints.read(round_).result.arrays
            if model_hash(from_arrays(arrays)) != expected:
                wrong.append(f"{where} differs from {known}.")
        except FedrotError as error:
            wrong.append(f"{where} cannot be used: {error}")
    if wrong:
        raise RuntimeError("\n".join(wrong))
    return (
        f"Rounds {', '.join(map(str, rounds))}: the models in '{folder}' are those of "
        f"{known}."
    )
