"""``rounds_of``: the rounds of a run whose models have a client's updates."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from fedrot.simulations.run_folder import read_rows


def rounds_of(client: str, file: Path) -> str:
    """Return in which rounds a client's updates are, and the last checkpoint without.

    Args:
        client: its own id or its node's, as rows have it.
        file: of ``Reporting(rows=..., hashes=True)``.

    Raises:
        ValueError: fedrot did not write the file, or no row names an update.
    """
    rows = read_rows(file)
    updates = [row for row in rows if row.keys() >= {"round", "sha256"}]
    if not updates:
        raise ValueError(
            f"'{file}' names no averaged update. Run with Reporting(rows=..., "
            "hashes=True)."
        )
    rounds = defaultdict[str, set[int]](set)
    for row in updates:
        for name in {"client", "node"} & row.keys():
            rounds[str(row[name])].add(row["round"])
    numbers = sorted(rounds.pop(client, ()))
    if numbers:
        before = numbers[0] - 1
        last = f"round-{before:06}" if before else "none: take the first model"
        sentence = (
            f"its updates are in rounds {', '.join(map(str, numbers))}, and so in "
            "every later model. The last checkpoint without them, if it was kept: "
            f"{last}."
        )
    else:
        sentence = (
            f"no model has its updates, but those of {', '.join(sorted(rounds))}."
        )
    if "fedrot-head-fitted" in str(rows):
        sentence += (
            " The task head was also fitted to sums, whose clients no row names. Only "
            "the first model is certainly without this client."
        )
    return f"Client {client}: {sentence}"
