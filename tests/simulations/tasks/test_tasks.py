"""Every other task in a simulation: images, causal language modelling, named entities."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import reproductions.arms  # noqa: F401
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.tasks.task import task_of
from tests.simulations.data.test_ner import write
from tests.simulations.in_process import simulated

GRID = """
[base]
clients = 2
seeds = 1
rounds = 1
layers = 1
width = 32
heads = 2
max_length = 32
lr = 5e-3
local_epochs = 6
train_limit = 240
test_limit = 80
starts = ["same", "scrambled"]
arms = "plain,aligned*0"

[[setting]]
setting = "image"
task = "image"
partition = "dirichlet:1"
arms = "plain,aligned*0,ensemble"

[[setting]]
setting = "clm"
task = "clm"
architecture = "llama"

[[setting]]
setting = "ner"
task = "ner"
data = "mine"
partition = "column:domain"
"""
METRICS = {
    "image": ["accuracy", "macro_f1", "ece", "calibrated_loss", "loss"],
    "clm": ["perplexity", "loss"],
    "ner": ["f1", "precision", "recall", "loss"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write(folder / "data" / "ner", copies=20)
    (folder / "grid.toml").write_text(GRID)
    simulated(folder / "run", "simulate", folder / "grid.toml", "--data-dir", folder / "data")
    return folder / "run"


def rows_of(run: Path, **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in read_rows(run) if all(row[name] == value for name, value in wanted.items())]


def central(run: Path, setting: str, start: str, arm: str, metric: str, server_round: int = 1) -> float:
    (row,) = rows_of(
        run, setting=setting, scope="central", start=start, arm=arm, metric=metric, round=server_round
    )
    return float(row["value"])


@pytest.mark.parametrize("task", METRICS)
def test_every_scope_has_the_metrics_of_the_task(run: Path, task: str) -> None:
    for scope in ("central", "alone:0", "alone:1"):
        found = rows_of(run, setting=task, scope=scope, arm="aligned*0", start="same", round=1)
        assert [row["metric"] for row in found] == METRICS[task]
        assert all(math.isfinite(row["value"]) for row in found)
    own = {row["metric"] for row in rows_of(run, setting=task, scope="client:0")}
    assert own == {"train-loss", "seconds-training", *METRICS[task]}


@pytest.mark.parametrize("task", METRICS)
def test_training_helps(run: Path, task: str) -> None:
    first = central(run, task, "same", "plain", "loss", 0)
    assert central(run, task, "same", "plain", "loss") < first


@pytest.mark.parametrize("task", METRICS)
def test_scrambling_does_not_touch_the_aligned_average(run: Path, task: str) -> None:
    def gap(arm: str) -> float:
        losses = [central(run, task, start, arm, "loss") for start in ("same", "scrambled")]
        return abs(losses[0] - losses[1])

    assert gap("aligned*0") < 1e-4
    assert gap("plain") > 10 * gap("aligned*0")


def test_the_headlines_agree_with_the_loss_and_the_ensemble_with_none(run: Path) -> None:
    loss = central(run, "clm", "same", "plain", "loss")
    assert central(run, "clm", "same", "plain", "perplexity") == pytest.approx(math.exp(loss))
    arms = {
        arm: central(run, "image", "same", arm, "loss") for arm in ("plain", "aligned*0", "ensemble")
    }
    assert len(set(arms.values())) == 3


def test_the_report_shows_every_task(run: Path) -> None:
    report = (run / "report.html").read_text()
    for setting, metrics in METRICS.items():
        assert (run / "plots" / f"{setting}-{metrics[0]}.png").is_file()
        assert setting in report


def test_a_client_trains_on_none_of_its_held_out_rows() -> None:
    config = SimulationConfig(
        train_limit=90, test_limit=9, clients=3, holdout=0.3, partition="dirichlet:1"
    )
    task = task_of(config.to_json())
    held_by_seed = set()
    for seed in (0, 1):
        clients = task.clients(seed)
        assert sorted(row for own in clients for row in own.tolist()) == list(range(90))
        for client, own in enumerate(clients):
            trained, held = task.client_rows(seed, client)
            assert sorted([*trained.tolist(), *held.tolist()]) == sorted(own.tolist())
            assert len(held) == math.floor(0.3 * len(own))
            # In order, and not the first or the last of the client's rows.
            assert trained.tolist() == sorted(trained.tolist())
            assert held.tolist() == sorted(held.tolist())
            assert held.tolist() not in (sorted(own.tolist())[: len(held)], [])
            held_by_seed.add((client, tuple(held.tolist())))
    assert len(held_by_seed) == 6
    first, second = (task.clients(seed) for seed in (0, 1))
    assert [own.tolist() for own in first] != [own.tolist() for own in second]
