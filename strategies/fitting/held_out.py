"""``evaluate_at_clients``: models evaluated on the rows that clients hold out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.strategies.fitting.ask import Clients, read_losses
from fedrot.strategies.wire.fitting_messages import EVALUATE, MODEL
from fedrot.task_head.losses import ONE, TEMPERATURES, LossSums
from fedrot.task_head.votes import Votes, in_order


def evaluate_at_clients(
    grid: Grid, config: ConfigRecord | None = None, timeout: float = 3600
) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Return a function that evaluates models on the held-out rows of all connected
    clients.

    Use it as ``Guard(metric, evaluate=...)``, which then needs no data at the server,
    and as ``evaluate_fn`` of ``start``. Its metrics are the ``loss`` and the
    ``accuracy`` of a row, the best ``temperature`` of the logits, ``calibrated_loss``,
    the loss at this temperature, and the number of ``rows``. With fewer than four
    clients these are means over all rows. With more clients the smallest and largest
    values are left out, and a client's rows count at most 1.5 times as much as the
    median client's (``fedrot.task_head.votes``), so that a quarter of the clients
    cannot turn a comparison.

    The models of one round are compared on the same rows: only clients that answered
    about the first model are asked about the others, and the metrics of a later model
    are those of the first and the centre of the clients' differences. If no client
    answers, a warning is logged, and the metrics are NaN, which is the worst value for
    a guard. Make a new function for every run.

    Args:
        grid: of the server app. Clients need ``answer_with_sums`` on their
            ``ClientApp``.
        config: sent with every request, like ``train_config`` in a round.
        timeout: seconds to wait for answers.

    Example: ``FedRot(config, guard=Guard("loss", evaluate=evaluate_at_clients(grid)))``
    """
    first: tuple[int, dict[int, LossSums]] = (-1, {})
    clients, read = (
        Clients(grid, config=config, timeout=timeout),
        partial(read_losses, task_heads=1),
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal first
        nodes = first[1] if first[0] == server_round else [*grid.get_node_ids()]
        try:
            answers = in_order(clients.ask(nodes, EVALUATE, read, {MODEL: arrays}))
        except FedrotError as error:
            log(WARNING, "Round %d: clients did not evaluate. %s", server_round, error)
            return MetricRecord(
                dict.fromkeys(("loss", "accuracy", "calibrated_loss"), math.nan)
            )
        if first[0] != server_round:
            first = server_round, answers
        return _metrics(answers, first[1])

    return evaluate


def _metrics(answers: dict[int, LossSums], first: dict[int, LossSums]) -> MetricRecord:
    """Return the metrics of a model, given the clients' losses of the round's first
    model.
    """
    new, start = Votes([*answers.values()]), Votes([*first.values()])
    before = Votes([first[node] for node in answers])
    found: dict[str, float] = {}
    for name, value in _VALUES.items():
        found[name] = float(
            start.centre(value(start)) + before.change(value(new), value(before))
        )
    temperature, rows = TEMPERATURES[new.temperature(0)], float(new.weights.sum())
    return MetricRecord({**found, "temperature": temperature, "rows": rows})


#: The clients' values of every metric.
_VALUES: dict[str, Callable[[Votes], Tensor]] = {
    "loss": lambda ballot: ballot.means[:, 0, ONE],
    "accuracy": lambda ballot: ballot.accuracy[:, 0],
    "calibrated_loss": lambda ballot: ballot.means[:, 0, ballot.temperature(0)],
}
