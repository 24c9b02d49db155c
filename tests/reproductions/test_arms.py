"""Arms that plug-ins add: ensembles, and soups."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reproductions.plugins  # noqa: F401
from fedrot.options import AlignmentOptions
from fedrot.simulations.arm import TOGETHER, Arm, known_aggregations
from fedrot.simulations.federation.arms import aggregation_of, with_state
from fedrot.simulations.models import build_model
from fedrot.simulations.settings import Experiment
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.symmetry import DEFAULT_PARTS
from reproductions.arms import ENSEMBLES, evaluate_ensemble
from reproductions.ensemble import Ensemble
from tests.simulations.federation.test_arms import SMALL
from tests.simulations.test_config import check_refused

#: The anchor that is not named.
RUNNING = AlignmentOptions.anchor


@pytest.fixture(scope="module")
def task() -> Task:
    return task_of(Experiment(**SMALL).to_json())


@pytest.fixture
def shell(task: Task) -> nn.Module:
    return build_model(task.config, task.data, seed=0)


# Names


#: Arms that merge in another way: aligned or not, parts, anchor, evidence, aggregation, other_basis.
MERGING: dict[str, tuple[bool, tuple[str, ...], str, str, str, bool]] = {
    "greedy": (False, (), RUNNING, "probe", "greedy", False),
    "ensemble": (False, (), RUNNING, "probe", "ensemble", False),
    "plain/ensemble-probabilities": (*(False, (), RUNNING, "probe", "ensemble-probabilities", False),),
    "aligned@global~learned/greedy": (True, DEFAULT_PARTS, "global", "learned", "greedy", True),
}


@pytest.mark.parametrize("name", MERGING)
def test_the_grammar_of_arms_that_merge(name: str) -> None:
    arm = Arm.parse(name)
    found = (arm.align, arm.parts, arm.anchor, arm.evidence, arm.aggregation, arm.other_basis)
    assert found == MERGING[name]
    config = Experiment.from_flat({"arms": f"plain, {name}"})
    assert config.cells()[1][2] == arm
    assert Experiment.model_validate_json(config.to_json()) == config


def test_every_aggregation_has_a_short_name(task: Task, shell: nn.Module) -> None:
    assert {"greedy", *ENSEMBLES} < set(known_aggregations())
    for aggregation in known_aggregations():
        short, full = Arm.parse(aggregation), Arm.parse(f"plain/{aggregation}")
        assert short.model_copy(update={"name": full.name}) == full
        assert (aggregation_of(short, task, 0, shell) is None) == (aggregation in TOGETHER)


BAD_ARMS = {
    "aligned/regmean/greedy": "unknown aggregation 'regmean/greedy'",
    "ensemble@global": "'ensemble'",
    "aligned/ensemble": "an ensemble needs no alignment; use 'ensemble'",
    "whole/ensemble-probabilities": "use 'ensemble-probabilities'",
    "ensemble(alpha=1)": "'ensemble' has no argument 'alpha'; it has none",
    "plain/ensemble(batches=2)": "'ensemble' needs no statistics",
    "aligned:loss/ensemble": "a guard compares two means; 'ensemble' gives no mean",
}


@pytest.mark.parametrize("name", BAD_ARMS)
def test_arms_that_are_none_are_refused_with_their_name(name: str) -> None:
    check_refused(name, BAD_ARMS[name])


def test_ensembles_of_subsets_and_images() -> None:
    assert Arm.parse("ensemble#0+1").clients == (0, 1)
    Experiment(task="image", arms=("plain", "ensemble"))
    assert not Experiment(arms=("ensemble",)).moves


def test_ensembles_soups_and_joined_training_have_their_conditions() -> None:
    for arm in ("ensemble", "plain/ensemble-probabilities"):
        with pytest.raises(ValueError, match="for task 'classification' or 'image', not for 'mlm'"):
            Experiment(task="mlm", arms=("plain", arm))
    for arm in ("greedy", "aligned/greedy"):
        with pytest.raises(ValueError, match="holdout must not be 0"):
            Experiment(holdout=0, arms=("plain", arm))
    Experiment(task="mlm", arms=("joined", "greedy", "aligned/regmean"))
    Experiment(holdout=0, arms=("joined", "ensemble", "aligned/fisher"))


class Says(nn.Module):
    """A model that always gives the same logits."""

    def __init__(self, problem: str, *rows: tuple[float, ...]) -> None:
        super().__init__()
        self.config = SimpleNamespace(problem_type=problem)
        self.rows = torch.tensor(rows)

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.rows)


def together(problem: str, *rows: tuple[float, ...], probabilities: bool) -> list[float]:
    models = [Says(problem, row) for row in rows]
    found: list[float] = Ensemble(models, probabilities)(input_ids=torch.zeros(1, 2)).logits[0].tolist()
    return found


def logs(*values: float) -> list[float]:
    return [math.log(value) for value in values]


def test_an_ensemble_of_single_labels() -> None:
    """Probabilities (1/4, 3/4) and (9/10, 1/10)."""
    rows = (0.0, math.log(3)), (math.log(9), 0.0)
    problem = "single_label_classification"
    assert together(problem, *rows, probabilities=False) == pytest.approx(logs(3, math.sqrt(3)))
    found = together(problem, *rows, probabilities=True)
    assert found == pytest.approx(logs(0.575, 0.425))
    assert sum(map(math.exp, found)) == pytest.approx(1)


def test_an_ensemble_of_several_labels() -> None:
    """Probabilities (1/2, 3/4) and (9/10, 1/2)."""
    rows = (0.0, math.log(3)), (math.log(9), 0.0)
    problem = "multi_label_classification"
    assert together(problem, *rows, probabilities=False) == pytest.approx(logs(3, math.sqrt(3)))
    assert together(problem, *rows, probabilities=True) == pytest.approx(logs(7 / 3, 5 / 3))


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_certain_models_stay_finite(problem: str) -> None:
    found = together(problem, (200.0, -200.0), (300.0, -300.0), probabilities=True)
    assert all(map(math.isfinite, found))
    assert found[0] > 10 + found[1]


@pytest.mark.parametrize("probabilities", [True, False])
def test_an_ensemble_of_scores_is_their_mean(probabilities: bool) -> None:
    assert together("regression", (1.0,), (4.0,), probabilities=probabilities) == [2.5]


def test_an_ensemble_answers_row_by_row() -> None:
    problem = "single_label_classification"
    models = [Says(problem, (0.0, 2.0), (4.0, 0.0)), Says(problem, (2.0, 0.0), (0.0, 2.0))]
    assert Ensemble(models)(x=torch.zeros(2)).logits.tolist() == [[1.0, 1.0], [2.0, 1.0]]


@pytest.mark.parametrize("name", ["ensemble", "ensemble-probabilities"])
def test_copies_of_one_model_say_what_it_says(name: str, task: Task, shell: nn.Module) -> None:
    state = dict(build_model(task.config, task.data, seed=3).state_dict())
    everything = np.arange(len(task.test.labels))
    alone = training.evaluate(with_state(shell, state), task, task.test, everything)
    before = {key: value.clone() for key, value in shell.state_dict().items()}
    for count in (1, 3):
        found = evaluate_ensemble(task, Arm.parse(name), shell, [state] * count)
        assert list(found) == list(alone)
        assert found == pytest.approx(alone, abs=1e-6)
    assert all(torch.equal(before[key], value) for key, value in shell.state_dict().items())


def test_the_ensemble_of_a_task_averages_its_models(task: Task, shell: nn.Module) -> None:
    states = [dict(build_model(task.config, task.data, seed=s).state_dict()) for s in (1, 2)]
    inputs = task.test.batch(np.arange(5))
    with torch.inference_mode():
        each = [with_state(shell, state).eval()(**inputs).logits for state in states]
        model = Ensemble([with_state(shell, state) for state in states], True).eval()
        found = model(**inputs).logits.softmax(-1)
    expected = (each[0].softmax(-1) + each[1].softmax(-1)) / 2
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("arm", "clients"), [("greedy", (0, 1)), ("plain/greedy#1", (1,))])
def test_the_soup_is_tasted_on_the_held_out_rows_of_its_clients(
    task: Task, shell: nn.Module, monkeypatch: pytest.MonkeyPatch, arm: str, clients: tuple[int, ...]
) -> None:
    asked: list[list[int]] = []

    def evaluate(model: Any, of: Task, split: Any, rows: np.ndarray) -> dict[str, float]:
        assert split is task.train
        asked.append(sorted(rows.tolist()))
        return {"loss": float(model.classifier.bias.sum())}

    monkeypatch.setattr(training, "evaluate", evaluate)
    build = aggregation_of(Arm.parse(arm), task, 1, shell)
    assert build is not None
    soup = build()
    state = dict(shell.state_dict())
    losses = (3.0, -1.0, 2.0)
    for loss in losses:
        soup.add({**state, "classifier.bias": torch.full_like(state["classifier.bias"], loss)}, 1.0)
    result = soup.result()
    # The lowest loss is the best, and joining the others only raises it.
    assert soup.chosen == (1,)  # type: ignore[attr-defined]
    assert torch.equal(result["classifier.bias"], torch.full_like(result["classifier.bias"], -1.0))
    held = sorted(row for client in clients for row in task.client_rows(1, client)[1].tolist())
    assert len(held) > 5
    assert all(rows == held for rows in asked)
    trained = {row for client in range(2) for row in task.client_rows(1, client)[0].tolist()}
    assert not trained & set(held)
