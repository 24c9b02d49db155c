"""The Flower ClientApp of simulations: training on the rows of one client.

Its replies depend only on the message and the node's partition id.
"""

from __future__ import annotations

import hashlib
import json
import os
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
from fedrot.simulations.models import build_model, load_tensors, model_config
from fedrot.simulations.scenario import Settings
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task, task_of
from fedrot.strategies import (
    LabelledRows,
    Privacy,
    add_statistics,
    answer_with_sums,
)
from fedrot.strategies.client.moves import Matching, match_at_client
from fedrot.strategies.client.privacy import USUAL_PRIVACY
from fedrot.strategies.round.asked import CLIENT_KEY, CLIENT_RECORD
from fedrot.strategies.wire.arrays import STATISTICS
from fedrot.strategies.wire.fitting_messages import (
    COUNT_CLASSES,
    PROBLEM_TYPE,
    STAGE,
)
from fedrot.strategies.wire.loaded_model import tensors_of
from fedrot.strategies.wire.statistics_record import (
    statistics_record,
    wanted_statistics,
)
from fedrot.symmetry import symmetry_of
from fedrot.task_head.names import task_head_names, task_head_of
from fedrot.tensors import Tensors

#: Size in bytes above which a folder of shared trainings takes none of later rounds.
KEPT_BYTES = 2**30
#: Rows per batch when a task head is fitted.
HEAD_BATCH = 64
#: Rows per batch for statistics (Jin et al. 2023, section 5.1).
STATISTICS_BATCH = 16
#: Maximum number of training rows for matching at a client.
MATCHING_ROWS = 4096

app = ClientApp()


@dataclass(frozen=True)
class ClientJob:
    """One message to a client.

    Attributes:
        settings: the message's fields, as ``CellRun.job``. ``batches`` is the most
            batches for statistics, ``loads`` a key of ``models.LOADERS``, ``cache`` the
            folder of shared trainings.
        client: its partition id.
    """

    settings: Settings
    client: int

    @classmethod
    def read(cls, message: Message, context: Context) -> ClientJob:
        """Read a job from a message and the node's context."""
        (settings,) = message.content.config_records.values()
        return cls(settings, int(context.node_config[CLIENT_KEY]))

    @property
    def stream(self) -> int:
        """The random seed of this client in this round and run."""
        return (self.seed * 1_000 + self.round) * 1_000 + self.client

    @property
    def seed(self) -> int:
        """The seed of the cell."""
        return self.settings["seed"]

    @property
    def round(self) -> int:
        """The number of the server's round."""
        return self.settings["server-round"]

    @property
    def task(self) -> Task:
        """The experiment's data and objective."""
        return task_of(self.settings["experiment"])

    def rows(self, held_out: bool = False) -> np.ndarray:
        """Return the client's training rows, or those that it holds out."""
        return self.task.client_rows(self.seed, self.client)[held_out]

    def model(self, tensors: Tensors | None = None) -> nn.Module:
        """Return the client's model, with these tensors or to load weights into."""
        model, _ = self._kept
        if tensors is not None:
            load_tensors(model, tensors, self.settings["loads"])
        return model

    def built(self) -> nn.Module:
        """Return the client's model as it was built."""
        model, first = self._kept
        load_tensors(model, first, "")
        return model

    @property
    def _kept(self) -> tuple[nn.Module, Tensors]:
        ranks = self.task.experiment.ranks
        return _empty_model(
            self.settings["experiment"],
            ranks[self.client % len(ranks)],
            self.settings["loads"],
        )

    def batches(self, rows: np.ndarray, size: int, limit: int = 0) -> Any:
        """Return batches of these rows, in random order.

        They have at most ``limit`` rows in all; 0: no limit.
        """
        return training.step_batches(
            self.task, self.model(), rows, limit or len(rows), size, self.stream
        )


@lru_cache(maxsize=4)
def _empty_model(
    experiment_json: str, rank: int | None, loads: str
) -> tuple[nn.Module, Tensors]:
    """Return a model to load weights into, and its first tensors.

    Loading takes less time than building.

    Adapters have one model per rank and loader: a plug-in's loader may change base
    weights.
    """
    # Clients share the machine's cores; more threads than cores are slower.
    torch.set_num_threads(1)
    task = task_of(experiment_json)
    model = build_model(task.experiment, task.data, seed=0, rank=rank)
    return model, tensors_of(model)


def _labelled(message: Message, context: Context) -> LabelledRows:
    job = ClientJob.read(message, context)
    rows = LabelledRows(
        job.built,
        partial(job.batches, job.rows(), HEAD_BATCH),
        partial(job.batches, job.rows(held_out=True), HEAD_BATCH),
    )
    # Priors are those of all rows, for all strategies.
    if job.settings[STAGE] == COUNT_CLASSES:
        return rows
    fewest = job.task.experiment.min_class_rows
    privacy = Privacy(fewest, USUAL_PRIVACY.min_rows if fewest > 1 else 1)
    return privacy.kept(rows, job.settings[PROBLEM_TYPE])


def _matching(message: Message, context: Context) -> Matching:
    job = ClientJob.read(message, context)
    experiment = job.task.experiment
    return Matching(
        partial(build_model, experiment, job.task.data, seed=0),
        partial(job.batches, job.rows(), experiment.batch_size, MATCHING_ROWS),
    )


# ``_labelled`` leaves rows out.
answer_with_sums(app, _labelled, privacy=Privacy(1, 1))
match_at_client(app, _matching)


@app.query()
def who(message: Message, context: Context) -> Message:
    """Answer with the node's partition id."""
    return Message(_identified(context), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train from the received model, and return the update.

    In the first round of an experiment with different starts, it trains from the
    client's own initial model.
    """
    job = ClientJob.read(message, context)
    task = job.task
    rows = job.rows()
    content = _identified(context)
    (arrays,) = message.content.array_records.values()
    state, loss = _trained(job, arrays)
    known = ~np.isnan(task.data.train.labels[rows].astype(np.float32))
    # A domain has only some of the labels. Adapters know no domains.
    if not known.all():
        received = arrays.to_torch_state_dict()
        settings = model_config(task.experiment, task.data)
        task_head = task_head_of(settings, received)
        names = received.keys() & {*task_head_names(task_head)}
        state, statistics = fedrot.completed(
            state,
            received,
            dict.fromkeys(names, np.flatnonzero(known.any(axis=0)).tolist()),
        )
        content[STATISTICS] = statistics_record(statistics)
    if task.experiment.start == "scrambled":
        state = fedrot.random_equivalent(
            state,
            symmetry_of(model_config(task.experiment, task.data), state),
            seed=job.stream,
        )
    content["arrays"] = ArrayRecord(state)
    content["metrics"] = MetricRecord({"num-examples": len(rows), "train-loss": loss})
    if wanted_statistics(message):
        most = job.settings["batches"]
        add_statistics(
            content,
            message,
            job.model(state),
            partial(job.batches, rows, STATISTICS_BATCH, most * STATISTICS_BATCH),
            max_batches=most or None,
        )
    return Message(content, reply_to=message)


def _identified(context: Context) -> RecordDict:
    """Return a reply's content with the node's partition id."""
    client = int(context.node_config[CLIENT_KEY])
    return RecordDict({CLIENT_RECORD: ConfigRecord({CLIENT_KEY: client})})


def _trained(job: ClientJob, arrays: ArrayRecord) -> tuple[dict[str, Tensor], float]:
    """Return the client's trained tensors and its loss.

    Strategies that send the same model train once. In the first round all strategies
    send the same model. Later, two do so only as long as their averages have the same
    bits; therefore trainings of later rounds are kept only while the folder is small.
    Clients on other machines do not have the folder.
    """
    settings = job.settings
    experiment = job.task.experiment
    what = [
        experiment.training,
        settings["lr"],
        job.stream,
        settings["loads"],
        arrays.object_id,
    ]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    folder = Path(settings["cache"])
    path = folder / f"{key}.pt"
    shared = settings["cache"] and os.access(folder, os.W_OK)
    if shared and path.exists():
        return torch.load(path, weights_only=True)
    model = job.model(arrays.to_torch_state_dict())
    if experiment.start == "different" and job.round == 1:
        model.load_state_dict(
            build_model(experiment, job.task.data, seed=job.stream).state_dict()
        )
    loss = training.train(
        model,
        job.task,
        job.rows(),
        job.stream,
        experiment.epochs(job.round),
        settings["lr"],
    )
    result = tensors_of(model), loss
    if shared:
        kept = sum(file.stat().st_size for file in folder.glob("*.pt"))
        if job.round == 1 or kept < KEPT_BYTES:
            with replacing(path) as temporary:
                torch.save(result, temporary)
    return result
