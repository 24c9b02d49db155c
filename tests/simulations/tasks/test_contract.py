"""What every task keeps: losses of torch, scores that depend on no batch, the same bits
for a seed.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
)

from fedrot.errors import FedrotError
from fedrot.simulations.data import IGNORED
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.objective import model_inputs
from fedrot.simulations.tasks.task_registry import TASKS
from fedrot.simulations.tasks.training import check_labels, check_model
from tests.simulations.tasks.cases import (
    CASES,
    changed,
    experiment_of,
    model_for,
    parts,
    task_for,
)
from tests.simulations.tensors import equal

SINGLE = ("accuracy", "macro_f1", "ece", "calibrated_loss")
#: The cases that run here, with their metrics, the headline metric first.
METRICS = {
    **dict.fromkeys(("distilbert", "gpt2", "llama", "image"), SINGLE),
    "multi": ("macro_f1", "micro_f1", "accuracy"),
    "regression": ("pearson", "spearman"),
    "domains": ("macro_f1", "f1_seen", "f1_other"),
    "mlm bert": ("pseudo_perplexity", "accuracy"),
    "clm gpt2": ("perplexity",),
    "ner bert": ("f1", "precision", "recall"),
}


@pytest.fixture(params=METRICS)
def case(request):
    return str(request.param)


@pytest.fixture
def task(case):
    return task_for(case)


def test_every_task_and_architecture_has_a_case():
    every = {
        (task, architecture)
        for task, traits in TASKS.items()
        for architecture in traits.architectures
    }
    assert {(e.task, e.architecture) for e in map(experiment_of, CASES)} == every
    run = [experiment_of(name) for name in METRICS]
    assert {e.task for e in run} == {*TASKS}
    assert {e.architecture for e in run} == {architecture for _, architecture in every}


def oracle(task, model, batch):
    """Return the mean loss that torch computes from a model's logits."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**model_inputs(model, inputs)).logits
    labels = batch["labels"]
    if task.data.kind == "regression" and task.experiment.task == "classification":
        return mse_loss(logits[:, 0], labels)
    if labels.is_floating_point():
        known = ~labels.isnan()
        return binary_cross_entropy_with_logits(logits[known], labels[known])
    if task.experiment.task == "clm":
        logits = logits[:, :-1]
        labels = labels[:, 1:]
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def test_the_loss_of_a_step_is_torch_s(task):
    model = model_for(task).eval()
    assert model.config.model_type == task.experiment.architecture
    rows = np.array([0, 3, 5, 6])
    batch = task.objective.batch(task.train, rows, np.random.default_rng(0))
    expected = oracle(task, model, batch)
    found = task.objective.loss(model, batch)
    torch.testing.assert_close(found, expected)
    found.backward()
    if "attention_mask" in batch and task.experiment.task in ("mlm", "clm", "ner"):
        assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()


def test_an_evaluation_is_the_mean_over_rows_one_by_one(case, task):
    """Of tokens for models of tokens, of domains for domains."""
    model = model_for(task).eval()
    rows = np.arange(len(task.test))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    losses = []
    weights = []
    for row in rows:
        batch = task.objective.batch(task.test, np.array([row]))
        with torch.no_grad():
            losses.append(float(oracle(task, model, batch)))
        labels = (
            batch["labels"][:, 1:] if task.experiment.task == "clm" else batch["labels"]
        )
        weights.append(
            1 if labels.is_floating_point() else int((labels != IGNORED).sum())
        )
    expected = np.average(losses, weights=weights)
    if case == "domains":
        of_row = np.array(task.test.domains)  # type: ignore[attr-defined]
        expected = np.mean(
            [np.mean(np.array(losses)[of_row == own]) for own in ("seen", "other")]
        )
    found = training.evaluate(model, task, task.test, rows)
    assert tuple(found) == (*task.objective.metrics, "loss") == (*METRICS[case], "loss")
    assert found["loss"] == pytest.approx(expected, rel=1e-4)
    if task.experiment.task in ("mlm", "clm"):
        assert found[METRICS[case][0]] == pytest.approx(math.exp(expected), rel=1e-3)
    turned = training.evaluate(model, task, task.test, rows[::-1].copy())
    assert turned == pytest.approx(found, rel=1e-4, abs=1e-6)


def test_training_learns_with_the_same_bits_for_a_seed(task, monkeypatch):
    longer = changed(task, lr=5e-3)
    rows = np.arange(len(task.train))
    noted = dict[bool, list[float]]({True: [], False: []})
    fresh = training.evaluate(model_for(task), task, task.train, rows)

    def trained(seed):
        model = model_for(task)
        loss = training.train(model, longer, rows, seed, 3)
        assert model.training
        return (
            loss,
            parts(model),
            training.evaluate(model, task, task.train, rows),
        )

    loss, state, found = trained(3)
    assert found["loss"] < fresh["loss"]
    note = lambda cost: noted[torch.is_inference_mode_enabled()].append(cost)  # noqa: E731
    monkeypatch.setattr(training, "ON_ROWS", [note])
    again, same, scores = trained(3)
    # Notes change nothing: of the rows of each step, then of a part of those of each
    # batch.
    assert (again, scores) == (loss, found)
    assert equal(same, state)
    usable = task.objective.usable(task.train, rows)
    assert len(noted[False]) == 3 * math.ceil(len(usable) / 8)
    assert sum(noted[False]) == 3 * len(usable)
    assert sum(noted[True]) == pytest.approx(training.EVALUATED * len(usable))
    assert trained(4)[0] != loss


def test_a_diverged_model_and_no_rows_have_no_scores(task):
    model = model_for(task)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    nothing = np.arange(0)
    for rows in (np.arange(4), nothing):
        found = training.evaluate(model, task, task.test, rows)
        assert tuple(found) == (*task.objective.metrics, "loss")
        assert all(map(math.isnan, found.values()))
    untrained = model_for(task)
    assert math.isnan(training.train(untrained, task, nothing, 0))
    assert equal(parts(untrained), parts(model_for(task)))


def test_a_trial_runs_the_longest_rows_and_trains_nothing(task, monkeypatch):
    model, batch, tried = model_for(task), task.objective.batch, list[Any]()

    def recorded(encoded, rows, rng):
        tried.append((encoded, rows))
        return batch(encoded, rows, rng)

    monkeypatch.setattr(task.objective, "batch", recorded)
    before = parts(model)
    check_labels(task)
    check_model(task, model)
    assert equal(parts(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    for (encoded, rows), split in zip(tried, (task.train, task.test), strict=True):
        every = task.objective.usable(split, np.arange(len(split)))
        assert encoded is split
        assert split.lengths(rows).max() == split.lengths(every).max()
        ids = getattr(split, "ids", [np.zeros(1)] * len(split))
        assert max(ids[row].max() for row in rows) == max(
            ids[row].max() for row in every
        )


@pytest.mark.parametrize(
    ("split", "said"), [("train", "training"), ("test", "held-out")]
)
def test_data_without_anything_to_predict_are_refused(split, said, monkeypatch):
    task = task_for("clm gpt2")
    kept = getattr(task, split)
    usable = lambda encoded, rows: rows[:0] if encoded is kept else rows  # noqa: E731
    monkeypatch.setattr(task.objective, "usable", usable)
    with pytest.raises(FedrotError, match=f"no {said} row has anything to predict"):
        check_model(task, model_for(task))
