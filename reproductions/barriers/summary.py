"""Tables of loss barriers, each compared with the line of method vanilla."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from fedrot.simulations.comparison.paired import paired_difference
from fedrot.simulations.report.tables import Table, format_interval, number
from reproductions.barriers.line import BarrierLine
from reproductions.barriers.methods import METHODS, VANILLA


def tables(lines: Iterable[BarrierLine]) -> Iterator[Table]:
    """Yield one table per cell, a line per method: means over pairs with 95 % t
    intervals.

    The share is the barrier divided by that of the vanilla line of the same pair.
    """
    found: dict[str, dict[str, dict[str, BarrierLine]]] = {}
    for line in lines:
        found.setdefault(line.cell, {}).setdefault(line.method, {})[line.pair] = line
    for cell, methods in found.items():
        yield Table(
            f"{cell}: loss barrier and first metric, means over pairs",
            (
                "method (pairs)",
                "barrier",
                "share of vanilla",
                "metric in the middle",
                "at the ends",
            ),
            [_cells(name, methods) for name in METHODS if name in methods],
            texts=("method (pairs)", "at the ends"),
        )


def _cells(method: str, methods: Mapping[str, Mapping[str, BarrierLine]]) -> list[str]:
    pairs, vanilla = methods[method], methods.get(VANILLA, {})

    def over(value: Callable[[BarrierLine], float], interval: bool = True) -> str:
        found = paired_difference([value(line) for line in pairs.values()])
        return format_interval(found) if interval else number(found.mean)

    def headline(line: BarrierLine, place: int) -> float:
        return next(iter(line.metrics[place].values()))

    def share(line: BarrierLine) -> float:
        whole = vanilla[line.pair].barrier if line.pair in vanilla else 0.0
        return line.barrier / whole if whole > 0 else math.nan

    barrier = over(lambda line: line.barrier)
    middle = over(lambda line: headline(line, len(line.metrics) // 2))
    ends = [over(partial(headline, place=end), interval=False) for end in (0, -1)]
    return [f"{method} ({len(pairs)})", barrier, over(share), middle, ", ".join(ends)]
