"""The Flower ClientApp: train on the own partition, evaluate on the own held-out rows.

Everything it needs comes in the message's configuration and the node's partition id, so the same app
runs in the simulation engine and in a federation of real nodes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedrot._io import replacing
from fedrot.aggregation.statistic_kinds import FISHER, GRAMS
from fedrot.strategies.client_matching import Matching, match_at_client
from fedrot.strategies.round.inbox import CLIENT_KEY, CLIENT_RECORD
from fedrot.strategies.wire.records import STATISTICS, statistics_record, wanted_statistics

if TYPE_CHECKING:
    import torch

    from fedrot.simulations.tasks.task import Task
    from fedrot.symmetry import Symmetry

#: Metrics of a client's own model, before averaging, on the central held-out split.
ALONE = "alone-"

app = ClientApp()


@dataclass(frozen=True)
class Job:
    """What one message asks for."""

    config_json: str
    seed: int
    start: str
    round: int
    last_round: int
    cache: str
    learn: bool
    align: tuple[str, ...]
    client: int

    @classmethod
    def read(cls, message: Message, context: Context) -> Job:
        """Read a job from a message and its node."""
        (config,) = message.content.config_records.values()
        return cls(
            config_json=str(config["simulation"]),
            seed=int(config["seed"]),  # type: ignore[arg-type]
            start=str(config["start"]),
            round=int(config["server-round"]),  # type: ignore[arg-type]
            last_round=int(config["last-round"]),  # type: ignore[arg-type]
            cache=str(config["cache"]),
            learn=bool(config["learn"]),
            align=tuple(part for part in str(config["align"]).split("+") if part),
            client=int(context.node_config[CLIENT_KEY]),
        )

    @property
    def stream(self) -> int:
        """A seed of its own for every client, round and run."""
        return (self.seed * 1_000 + self.round) * 1_000 + self.client


@app.query()
def who(message: Message, context: Context) -> Message:
    """Answer with the node's partition id."""
    return Message(RecordDict({CLIENT_RECORD: _identity(context)}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train from the received model (or from an own start) and return the update."""
    from fedrot.simulations.tasks.task import task_of

    job = Job.read(message, context)
    task = task_of(job.config_json)
    (arrays,) = message.content.array_records.values()
    state, metrics = _cached(job, _training_key(job, arrays), lambda: _train(job, task, arrays))
    if job.start == "scrambled":
        state = _scrambled(job, task, state)
    if job.align:
        state = _aligned(job, task, state, arrays.to_torch_state_dict())
    content = RecordDict(
        {
            "arrays": ArrayRecord(state),
            "metrics": MetricRecord({**metrics}),
            CLIENT_RECORD: _identity(context),
        }
    )
    kinds = wanted_statistics(message)
    if kinds:
        content[STATISTICS] = _statistics(job, task, state, kinds)
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global model on the client's own held-out rows."""
    from fedrot.simulations.tasks import training
    from fedrot.simulations.tasks.task import task_of

    job = Job.read(message, context)
    task = task_of(job.config_json)
    (arrays,) = message.content.array_records.values()
    _, held_out = task.client_rows(job.seed, job.client)
    model = _model(job, task)
    model.load_state_dict(arrays.to_torch_state_dict())
    metrics = training.evaluate(model, task, task.train, held_out)
    content = RecordDict(
        {
            "metrics": MetricRecord({"num-examples": len(held_out), **metrics}),
            CLIENT_RECORD: _identity(context),
        }
    )
    return Message(content, reply_to=message)


#: Training rows that a client matches on.
MATCHING_ROWS = 4096


def _matching(message: Message, context: Context) -> Matching:
    """Match on the client's own training rows, in batches as it trains on them."""
    from fedrot.research.learning import LearningOptions
    from fedrot.simulations.models.build import build_model
    from fedrot.simulations.tasks.task import task_of
    from fedrot.simulations.tasks.training import step_batches

    job = Job.read(message, context)
    task = task_of(job.config_json)
    rows, _ = task.client_rows(job.seed, job.client)
    limit, size = MATCHING_ROWS, task.config.batch_size
    return Matching(
        build=lambda: build_model(task.config, task.data, seed=0),
        batches=lambda: step_batches(task, _model(job, task), rows, limit, size, job.stream),
        learning=LearningOptions() if job.learn else None,
    )


match_at_client(app, _matching)


def _identity(context: Context) -> ConfigRecord:
    return ConfigRecord({CLIENT_KEY: int(context.node_config[CLIENT_KEY])})


@lru_cache(maxsize=1)
def _empty_model(config_json: str) -> torch.nn.Module:
    """Building a model costs more than loading weights into it."""
    import torch

    from fedrot.simulations.models.build import build_model
    from fedrot.simulations.tasks.task import task_of

    # Clients share the machine's cores; more threads than cores only get in each other's way.
    torch.set_num_threads(1)
    task = task_of(config_json)
    return build_model(task.config, task.data, seed=0)


def _model(job: Job, task: Task) -> torch.nn.Module:
    return _empty_model(task.config.to_json())


def _train(
    job: Job, task: Task, arrays: ArrayRecord
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    import numpy as np

    from fedrot.simulations.models.build import build_model
    from fedrot.simulations.tasks import training

    model = _model(job, task)
    if job.start == "different" and job.round == 1:
        own = build_model(task.config, task.data, seed=job.stream)
        model.load_state_dict(own.state_dict())
    else:
        model.load_state_dict(arrays.to_torch_state_dict())
    if task.config.task_head == "different" and job.round == 1:
        _draw_head(model, build_model(task.config, task.data, seed=job.stream))
    rows, _ = task.client_rows(job.seed, job.client)
    epochs = task.config.epochs(job.round)
    loss = training.train(model, task, rows, job.stream, epochs)
    metrics = {"num-examples": len(rows), "train-loss": loss}
    if job.round == job.last_round:
        everything = np.arange(len(task.test.labels))
        alone = training.evaluate(model, task, task.test, everything)
        metrics |= {f"{ALONE}{name}": value for name, value in alone.items()}
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, metrics


def _draw_head(model: Any, other: Any) -> None:
    """Give a model another's task head: the parameters beside the encoder that it does not share."""
    encoder = f"{model.base_model_prefix}."
    head = {name: p for name, p in other.named_parameters() if not name.startswith(encoder)}
    model.load_state_dict(head, strict=False)


def _scrambled(job: Job, task: Task, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from fedrot import random_equivalent

    return random_equivalent(state, _symmetry(task, state), seed=job.stream)


def _aligned(
    job: Job, task: Task, state: dict[str, torch.Tensor], received: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Align at the client, as ``align_mod`` does, where statistics have to come after it."""
    from fedrot import AlignmentOptions, align

    options = AlignmentOptions(parts=job.align)
    return align(state, received, _symmetry(task, state), options).apply(state)


def _symmetry(task: Task, state: dict[str, torch.Tensor]) -> Symmetry:
    from fedrot import symmetry_of
    from fedrot.simulations.models.build import model_config

    return symmetry_of(model_config(task.config, task.data), state)


#: Training rows in a batch of statistics; Jin et al. (2023) have 16 and read up to 100 batches.
STATISTICS_BATCH = 16


def _statistics(
    job: Job, task: Task, state: dict[str, torch.Tensor], kinds: tuple[str, ...]
) -> ArrayRecord:
    """Return the statistics of an update on the client's own training rows."""
    from fedrot import collect_fisher, collect_gram
    from fedrot.simulations.tasks.training import step_batches

    rows, _ = task.client_rows(job.seed, job.client)
    collectors: dict[str, Callable[[Any, Any], dict[str, dict[str, torch.Tensor]]]] = {
        GRAMS[1]: collect_gram,
        FISHER: collect_fisher,
    }

    def compute() -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        model = _model(job, task)
        model.load_state_dict(state)
        found: dict[str, dict[str, torch.Tensor]] = {}
        for kind in kinds:
            batches = step_batches(task, model, rows, len(rows), STATISTICS_BATCH, job.stream)
            found |= collectors[kind](model, batches)
        return statistics_record(found).to_torch_state_dict(), {}

    return ArrayRecord(_cached(job, _hashed([kinds, job.stream], ArrayRecord(state)), compute)[0])


def _training_key(job: Job, arrays: ArrayRecord) -> str:
    """Training is a function of the configuration, the seed, the round, the client and the model.

    Every start but "different" trains from what it received; scrambling comes after the cache.
    """
    own_start = job.start == "different" and job.round == 1
    return _hashed([job.config_json, job.stream, job.last_round, own_start], arrays)


def _hashed(what: Any, arrays: ArrayRecord) -> str:
    key = hashlib.sha256(json.dumps(what).encode())
    for name, array in sorted(arrays.items()):
        key.update(name.encode())
        key.update(array.data)
    return key.hexdigest()


Result = tuple[dict[str, "torch.Tensor"], dict[str, float]]


def _cached(job: Job, key: str, compute: Callable[[], Result]) -> Result:
    """Arms that send a client the same model get the same answer: it is computed once.

    After the first round arms hardly ever agree, and the folder is the engine's: clients on other
    machines do not have it.
    """
    if job.round > 1 or not job.cache or not Path(job.cache).is_dir():
        return compute()
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = Path(job.cache) / f"{key}.safetensors"
    if path.exists():
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return state, json.loads(file.metadata()["metrics"])
    state, metrics = compute()
    separate = {name: tensor.contiguous() for name, tensor in state.items()}
    with replacing(path) as temporary:
        save_file(separate, temporary, metadata={"metrics": json.dumps(metrics)})
    return state, metrics
