"""``verified``: whether checkpoints have the hashes that a strategy wrote."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from fedrot.errors import FedrotError
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import Checkpointing, from_arrays, model_hash


def verified(file: Path, folder: Path) -> str:
    """Return which checkpoints have the hashes in a file of ``Reporting(rows=...,
    hashes=True)``.

    Raises:
        RuntimeError: models differ. ValueError: there are no hashes, or no checkpoints.
    """
    rows = [
        row
        for row in read_rows(file)
        if row.keys() >= {"round", "sha256_before", "sha256_after"}
    ]
    checkpoints = Checkpointing(folder)
    if not rows or not (numbers := checkpoints.rounds()):
        lacking = (
            f"'{folder}' has no checkpoints"
            if rows
            else f"'{file}' has no hashes of models"
        )
        raise ValueError(f"{lacking}: there is nothing to verify.")
    broken = [
        (a, b) for a, b in pairwise(rows) if a["sha256_after"] != b["sha256_before"]
    ]
    wrong = [
        f"Round {b['round']} did not begin with round {a['round']}'s model."
        for a, b in broken
    ]
    known = f"'{file}', with rounds {rows[0]['round']} to {rows[-1]['round']}"
    odd = {*folder.glob("round-*")} - {*map(checkpoints.path, numbers)}
    wrong += [f"'{path}' is no checkpoint." for path in sorted(odd)]
    for number in numbers:
        # A round in which nobody was asked has no row, and leaves the model as it was.
        told = [
            rows[0]["sha256_before"],
            *(r["sha256_after"] for r in rows if r["round"] <= number),
        ]
        where = f"Round {number}: the checkpoint '{checkpoints.path(number)}'"
        try:
            if (
                model_hash(from_arrays(checkpoints.read(number).result.arrays))
                != told[-1]
            ):
                wrong.append(f"{where} differs from {known}.")
        except FedrotError as error:
            wrong.append(f"{where} cannot be used: {error}")
    if wrong:
        raise RuntimeError("\n".join(wrong))
    return (
        f"Rounds {', '.join(map(str, numbers))}: the models in '{folder}' are those of "
        f"{known}."
    )
