"""What models are worth on the sites' own test rows, against numpy and saved models."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from transformers import AutoModelForSequenceClassification

from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.cells import run_cell
from fedrot.simulations.federation.client_app import app
from fedrot.simulations.federation.grids import OrderedGrid, local_clients
from fedrot.simulations.federation.own_rows import FEWEST, MOST, own_test_rows
from fedrot.simulations.run_folder import cells_of
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.objective import model_inputs
from fedrot.simulations.tasks.training import task_of
from fedrot.strategies import LabelledRows, Privacy, answer_with_sums, report_sites
from fedrot.strategies.wire.flower_compat import outside_of_the_engine
from tests.simulations.data.files import write
from tests.simulations.tasks.cases import SMALL, experiment_of


def of(**fields):
    given = {"train_limit": 240, "test_limit": 90, "holdout": 0.25, "seeds": [3]}
    given |= {"rounds": 1, "strategies": "fedavg", "lr": 0.01, "clients": 3}
    return Experiment.from_flat(
        {**SMALL, "partition": "dirichlet:0.3", **given, **fields}
    )


def task_for(experiment):
    return task_of(experiment.to_json())


def played(experiment, folder, save=None):
    """Run the only cell; return its rows of sites, by metric a value a site."""
    count = experiment.clients
    with outside_of_the_engine():
        grid = OrderedGrid(local_clients(app, count), count)
        (cell,) = cells_of([experiment])
        run = run_cell(cell, grid, folder, save)
    found = defaultdict(list)
    for row in run.rows:
        if row["scope"].startswith("site:"):
            assert row["round"] == experiment.rounds
            site = int(row["scope"].removeprefix("site:"))
            found[row["metric"]][site:] = [row["value"]]
    return found, run


# What a site's own test rows are


def test_drawn_rows_have_the_proportions_of_the_site():
    task = task_for(of(test_limit=None))
    there = np.bincount(task.data.test.labels, minlength=7)
    for seed in range(6):
        for client, rows in enumerate(task.clients(seed)):
            drawn = own_test_rows(task, seed, client)
            of_site = np.bincount(task.data.train.labels[rows], minlength=7) / len(rows)
            counts = np.bincount(task.data.test.labels[drawn], minlength=7)
            assert np.abs(counts - of_site * len(drawn)).max() < 4
            assert len(np.unique(drawn)) == len(drawn) <= MOST + 4
            # Some class has no rows left, so that no more can be drawn.
            assert len(drawn) > MOST - 4 or (there - counts).min() < 4
            assert (drawn == own_test_rows(task, seed, client)).all()


def test_rows_of_scarce_classes_repeat_below_the_fewest():
    task = task_for(of(test_limit=9, partition="pathological:1", clients=7))
    sizes = set()
    for client, rows in enumerate(task.clients(0)):
        drawn = own_test_rows(task, 0, client)
        assert {*task.data.test.labels[drawn]} <= {task.data.train.labels[rows[0]]}
        sizes.add(len(drawn))
    assert sizes == {0, FEWEST}


def test_rows_of_a_column_and_of_equal_divisions(tmp_path):
    file = write(
        tmp_path / "a.csv",
        text=[f"a story {row}" for row in range(120)],
        label=["joy", "fear", "joy"] * 40,
        site=[" north", "south", "north ", "east"] * 30,
    )
    task = task_for(of(data=str(file), partition="column:site", clients=0))
    values = [name.strip() for name in task.data.test.columns["site"]]
    for client, name in enumerate(("east", "north", "south")):
        expected = [row for row, value in enumerate(values) if value == name]
        assert own_test_rows(task, 0, client).tolist() == expected
    task = task_for(of(data=str(file), partition="iid"))
    assert own_test_rows(task, 0, 2).tolist() == [*range(len(values))]


# What is measured there


def test_own_rows_are_scored_with_the_priors_of_training_rows(tmp_path):
    experiment = of()
    values, _ = played(experiment, tmp_path, tmp_path / "saved")
    task = task_for(experiment)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    labels = task.data.train.labels
    parts = [labels[task.client_rows(3, client)[0]] for client in range(3)]
    counts = [np.bincount(part, minlength=7) for part in parts]
    priors = np.where(sum(counts) > 0, sum(counts), 0.5) / sum(counts).sum()
    differs = False
    for client in range(3):
        rows = own_test_rows(task, 3, client)
        with torch.no_grad():
            answer = model.eval()(**task.test.batch(rows))
        logits = answer.logits.double().numpy()
        # Bayes' rule with one row of everybody's shares.
        shares = (counts[client] + priors) / (counts[client].sum() + 1)
        own = logits + np.log(shares) - np.log(priors)
        differs |= (own.argmax(1) != logits.argmax(1)).any()
        truth = task.data.test.labels[rows]
        for whose, scores in (("global", logits), ("own", own)):
            accuracy = (scores.argmax(1) == truth).mean()
            assert values[f"{whose}-accuracy"][client] == pytest.approx(accuracy)
        assert values["test-rows"][client] == len(np.unique(rows))
    assert differs


def test_alone_is_a_head_of_the_first_model_whatever_the_strategy(tmp_path):
    names = ("fedavg", "head_only")
    found = [played(of(strategies=name), tmp_path)[0] for name in names]
    alone, other = (values["alone-accuracy"] for values in found)
    assert alone == other
    assert len(alone) == 3


def test_a_site_of_one_class_alone_answers_with_it(tmp_path):
    values, _ = played(of(partition="pathological:1", clients=7), tmp_path)
    assert values["alone-accuracy"] == [1.0] * 7


@pytest.mark.parametrize("tested", ["2", "1"])
def test_sites_without_test_rows_are_left_out(tested, tmp_path, caplog):
    file = write(
        tmp_path / "a.csv",
        text=[f"a story {row}" for row in range(120)],
        label=["joy", "fear", "joy"] * 40,
        site=["0", "1"] * 50 + [tested] * 20,
        split=["train"] * 100 + ["test"] * 20,
    )
    experiment = of(data=str(file), partition="column:site", clients=2)
    values, _ = played(experiment, tmp_path)
    has_rows = tested == "1"
    assert len(values["own-accuracy"]) == len(values["test-rows"]) == has_rows
    assert ("Site 0 is left out: No row has a label" in caplog.text) == has_rows


@pytest.mark.parametrize(
    ("case", "metric", "alone"),
    [
        ("multi", "accuracy", 1),
        ("regression", "loss", 1),
        ("clm gpt2", "loss", 0),
        ("domains", "loss", 0),
    ],
)
def test_other_kinds_of_labels(case, metric, alone, tmp_path):
    fields = {"strategies": ["fedavg"], "seeds": [0], "rounds": 1, "holdout": 0.25}
    values, _ = played(experiment_of(case, **fields), tmp_path)
    heads = ["alone", "global", "own"][1 - alone :]
    assert {*values} == {"test-rows", *(f"{head}-{metric}" for head in heads)}
    # Each label has a shift of its own, and a regression the mean residual.
    unlike = np.not_equal(values[f"own-{metric}"], values[f"global-{metric}"])
    assert unlike.any() == alone


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"partition": "pathological:2"},
        {"case": "multi"},
        {"case": "regression"},
        {"case": "gpt2"},
    ],
    ids=str,
)
def test_heads_have_the_values_that_the_sites_themselves_report(fields, tmp_path):
    given = {"strategies": ["fedavg"], "seeds": [3], "rounds": 1, "holdout": 0.25}
    given |= {"clients": 3, "partition": "dirichlet:1"} | fields
    experiment = experiment_of(given.pop("case", "bert"), **given)
    values, run = played(experiment, tmp_path, tmp_path / "saved")
    task = task_for(experiment)
    first = run.model()
    last = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")

    def batches(split, rows):
        for row in rows:
            batch = model_inputs(first, split.batch(np.array([row])))
            yield {**batch, "labels": split.targets(np.array([row]))}

    def node(client):
        training_rows, held_out = task.client_rows(3, client)
        rows = LabelledRows(
            run.model,
            partial(batches, task.train, training_rows),
            partial(batches, task.train, held_out),
            test=partial(batches, task.test, own_test_rows(task, 3, client)),
            name=str(client),
        )
        site = ClientApp()
        answer_with_sums(site, lambda message, context: rows, privacy=Privacy(1, 1))
        return site

    grid = local_clients(app, 3)
    for client in range(3):
        grid.nodes[client] = partial(node(client), **grid.nodes[client].keywords)
    with outside_of_the_engine():
        sites = report_sites(
            grid,
            ArrayRecord(last.state_dict()),
            last.config,
            first=ArrayRecord(first.state_dict()),
        )
    # A regression alone makes more of the rounding of features without padding.
    for head, most in (("own", 1e-6), ("global", 1e-6), ("alone", 1e-3)):
        reported = [row[head][sites.measure] for row in sites.rows]
        assert values[f"{head}-{sites.measure}"] == pytest.approx(reported, abs=most)


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
    values, _ = played(experiment, tmp_path)
    task = task_for(experiment)
    first = trained[0][3]
    parts = [task.client_rows(3, client)[0].tolist() for client in range(3)]
    assert trained == [(rows, 4.0, 0.5, first) for rows in parts]
    # It names the last class, and there is no global model.
    truths = [task.data.test.labels[own_test_rows(task, 3, n)] for n in range(3)]
    assert values["own-accuracy"] == [(truth == 6).mean() for truth in truths]
    assert "global-accuracy" not in values


@pytest.mark.parametrize("helps", [True, False])
def test_held_out_rows_choose_the_model_that_was_trained_on(
    helps, tmp_path, monkeypatch
):
    trained = []

    def train(model, task, rows, seed, epochs, lr):
        if seed // 1_000 % 1_000 == 2:  # after the only round
            trained.append((rows.tolist(), epochs))
            with torch.no_grad():
                bias = model.classifier.bias
                bias[task.data.train.labels[rows[0]]] += 9.0 if helps else -9.0
        return 0.0

    monkeypatch.setattr(training, "train", train)
    apart = {"partition": "pathological:1", "clients": 7}
    experiment = of(strategies="local_finetuning", **apart)
    values, run = played(experiment, tmp_path)
    task = task_for(experiment)
    parts = [task.client_rows(3, client)[0].tolist() for client in range(7)]
    assert trained == [(rows, 1.0) for rows in parts]
    assert (values["own-accuracy"] == [1.0] * 7) == helps
    assert (values["own-accuracy"] == values["global-accuracy"]) == (not helps)
    # The global model is FedAvg's, also after the sites have trained it.
    _, other = played(of(**apart), tmp_path / "plain")
    of_all, same = (
        [row["value"] for row in rows if row["scope"] == "central"]
        for rows in (run.rows, other.rows)
    )
    assert of_all == same


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
