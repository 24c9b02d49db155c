"""Kinds of strategies that plug-ins add: ensembles, rivals' adapters, rotated adapters,
fewer steps.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

import reproductions.plugins  # noqa: F401
from fedrot.simulations.data.tokenizers import bundled_tokenizer
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.cells import RUNS, run_cell
from fedrot.simulations.federation.client_app import app
from fedrot.simulations.federation.grids import OrderedGrid, local_clients
from fedrot.simulations.models import build_model
from fedrot.simulations.run_folder import cells_of
from fedrot.simulations.strategy import KINDS
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import task_of
from fedrot.strategies.wire.flower_compat import outside_of_the_engine
from reproductions.ensemble import Ensemble, with_state

SMALL = {
    "train_limit": 64,
    "test_limit": 20,
    "max_length": 16,
    "clients": 2,
    "seeds": 1,
}
SMALL |= {"depth": 1, "width": 16, "heads": 2, "lr": 0.01}
LORA = {"r": 3, "target_modules": ["query", "value"], "lora_alpha": 6}
OF_LORA = {
    "depth": 2,
    "width": 128,
    "heads": 4,
    "holdout": 0.0,
    "rounds": 2,
    "local_epochs": 2,
}


def rival(name, **options):
    return {"name": name, "kind": "rival", "options": options}


RANKS = {**LORA, "r": [2, 4]}


def experiment_of(*strategies, **changes):
    return Experiment.from_flat({**SMALL, "strategies": [*strategies], **changes})


def run(experiment, scratch):
    """Run the cells of an experiment in this process; return them by strategy."""
    found = {}
    with outside_of_the_engine():
        for cell in cells_of([experiment]):
            grid = OrderedGrid(
                local_clients(app, experiment.clients), experiment.clients
            )
            found[cell.strategy.name] = run_cell(cell, grid, scratch)
    return found


def value(cell, metric, scope, server_round):
    (row,) = (
        r
        for r in cell.rows
        if (r["metric"], r["scope"], r["round"]) == (metric, scope, server_round)
    )
    return float(row["value"])


def errors(cell):
    return [value(cell, "fedrot-adapter-error", "round", number) for number in (1, 2)]


@pytest.fixture(scope="module")
def task():
    return task_of(experiment_of("fedavg").to_json())


@pytest.fixture
def shell(task):
    return build_model(task.experiment, task.data, seed=0)


REFUSED = (
    ({"kind": "ensemble", "guard": "loss"}, {}, "does not read guard"),
    ({"kind": "ensemble", "alignment": {"chance": 0}}, {}, "does not read alignment"),
    ({"kind": "ensemble", "options": {"mean": True}}, {}, "probabilities"),
    ({"kind": "ensemble"}, {"task": "mlm"}, "not for 'mlm'"),
    ({"kind": "ensemble"}, {"lora": LORA}, "leave out lora"),
    ({"kind": "joined-steps", "fit_at_end": True}, {}, "does not read fit_at_end"),
    ({"kind": "adapters"}, {}, "is for adapters; give lora"),
    ({"kind": "adapters"}, {"lora": RANKS}, "rotated"),
    ({"kind": "adapters", "options": {"chance": -1}}, {"lora": LORA}, "chance is -1"),
    (rival("x"), {}, "is for adapters; give lora"),
    (rival("x", method="pads"), {"lora": LORA}, "Unknown method 'pads'"),
    (rival("x", ridge=1), {"lora": LORA}, "ridge"),
    (rival("x", method="rotate"), {"lora": RANKS}, "no mean"),
)


@pytest.mark.parametrize(("strategy", "changes", "said"), REFUSED)
def test_what_does_not_go_together_is_refused(strategy, changes, said):
    given = {"strategies": [{"name": "x", **strategy}], **changes}
    given |= {"model": "some/model"} if "lora" in changes else {}
    with pytest.raises(ValueError, match=said):
        Experiment.from_flat(given)
    assert KINDS.keys() == RUNS.keys()


class Says(nn.Module):
    """A model that always gives the same logits."""

    def __init__(self, problem, *rows):
        super().__init__()
        self.config = SimpleNamespace(problem_type=problem)
        self.rows = torch.tensor(rows)

    def forward(self, **inputs):
        return SimpleNamespace(logits=self.rows)


def together(problem, *rows, probabilities):
    models = [Says(problem, row) for row in rows]
    return (
        Ensemble(models, probabilities)(input_ids=torch.zeros(1, 2)).logits[0].tolist()
    )


def logs(*values):
    return [math.log(value) for value in values]


SINGLE, MULTI = "single_label_classification", "multi_label_classification"
#: Kind of labels, whether probabilities are averaged, and the answer to logits (0, ln
#: 3), (ln 9, 0).
ANSWERS = [
    (SINGLE, False, logs(3, math.sqrt(3))),
    (SINGLE, True, logs(0.575, 0.425)),  # of (1/4, 3/4) and (9/10, 1/10)
    (MULTI, False, logs(3, math.sqrt(3))),
    (MULTI, True, logs(7 / 3, 5 / 3)),  # of (1/2, 3/4) and (9/10, 1/2)
    ("regression", True, logs(3, math.sqrt(3))),
]


@pytest.mark.parametrize(("problem", "probabilities", "expected"), ANSWERS)
def test_an_ensemble_averages_logits_or_probabilities(problem, probabilities, expected):
    rows = (0.0, math.log(3)), (math.log(9), 0.0)
    assert together(problem, *rows, probabilities=probabilities) == pytest.approx(
        expected
    )
    found = together(
        problem, (200.0, -200.0), (300.0, -300.0), probabilities=probabilities
    )
    assert all(map(math.isfinite, found))
    assert found[0] > 10 + found[1]


def test_the_ensemble_of_a_task_averages_its_models(task, shell):
    models = [
        with_state(shell, build_model(task.experiment, task.data, seed).state_dict())
        for seed in (1, 2)
    ]
    inputs = task.test.batch(np.arange(5))
    with torch.inference_mode():
        first, second, found = (
            model.eval()(**inputs).logits.softmax(-1)
            for model in (*models, Ensemble(models, True))
        )
    expected = (first + second) / 2
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_the_clients_models_of_a_round_answer_together(tmp_path):
    together = {"name": "together", "kind": "ensemble"}
    second = {**together, "name": "second", "clients": [1]}
    alone = [
        {"name": str(client), "alignment": False, "clients": [client]}
        for client in range(2)
    ]
    experiment = experiment_of("fedavg", together, second, *alone, rounds=1)
    found = run(experiment, tmp_path)
    starts, losses = (
        {name: value(cell, "loss", "central", n) for name, cell in found.items()}
        for n in (0, 1)
    )
    assert losses["second"] == pytest.approx(losses["1"], abs=1e-6)
    # The loss of averaged logits is below the mean of the losses (it is convex), and
    # not FedAvg's.
    assert losses["together"] < (losses["0"] + losses["1"]) / 2
    assert abs(losses["together"] - losses["fedavg"]) > 1e-5
    assert len({*starts.values()}) == 1


def test_joined_steps_are_those_of_one_client(tmp_path, monkeypatch):
    asked = []

    def train(model, of, rows, seed, epochs, lr):
        asked.append((len(rows), epochs))
        return 0.0

    monkeypatch.setattr(training, "train", train)
    run(
        experiment_of("joined", {"name": "steps", "kind": "joined-steps"}, rounds=1),
        tmp_path,
    )
    (rows, epochs), (same, fewer) = asked
    assert (rows, fewer) == (same, epochs / 2)


STRATEGIES = (
    "fedavg",
    {"name": "previous", "adapters": {"method": "exact", "gauge": "previous"}},
    rival("mean"),
    rival("folded", residual="fold"),
    rival("frozen", schedule="freeze-a"),
    rival("stacked", method="stack", residual="fold"),
    {
        "name": "rotated",
        "kind": "adapters",
        "options": {"anchor": "global", "chance": 0},
    },
)


@pytest.fixture(scope="module")
def of_lora(tmp_path_factory):
    """Return experiments of a saved encoder with its tokenizer."""
    folder = tmp_path_factory.mktemp("pretrained")
    small = experiment_of("fedavg")
    model = build_model(small, task_of(small.to_json()).data, 0)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=bundled_tokenizer()).save_pretrained(
        folder
    )
    return lambda *names, **changes: experiment_of(
        *names, **{**OF_LORA, "model": str(folder), "lora": LORA, **changes}
    )


@pytest.fixture(scope="module")
def ran(of_lora, tmp_path_factory):
    return run(of_lora(*STRATEGIES), tmp_path_factory.mktemp("run"))


def test_errors_of_the_averages_are_recorded(ran):
    for name in ("folded", "stacked"):
        assert errors(ran[name]) == [0, 0]
    assert max(errors(ran["frozen"])) < 1e-5
    assert min(errors(ran["fedavg"])) > 0.001
    assert errors(ran["mean"]) == pytest.approx(errors(ran["fedavg"]), rel=1e-4)
    # Of the same updates no factors have a smaller one; later rounds start from
    # different adapters.
    assert errors(ran["previous"])[0] < errors(ran["fedavg"])[0]


def test_factors_are_rotated_as_fedrot_does(ran):
    # Two clients, two modules; without a test against chance.
    assert value(ran["rotated"], "fedrot-groups-moved", "round", 1) == 4


def test_clients_of_several_ranks(of_lora, tmp_path):
    ranks = {**RANKS, "target_modules": ["query"]}
    found = run(of_lora("exact", rival("padded", method="pad"), lora=ranks), tmp_path)
    exact, padded = (
        value(found[name], "loss", "central", 2) for name in ("exact", "padded")
    )
    assert exact != padded
    assert max(exact, padded) < 3
