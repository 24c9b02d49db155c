"""The Flower ClientApp of simulations: training and evaluation on the rows of one client.

Its replies depend only on the message and the node's partition id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

import fedrot
from fedrot._io import replacing, write_tensors
from fedrot.collect.statistics import Statistics
from fedrot.lora import train_only
from fedrot.options import AlignmentOptions
from fedrot.simulations.models import build_model, load_tensors, model_config, tensors_of
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.strategies import LabelledRows, add_statistics, answer_with_sums
from fedrot.strategies.client_matching import Matching, match_at_client
from fedrot.strategies.round.inbox import CLIENT_KEY, CLIENT_RECORD
from fedrot.strategies.wire.records import (
    STATISTICS,
    statistics_record,
    wanted_statistics,
)
from fedrot.symmetry import Symmetry, symmetry_of

#: Prefix of the metrics of a client's own model, before averaging, on the data set's held-out split.
ALONE = "alone-"
#: Size in bytes above which a cache folder takes no results of later rounds.
KEPT_BYTES = 2**30
#: Key for the factors of an adapter that clients train, which a plug-in's strategy may set.
FACTORS = "fedrot-train"
#: Rows per batch when a task head is fitted, and for statistics (Jin et al. 2023, section 5.1).
HEAD_BATCH, STATISTICS_BATCH = 64, 16
#: Maximum number of training rows for matching at a client.
MATCHING_ROWS = 4096

State: TypeAlias = dict[str, Tensor]
Result: TypeAlias = tuple[State, dict[str, float]]

app = ClientApp()


@dataclass(frozen=True)
class ClientJob:
    """One message of the server to one client."""

    experiment_json: str
    seed: int
    lr: float
    round: int
    last_round: int
    cache: str  # Folder of results that arms share; empty for none.
    align: tuple[str, ...]  # Parts that are aligned at the client.
    chance: float  # See AlignmentOptions.
    statistics_batches: int  # Number of batches for statistics; 0: the limit of their kind.
    factors: str  # Factors of an adapter that the client trains; see train_only.
    loads: str  # How an adapter is loaded; see LOADERS.
    client: int  # Partition id of the node.

    @classmethod
    def read(cls, message: Message, context: Context) -> ClientJob:
        """Read a job from a message and the node's context."""
        config: Any
        (config,) = message.content.config_records.values()
        return cls(
            experiment_json=str(config["experiment"]),
            seed=int(config["seed"]),
            lr=float(config["lr"]),
            round=int(config["server-round"]),
            last_round=int(config["last-round"]),
            cache=str(config["cache"]),
            align=tuple(part for part in str(config["align"]).split("+") if part),
            chance=cast(float, config["chance"]),
            statistics_batches=int(config["batches"]),
            factors=str(config.get(FACTORS, "both")),
            loads=str(config["loads"]),
            client=int(context.node_config[CLIENT_KEY]),
        )

    @property
    def stream(self) -> int:
        """The random seed of this client in this round and run."""
        return (self.seed * 1_000 + self.round) * 1_000 + self.client

    @property
    def task(self) -> Task:
        """The experiment's data and objective."""
        return task_of(self.experiment_json)

    @property
    def rows(self) -> np.ndarray:
        """The client's training rows."""
        return self.task.client_rows(self.seed, self.client)[0]

    @property
    def own_start(self) -> bool:
        """Whether the client trains from its own initial model."""
        return self.task.experiment.start == "different" and self.round == 1

    def model(self) -> nn.Module:
        """Return the client's model, to load weights into."""
        adapter = self.task.experiment.adapter
        return _empty_model(self.experiment_json, adapter and adapter.rank_of(self.client), self.loads)

    def batches(self, limit: int, size: int) -> Any:
        """Return batches of at most ``limit`` random training rows."""
        model = self.model()
        return training.step_batches(self.task, model, self.rows, limit, size, self.stream)

    def of_task_head(self) -> LabelledRows:
        """Return the rows, in batches, for the client's answers about the task head."""
        kept, held_out = self.task.client_rows(self.seed, self.client)
        training_rows, held_out_rows = (
            partial(
                training.step_batches, self.task, self.model(), rows, len(rows), HEAD_BATCH, self.stream
            )
            for rows in (kept, held_out)
        )
        return LabelledRows(self.model, training_rows, held_out_rows)

    @property
    def known_labels(self) -> list[int] | None:
        """The labels for which the client's rows have values; None if these are all labels."""
        known = ~np.isnan(self.task.data.train.labels[self.rows].astype(np.float32))
        return None if known.all() else np.flatnonzero(known.any(axis=0)).tolist()

    def symmetry(self, state: Mapping[str, Tensor]) -> Symmetry:
        """Return the symmetry of the experiment's model."""
        return symmetry_of(model_config(self.task.experiment, self.task.data), state)


@lru_cache(maxsize=4)
def _empty_model(experiment_json: str, rank: int | None, loads: str) -> nn.Module:
    """Return a model to load weights into; loading takes less time than building.

    Adapters have one model per rank and loader: a plug-in's loader may change base weights.
    """
    # Clients share the machine's cores; more threads than cores are slower.
    torch.set_num_threads(1)
    task = task_of(experiment_json)
    return build_model(task.experiment, task.data, seed=0, rank=rank)


answer_with_sums(app, lambda message, context: ClientJob.read(message, context).of_task_head())


@app.query()
def who(message: Message, context: Context) -> Message:
    """Answer with the node's partition id."""
    return Message(_content(context), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train from the received model, or from the client's own initial model, and return the update."""
    job = ClientJob.read(message, context)
    (arrays,) = message.content.array_records.values()
    # All that determines the trained model; scrambling is done after the cache.
    experiment = job.task.experiment
    how = [experiment.training, job.lr, job.stream, job.last_round, job.own_start]
    key = _hashed([*how, job.factors, job.loads], arrays)
    state, metrics = _cached(job, key, lambda: _train(job, arrays))
    statistics: Statistics = {}
    if job.known_labels is not None:
        received = arrays.to_torch_state_dict()
        rows = dict.fromkeys(_task_head(job), job.known_labels)
        state, statistics = fedrot.completed(state, received, rows)
    if experiment.start == "scrambled":
        state = fedrot.random_equivalent(state, job.symmetry(state), seed=job.stream)
    if job.align:
        # Like align_mod, but before the statistics of the update are computed.
        received = arrays.to_torch_state_dict()
        options = AlignmentOptions(parts=job.align, chance=job.chance)
        state = fedrot.align(state, received, job.symmetry(state), options).apply(state)
    content = RecordDict()
    content["arrays"] = ArrayRecord(state)
    if statistics:
        content[STATISTICS] = statistics_record(statistics)
    metrics |= _add_statistics(job, message, state, content)
    return Message(RecordDict({**content, **_content(context, metrics)}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global model on the client's held-out rows."""
    job = ClientJob.read(message, context)
    (arrays,) = message.content.array_records.values()
    _, held_out = job.task.client_rows(job.seed, job.client)
    model = job.model()
    load_tensors(model, arrays.to_torch_state_dict(), job.loads)
    metrics = training.evaluate(model, job.task, job.task.train, held_out)
    content = _content(context, {"num-examples": len(held_out), **metrics})
    return Message(content, reply_to=message)


def _matching(message: Message, context: Context) -> Matching:
    """Return a model, and batches of the client's training rows, for matching."""
    job = ClientJob.read(message, context)
    experiment = job.task.experiment
    return Matching(
        build=lambda: build_model(experiment, job.task.data, seed=0),
        batches=lambda: job.batches(MATCHING_ROWS, experiment.batch_size),
    )


match_at_client(app, _matching)


def _content(context: Context, metrics: Mapping[str, float] | None = None) -> RecordDict:
    """Return a reply's records: the client's id, and its metrics."""
    content = RecordDict({} if metrics is None else {"metrics": MetricRecord({**metrics})})
    content[CLIENT_RECORD] = ConfigRecord({CLIENT_KEY: int(context.node_config[CLIENT_KEY])})
    return content


def _train(job: ClientJob, arrays: ArrayRecord) -> Result:
    task, model = job.task, job.model()
    if job.own_start:
        own = build_model(task.experiment, task.data, seed=job.stream)
        model.load_state_dict(own.state_dict())
    else:
        load_tensors(model, arrays.to_torch_state_dict(), job.loads)
    if task.experiment.lora:
        train_only(model, job.factors)
    start = perf_counter()
    epochs = task.experiment.epochs(job.round)
    loss = training.train(model, task, job.rows, job.stream, epochs, job.lr)
    seconds = {"seconds-training": perf_counter() - start}
    metrics = {"num-examples": len(job.rows), "train-loss": loss, **seconds}
    if job.round == job.last_round:
        alone = training.evaluate(model, task, task.test, np.arange(len(task.test.labels)))
        metrics |= {f"{ALONE}{k}": v for k, v in alone.items()}
    return tensors_of(model), metrics


def _task_head(job: ClientJob) -> list[str]:
    """Return the parameters of a classifier with a row for each label."""
    model: Any = job.model()
    encoder, labels = f"{model.base_model_prefix}.", model.config.num_labels
    named = model.named_parameters()
    return [name for name, p in named if not name.startswith(encoder) and len(p) == labels]


def _add_statistics(
    job: ClientJob, message: Message, state: State, content: RecordDict
) -> dict[str, float]:
    """Add statistics of an update on the client's training rows; return their time in seconds."""
    kinds, most = wanted_statistics(message), job.statistics_batches
    if not kinds:
        return {}

    def compute() -> Result:
        start = perf_counter()
        model, found = job.model(), RecordDict()
        load_tensors(model, state)
        batches = partial(job.batches, most * STATISTICS_BATCH or len(job.rows), STATISTICS_BATCH)
        add_statistics(found, message, model, batches, max_batches=most or None)
        record = found.array_records[STATISTICS].to_torch_state_dict()
        return record, {"seconds-statistics": perf_counter() - start}

    key = _hashed([kinds, job.stream, most], ArrayRecord(state))
    record, seconds = _cached(job, key, compute)
    before = content.array_records.get(STATISTICS, ArrayRecord())
    content[STATISTICS] = ArrayRecord({**before, **ArrayRecord(record)})
    return seconds


def _hashed(what: Any, arrays: ArrayRecord) -> str:
    key = hashlib.sha256(json.dumps(what).encode())
    for name, array in sorted(arrays.items()):
        key.update(name.encode())
        key.update(array.data)
    return key.hexdigest()


def _cached(job: ClientJob, key: str, compute: Callable[[], Result]) -> Result:
    """Compute a result once for all arms that send a client the same model.

    In the first round all arms send the same model. Later, two arms do so only as long as their averages
    have the same bits; therefore results of later rounds are kept only while the folder is small.
    Clients on other machines do not have the folder.
    """
    folder = Path(job.cache)
    if not job.cache or not folder.is_dir():
        return compute()
    from safetensors import safe_open

    path = folder / f"{key}.safetensors"
    if path.exists():
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            state = {name: file.get_tensor(name) for name in names}
            return state, json.loads(file.metadata()["metrics"])
    state, metrics = compute()
    kept = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if job.round == 1 or kept < KEPT_BYTES:
        separate = {name: tensor.contiguous() for name, tensor in state.items()}
        with replacing(path) as temporary:
            write_tensors(temporary, separate, {"metrics": json.dumps(metrics)})
    return state, metrics
