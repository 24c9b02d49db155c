"""``evaluate_at_clients`` with four clients and more, against plain numbers."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict

from fedrot.strategies import evaluate_at_clients, to_arrays
from fedrot.strategies.wire.fitting_messages import LOSSES, MODEL
from fedrot.task_head.losses import ONE, TEMPERATURES
from tests.strategies.fakes import grid_of

FIRST, SECOND = (ArrayRecord({"w": torch.full((1,), value)}) for value in (0.0, 1.0))


def drawn(seed, count):
    rng = np.random.default_rng(seed)
    figures = []
    for _ in range(count):
        losses = tuple(rng.uniform(0.2, 2, 2))
        rows = int(rng.integers(10, 400))
        figures.append((rows, losses, tuple(rng.integers(0, rows + 1, 2) / rows)))
    return figures


def answers(rows, losses, right):
    """Return a client that answers about two models by their first value."""
    # The second half of the temperatures is better by .1.
    better = torch.where(torch.arange(len(TEMPERATURES)) > ONE, 0.1, 0.0).double()

    def answer(message):
        place = int(message.content.array_records[MODEL]["w"].numpy()[0])
        grid = (losses[place] - better).unsqueeze(0) * rows
        counts = torch.tensor([rows, round(right[place] * rows)]).double()
        record = {
            "losses": grid,
            "squares": torch.zeros_like(grid),
            "counts": counts,
        }
        return Message(RecordDict({LOSSES: to_arrays(record)}), reply_to=message)

    return answer


def slow_centre(values, rows):
    """Return the weighted mean without a quarter of the clients' weight at each end."""
    weights = np.minimum(rows, median(rows))
    quarter = min(sum(sorted(weights)[-(len(rows) // 4) :]), weights.sum() / 2)
    order = np.argsort(values)
    ends = np.cumsum(weights[order])
    starts = ends - weights[order]
    low, high = quarter, weights.sum() - quarter
    inside = np.clip(np.minimum(ends, high) - np.maximum(starts, low), 0, None)
    return float((inside * np.array(values)[order]).sum() / inside.sum())


def expected(figures, values, place):
    """Return a metric of the second model: the first's, and the centre of changes."""
    rows = [row for row, *_ in figures]
    first = [values(figure, 0) for figure in figures]
    start = slow_centre(first, rows)
    if place == 0:
        return start
    changes = [
        np.clip(values(figure, 1) - before, -start - 1, start + 1)
        for figure, before in zip(figures, first, strict=True)
    ]
    return start + slow_centre(changes, rows)


METRICS = {
    "loss": lambda figure, place: figure[1][place],
    "accuracy": lambda figure, place: figure[2][place],
    "calibrated_loss": lambda figure, place: figure[1][place] - 0.1,
}


@pytest.mark.parametrize("count", [4, 5, 9, 12])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_centres_and_centres_of_changes(seed, count):
    figures = drawn(seed, count)
    evaluate = evaluate_at_clients(grid_of(answers(*figure) for figure in figures))
    for place, arrays in enumerate((FIRST, SECOND)):
        metrics = dict(evaluate(1, arrays))
        for name, values in METRICS.items():
            assert metrics[name] == pytest.approx(expected(figures, values, place))
        rows = [row for row, *_ in figures]
        assert metrics["rows"] == pytest.approx(
            sum(min(row, median(rows)) for row in rows)
        )


@pytest.mark.parametrize("liar", [0.0, 1e6])
def test_one_of_four_keeps_metrics_in_the_range_of_the_others(
    liar,
):
    figures = drawn(7, 3)
    lie = (10**6, (liar, liar), (1.0, 1.0))
    grid = grid_of(answers(*figure) for figure in [*figures, lie])
    metrics = dict(evaluate_at_clients(grid)(1, FIRST))
    honest = [losses[0] for _, losses, _ in figures]
    assert min(honest) <= metrics["loss"] <= max(honest)
