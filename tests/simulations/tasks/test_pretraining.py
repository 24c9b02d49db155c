"""Start ``pretrained``: the body of a language model that was trained on other texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.pretraining import load_pretrained
from fedrot.simulations.tasks.task import task_of
from tests.simulations.commands import options_of
from tests.simulations.in_process import simulated

SMALL = {"layers": 1, "width": 16, "heads": 2, "max_length": 16, "train_limit": 60, "test_limit": 40}
PRETRAINED = {"starts": ("pretrained",), "pretrain_data": "goemotions_ekman", "pretrain_limit": 400}


def configuration(**settings: Any) -> SimulationConfig:
    return SimulationConfig.from_flat({**SMALL, **PRETRAINED, **settings})


@pytest.mark.parametrize(
    ("architecture", "task", "body", "language"),
    [
        ("bert", "classification", "bert.", "mlm"),
        ("distilbert", "classification", "distilbert.", "mlm"),
        ("gpt2", "classification", "transformer.", "clm"),
        ("llama", "clm", "model.", "clm"),
    ],
)
def test_the_body_is_that_of_the_language_model(
    architecture: str, task: str, body: str, language: str
) -> None:
    config = configuration(architecture=architecture, task=task)
    data = task_of(config.to_json()).data
    before = build_model(config, data, 3).state_dict()
    model = build_model(config, data, 3)
    load_pretrained(model, config)
    after = model.state_dict()
    learned = config.pretraining
    assert (learned.task, learned.train_limit, learned.width) == (language, 400, 16)
    trained = task_of(learned.to_json())
    by_hand = build_model(learned, trained.data, 0)
    training.train(by_hand, trained, np.arange(400), 0)
    known = by_hand.state_dict()
    for name, tensor in after.items():
        taken = name.startswith(body) and name in known
        assert torch.equal(tensor, known[name] if taken else before[name])
    assert any(not torch.equal(after[name], before[name]) for name in after)
    # The language model's head stays behind, and so does the pooler that it does not have.
    assert {name for name in after if not (name.startswith(body) and name in known)}


def test_a_pretrained_language_model_predicts_better_than_a_random_one() -> None:
    config = configuration(architecture="gpt2", task="clm", pretrain_epochs=8, lr=1e-2)
    task = task_of(config.to_json())
    losses = []
    for pretrained in (False, True):
        model = build_model(config, task.data, 3)
        if pretrained:
            load_pretrained(model, config)
        rows = np.arange(len(task.train.labels))
        training.train(model, task, rows, 0, epochs=4)
        losses.append(training.evaluate(model, task, task.test, np.arange(40))["loss"])
    assert losses[1] < losses[0] - 0.1


def test_a_run_starts_from_it_and_other_starts_do_not(tmp_path: Path) -> None:
    options = options_of(SMALL)
    simulated(
        tmp_path / "run",
        *("simulate", *options, "--clients", 2, "--rounds", 1, "--seeds", 1, "--arms", "plain"),
        *("--start", "same,pretrained", "--set", "pretrain_data=goemotions_ekman"),
        *("--set", "pretrain_limit=100"),
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    initial = {r["start"]: r["value"] for r in rows if r["round"] == 0 and r["metric"] == "loss"}
    assert initial["same"] != initial["pretrained"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pretrain_data": ""}, "needs texts to pretrain on; give pretrain_data"),
        ({"model": "somewhere"}, "model 'somewhere' is pretrained already; choose start 'same'"),
        ({"task": "image", "data": "digits"}, "not for architecture 'vit'"),
    ],
)
def test_what_cannot_be_pretrained_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configuration(**settings)
