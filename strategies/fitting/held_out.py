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
    """Return a function that evaluates models on the clients' held-out rows.

    Use it as ``Guard(metric, evaluate=...)``, which then needs no data at the server,
    and as ``evaluate_fn`` of ``start``. Its metrics are the ``loss`` and the
    ``accuracy`` of a row, the best ``temperature`` of the logits, ``calibrated_loss``,
    the loss at this temperature, and the number of ``rows``. With fewer than four
    clients these are means over all rows. With more clients the smallest and largest
    values are left out, and a client's rows count at most as much as the median
    client's (``fedrot.task_head.votes``), so that a quarter of the clients cannot turn
    a comparison.

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
    first_round = -1
    first: dict[int, LossSums] = {}
    clients = Clients(grid, config=config, timeout=timeout)
    read = partial(read_losses, heads=1)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal first, first_round
        is_first = server_round != first_round
        nodes = grid.get_node_ids() if is_first else first
        try:
            answers = in_order(clients.ask(nodes, EVALUATE, read, {MODEL: arrays}))
        except FedrotError as error:
            log(WARNING, "Round %d: clients did not evaluate. %s", server_round, error)
            return MetricRecord(dict.fromkeys(_VALUES, math.nan))
        if is_first:
            first_round = server_round
            first = answers
        new = Votes([*answers.values()], [MODEL])
        start = Votes([*first.values()], [MODEL])
        before = Votes([first[node] for node in answers], [MODEL])
        metrics = MetricRecord()
        for name, value in _VALUES.items():
            change = before.change(value(new), value(before))
            metrics[name] = float(start.centre(value(start)) + change)
        metrics["temperature"] = TEMPERATURES[new.temperature(MODEL)]
        metrics["rows"] = float(new.weights.sum())
        return metrics

    return evaluate


#: The clients' values of every metric.
_VALUES: dict[str, Callable[[Votes], Tensor]] = {
    "loss": lambda votes: votes.means(MODEL)[:, ONE],
    "accuracy": lambda votes: votes.accuracy(MODEL),
    "calibrated_loss": lambda votes: votes.at_best(MODEL),
}
