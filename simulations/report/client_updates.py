"""``rounds_of``: the rounds of a run whose models have a client's updates."""

from __future__ import annotations

from pathlib import Path

from fedrot.simulations.report.pages import strategy_rows

#: Fields of a row about an averaged update: of one with hashes, of one of alignment.
_AVERAGED = ("sha256", "before")


def rounds_of(client: str, file: Path) -> str:
    """Return in which rounds a client's updates are, and the last checkpoint without.

    Args:
        client: its own id or its node's, as rows have it.
        file: of ``Reporting(rows=...)``. Without ``hashes=True`` a round counts in
            which the client was aligned, also if the round kept the old model.

    Raises:
        ValueError: no strategy wrote the file, no row has an update, or none is of the
            client.
    """
    rows = strategy_rows(file)
    field = next((name for name in _AVERAGED if any(name in row for row in rows)), "")
    if not field:
        raise ValueError(
            f"'{file}' does not say whose updates were averaged. Run with "
            "Reporting(rows=..., hashes=True)."
        )
    own = [
        row for row in rows if client in (str(row.get("client")), str(row.get("node")))
    ]
    rounds = sorted({row["round"] for row in own if field in row})
    # Without hashes, rows of updates do not name nodes: one may have another name here.
    if not own or not rounds and field == _AVERAGED[1]:
        known = {str(row["client"]) for row in rows if field in row}
        raise ValueError(
            f"'{file}' has no update of client {client}, but of clients "
            f"{', '.join(sorted(known)):.200}. Rows of Reporting(rows=..., "
            "hashes=True) name nodes, too."
        )
    lines = [f"Client {client}: no model of this run has its updates."]
    if rounds:
        before = rounds[0] - 1
        last = f"The last checkpoint without them is round-{before:06}."
        if not before:
            last = "No checkpoint is without them, only the first model is."
        lines = [
            f"Client {client}: its updates are in rounds "
            f"{', '.join(map(str, rounds))}, and so in every later model. {last}"
        ]
    if any("fedrot-head-fitted" in row.get("metrics", {}) for row in rows):
        lines.append(
            "The task head was also fitted to sums of all clients that answered, which "
            "no row names. Only the first model is certainly without this client's."
        )
    return "\n".join(lines)
