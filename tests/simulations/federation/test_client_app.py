"""What a client computes: its start, its update, its statistics, and which trainings
are shared.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

import fedrot
from fedrot.collect.statistics import STATISTIC_KINDS
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation import client_app
from fedrot.simulations.models import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import task_of
from fedrot.strategies.wire.arrays import STATISTICS
from fedrot.strategies.wire.fitting_messages import (
    COUNT,
    MESSAGE_TYPE,
    PROBLEM_TYPE,
    ROWS,
    STAGE,
    TASK_HEAD,
)
from fedrot.strategies.wire.statistics_record import read_statistics
from fedrot.task_head.outputs import SINGLE
from tests.simulations.data.files import write
from tests.simulations.tasks.cases import SMALL
from tests.simulations.tensors import equal
from tests.strategies import fakes

UP = "bert.encoder.layer.0.intermediate.dense.weight"


def of(**fields):
    return Experiment.from_flat({**SMALL, "holdout": 0.2, **fields})


@pytest.fixture(scope="module")
def task():
    return task_of(of().to_json())


@pytest.fixture(scope="module")
def received(task):
    """The model that clients get."""
    return dict(build_model(task.experiment, task.data, seed=0).state_dict())


def with_state(task, state):
    model = build_model(task.experiment, task.data, seed=0)
    model.load_state_dict(dict(state))
    return model


def answered(model, client=0, **told):
    """Return what a client answers; ``told`` may have fields of the experiment as
    ``fields``.
    """
    assert fakes.TaskIdentity.run_id == 1  # or Flower refuses to make messages
    fields = told.pop("fields", {})
    job = {
        "experiment": of(**fields).to_json(),
        "seed": 0,
        "lr": 1e-3,
        "cache": "",
        "server-round": 1,
        "batches": 0,
        "loads": "",
        **{name.replace("_", "-"): value for name, value in told.items()},
    }
    if "statistics" in job:
        job[STATISTICS] = job.pop("statistics")
    content = RecordDict(
        {"arrays": ArrayRecord(dict(model)), "config": ConfigRecord(job)}
    )
    message = Message(content, dst_node_id=1, message_type="train")
    found = fakes.node_of(client_app.app, **{"partition-id": client})(message)
    assert dict(found.content["client"]) == {"partition-id": client}
    return found.content


def ask(model, client=0, **told):
    """Return a client's update."""
    return fakes.tensors_of(answered(model, client, **told)["arrays"])


@pytest.fixture
def untrained(monkeypatch):
    """Clients return what they start from."""
    monkeypatch.setattr(training, "train", lambda *_: 0.0)


@pytest.fixture
def trainings(monkeypatch):
    """Losses of all trainings, each another one, that leave their number in the
    head.
    """
    losses = []

    def train(model, *_):
        losses.append(len(losses) + 1.0)
        with torch.no_grad():
            model.classifier.bias.fill_(losses[-1])
        return losses[-1]

    monkeypatch.setattr(training, "train", train)
    return losses


def number_in(update):
    """Return which of ``trainings`` an update is."""
    (number,) = {float(value) for value in update["classifier.bias"]}
    return number


def test_an_update_is_a_training_of_the_received_model(task, received):
    model = with_state(task, received)
    loss = training.train(model, task, task.client_rows(2, 1)[0], 2_003_001, 1, 0.01)
    content = answered(received, 1, seed=2, server_round=3, lr=0.01)
    assert equal(fakes.tensors_of(content["arrays"]), model.state_dict())
    assert content["metrics"]["train-loss"] == loss
    assert content["metrics"]["num-examples"] == len(task.client_rows(2, 1)[0])


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("told", "seed"),
    [
        ({}, None),
        ({"fields": {"start": "different"}}, 1_001),
        ({"fields": {"start": "different"}, "seed": 2}, 2_001_001),
        ({"fields": {"start": "different"}, "server_round": 2}, None),
    ],
)
def test_a_client_starts_from_a_model_of_its_own_only_where_it_is_to(
    told, seed, task, received
):
    own = (
        received
        if seed is None
        else build_model(task.experiment, task.data, seed).state_dict()
    )
    found = ask(received, 1, **told)
    assert found.keys() == own.keys()
    assert equal(found, own)


@pytest.mark.usefixtures("untrained")
def test_clients_are_scrambled_in_ways_of_their_own(task, received):
    rows = np.arange(8)
    scrambled = {"fields": {"start": "scrambled"}}
    found = [received]
    for client, told in ((0, {}), (1, {}), (0, {"server_round": 2}), (0, {"seed": 1})):
        found.append(ask(received, client, **scrambled, **told))
    expected, *losses = (
        training.evaluate(with_state(task, state), task, task.test, rows)["loss"]
        for state in found
    )
    assert losses == pytest.approx([expected] * 4, abs=1e-4)
    assert len({tuple(state[UP].flatten().tolist()) for state in found}) == 5
    assert torch.equal(ask(received, 0, **scrambled)[UP], found[1][UP])


@pytest.mark.usefixtures("untrained")
def test_statistics_are_of_the_update_on_the_clients_own_rows(task, received):
    content = answered(received, 1, statistics="gram,fisher")
    state = fakes.tensors_of(content["arrays"])
    found = read_statistics(content)
    assert set(found) == {"gram", "fisher"}
    assert all(
        found["fisher"][name].shape == tensor.shape for name, tensor in state.items()
    )
    rows, _ = task.client_rows(0, 1)
    batches = [{**task.train.batch(np.array([row]))} for row in rows]
    expected = fedrot.collect_gram(with_state(task, state), batches)
    torch.testing.assert_close(found["gram"], expected["gram"], atol=1e-4, rtol=1e-4)
    assert read_statistics(answered(received, 1, statistics="")) == {}


@pytest.mark.usefixtures("untrained")
def test_statistics_come_from_as_many_batches_as_asked_for(task, received, monkeypatch):
    """What is asked for replaces the kind's own limit, which is smaller or larger."""
    seen = []
    gram = STATISTIC_KINDS["gram"]

    def collect(model, batches, **options):
        found = [*batches]
        seen.append((len(found), options.get("max_batches", "its own")))
        return gram.collect(model, found, **options)

    monkeypatch.setitem(STATISTIC_KINDS, "gram", replace(gram, collect=collect))
    for limit in (0, 2):
        answered(received, statistics="gram", batches=limit)
    every = math.ceil(len(task.client_rows(0, 0)[0]) / 16)
    assert seen == [(every, "its own"), (2, None)]


#: What decides what a client trains in the first round, and what does not.
DECIDES = {
    "seed": ({"seed": 1}, True),
    "client": ({"client": 1}, True),
    "an own start": ({"fields": {"start": "different"}}, True),
    "learning rate": ({"lr": 0.5}, True),
    "epochs of the first round": ({"fields": {"first_epochs": 3.0}}, True),
    "the round": ({"server_round": 2}, True),
    "partition": ({"fields": {"partition": "dirichlet:1"}}, True),
    "the model": ({"weight": 2.0}, True),
    "scrambled": ({"fields": {"start": "scrambled"}}, False),
    "names and strategies": (
        {"fields": {"strategies": "aligned", "name": "x", "seeds": "9"}},
        False,
    ),
}


@pytest.mark.parametrize(("change", "differs"), DECIDES.values(), ids=DECIDES)
def test_strategies_share_a_training_only_if_nothing_that_decides_it_differs(
    change, differs, received, tmp_path, trainings
):
    def ask_for(client=0, weight=1.0, **told):
        sent = {**received, "classifier.weight": received["classifier.weight"] * weight}
        content = answered(sent, client, cache=str(tmp_path), **told)
        update = fakes.tensors_of(content["arrays"])
        return number_in(update), content["metrics"]["train-loss"]

    # All are there from the first time on, each for those who ask the same.
    expected = [(1, 1), (2, 2) if differs else (1, 1)] * 2
    assert [ask_for(**told) for told in ({}, change, {}, change)] == expected
    assert len(trainings) == 1 + differs


def test_later_rounds_share_trainings_while_the_folder_is_small(
    received, tmp_path, trainings, monkeypatch
):
    def numbers(client, server_round, cache=str(tmp_path)):
        return [
            number_in(ask(received, client, cache=cache, server_round=server_round))
            for _ in range(2)
        ]

    assert numbers(0, 2) == [1, 1]
    assert len([*tmp_path.iterdir()]) == 1
    monkeypatch.setattr(client_app, "KEPT_BYTES", 1)
    assert numbers(1, 2) == [2, 3]
    assert numbers(0, 2) == [1, 1]
    assert numbers(1, 1) == [4, 4]
    # Clients on other machines share none.
    assert [numbers(0, 1, cache) for cache in ("", "/nowhere")] == [[5, 6], [7, 8]]


def test_outputs_of_labels_that_a_client_does_not_know_stay(tmp_path):
    """Each client has one of two data sets that share a class."""
    texts = [f"word {i}" for i in range(40)]
    for name, classes in (("news", "ab"), ("talk", "bc")):
        write(tmp_path / f"{name}.csv", text=texts, label=[*classes] * 20)
    fields = {
        "data": "news.csv,talk.csv",
        "data_dir": str(tmp_path),
        "partition": "column:domain",
    }
    task = task_of(of(**fields).to_json())
    start = build_model(task.experiment, task.data, seed=0).state_dict()
    assert task.data.label_names == ("a", "b", "c")
    moved = []
    for client in range(2):
        # Weight decay moves what has no loss, too.
        content = answered(start, client, fields=fields, lr=0.1)
        weight = fakes.tensors_of(content["arrays"])["classifier.weight"]
        moved.append((weight != start["classifier.weight"]).any(1).tolist())
        trained = read_statistics(content)["trained"]
        moved.append(trained["classifier.bias"].flatten().tolist())
    assert sorted(moved) == [[False, True, True]] * 2 + [[True, True, False]] * 2


@pytest.mark.parametrize("fewest", [1, 5])
def test_scarce_classes_are_left_out_as_the_setting_says(fewest):
    task = task_of(of(min_class_rows=fewest).to_json())
    job = {"experiment": task.experiment.to_json(), "seed": 0, "server-round": 0}
    job |= {"loads": "", PROBLEM_TYPE: SINGLE, TASK_HEAD: "classifier", STAGE: COUNT}
    content = RecordDict({"config": ConfigRecord(job)})
    message = Message(content, dst_node_id=1, message_type=MESSAGE_TYPE)
    found = fakes.node_of(client_app.app, **{"partition-id": 0})(message)
    classes = np.bincount(task.data.train.labels[task.client_rows(0, 0)[0]])
    assert {*classes.tolist()} & {1, 2, 3, 4}
    assert found.content[ROWS]["training"] == classes[classes >= fewest].sum()
