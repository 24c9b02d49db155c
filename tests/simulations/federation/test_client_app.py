"""What a client computes: its start, its update, its statistics, and which trainings are shared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

import fedrot
from fedrot.collect.statistics import STATISTIC_KINDS, StatisticKind
from fedrot.simulations.federation import client_app
from fedrot.simulations.federation.cells import with_state
from fedrot.simulations.models import build_model, model_config
from fedrot.simulations.settings import Experiment
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.strategies.wire.records import STATISTICS, read_statistics
from tests.strategies import fakes

State = dict[str, Tensor]
SMALL: dict[str, Any] = {
    **{"train_limit": 90, "test_limit": 30, "layers": 1, "width": 16, "heads": 2, "clients": 2},
    **{"batch_size": 16, "max_length": 24, "holdout": 0.2},
}
UP = "bert.encoder.layer.0.intermediate.dense.weight"


def of(**fields: Any) -> Experiment:
    return Experiment.from_flat({**SMALL, **fields})


@pytest.fixture(scope="module")
def task() -> Task:
    return task_of(of().to_json())


@pytest.fixture(scope="module")
def received(task: Task) -> State:
    """The model that clients get."""
    return dict(build_model(task.experiment, task.data, seed=0).state_dict())


@pytest.fixture
def shell(task: Task) -> nn.Module:
    return build_model(task.experiment, task.data, seed=0)


def answered(
    model: Mapping[str, Tensor], client: int = 0, kind: str = "train", **told: Any
) -> RecordDict:
    """Return what a client answers; ``told`` may have fields of the experiment as ``fields``."""
    assert fakes.TaskIdentity.run_id == 1  # or Flower refuses to make messages
    fields = told.pop("fields", {})
    job = {
        **{"experiment": of(**fields).to_json(), "seed": 0, "lr": 1e-3, "cache": ""},
        **{"server-round": 1, "align": "", "chance": 0.0, "batches": 0, "loads": ""},
        **{name.replace("_", "-"): value for name, value in told.items()},
    }
    if "statistics" in job:
        job[STATISTICS] = job.pop("statistics")
    content = RecordDict({"arrays": ArrayRecord(dict(model)), "config": ConfigRecord(job)})
    message = Message(content, dst_node_id=1, message_type=kind)
    found = client_app.app(message, Context(1, 1, {"partition-id": client}, RecordDict(), {}))
    assert dict(found.content["client"]) == {"partition-id": client}
    return found.content


def ask(model: Mapping[str, Tensor], client: int = 0, **told: Any) -> State:
    """Return a client's update."""
    return dict(answered(model, client, **told).array_records["arrays"].to_torch_state_dict())


def metrics_of(content: RecordDict) -> dict[str, Any]:
    (metrics,) = content.metric_records.values()
    assert isinstance(metrics, MetricRecord)
    return dict(metrics)


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients return what they start from."""
    monkeypatch.setattr(training, "train", lambda *_: 0.0)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Losses of all trainings, each another one, that leave their number in the head."""
    losses: list[float] = []

    def train(model: Any, *_: Any) -> float:
        losses.append(len(losses) + 1.0)
        with torch.no_grad():
            model.classifier.bias.fill_(losses[-1])
        return losses[-1]

    monkeypatch.setattr(training, "train", train)
    return losses


def number_in(update: State) -> float:
    """Return which of ``trainings`` an update is."""
    (number,) = {float(value) for value in update["classifier.bias"]}
    return number


# Starts


def test_an_update_is_a_training_of_the_received_model(task: Task, received: State) -> None:
    model = build_model(task.experiment, task.data, seed=5)
    model.load_state_dict(received)
    loss = training.train(model, task, task.client_rows(2, 1)[0], 2_003_001, 1, 0.01)
    content = answered(received, 1, seed=2, server_round=3, lr=0.01)
    found = content.array_records["arrays"].to_torch_state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert metrics_of(content)["train-loss"] == loss
    assert metrics_of(content)["num-examples"] == len(task.client_rows(2, 1)[0])


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
    told: dict[str, Any], seed: int | None, task: Task, received: State
) -> None:
    own = received if seed is None else build_model(task.experiment, task.data, seed).state_dict()
    found = ask(received, 1, **told)
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())


@pytest.mark.usefixtures("untrained")
def test_clients_are_scrambled_in_ways_of_their_own(
    task: Task, shell: nn.Module, received: State
) -> None:
    rows, scrambled = np.arange(8), {"fields": {"start": "scrambled"}}
    expected = training.evaluate(shell, task, task.test, rows)["loss"]
    found = [received]
    for client, told in ((0, {}), (1, {}), (0, {"server_round": 2}), (0, {"seed": 1})):
        found.append(ask(received, client, **scrambled, **told))
        loss = training.evaluate(with_state(shell, found[-1]), task, task.test, rows)["loss"]
        assert loss == pytest.approx(expected, abs=1e-4)
    assert len({tuple(state[UP].flatten().tolist()) for state in found}) == 5
    assert torch.equal(ask(received, 0, **scrambled)[UP], found[1][UP])


# Statistics


@pytest.mark.usefixtures("untrained")
def test_statistics_are_of_the_update_on_the_clients_own_rows(
    task: Task, shell: nn.Module, received: State
) -> None:
    content = answered(received, 1, statistics="gram,fisher")
    state = content.array_records["arrays"].to_torch_state_dict()
    found = read_statistics(content)
    assert set(found) == {"gram", "input_mean", "fisher"}
    assert all(found["fisher"][name].shape == tensor.shape for name, tensor in state.items())
    rows, _ = task.client_rows(0, 1)
    batches = [{**task.train.batch(rows[[i]])} for i in range(len(rows))]
    expected = fedrot.collect_gram(with_state(shell, state), batches)
    for kind in ("gram", "input_mean"):
        assert found[kind].keys() == expected[kind].keys()
        for name, statistic in expected[kind].items():
            torch.testing.assert_close(found[kind][name], statistic, atol=1e-4, rtol=1e-4)
    assert metrics_of(content)["seconds-statistics"] > 0
    assert read_statistics(answered(received, 1, statistics="")) == {}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, Any]]:
    """Note the name, the number of batches and the limit of everything that is collected."""
    names: list[tuple[str, int, Any]] = []

    def noting(kind: StatisticKind) -> StatisticKind:
        def collect(model: Any, batches: Any, **options: Any) -> Any:
            found = [*batches]
            names.append((kind.name, len(found), options.get("max_batches", "its own")))
            assert kind.collect is not None
            return kind.collect(model, found, **options)

        return replace(kind, collect=collect)

    for name in ("gram", "fisher"):
        monkeypatch.setitem(STATISTIC_KINDS, name, noting(STATISTIC_KINDS[name]))
    return names


@pytest.mark.usefixtures("untrained")
def test_statistics_come_from_as_many_batches_as_asked_for(
    task: Task, received: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for replaces the kind's own limit, which is smaller or larger."""
    seen = counted(monkeypatch)
    for limit in (0, 2):
        answered(received, statistics="gram", batches=limit)
    every = math.ceil(len(task.client_rows(0, 0)[0]) / 16)
    assert seen == [("gram", every, "its own"), ("gram", 2, None)]


@pytest.mark.usefixtures("untrained")
def test_statistics_are_computed_once_for_one_update(
    received: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, told = counted(monkeypatch), {"cache": str(tmp_path), "statistics": "gram"}
    once, again = (read_statistics(answered(received, **told))["gram"] for _ in range(2))
    assert [name for name, *_ in seen] == ["gram"]
    assert all(torch.equal(once[name], gram) for name, gram in again.items())
    # A matrix that several layers share is one tensor, also from the file.
    assert len({id(gram) for gram in again.values()}) == len({id(gram) for gram in once.values()})
    seen.clear()
    # Another client, kind, seed, update, round or limit of batches has statistics of its own.
    answered(received, 1, **told)
    answered(received, **{**told, "statistics": "fisher"})
    answered(received, seed=1, **told)
    answered(received, fields={"start": "scrambled"}, **told)
    answered(received, server_round=2, **told)
    answered(received, batches=1, **told)
    assert [name for name, *_ in seen] == ["gram", "fisher", *["gram"] * 4]


def test_clients_that_align_first_send_the_unscrambled_update_and_its_fisher(
    task: Task, received: State
) -> None:
    scrambled = {"fields": {"start": "scrambled"}, "statistics": "fisher"}
    first = answered(received, align="attention+ffn", statistics="fisher")
    again = answered(received, align="attention+ffn", **scrambled)
    lost = answered(received, **scrambled)
    update, same, other = (c.array_records["arrays"].to_torch_state_dict() for c in (first, again, lost))
    fisher, its, theirs = (read_statistics(c)["fisher"] for c in (first, again, lost))
    for name, tensor in update.items():
        torch.testing.assert_close(same[name], tensor, atol=1e-4, rtol=0)
        scale = max(float(fisher[name].max()), 1e-6)
        torch.testing.assert_close(its[name] / scale, fisher[name] / scale, atol=1e-3, rtol=0)
    assert float((other[UP] - update[UP]).abs().max()) > 0.01
    assert float((theirs[UP] - fisher[UP]).abs().max()) > 0
    symmetry = fedrot.symmetry_of(model_config(task.experiment, task.data), received)
    trained = ask(received)
    eager = fedrot.AlignmentOptions(parts=("attention", "ffn"), chance=0)
    for name, tensor in fedrot.align(trained, received, symmetry, eager).apply(trained).items():
        torch.testing.assert_close(update[name], tensor, atol=1e-6, rtol=0)
    # With a chance that nothing exceeds, nothing is moved.
    still = ask(received, align="attention+ffn", chance=1e9)
    assert torch.equal(still[UP], trained[UP])


# Shared trainings

#: What decides what a client trains in the first round, or what it reports of it.
DECIDES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "client": {"client": 1},
    "an own start": {"fields": {"start": "different"}},
    "learning rate": {"lr": 0.5},
    "epochs of the first round": {"fields": {"first_epochs": 3.0}},
    "the round": {"server_round": 2},
    "partition": {"fields": {"partition": "dirichlet:1"}},
    "the model": {"model": 2.0},
    "a part of an adapter": {"fedrot_train": "b"},
    "how an adapter is loaded": {"loads": "x"},
}


@pytest.mark.parametrize("what", DECIDES)
def test_strategies_share_a_training_only_if_nothing_that_decides_it_differs(
    what: str, received: State, tmp_path: Path, trainings: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        client_app, "load_tensors", lambda model, state, *_: model.load_state_dict(state)
    )

    def ask_for(change: Mapping[str, Any]) -> float:
        told = {"cache": str(tmp_path), "client": 0, **change}
        weight = received["classifier.weight"] * told.pop("model", 1.0)
        return number_in(ask({**received, "classifier.weight": weight}, told.pop("client"), **told))

    assert ask_for({}) == 1
    assert ask_for(DECIDES[what]) == 2
    # Both are there from now on, each for those who ask the same.
    assert [ask_for({}), ask_for(DECIDES[what])] == [1, 2]
    assert trainings == [1.0, 2.0]


@pytest.mark.parametrize(
    "same",
    [
        {"fields": {"start": "scrambled"}},
        {"fields": {"strategies": "joined", "name": "other", "seeds": "9"}},
        {"align": "ffn"},
        {"batches": 3},
    ],
    ids=str,
)
def test_what_does_not_change_a_training_shares_it(
    same: dict[str, Any], received: State, tmp_path: Path, trainings: list[float]
) -> None:
    for change in ({}, same):
        assert number_in(ask(received, cache=str(tmp_path), **change)) == 1
    assert trainings == [1.0]


def test_clients_elsewhere_share_no_training(
    received: State, tmp_path: Path, trainings: list[float]
) -> None:
    for cache in ("", str(tmp_path / "missing")):
        for _ in range(2):
            ask(received, cache=cache)
    assert len(trainings) == 4
    assert list(tmp_path.iterdir()) == []


def test_later_rounds_share_trainings_while_the_folder_is_small(
    received: State, tmp_path: Path, trainings: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbers(client: int, server_round: int) -> list[float]:
        told = {"cache": str(tmp_path), "server_round": server_round}
        return [number_in(ask(received, client, **told)) for _ in range(2)]

    assert numbers(0, 2) == [1, 1]
    monkeypatch.setattr(client_app, "KEPT_BYTES", 1)
    assert numbers(1, 2) == [2, 3]
    assert numbers(0, 2) == [1, 1]
    assert numbers(1, 1) == [4, 4]


def test_the_metrics_of_a_shared_training_are_its_own(
    task: Task, received: State, tmp_path: Path, trainings: list[float]
) -> None:
    first, again = (metrics_of(answered(received, cache=str(tmp_path))) for _ in range(2))
    assert again == first
    assert first["train-loss"] == trainings[0]
    assert first["seconds-training"] > 0


# Rows and labels that a client lacks


def test_outputs_of_labels_that_a_client_does_not_know_stay(tmp_path: Path) -> None:
    """Each client has one of two data sets that share a class."""
    for name, classes in (("news", "ab"), ("talk", "bc")):
        rows = [f"word {i},{classes[i % 2]}" for i in range(40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    fields = {"data": "news.csv,talk.csv", "data_dir": str(tmp_path), "partition": "column:domain"}
    task = task_of(of(**fields).to_json())
    start = build_model(task.experiment, task.data, seed=0).state_dict()
    assert task.data.label_names == ("a", "b", "c")
    moved = []
    for client in range(2):
        # Weight decay moves what has no loss, too.
        head = ask(start, client, fields=fields, lr=0.1)["classifier.weight"]
        moved.append([not torch.equal(head[k], start["classifier.weight"][k]) for k in range(3)])
    assert sorted(moved) == [[False, True, True], [True, True, False]]
