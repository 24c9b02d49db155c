"""What models are worth on the sites' own test rows, against numpy and saved models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.cells import run_cell
from fedrot.simulations.federation.client_app import app
from fedrot.simulations.federation.grids import OrderedGrid, local_clients
from fedrot.simulations.federation.own_rows import FEWEST, MOST, own_test_rows
from fedrot.simulations.run_folder import cells_of
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import task_of
from fedrot.strategies.wire.flower_compat import outside_of_the_engine
from tests.simulations.data.files import write
from tests.simulations.tasks.cases import SMALL, experiment_of

SITES = ["north", "south", "east"]


def of(**fields):
    small_run = {**SMALL, "train_limit": 240, "test_limit": 90, "holdout": 0.25}
    return Experiment.from_flat(
        {
            **small_run,
            "seeds": [3],
            "rounds": 1,
            "strategies": "fedavg",
            "lr": 0.01,
            "clients": 3,
            "partition": "dirichlet:0.3",
            **fields,
        }
    )


def task_for(experiment):
    return task_of(experiment.to_json())


def played(experiment, folder, save=None):
    """Run the only cell; return the values of own rows by scope, site and metric."""
    count = experiment.clients
    with outside_of_the_engine():
        grid = OrderedGrid(local_clients(app, count), count)
        (cell,) = cells_of([experiment])
        run = run_cell(cell, grid, folder, save)
    assert {row["round"] for row in run.rows if row["scope"][:3] == "own"} == {
        experiment.rounds
    }
    return {
        (*row["scope"].split(":", 1), row["metric"]): row["value"]
        for row in run.rows
        if row["scope"].startswith("own")
    }, run


def logits_of(model, task, rows):
    with torch.no_grad():
        return model.eval()(**task.test.batch(rows)).logits.double().numpy()


# What a site's own test rows are


def test_drawn_rows_have_the_proportions_of_the_site():
    task = task_for(of(test_limit=None))
    test = task.data.test.labels
    for seed in range(6):
        for client, rows in enumerate(task.clients(seed)):
            drawn = own_test_rows(task, seed, client)
            there = np.bincount(test, minlength=7)
            share = np.bincount(task.data.train.labels[rows], minlength=7) / len(rows)
            size = len(drawn)
            assert (
                np.abs(np.bincount(test[drawn], minlength=7) - share * size).max() < 4
            )
            assert len(np.unique(drawn)) == size <= MOST + 4
            # Some class has no rows left, so that no more can be drawn.
            left = there - np.bincount(test[drawn], minlength=7)
            assert size > MOST - 4 or left.min() < 4
            assert (drawn == own_test_rows(task, seed, client)).all()


def test_rows_of_scarce_classes_repeat_below_the_fewest():
    task = task_for(of(test_limit=9, partition="pathological:1", clients=7))
    for client in range(7):
        drawn = own_test_rows(task, 0, client)
        labels = task.data.test.labels[drawn]
        wanted = task.data.train.labels[task.clients(0)[client][0]]
        assert {*labels.tolist()} <= {wanted}
        assert len(drawn) in (0, FEWEST)


def test_rows_of_a_column_and_of_equal_divisions(tmp_path):
    rows = 120
    where = np.random.default_rng(0).choice(SITES, rows, p=[0.6, 0.3, 0.1])
    file = write(
        tmp_path / "a.csv",
        text=[f"a story {row}" for row in range(rows)],
        label=["joy" if row % 3 else "fear" for row in range(rows)],
        site=[f" {name}" for name in where],
    )
    task = task_for(of(data=str(file), partition="column:site", clients=0))
    values = [name.strip() for name in task.data.test.columns["site"]]
    for client, name in enumerate(sorted(SITES)):
        expected = [row for row, value in enumerate(values) if value == name]
        assert own_test_rows(task, 0, client).tolist() == expected
    task = task_for(of(data=str(file), partition="iid"))
    assert own_test_rows(task, 0, 2).tolist() == [*range(len(values))]


# What is measured there


def shifted(logits, priors, counts):
    """Bayes' rule with one row of everybody's shares."""
    shares = (counts + priors) / (counts.sum() + 1)
    return logits + np.log(shares) - np.log(priors)


def test_own_rows_are_scored_with_the_priors_of_training_rows(tmp_path):
    experiment = of()
    values, _ = played(experiment, tmp_path, tmp_path / "saved")
    task = task_for(experiment)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    labels = task.data.train.labels
    counts = [
        np.bincount(labels[task.client_rows(3, client)[0]], minlength=7)
        for client in range(3)
    ]
    total = sum(counts)
    priors = np.where(total > 0, total, 0.5) / total.sum()
    differs = False
    for client in range(3):
        rows = own_test_rows(task, 3, client)
        logits = logits_of(model, task, rows)
        truth = task.data.test.labels[rows]
        own = shifted(logits, priors, counts[client])
        for scope, scores in (("own-global", logits), ("own", own)):
            accuracy = (scores.argmax(1) == truth).mean()
            exact = scores - np.log(np.exp(scores).sum(1, keepdims=True))
            loss = -exact[np.arange(len(rows)), truth].mean()
            site = (scope, str(client))
            assert values[*site, "accuracy"] == pytest.approx(accuracy)
            assert values[*site, "loss"] == pytest.approx(loss, rel=1e-4)
            assert values[*site, "test-rows"] == len(np.unique(rows))
        differs |= bool((own.argmax(1) != logits.argmax(1)).any())
    assert differs
    assert {key[0] for key in values} == {"own", "own-global", "own-alone"}


def test_alone_is_a_head_of_the_first_model_whatever_the_strategy(tmp_path):
    values, other = (
        played(of(strategies=name), tmp_path)[0] for name in ("fedavg", "head_only")
    )
    alone = {key: value for key, value in values.items() if key[0] == "own-alone"}
    assert alone == {key: other[key] for key in alone}
    assert len(alone) == 9


def test_a_site_of_one_class_alone_answers_with_it(tmp_path):
    values, _ = played(of(partition="pathological:1", clients=7), tmp_path)
    accuracies = [
        value
        for (scope, _, metric), value in values.items()
        if (scope, metric) == ("own-alone", "accuracy")
    ]
    assert accuracies == [1.0] * 7


@pytest.mark.parametrize("case", ["multi", "regression", "clm gpt2", "domains"])
def test_other_kinds_of_labels(case, tmp_path):
    fields = {"strategies": ["fedavg"], "seeds": [0], "rounds": 1, "holdout": 0.25}
    values, _ = played(experiment_of(case, **fields), tmp_path)
    scopes = {key[0] for key in values}
    pairs = [
        (values["own", site, "loss"], values["own-global", site, "loss"])
        for site in ("0", "1")
    ]
    # Each label has a shift of its own, and a regression the mean residual.
    shifted = case in ("multi", "regression")
    assert all((own != everywhere) == shifted for own, everywhere in pairs)
    assert scopes == {"own", "own-global", *["own-alone"] * shifted}


# The two strategies


def test_alone_trains_the_first_model_for_the_epochs_of_all_rounds(
    tmp_path, monkeypatch
):
    trained = []

    def train(model, task, rows, seed, epochs, lr):
        bias = model.classifier.bias
        trained.append((rows.tolist(), epochs, lr, float(bias.detach().sum())))
        with torch.no_grad():
            bias += torch.arange(len(bias)) * 100.0

    monkeypatch.setattr(training, "train", train)
    strategy = {"name": "alone", "kind": "alone", "learning_rate": 0.5}
    experiment = of(rounds=3, first_epochs=2, strategies=[strategy])
    values, run = played(experiment, tmp_path)
    task = task_for(experiment)
    first = trained[0][3]
    assert trained == [
        (task.client_rows(3, client)[0].tolist(), 4.0, 0.5, first)
        for client in range(3)
    ]
    # It names the last class, and there is no global model.
    for client in range(3):
        truth = task.data.test.labels[own_test_rows(task, 3, client)]
        assert values["own", str(client), "accuracy"] == (truth == 6).mean()
    assert {row["scope"].split(":")[0] for row in run.rows} == {"own", "own-alone"}


@pytest.mark.parametrize("helps", [True, False])
def test_held_out_rows_choose_the_model_that_was_trained_on(
    helps, tmp_path, monkeypatch
):
    trained = []

    def train(model, task, rows, seed, epochs, lr):
        if seed // 1_000 % 1_000 == 2:  # after the only round
            trained.append((rows.tolist(), epochs))
            with torch.no_grad():
                model.classifier.bias[task.data.train.labels[rows[0]]] += (
                    9.0 if helps else -9.0
                )
        return 0.0

    monkeypatch.setattr(training, "train", train)
    apart = {"partition": "pathological:1", "clients": 7}
    experiment = of(strategies="local_finetuning", **apart)
    values, run = played(experiment, tmp_path)
    task = task_for(experiment)
    parts = [task.client_rows(3, client)[0].tolist() for client in range(7)]
    assert trained == [(rows, 1.0) for rows in parts]
    accuracies = [
        [values[scope, str(client), "accuracy"] for client in range(7)]
        for scope in ("own", "own-global")
    ]
    assert (accuracies[0] == [1.0] * 7) == helps
    assert (accuracies[0] == accuracies[1]) == (not helps)
    # The global model is FedAvg's, also after the sites have trained it.
    _, other = played(of(**apart), tmp_path / "plain")
    of_all = [row for row in other.rows if row["scope"] == "central"]
    same = [row for row in run.rows if row["scope"] == "central"]
    assert [row["value"] for row in of_all] == [row["value"] for row in same]


@pytest.mark.parametrize(
    ("strategy", "fields", "says"),
    [
        ({"kind": "alone", "fit_head": True}, {}, "does not read fit_head"),
        ({"kind": "alone", "fraction_train": 0.5}, {}, "does not read fraction_train"),
        ({"kind": "local_finetuning"}, {"holdout": 0}, "holdout must not be 0"),
    ],
)
def test_what_a_strategy_of_sites_does_not_read_is_refused(strategy, fields, says):
    with pytest.raises(ValueError, match=says):
        of(strategies=[{"name": "own", **strategy}], **fields)
