"""The Flower ClientApp of simulations: training on the rows of one client.

Its replies depend only on the message and the node's partition id.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from torch import Tensor, nn

import fedrot
from fedrot._io import replacing
from fedrot.simulations.models import (
    build_model,
    load_tensors,
    model_config,
    tensors_of,
)
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task, task_of
from fedrot.strategies import LabelledRows, add_statistics, answer_with_sums
from fedrot.strategies.client.moves import Matching, match_at_client
from fedrot.strategies.round.asked import CLIENT_KEY, CLIENT_RECORD
from fedrot.strategies.wire.arrays import STATISTICS
from fedrot.strategies.wire.statistics_record import (
    statistics_record,
    wanted_statistics,
)
from fedrot.symmetry import symmetry_of
from fedrot.task_head.names import adapter_task_head_of, task_head_of

#: Size in bytes above which a folder of shared trainings takes none of later rounds.
KEPT_BYTES = 2**30
#: Rows per batch when a task head is fitted, and for statistics (Jin et al. 2023,
#: section 5.1).
HEAD_BATCH, STATISTICS_BATCH = 64, 16
#: Maximum number of training rows for matching at a client.
MATCHING_ROWS = 4096

app = ClientApp()


@dataclass(frozen=True)
class ClientJob:
    """One message: ``told``, as ``CellRun.job``, to the ``client`` of a partition
    id.
    """

    told: Mapping[str, Any]
    client: int

    @classmethod
    def read(cls, message: Message, context: Context) -> ClientJob:
        """Read a job from a message and the node's context."""
        (told,) = message.content.config_records.values()
        return cls(told, int(context.node_config[CLIENT_KEY]))

    @property
    def stream(self) -> int:
        """The random seed of this client in this round and run."""
        return (
            int(self.told["seed"]) * 1_000 + int(self.told["server-round"])
        ) * 1_000 + self.client

    @property
    def task(self) -> Task:
        """The experiment's data and objective."""
        return task_of(self.told["experiment"])

    def rows(self, held_out: bool = False) -> np.ndarray:
        """Return the client's training rows, or those that it holds out."""
        return self.task.client_rows(int(self.told["seed"]), self.client)[held_out]

    def model(self, tensors: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return the client's model, with these tensors or to load weights into."""
        ranks = self.task.experiment.ranks
        rank = ranks[self.client % len(ranks)]
        model = _empty_model(self.told["experiment"], rank, self.told["loads"])
        if tensors is not None:
            load_tensors(model, tensors, self.told["loads"])
        return model

    def batches(self, rows: np.ndarray, limit: int, size: int) -> Any:
        """Return batches of at most ``limit`` of these rows, in random order."""
        return training.step_batches(
            self.task, self.model(), rows, limit, size, self.stream
        )


@lru_cache(maxsize=4)
def _empty_model(experiment_json: str, rank: int | None, loads: str) -> nn.Module:
    """Return a model to load weights into; loading takes less time than building.

    Adapters have one model per rank and loader: a plug-in's loader may change base
    weights.
    """
    # Clients share the machine's cores; more threads than cores are slower.
    torch.set_num_threads(1)
    task = task_of(experiment_json)
    return build_model(task.experiment, task.data, seed=0, rank=rank)


def _labelled(message: Message, context: Context) -> LabelledRows:
    job = ClientJob.read(message, context)
    kept, held_out = (
        partial(job.batches, rows, len(rows), HEAD_BATCH)
        for rows in map(job.rows, (False, True))
    )
    return LabelledRows(job.model, kept, held_out)


def _matching(message: Message, context: Context) -> Matching:
    job = ClientJob.read(message, context)
    experiment, data = job.task.experiment, job.task.data
    batches = partial(job.batches, job.rows(), MATCHING_ROWS, experiment.batch_size)
    return Matching(partial(build_model, experiment, data, seed=0), batches)


answer_with_sums(app, _labelled)
match_at_client(app, _matching)


@app.query()
def who(message: Message, context: Context) -> Message:
    """Answer with the node's partition id."""
    return Message(_own(context), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train from the received model, or from the client's own initial model, and return
    the update.
    """
    job = ClientJob.read(message, context)
    task, rows, content = job.task, job.rows(), _own(context)
    (arrays,) = message.content.array_records.values()
    state, loss = _trained(job, arrays)
    known = ~np.isnan(task.data.train.labels[rows].astype(np.float32))
    if not known.all():  # The client's data has only some of the labels.
        received = arrays.to_torch_state_dict()
        settings = model_config(task.experiment, task.data)
        head = (
            adapter_task_head_of(received)
            if task.experiment.lora
            else task_head_of(settings, received)
        )
        names = received.keys() & {f"{head}.weight", f"{head}.bias"}
        labels = np.flatnonzero(known.any(axis=0)).tolist()
        state, statistics = fedrot.completed(
            state, received, dict.fromkeys(names, labels)
        )
        content[STATISTICS] = statistics_record(statistics)
    if task.experiment.start == "scrambled":
        symmetry = symmetry_of(model_config(task.experiment, task.data), state)
        state = fedrot.random_equivalent(state, symmetry, seed=job.stream)
    content["arrays"] = ArrayRecord(state)
    content["metrics"] = MetricRecord({"num-examples": len(rows), "train-loss": loss})
    if wanted_statistics(message):
        most = int(job.told["batches"])
        batches = partial(
            job.batches, rows, most * STATISTICS_BATCH or len(rows), STATISTICS_BATCH
        )
        add_statistics(
            content, message, job.model(state), batches, max_batches=most or None
        )
    return Message(content, reply_to=message)


def _own(context: Context) -> RecordDict:
    """Return a reply's content with the node's partition id."""
    return RecordDict(
        {
            CLIENT_RECORD: ConfigRecord(
                {CLIENT_KEY: int(context.node_config[CLIENT_KEY])}
            )
        }
    )


def _trained(job: ClientJob, arrays: ArrayRecord) -> tuple[dict[str, Tensor], float]:
    """Return the client's trained tensors and its loss; strategies that send the same
    model train once.

    In the first round all strategies send the same model. Later, two do so only as long
    as their averages have the same bits; therefore trainings of later rounds are kept
    only while the folder is small. Clients on other machines do not have the folder.
    """
    task, told = job.task, job.told
    what = [
        task.experiment.training,
        told["lr"],
        job.stream,
        told["loads"],
        arrays.object_id,
    ]
    folder = Path(told["cache"])
    path = folder / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()}.pt"
    shared = told["cache"] != "" and os.access(folder, os.W_OK)
    if shared and path.exists():
        found: tuple[dict[str, Tensor], float] = torch.load(path, weights_only=True)
        return found
    model = job.model(arrays.to_torch_state_dict())
    if task.experiment.start == "different" and told["server-round"] == 1:
        own = build_model(task.experiment, task.data, seed=job.stream)
        model.load_state_dict(own.state_dict())
    epochs = task.experiment.epochs(told["server-round"])
    loss = training.train(model, task, job.rows(), job.stream, epochs, told["lr"])
    found = tensors_of(model), loss
    kept = sum(file.stat().st_size for file in folder.glob("*.pt")) if shared else 0
    if shared and (told["server-round"] == 1 or kept < KEPT_BYTES):
        with replacing(path) as temporary:
            torch.save(found, temporary)
    return found
