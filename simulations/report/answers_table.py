"""``answers_table``: what a site has answered, from the record of its ``Privacy``."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from fedrot.simulations.comparison.summary import span
from fedrot.simulations.report.tables import NONE, Table
from fedrot.strategies.client.answer_record import SALT, Line, Record

_HEADER = (
    "run",
    "stage",
    "answers",
    "rounds",
    "rows",
    "rows left out",
    "classes left out",
    "withheld",
    "again",
)


def is_record(file: Path) -> bool:
    """Return whether a file begins as a record of a client's answers."""
    with file.open("rb") as opened:
        return opened.readline(80).startswith(f'{{"{SALT}"'.encode())


def answers_table(file: Path) -> Table:
    """Return the numbers of a site's answers by run and stage.

    Rows, and what was left out, are the smallest and the largest number of an answer.
    ``again`` counts answers about a model that had been answered about with other rows.

    Raises:
        FedrotError: the record is damaged.
    """
    answers = defaultdict[tuple[str, str], list[Line]](list)
    for line in Record(file).lines():
        # Lines of others than ``answer_with_sums`` have other keys.
        if "left_out" in line:
            answers[str(line["run"]), str(line["stage"])].append(line)
    lines = [(*key, *_cells(of_key)) for key, of_key in answers.items()]
    return Table(f"Answers in {file.name}", _HEADER, lines, ("run", "stage"))


def _cells(lines: list[Line]) -> tuple[str, ...]:
    rounds = [line["round"] for line in lines if line["round"] is not None]
    ranges = [
        [line["rows"] for line in lines],
        *([line["left_out"][what] for line in lines] for what in ("rows", "classes")),
    ]
    counts = [
        str(sum(bool(line.get(what)) for line in lines))
        for what in ("withheld", "again")
    ]
    in_rounds = span(rounds) if rounds else NONE
    return (str(len(lines)), in_rounds, *map(span, ranges), *counts)
