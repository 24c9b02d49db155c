"""Folders of checkpoints: the model of a round, and its metrics, are the round's
number.
"""

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg, Result

from fedrot.strategies.resume.checkpoints import Checkpointing
from fedrot.strategies.resume.state import RunState


def run_state():
    """Return the state of a run of FedAvg."""
    return RunState(FedAvg(), ConfigRecord(), ConfigRecord())


def result_of(number, arrays=None):
    """Return the result after a round."""
    model = (
        ArrayRecord({"weight": torch.full((50, 40), float(number))})
        if arrays is None
        else arrays
    )
    metrics = {done: MetricRecord({"loss": 1 / done}) for done in range(1, number + 1)}
    return Result(model, train_metrics_clientapp=metrics)


def save(folder, number, arrays=None, keep=3):
    """Save one round, as the first of a run."""
    checkpoints = Checkpointing(folder, keep)
    torch.rand(())  # As in a run: no two states are the same.
    with checkpoints.writing():
        return checkpoints.save(number, result_of(number, arrays), run_state())


def round_of(found):
    """Return which round a checkpoint of ``save`` is, by its model and metrics."""
    (value,) = set(found.result.arrays["weight"].numpy().flatten().tolist())
    assert value == found.round == max(found.result.train_metrics_clientapp)
    return found.round
