"""Arms that merge, ensemble or join, and what clients compute for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor, nn

import fedrot
import reproductions.soup  # noqa: F401  # An aggregation that takes a score.
from fedrot.aggregation import Fisher, Mean, RegMean
from fedrot.collect.statistics import STATISTIC_KINDS, StatisticKind
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation import client_app
from fedrot.simulations.federation.arms import (
    aggregation_of,
    evaluate_at_clients,
    train_joined,
    with_state,
)
from fedrot.simulations.models.build import build_model, model_config
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.strategies.wire.records import STATISTICS, read_statistics
from tests.strategies import fakes

SMALL: dict[str, Any] = {
    "train_limit": 90,
    "test_limit": 30,
    "width": 16,
    "heads": 2,
    "clients": 2,
    "batch_size": 16,
    "max_length": 24,
    "holdout": 0.2,
}
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def task() -> Task:
    return task_of(SimulationConfig(**SMALL).to_json())


@pytest.fixture
def shell(task: Task) -> nn.Module:
    return build_model(task.config, task.data, seed=0)


# --- what merges -------------------------------------------------------------------------------------


def test_every_aggregation_has_its_aggregator(task: Task, shell: nn.Module) -> None:
    classes = {
        "mean": Mean,
        "regmean": RegMean,
        "fisher": Fisher,
    }
    for name in classes:
        build = aggregation_of(Arm.parse(name), task, 0, shell)
        assert build is not None
        first, second = build(), build()
        assert isinstance(first, classes[name])
        assert first is not second


def test_an_aggregation_has_the_arguments_of_its_arm(task: Task, shell: nn.Module) -> None:
    build = aggregation_of(Arm.parse("plain/regmean(alpha=0.25)"), task, 0, shell)
    default = aggregation_of(Arm.parse("plain/regmean"), task, 0, shell)
    assert build is not None
    assert default is not None
    found, plain = build(), default()
    assert isinstance(found, RegMean)
    assert isinstance(plain, RegMean)
    assert (found.alpha, found.beta, plain.alpha) == (0.25, plain.beta, 0.9)


def test_a_copy_with_other_tensors_leaves_the_model_as_it_is(shell: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in shell.state_dict().items()}
    other = with_state(shell, {name: tensor + 1 for name, tensor in before.items()})
    assert all(torch.equal(shell.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(other.state_dict()[name], tensor + 1) for name, tensor in before.items())


def test_joined_training_sees_every_clients_rows(
    task: Task, shell: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[list[int], int, float]] = []

    def train(model: Any, of: Task, rows: np.ndarray, seed: int, epochs: float) -> float:
        calls.append((rows.tolist(), seed, epochs))
        return 0.0

    monkeypatch.setattr(training, "train", train)
    config = task.config.model_copy(update={"local_epochs": 2.0, "first_epochs": 5.0})
    of = replace(task, config=config)
    for server_round in (1, 2, 3):
        train_joined(of, Arm.parse("joined"), 1, shell, server_round)
    rows = sorted(row for client in range(2) for row in task.client_rows(1, client)[0].tolist())
    assert len(rows) > 60
    assert [call[0] for call in calls] == [rows] * 3
    assert len({call[1] for call in calls}) == 3
    assert [call[2] for call in calls] == [5.0, 2.0, 2.0]
    train_joined(of, Arm.parse("joined"), 0, shell, 1)
    assert len({call[1] for call in calls}) == 4


def test_joined_training_learns(task: Task, shell: nn.Module) -> None:
    rows = np.concatenate([task.client_rows(0, client)[0] for client in range(2)])
    before = training.evaluate(shell, task, task.train, rows)["loss"]
    train_joined(task, Arm.parse("joined"), 0, shell, 1)
    assert training.evaluate(shell, task, task.train, rows)["loss"] < before


def test_an_arm_of_some_clients_chooses_by_their_held_out_rows(
    task: Task, shell: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(training, "evaluate", lambda *given: seen.append(given[2:]) or {})
    own = [task.client_rows(1, client)[1] for client in range(2)]
    for arm, rows in (("plain#1", own[1]), ("plain", np.concatenate(own))):
        evaluate_at_clients(task, Arm.parse(arm), 1, shell)
        split, chosen = seen.pop()
        assert split is task.train
        assert chosen.tolist() == rows.tolist()


# --- clients -----------------------------------------------------------------------------------------


def ask(
    config: SimulationConfig, model: Mapping[str, Tensor], client: int, **options: Any
) -> tuple[State, dict[str, dict[str, Tensor]]]:
    """Let a client train, and return its update and its statistics."""
    content = answered(config, model, client, **options)
    arrays: ArrayRecord = content.array_records["arrays"]
    return dict(arrays.to_torch_state_dict()), read_statistics(content)


def answered(
    config: SimulationConfig, model: Mapping[str, Tensor], client: int, **options: Any
) -> RecordDict:
    """Let a client train, and return what it answers."""
    assert fakes.TaskIdentity.run_id == 1  # or Flower refuses to make messages
    job = {
        "simulation": config.to_json(),
        "seed": 0,
        "start": "same",
        "last-round": 9,
        "server-round": 1,
        "cache": "",
        "count": False,
        "align": "",
        "chance": 1.1,
        "batches": 0,
        "loads": "",
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    if "statistics" in job:
        job[STATISTICS] = job.pop("statistics")
    content = RecordDict({"arrays": ArrayRecord(dict(model)), "config": ConfigRecord(job)})
    message = Message(content, dst_node_id=1, message_type="train")
    context = Context(1, 1, {"partition-id": client}, RecordDict(), {})
    return client_app.train(message, context).content


def initial(config: SimulationConfig) -> State:
    return dict(build_model(config, task_of(config.to_json()).data, seed=0).state_dict())


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients return what they start from."""
    monkeypatch.setattr(training, "train", lambda *args: 0.0)


@pytest.mark.usefixtures("untrained")
def test_every_tensor_is_received() -> None:
    config = SimulationConfig(**SMALL)
    received = initial(config)
    found = ask(config, received, 1)[0]
    assert all(torch.equal(found[name], tensor) for name, tensor in received.items())


@pytest.mark.usefixtures("untrained")
def test_a_client_starts_from_a_model_of_its_own_only_where_it_is_to(task: Task) -> None:
    received = initial(task.config)
    for given, seed in (
        ({"start": "different"}, 1_001),
        ({"start": "different", "seed": 2}, 2_001_001),
        ({"start": "different", "server_round": 2}, None),
        ({"start": "same"}, None),
    ):
        found = ask(task.config, received, 1, **given)[0]
        own = received if seed is None else build_model(task.config, task.data, seed).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in own.items())


@pytest.mark.usefixtures("untrained")
def test_clients_are_scrambled_in_ways_of_their_own(task: Task, shell: nn.Module) -> None:
    received = initial(task.config)
    rows = np.arange(8)
    expected = training.evaluate(shell, task, task.test, rows)["loss"]
    up, found = "bert.encoder.layer.0.intermediate.dense.weight", [received]
    for client, given in ((0, {}), (1, {}), (0, {"server_round": 2}), (0, {"seed": 1})):
        found.append(ask(task.config, received, client, start="scrambled", **given)[0])
        loss = training.evaluate(with_state(shell, found[-1]), task, task.test, rows)["loss"]
        assert loss == pytest.approx(expected, abs=1e-4)
    assert len({tuple(state[up].flatten().tolist()) for state in found}) == 5
    again = ask(task.config, received, 0, start="scrambled")[0]
    assert torch.equal(again[up], found[1][up])


@pytest.mark.usefixtures("untrained")
def test_statistics_are_of_the_update_on_the_clients_own_rows(task: Task, shell: nn.Module) -> None:
    received = initial(task.config)
    state, found = ask(task.config, received, 1, statistics="gram,fisher")
    assert set(found) == {"gram", "input_mean", "fisher"}
    assert {tuple(found["fisher"][name].shape) == tuple(t.shape) for name, t in state.items()} == {True}
    rows, _ = task.client_rows(0, 1)
    batches = [{**task.train.batch(rows[[i]])} for i in range(len(rows))]
    expected = fedrot.collect_gram(with_state(shell, state), batches)
    for kind in ("gram", "input_mean"):
        assert found[kind].keys() == expected[kind].keys()
        for name, statistic in expected[kind].items():
            torch.testing.assert_close(found[kind][name], statistic, atol=1e-4, rtol=1e-4)
    assert len({id(gram) for gram in found["gram"].values()}) == 2 * 4 + 2
    assert ask(task.config, received, 1, statistics="")[1] == {}


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was collected, in order."""
    names: list[str] = []

    def counted(kind: StatisticKind) -> StatisticKind:
        def collect(*args: Any, **kwargs: Any) -> Any:
            names.append(f"collect_{kind.name}")
            return kind.collect(*args, **kwargs) if kind.collect else None

        return replace(kind, collect=collect)

    for name in ("gram", "fisher"):
        monkeypatch.setitem(STATISTIC_KINDS, name, counted(STATISTIC_KINDS[name]))
    return names


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("limit", [0, 2])
def test_statistics_come_from_as_many_batches_as_asked_for(
    limit: int, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for replaces the kind's own limit, which is smaller or larger."""
    seen: list[tuple[int, dict[str, Any]]] = []
    gram = STATISTIC_KINDS["gram"]

    def collect(model: Any, batches: Any, **options: Any) -> Any:
        found = list(batches)
        seen.append((len(found), options))
        assert gram.collect is not None
        return gram.collect(model, found, **options)

    monkeypatch.setitem(STATISTIC_KINDS, "gram", replace(gram, collect=collect))
    ask(task.config, initial(task.config), 0, statistics="gram", batches=limit)
    rows = len(task.client_rows(0, 0)[0])
    assert seen == [(limit, {"max_batches": None}) if limit else (math.ceil(rows / 16), {})]


@pytest.mark.usefixtures("untrained")
def test_statistics_are_computed_once_for_one_update(
    task: Task, tmp_path: Path, collected: list[str]
) -> None:
    received = initial(task.config)
    cache = {"cache": str(tmp_path), "statistics": "gram"}
    once = ask(task.config, received, 0, **cache)[1]
    again = ask(task.config, received, 0, **cache)[1]
    assert collected == ["collect_gram"]
    assert all(torch.equal(once["gram"][name], gram) for name, gram in again["gram"].items())
    assert len({id(gram) for gram in again["gram"].values()}) == 2 * 4 + 2
    collected.clear()
    # Another client, kind, seed, update, round or limit of batches has statistics of its own.
    ask(task.config, received, 1, **cache)
    ask(task.config, received, 0, **{**cache, "statistics": "fisher"})
    ask(task.config, received, 0, seed=1, **cache)
    ask(task.config, received, 0, start="scrambled", **cache)
    ask(task.config, received, 0, server_round=2, **cache)
    ask(task.config, received, 0, batches=1, **cache)
    assert collected == ["collect_gram", "collect_fisher", *["collect_gram"] * 4]


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Losses of all trainings, each another one, that leave their number in the head."""
    losses: list[float] = []

    def train(model: Any, *args: Any) -> float:
        losses.append(len(losses) + 1.0)
        with torch.no_grad():
            model.classifier.bias.fill_(losses[-1])
        return losses[-1]

    monkeypatch.setattr(training, "train", train)
    return losses


def training_of(update: State) -> float:
    """Return which of ``trainings`` an update is."""
    (number,) = {float(value) for value in update["classifier.bias"]}
    return number


#: What decides what a client trains in the first round, or what it reports of it.
DECIDES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "client": {"client": 1},
    "the last round": {"last_round": 1},
    "an own start": {"start": "different"},
    "learning rate": {"config": {"lr": 0.5}},
    "epochs of the first round": {"config": {"first_epochs": 3.0}},
    "the round": {"server_round": 2},
    "partition": {"config": {"partition": "dirichlet:1"}},
    "the model": {"model": 2.0},
}


@pytest.mark.parametrize("what", DECIDES)
def test_arms_share_a_training_only_if_nothing_that_decides_it_differs(
    what: str, task: Task, tmp_path: Path, trainings: list[float]
) -> None:
    def ask_for(change: Mapping[str, Any]) -> float:
        given = {"cache": str(tmp_path), "client": 0, "last_round": 2, **change}
        config = task.config.model_copy(update=given.pop("config", {}))
        received = initial(task.config)
        received["classifier.weight"] *= given.pop("model", 1.0)
        return training_of(ask(config, received, given.pop("client"), **given)[0])

    assert ask_for({}) == 1
    assert ask_for(DECIDES[what]) == 2
    # Both are there from now on, each for those who ask the same.
    assert [ask_for({}), ask_for(DECIDES[what])] == [1, 2]
    assert trainings == [1.0, 2.0]


@pytest.mark.parametrize("same", [{"count": True}, {"start": "scrambled"}, {"align": "ffn"}], ids=str)
def test_what_comes_after_training_shares_it(
    same: dict[str, Any], task: Task, tmp_path: Path, trainings: list[float]
) -> None:
    received = initial(task.config)
    for change in ({}, same):
        update, _ = ask(task.config, received, 0, cache=str(tmp_path), **change)
        assert training_of(update) == 1
    assert trainings == [1.0]


def test_clients_elsewhere_share_no_training(task: Task, tmp_path: Path, trainings: list[float]) -> None:
    received = initial(task.config)
    for cache in ("", str(tmp_path / "missing")):
        for _ in range(2):
            ask(task.config, received, 0, cache=cache)
    assert len(trainings) == 4
    assert list(tmp_path.iterdir()) == []


def test_later_rounds_share_trainings_while_the_folder_is_small(
    task: Task, tmp_path: Path, trainings: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    received = initial(task.config)

    def numbers(client: int, server_round: int) -> list[float]:
        given = {"cache": str(tmp_path), "server_round": server_round}
        return [training_of(ask(task.config, received, client, **given)[0]) for _ in range(2)]

    assert numbers(0, 2) == [1, 1]
    monkeypatch.setattr(client_app, "KEPT_BYTES", 1)
    assert numbers(1, 2) == [2, 3]
    assert numbers(0, 2) == [1, 1]
    assert numbers(1, 1) == [4, 4]


def test_the_metrics_of_a_shared_training_are_its_own(
    task: Task, tmp_path: Path, trainings: list[float]
) -> None:
    received = initial(task.config)

    def metrics(last_round: int) -> dict[str, Any]:
        content = answered(task.config, received, 0, cache=str(tmp_path), last_round=last_round)
        (found,) = content.metric_records.values()
        return dict(found)

    first = metrics(1)
    assert metrics(1) == first
    assert first["train-loss"] == trainings[0]
    assert first["seconds-training"] > 0
    assert first["num-examples"] == len(task.client_rows(0, 0)[0])
    # Only in the last round clients are evaluated alone.
    assert {name for name in first if name.startswith("alone-")} == {
        f"alone-{name}" for name in (*task.data.metrics, "ece", "calibrated_loss", "loss")
    }
    assert not any(name.startswith("alone-") for name in metrics(2))


def test_clients_that_align_first_send_the_unscrambled_update_and_fisher(task: Task) -> None:
    received = initial(task.config)
    # With more, what is noise alone stays, and only scrambled clients are fitted to it.
    options = {"align": "attention+ffn", "chance": 0.0, "statistics": "fisher"}
    update, fisher = ask(task.config, received, 0, start="same", **options)
    again, same = ask(task.config, received, 0, start="scrambled", **options)
    lost, other = ask(task.config, received, 0, start="scrambled", statistics="fisher")
    for name, tensor in update.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-4, rtol=0)
    for name, tensor in fisher["fisher"].items():
        scale = max(float(tensor.max()), 1e-6)
        torch.testing.assert_close(same["fisher"][name] / scale, tensor / scale, atol=1e-3, rtol=0)
    up = "bert.encoder.layer.0.intermediate.dense.weight"
    assert float((lost[up] - update[up]).abs().max()) > 0.01
    assert float((other["fisher"][up] - fisher["fisher"][up]).abs().max()) > 0
    symmetry = fedrot.symmetry_of(model_config(task.config, task.data), received)
    trained, _ = ask(task.config, received, 0, start="same")
    eager = fedrot.AlignmentOptions(parts=("attention", "ffn"), chance=0)
    expected = fedrot.align(trained, received, symmetry, eager).apply(trained)
    for name, tensor in expected.items():
        torch.testing.assert_close(update[name], tensor, atol=1e-6, rtol=0)


def test_a_score_is_higher_for_a_model_with_a_lower_loss(
    task: Task, shell: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = aggregation_of(Arm.parse("greedy"), task, 0, shell)
    assert build is not None
    score: Any = vars(build())["_score"]
    losses = iter((0.4, 1.5))
    monkeypatch.setattr(training, "evaluate", lambda *_: {"accuracy": 0.5, "loss": next(losses)})
    tensors = shell.state_dict()
    assert score(tensors) > score(tensors)
