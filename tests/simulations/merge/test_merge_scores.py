"""Saved models scored on held-out rows, alone and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.merge.merge_scores import Scores, tables, verdict
from fedrot.simulations.merge.merge_settings import MergeSettings
from fedrot.simulations.merge.merging import merge
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from tests.simulations.commands import SMALL, invoke

DATA = "goemotions_ekman"
SETTINGS = MergeSettings(data=DATA, weights="1,3", parts="whole")


@pytest.fixture(params=["classification", "mlm", "clm"])
def task(request: pytest.FixtureRequest) -> Task:
    settings = {**SMALL, "task": request.param, "max_length": 64, "test_limit": 500}
    return task_of(SimulationConfig(**settings).to_json())


@pytest.fixture
def models(task: Task, tmp_path: Path) -> list[Path]:
    """Two models of the harness, trained a little from different starts."""
    folders = []
    for seed in (0, 1):
        model: Any = build_model(task.config, task.data, seed)
        training.train(model, task, np.arange(64), seed, epochs=2)
        folders.append(tmp_path / f"model{seed}")
        model.save_pretrained(folders[-1])
    return folders


def score(task: Task, state: dict[str, torch.Tensor]) -> dict[str, float]:
    model = build_model(task.config, task.data, seed=0)
    model.load_state_dict(state, strict=False)
    return training.evaluate(model, task, task.test, np.arange(len(task.test)))


def test_every_model_is_scored_as_the_harness_scores_it(
    task: Task, models: list[Path], tmp_path: Path
) -> None:
    found = merge(models, tmp_path / "out", SETTINGS).scores
    assert found is not None
    assert (found.data, found.rows) == (DATA, 500)
    first, second = (load_file(folder / "model.safetensors") for folder in models)
    plain = {name: (tensor + 3 * second[name]) / 4 for name, tensor in first.items()}
    merged = load_file(tmp_path / "out" / "model.safetensors")
    expected = {"model0": first, "model1": second, "plain average": plain, "merged": merged}
    assert found.models.keys() == expected.keys()
    for name, state in expected.items():
        assert found.models[name] == pytest.approx(score(task, state), abs=1e-5), name
    assert found.models["plain average"]["loss"] != pytest.approx(found.models["merged"]["loss"])


def test_the_command_prints_a_line_per_model(models: list[Path]) -> None:
    options = ["--data", DATA, "--parts", "none", "--dry-run"]
    code, printed = invoke("merge", *models, *options)
    assert code == 0, printed
    assert f"On 500 rows of {DATA}, which this command did not use otherwise" in printed
    lines = [printed.index(name) for name in ("model0 (0.5)", "On 500", "plain average", "merged │")]
    assert lines == sorted(lines)
    assert "loss (nats, lower is better)." in " ".join(printed.split())
    assert "'model1' was averaged as it is: no part was asked for (--parts)." in " ".join(
        printed.split()
    )


def scored(metric: str, values: dict[str, list[float]]) -> Scores:
    """Return scores with these values on blocks of rows; the loss is 1 minus the value."""
    blocks = {
        name: [{metric: value, "ece": 0.1, "loss": 1 - value} for value in own]
        for name, own in values.items()
    }
    means = {
        name: {key: sum(block[key] for block in own) / len(own) for key in (metric, "ece", "loss")}
        for name, own in blocks.items()
    }
    return Scores("d", 9, means, blocks)


#: By model; the merged one minus b is 0.1 +- 0.05.
BLOCKS = {"a": [0.3, 0.3], "b": [0.55, 0.65], "plain average": [0.5, 0.5], "merged": [0.6, 0.8]}


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            "accuracy",
            "By accuracy, the merged model (0.700) against the plain average (0.500): "
            "+0.200 [-1.071, +1.471] within noise of 1.271; against the best model alone, b (0.600): "
            "+0.100 [-0.535, +0.735] within noise of 0.635. "
            "9 rows; 95 % t intervals over 2 blocks of them.",
        ),
        (
            "perplexity",
            "By perplexity, the merged model (0.700) against the plain average (0.500): "
            "+0.200 [-1.071, +1.471] within noise of 1.271; against the best model alone, a (0.300): "
            "+0.400 [-0.871, +1.671] within noise of 1.271. "
            "9 rows; 95 % t intervals over 2 blocks of them.",
        ),
    ],
)
def test_the_verdict_is_by_the_headline_metric(metric: str, said: str) -> None:
    assert verdict(scored(metric, BLOCKS)) == said


def test_every_difference_has_an_interval_and_a_direction() -> None:
    values = {"a": [0.3, 0.3, 0.3], "plain average": [0.5, 0.5, 0.5], "merged": [0.6, 0.61, 0.62]}
    found = scored("accuracy", values)
    assert "the plain average (0.500): +0.110 [+0.085, +0.135] better; against" in verdict(found)
    first, second = tables(found)
    assert [*first.header] == ["model", "accuracy", "ece", "loss"]
    assert "ece (expected calibration error, 0 to 1, lower is better)" in first.caption
    assert second.lines == [
        ("a", "+0.310 [+0.285, +0.335] better", "-0.310 [-0.335, -0.285] better"),
        ("plain average", "+0.110 [+0.085, +0.135] better", "-0.110 [-0.135, -0.085] better"),
    ]
    (_, worse) = tables(scored("perplexity", values))
    assert worse.lines[1][1] == "+0.110 [+0.085, +0.135] worse"


def test_of_a_loss_as_headline_there_is_one_difference() -> None:
    values = {"a": [0.3, 0.3], "plain average": [0.5, 0.5], "merged": [0.6, 0.8]}
    only = Scores(
        "d",
        9,
        {name: {"loss": sum(own) / 2} for name, own in values.items()},
        {name: [{"loss": value} for value in own] for name, own in values.items()},
    )
    assert [[*table.header][1:] for table in tables(only)] == [["loss"], ["loss"]]


def test_blocks_are_disjoint_and_hold_all_rows(task: Task, models: list[Path]) -> None:
    found = merge(models, None, SETTINGS, dry_run=True).scores
    assert found is not None
    for name, own in found.blocks.items():
        assert len(own) == 10
        if found.headline == "accuracy":  # All blocks have 50 rows.
            mean = np.mean([block["accuracy"] for block in own])
            assert mean == pytest.approx(found.models[name]["accuracy"])


@pytest.mark.parametrize("task", ["classification"], indirect=True)
def test_outputs_without_names_are_told(task: Task, models: list[Path]) -> None:
    said = (
        "The models' outputs have no names. They are taken to be the data's labels in this order: anger,"
    )
    assert any(said in note for note in merge(models, None, SETTINGS, dry_run=True).notes)
    for folder in models:
        config = json.loads((folder / "config.json").read_text())
        names = task.data.label_names
        config |= {"id2label": {str(i): name for i, name in enumerate(names)}}
        config |= {"label2id": {name: i for i, name in enumerate(names)}}
        (folder / "config.json").write_text(json.dumps(config))
    found = merge(models, None, SETTINGS, dry_run=True)
    assert found.scores is not None
    assert not any("no names" in note for note in found.notes)


@pytest.mark.parametrize("task", ["classification"], indirect=True)
def test_data_that_do_not_fit_are_no_error(models: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("text,label\n" + "one two,0\nthree four,1\n" * 20)
    report = merge(models, None, MergeSettings(data=str(file), method="regmean"), dry_run=True)
    assert report.scores is None
    assert any("they have 7 outputs, and" in note and "has 2 classes" in note for note in report.notes)


def test_without_data_nothing_is_scored(models: list[Path]) -> None:
    report = merge(models, None, MergeSettings(), dry_run=True)
    assert report.scores is None
    assert not any("scored" in note for note in report.notes)
