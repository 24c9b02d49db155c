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
from typing import Any, TypeAlias

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
from fedrot.strategies.wire.records import STATISTICS, statistics_record, wanted_statistics
from fedrot.symmetry import Symmetry, symmetry_of

#: Size in bytes above which a cache folder takes no results of later rounds.
KEPT_BYTES = 2**30
#: Rows per batch when a task head is fitted, and for statistics (Jin et al. 2023, section 5.1).
HEAD_BATCH, STATISTICS_BATCH = 64, 16
#: Maximum number of training rows for matching at a client.
MATCHING_ROWS = 4096

State: TypeAlias = dict[str, Tensor]
Result: TypeAlias = tuple[State, dict[str, float]]

app = ClientApp()


@dataclass(frozen=True)
class ClientJob:
    """One message of the server to one client.

    ``told`` has the experiment as JSON, ``seed``, ``lr``, ``server-round``, ``cache``
    (folder of results that strategies share; empty for none), ``align`` (parts that are aligned at the
    client) with their ``chance``, ``batches`` (for statistics; 0: the limit of their kind) and ``loads``
    (how an adapter is loaded, see ``LOADERS``); a plug-in's strategy may add ``fedrot-train``, see
    ``train_only``.
    """

    told: Mapping[str, Any]
    client: int  # Partition id of the node.

    @classmethod
    def read(cls, message: Message, context: Context) -> ClientJob:
        """Read a job from a message and the node's context."""
        (told,) = message.content.config_records.values()
        return cls(told, int(context.node_config[CLIENT_KEY]))

    @property
    def stream(self) -> int:
        """The random seed of this client in this round and run."""
        return (int(self.told["seed"]) * 1_000 + int(self.told["server-round"])) * 1_000 + self.client

    @property
    def task(self) -> Task:
        """The experiment's data and objective."""
        return task_of(self.told["experiment"])

    def rows(self, held_out: bool = False) -> np.ndarray:
        """Return the client's training rows, or those that it holds out."""
        return self.task.client_rows(int(self.told["seed"]), self.client)[held_out]

    @property
    def own_start(self) -> bool:
        """Whether the client trains from its own initial model."""
        return self.task.experiment.start == "different" and self.told["server-round"] == 1

    def model(self) -> nn.Module:
        """Return the client's model, to load weights into."""
        rank = self.task.experiment.rank_of(self.client)
        return _empty_model(self.told["experiment"], rank, self.told["loads"])

    def loaded(self, arrays: ArrayRecord) -> nn.Module:
        """Return the client's model with the tensors of a message."""
        model = self.model()
        load_tensors(model, arrays.to_torch_state_dict(), self.told["loads"])
        return model

    def batches(self, rows: np.ndarray, limit: int, size: int) -> Any:
        """Return batches of at most ``limit`` of these rows, in random order."""
        return training.step_batches(self.task, self.model(), rows, limit, size, self.stream)

    @property
    def known_labels(self) -> list[int] | None:
        """The labels for which the client's rows have values; None if these are all labels."""
        known = ~np.isnan(self.task.data.train.labels[self.rows()].astype(np.float32))
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


def _labelled(message: Message, context: Context) -> LabelledRows:
    """Return the rows, in batches, for the client's answers about the task head."""
    job = ClientJob.read(message, context)
    kept, held_out = (
        partial(job.batches, rows, len(rows), HEAD_BATCH) for rows in map(job.rows, (False, True))
    )
    return LabelledRows(job.model, kept, held_out)


def _matching(message: Message, context: Context) -> Matching:
    """Return a model, and batches of the client's training rows, for matching."""
    job = ClientJob.read(message, context)
    experiment, data = job.task.experiment, job.task.data
    batches = partial(job.batches, job.rows(), MATCHING_ROWS, experiment.batch_size)
    return Matching(lambda: build_model(experiment, data, seed=0), batches)


answer_with_sums(app, _labelled)
match_at_client(app, _matching)


@app.query()
def who(message: Message, context: Context) -> Message:
    """Answer with the node's partition id."""
    return Message(_content(context), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train from the received model, or from the client's own initial model, and return the update."""
    job = ClientJob.read(message, context)
    (arrays,) = message.content.array_records.values()
    state, metrics = _trained(job, arrays)
    statistics: Statistics = {}
    known = job.known_labels
    if known is not None:
        rows = dict.fromkeys(_task_head(job), known)
        state, statistics = fedrot.completed(state, arrays.to_torch_state_dict(), rows)
    if job.task.experiment.start == "scrambled":
        state = fedrot.random_equivalent(state, job.symmetry(state), seed=job.stream)
    if job.told["align"]:
        # Like align_mod, but before the statistics of the update are computed.
        received = arrays.to_torch_state_dict()
        options = AlignmentOptions(parts=job.told["align"].split("+"), chance=job.told["chance"])
        state = fedrot.align(state, received, job.symmetry(state), options).apply(state)
    content = RecordDict({"arrays": ArrayRecord(state)})
    if statistics:
        content[STATISTICS] = statistics_record(statistics)
    metrics = {**metrics, **_add_statistics(job, message, state, content)}
    return Message(RecordDict({**content, **_content(context, metrics)}), reply_to=message)


def _content(context: Context, metrics: Mapping[str, float] | None = None) -> RecordDict:
    """Return a reply's records: the client's id, and its metrics."""
    content = RecordDict({} if metrics is None else {"metrics": MetricRecord({**metrics})})
    content[CLIENT_RECORD] = ConfigRecord({CLIENT_KEY: int(context.node_config[CLIENT_KEY])})
    return content


def _trained(job: ClientJob, arrays: ArrayRecord) -> Result:
    """Return the client's trained tensors and metrics; the same message trains once."""
    task, told = job.task, job.told
    factors = str(told.get("fedrot-train", "both"))

    def compute() -> Result:
        model = job.loaded(arrays)
        if job.own_start:
            own = build_model(task.experiment, task.data, seed=job.stream)
            model.load_state_dict(own.state_dict())
        if task.experiment.lora:
            train_only(model, factors)
        start, epochs = perf_counter(), task.experiment.epochs(told["server-round"])
        loss = training.train(model, task, job.rows(), job.stream, epochs, told["lr"])
        metrics = {"num-examples": len(job.rows()), "train-loss": loss}
        metrics["seconds-training"] = perf_counter() - start
        return tensors_of(model), metrics

    how = [told["lr"], job.stream, job.own_start, factors, told["loads"]]
    return _cached(job, [task.experiment.training, *how], arrays, compute)


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
    kinds, most, rows = wanted_statistics(message), int(job.told["batches"]), job.rows()
    if not kinds:
        return {}

    def compute() -> Result:
        start, found = perf_counter(), RecordDict()
        model = job.loaded(ArrayRecord(state))
        batches = partial(job.batches, rows, most * STATISTICS_BATCH or len(rows), STATISTICS_BATCH)
        add_statistics(found, message, model, batches, max_batches=most or None)
        record = found.array_records[STATISTICS].to_torch_state_dict()
        return record, {"seconds-statistics": perf_counter() - start}

    record, seconds = _cached(job, [kinds, job.stream, most], ArrayRecord(state), compute)
    before = content.array_records.get(STATISTICS, ArrayRecord())
    content[STATISTICS] = ArrayRecord({**before, **ArrayRecord(record)})
    return seconds


def _cached(job: ClientJob, what: Any, arrays: ArrayRecord, compute: Callable[[], Result]) -> Result:
    """Compute a result once for all strategies that send a client the same model.

    In the first round all strategies send the same model. Later, two do so only as long as their
    averages have the same bits; therefore results of later rounds are kept only while the folder is
    small. Clients on other machines do not have the folder.
    """
    folder = Path(job.told["cache"])
    if not job.told["cache"] or not folder.is_dir():
        return compute()
    from safetensors import safe_open

    key = hashlib.sha256(json.dumps(what).encode())
    for name, array in sorted(arrays.items()):
        key.update(name.encode())
        key.update(array.data)
    path = folder / f"{key.hexdigest()}.safetensors"
    if path.exists():
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            state = {name: file.get_tensor(name) for name in names}
            return state, json.loads(file.metadata()["metrics"])
    state, metrics = compute()
    kept = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if job.told["server-round"] == 1 or kept < KEPT_BYTES:
        separate = {name: tensor.contiguous() for name, tensor in state.items()}
        with replacing(path) as temporary:
            write_tensors(temporary, separate, {"metrics": json.dumps(metrics)})
    return state, metrics
