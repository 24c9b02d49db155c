"""``rounds_of``: the rounds of a run whose models have a client's updates."""

from __future__ import annotations

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
    rounds = dict[str, set[int]]()
    for row in updates:
        for name in (row.get("client"), row.get("node")):
            rounds.setdefault(str(name), set()).add(row["round"])
    if client in rounds:
        first, *_ = numbers = sorted(rounds[client])
        last = f"round-{first - 1:06}" if first > 1 else "none: take the first model"
        sentence = (
            f"its updates are in rounds {', '.join(map(str, numbers))}, and so in "
            f"every later model. The last checkpoint without them: {last}."
        )
    else:
        others = ", ".join(sorted(rounds))
        sentence = f"no model has its updates, but those of {others}."
    if "fedrot-head-fitted" in str(rows):
        sentence += (
            " The task head was also fitted to sums, whose clients no row names. Only "
            "the first model is certainly without this client."
        )
    return f"Client {client}: {sentence}"
