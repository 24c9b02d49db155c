"""Checkpoints that an earlier fedrot wrote after round 2 are resumed to the bits that it reached.

``data/`` was written by ``python -m tests.strategies.resume.test_old_checkpoints`` at the commit that
``data/expected.json`` names. All arithmetic of these runs is elementwise or discrete, so that the bits
do not depend on the machine.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam, Result
from transformers import BertConfig, BertForSequenceClassification

from fedrot import AlignmentOptions
from fedrot.strategies import Aligned, Checkpointing, FedRot, Server
from tests.strategies.fakes import Client, FakeGrid, reply, tensors_of
from tests.strategies.resume.killed_run import METRICS, without_clocks

DATA = Path(__file__).parent / "data"
WRITTEN, ROUNDS, CLIENTS = 2, 4, 4
CONFIG = BertConfig(
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    vocab_size=16,
    max_position_embeddings=8,
)
INTERMEDIATE = "bert.encoder.layer.0.intermediate.dense"


class AlignedAdam(Aligned, FedAdam):
    """Alignment in front of a strategy with moments."""


def _common(folder: Path) -> dict[str, Any]:
    return {
        "alignment": AlignmentOptions(parts=("heads", "ffn")),
        "server": Server(deterministic=True),
        "checkpoints": Checkpointing(folder, keep=1),
        "fraction_train": 0.5,
        "fraction_evaluate": 0.0,
    }


STRATEGIES: dict[str, Callable[[Path], Any]] = {
    "FedRot": lambda folder: FedRot(CONFIG, **_common(folder)),
    "AlignedAdam": lambda folder: AlignedAdam(CONFIG, **_common(folder), eta=0.125),
}


def initial() -> dict[str, torch.Tensor]:
    """Return a model of small fractions, in which no two neurons are alike."""
    shapes = {k: t.shape for k, t in BertForSequenceClassification(CONFIG).state_dict().items()}
    counted = enumerate(shapes.items())
    return {
        name: ((torch.arange(shape.numel()) * (37 + place) % 101) / 64).reshape(shape)
        for place, (name, shape) in counted
    }


def client(index: int) -> Client:
    """Return a client that moves every number a little, and the neurons of its feed-forward around."""

    def answer(message: Message) -> Message:
        number: Any = message.content.config_records["config"]["server-round"]
        moved = {
            name: tensor
            + ((torch.arange(tensor.numel()) + number) % (3 + index)).reshape(tensor.shape) / 256
            for name, tensor in tensors_of(message.content.array_records["arrays"]).items()
        }
        for name in (f"{INTERMEDIATE}.weight", f"{INTERMEDIATE}.bias"):
            moved[name] = moved[name].roll(index, 0)
        output = INTERMEDIATE.replace("intermediate", "output") + ".weight"
        moved[output] = moved[output].roll(index, 1)
        return reply(message, moved, 8 << index, index, train_loss=1 / (number + index))

    return answer


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the next number of each random generator."""
    drawn = [random.random(), float(np.random.random_sample()), int(torch.randint(1 << 30, ()))]
    return MetricRecord({"drawn": [float(x) for x in drawn]})


def play(name: str, folder: Path, rounds: int, seed: int) -> Result:
    """Run a strategy, or the rest of its run."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    grid = FakeGrid({100 + index: client(index) for index in range(CLIENTS)})
    config = ConfigRecord({"lr": 0.5})
    start = STRATEGIES[name](folder).start
    return start(grid, ArrayRecord(initial()), rounds, train_config=config, evaluate_fn=evaluate)


def ending(result: Result) -> dict[str, str]:
    """Return digests of the model and of all metrics, but for sums whose order the machine chooses."""
    model = hashlib.sha256()
    for name, array in result.arrays.items():
        model.update(f"{name} {array.dtype} {array.shape}".encode())
        model.update(array.data)
    metrics = {
        f"{kind} {number} {key}": value
        for kind in METRICS
        for number, record in getattr(result, kind).items()
        for key, value in without_clocks(record).items()
        if not key.startswith("fedrot-share")
    }
    return {"model": model.hexdigest(), "metrics": hashlib.sha256(repr(metrics).encode()).hexdigest()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_checkpoint_of_an_earlier_fedrot_is_resumed_to_the_same_bits(
    tmp_path: Path, name: str
) -> None:
    expected = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
    shutil.unpack_archive(DATA / f"{name}.zip", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"round-{WRITTEN:06d}"]
    assert ending(play(name, tmp_path, ROUNDS, seed=99)) == expected[name]


def write() -> None:
    """Write ``data/`` with the fedrot that is checked out."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, check=True)
    expected: dict[str, Any] = {"written by": commit.stdout.decode().strip()}
    for name in STRATEGIES:
        with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as whole:
            play(name, Path(kept), WRITTEN, seed=1)
            shutil.make_archive(str(DATA / name), "zip", kept, f"round-{WRITTEN:06d}")
            expected[name] = ending(play(name, Path(whole), ROUNDS, seed=1))
    (DATA / "expected.json").write_text(json.dumps(expected, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
