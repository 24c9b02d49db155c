"""``task_heads_at_sites``: what heads are worth at the sites of a simulation.

Values equal those of ``report_sites``, where every site runs the models on its rows.
Here each row is run once, whatever the number of sites that test on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from logging import WARNING

import numpy as np
import torch
from flwr.app import ConfigRecord
from flwr.common import log
from numpy import ndarray
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from fedrot.errors import FedrotError
from fedrot.simulations.data.encode import Encoded
from fedrot.simulations.federation.cell_run import CellRun
from fedrot.simulations.federation.client_app import HEAD_BATCH
from fedrot.simulations.tasks.objective import model_inputs, shortest_first
from fedrot.simulations.tasks.training import Task
from fedrot.strategies import class_priors
from fedrot.strategies.fitting.sites import NAMES
from fedrot.strategies.wire.loaded_model import tensors_of
from fedrot.task_head.labelled_rows import labelled_rows
from fedrot.task_head.names import task_head_of
from fedrot.task_head.outputs import OUTPUT_KINDS, problem_type_of
from fedrot.task_head.site_figures import site_figures
from fedrot.tensors import TensorDict


def task_heads_at_sites(
    cell: CellRun,
    model: nn.Module,
    priors: Sequence[float],
    test_rows: dict[int, ndarray],
) -> Iterator[tuple[int, str, list[float]]]:
    """Yield each site, its metric, and the metric's values for ``sites.HEADS``.

    Sites without training rows, or without test rows, are left out with a warning.

    Args:
        model: the last one, with its head.
        priors: shares of classes in its bias; without any, clients are asked.
        test_rows: numbers of each site's test rows, int64 ``[n]``.

    Raises:
        FedrotError: the model has no task head, or no site has test rows.
    """
    task = cell.task
    config = model.config
    problem_type = problem_type_of(config)
    has_classes = OUTPUT_KINDS[problem_type].has_classes
    shares = torch.tensor(
        priors or class_priors(cell.grid, config, config=ConfigRecord(cell.job)),
        dtype=torch.float64,
    )
    first = cell.model()
    task_head = task_head_of(config, tensors_of(first))
    of_sites = np.concatenate([task.clients(cell.seed)[site] for site in test_rows])
    tested = np.unique(np.concatenate([*test_rows.values()]))
    of_training = _read(first, task, task.train, of_sites, task_head)
    of_test = _read(first, task, task.test, tested, task_head)
    of_test |= _read(model, task, task.test, tested)
    if not has_classes:  # Sites need the residuals of their training rows.
        of_training |= _read(model, task, task.train, of_sites)
    models = (
        _LastLayer(config, "features", first.get_submodule(task_head)),
        _LastLayer(config, "logits", nn.Identity()),
    )
    for site, rows in test_rows.items():
        training, held_out = task.client_rows(cell.seed, site)
        try:
            figures = site_figures(
                iter(models),
                shares,
                partial(_batches, of_training, training),
                _batches(of_training, held_out),
                _batches(of_test, rows),
                "head",
                problem_type,
            )
        except FedrotError as error:
            log(WARNING, "Site %d is left out: %s", site, error)
        else:
            values = figures["heads"][:, int(has_classes)]
            yield site, NAMES[has_classes], values.tolist()


class _LastLayer(nn.Module):
    """The last layer of a classifier, for batches of what the others have computed.

    ``reads`` says what: ``features`` of the first model, or ``logits`` of the last one.
    """

    def __init__(self, config: object, reads: str, head: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.reads = reads
        self.head = head

    def forward(self, **batch: Tensor) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(logits=self.head(batch[self.reads]))


def _read(
    model: nn.Module, task: Task, split: Encoded, rows: ndarray, task_head: str = ""
) -> TensorDict:
    """Return what ``labelled_rows`` yields for rows of a split, and their ``labels``.

    Both are by the number of a row. Values of other rows have no meaning.
    """
    in_order = [rows[places] for places in shortest_first(split, rows, HEAD_BATCH)]
    batches = (
        model_inputs(model, task.objective.batch(split, some)) for some in in_order
    )
    problem_type = problem_type_of(model.config)
    of_batches = labelled_rows(model, batches, problem_type, task_head)
    # Models compute in float32, of which ``labelled_rows`` makes float64.
    values, labels = zip(
        *((each.float(), of) for each, of, _ in of_batches), strict=True
    )
    places = np.zeros(len(split), dtype=np.int64)
    places[np.concatenate(in_order)] = range(len(rows))
    return {
        "features" if task_head else "logits": torch.cat(values)[places],
        "labels": torch.cat(labels)[places],
    }


def _batches(columns: TensorDict, rows: ndarray) -> list[TensorDict]:
    """Return rows as one batch; none without rows."""
    batch = {name: values[rows] for name, values in columns.items()}
    return [batch] if len(rows) else []
