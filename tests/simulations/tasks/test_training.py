"""Local training: how much of the data an epoch, or a part of one, sees."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedrot.errors import FedrotError
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig, TaskName
from fedrot.simulations.data.sources import DataError
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.objective import model_inputs
from fedrot.simulations.tasks.objectives import Classification
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.simulations.tasks.trial import check_held_out, check_model
from tests.simulations.commands import SMALL
from tests.simulations.data.test_data import write

Seen = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def task() -> Task:
    config = SimulationConfig(train_limit=70, test_limit=10, width=16, heads=2, clients=2, batch_size=8)
    return task_of(config.to_json())


@pytest.fixture
def seen(task: Task, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Return a function from epochs and seed to the rows of every step of a training on 70 rows."""
    steps: list[list[int]] = []
    batch = Classification.batch

    def recorded(self: Any, encoded: Any, rows: np.ndarray, rng: Any) -> dict[str, torch.Tensor]:
        steps.append(rows.tolist())
        return batch(self, encoded, rows, rng)

    monkeypatch.setattr(Classification, "batch", recorded)

    def rows_of(epochs: float | None, seed: int, of: Task = task) -> list[list[int]]:
        steps.clear()
        model = build_model(of.config, of.data, seed=0)
        assert math.isfinite(training.train(model, of, np.arange(70), seed, epochs))
        return list(steps)

    return rows_of


def test_an_epoch_sees_every_row_once(seen: Seen) -> None:
    two = seen(2, 0)
    assert len(two) == 18
    for epoch in (two[:9], two[9:]):
        assert sorted(row for step in epoch for row in step) == list(range(70))
    assert two[:9] != two[9:]


def test_a_part_of_an_epoch_is_its_first_steps(seen: Seen) -> None:
    whole = seen(1, 0)
    for epochs, steps in ((0.01, 1), (0.25, 3), (0.5, 5), (1.0, 9)):
        assert seen(epochs, 0) == whole[:steps]
    assert seen(1.5, 0)[:9] == whole
    assert len(seen(1.5, 0)) == 14
    assert seen(0.5, 1) != whole[:5]


@pytest.mark.parametrize(
    ("epochs", "of_steps"),
    [(0.5, slice(0, 5)), (1.0, slice(0, 9)), (1.5, slice(5, 14)), (3.0, slice(18, 27))],
)
def test_the_loss_of_a_training_is_that_of_its_last_epoch(
    task: Task, monkeypatch: pytest.MonkeyPatch, epochs: float, of_steps: slice
) -> None:
    losses: list[float] = []
    loss = Classification.loss

    def recorded(self: Any, model: Any, batch: Any) -> torch.Tensor:
        found = loss(self, model, batch) + len(losses)
        losses.append(float(found.detach()))
        return found

    monkeypatch.setattr(Classification, "loss", recorded)
    model = build_model(task.config, task.data, seed=0)
    found = training.train(model, task, np.arange(70), 4, epochs)
    assert len(losses) == of_steps.stop
    assert found == pytest.approx(math.fsum(losses[of_steps]) / len(losses[of_steps]))


def trained(of: Task, seed: int, **settings: Any) -> dict[str, torch.Tensor]:
    """Return a model after an epoch on 24 rows: three steps."""
    changed = replace(of, config=of.config.model_copy(update=settings))
    model = build_model(changed.config, of.data, seed=0)
    training.train(model, changed, np.arange(24), seed, settings.get("local_epochs"))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_training_takes_the_configured_learning_rate_and_weight_decay(task: Task) -> None:
    before = build_model(task.config, task.data, seed=0).state_dict()
    one_step = trained(task, 0, lr=0.02, weight_decay=0.0, local_epochs=0.1)
    # Adam's first step is as long as the learning rate wherever there is a gradient.
    steps = (one_step["classifier.bias"] - before["classifier.bias"]).abs()
    assert steps == pytest.approx(torch.full_like(steps, 0.02), rel=1e-3)
    # What no row uses has no gradient and only decays.
    words = "bert.embeddings.word_embeddings.weight"
    used = set(task.train.batch(np.arange(24))["input_ids"].flatten().tolist())
    unused = sorted(set(range(len(before[words]))) - used)
    assert len(unused) > 100
    found = trained(task, 0, lr=0.02, weight_decay=0.5)[words][unused]
    torch.testing.assert_close(found, before[words][unused] * (1 - 0.02 * 0.5) ** 3)


def test_dropout_is_on_in_training_and_off_in_evaluation(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[bool] = []
    loss, evaluate = Classification.loss, Classification.evaluate

    def loss_seen(self: Any, model: Any, batch: Any) -> torch.Tensor:
        modes.append(model.training)
        return loss(self, model, batch)

    def evaluate_seen(self: Any, model: Any, encoded: Any, rows: np.ndarray) -> dict[str, float]:
        modes.append(model.training)
        return evaluate(self, model, encoded, rows)

    monkeypatch.setattr(Classification, "loss", loss_seen)
    monkeypatch.setattr(Classification, "evaluate", evaluate_seen)
    model = build_model(task.config, task.data, seed=0)
    assert model.config.hidden_dropout_prob > 0
    for _ in range(2):
        training.train(model, task, np.arange(8), 0)
        first = training.evaluate(model, task, task.test, np.arange(10))
        assert training.evaluate(model, task, task.test, np.arange(10)) == first
    assert modes == [True, False, False] * 2


def test_dropout_depends_on_the_seed_and_on_no_other_random_number(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[float] = []
    loss = Classification.loss

    def recorded(self: Any, model: Any, batch: Any) -> torch.Tensor:
        drawn.append(float(torch.rand(())))
        return loss(self, model, batch)

    monkeypatch.setattr(Classification, "loss", recorded)
    for noise, seed in ((1, 4), (2, 4), (1, 5)):
        model = build_model(task.config, task.data, seed=0)
        torch.manual_seed(noise)
        training.train(model, task, np.arange(8), seed)
    one, same, other = drawn
    assert one == same
    assert one != other


def test_every_training_hides_other_tokens(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    batch = Classification.batch

    def recorded(self: Any, encoded: Any, rows: np.ndarray, rng: Any) -> Any:
        drawn.append(rng.random())
        return batch(self, encoded, rows, rng)

    monkeypatch.setattr(Classification, "batch", recorded)
    for seed in (0, 1, 0):
        trained(task, seed)
    assert drawn[:3] == drawn[6:]
    assert len(drawn) == 9
    assert len(set(drawn)) == 6


def test_step_batches_are_random_rows_each_once_and_no_more_than_asked_for(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[int]] = []
    batch = Classification.batch

    def recorded(self: Any, encoded: Any, rows: np.ndarray, rng: Any) -> Any:
        assert encoded is task.train
        found.append(rows.tolist())
        return batch(self, encoded, rows, rng)

    monkeypatch.setattr(Classification, "batch", recorded)
    model = build_model(task.config, task.data, seed=0)

    def chosen(limit: int, seed: int) -> list[list[int]]:
        found.clear()
        sizes = [
            len(inputs["labels"])
            for inputs in training.step_batches(task, model, np.arange(10, 60), limit, 8, seed)
        ]
        assert sizes == [len(rows) for rows in found]
        return list(found)

    few = chosen(20, 0)
    assert sorted(map(len, few)) == [4, 8, 8]
    assert len({row for rows in few for row in rows} & set(range(10, 60))) == 20
    assert chosen(20, 0) == few
    assert {row for rows in chosen(20, 1) for row in rows} != {row for rows in few for row in rows}
    assert sorted(row for rows in chosen(999, 0) for row in rows) == list(range(10, 60))


def test_nothing_to_train_on_is_no_training(task: Task) -> None:
    model = build_model(task.config, task.data, seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert math.isnan(training.train(model, task, np.arange(0), 0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_epochs_of_the_configuration_are_the_default(task: Task, seen: Seen) -> None:
    half = replace(task, config=task.config.model_copy(update={"local_epochs": 0.5}))
    assert half.config.epochs(1) == half.config.epochs(2) == 0.5
    assert seen(None, 3, half) == seen(0.5, 3)
    assert seen(None, 3) == seen(1, 3)


def test_a_tenth_of_ten_steps_is_one_step(task: Task, seen: Seen) -> None:
    """1.1 times 10 is more than 11 in floating-point numbers."""
    tens = replace(task, config=task.config.model_copy(update={"batch_size": 7}))
    for epochs, steps in ((1.0, 10), (1.1, 11), (0.7, 7), (1.11, 12)):
        assert len(seen(epochs, 0, tens)) == steps


@pytest.mark.parametrize("name", ["classification", "mlm"])
def test_a_lent_device_trains_the_same_model_and_gives_it_back(
    name: TaskName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another name of the CPU stands for a GPU: inputs and outputs take the way of a GPU's."""
    device = torch.device("cpu", 0)
    config = SimulationConfig(task=name, **SMALL)
    task = task_of(config.to_json())
    results: list[Any] = []
    moves: list[Any] = []
    to = torch.Tensor.to

    def spy(tensor: torch.Tensor, *where: Any, **options: Any) -> torch.Tensor:
        # A model's own whole numbers have one row.
        tokens = not tensor.is_floating_point() and tensor.ndim == 2 and len(tensor) > 1
        moves.extend((place, tokens) for place in where[:1])
        return to(tensor, *where, **options)

    for lent in (torch.device("cpu"), device):
        monkeypatch.setattr(training, "lent_device", lambda lent=lent: lent)
        model = build_model(config, task.data, seed=0)
        moves.clear()
        monkeypatch.setattr(torch.Tensor, "to", spy)
        loss = training.train(model, task, np.arange(64), seed=1)
        metrics = training.evaluate(model, task, task.test, np.arange(20))
        monkeypatch.setattr(torch.Tensor, "to", to)
        # Tokens go there, losses and logits come back.
        assert ((device, True) in moves) == (lent == device)
        assert (("cpu", False) in moves) == (lent == device)
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        results.append((loss, metrics, model.state_dict()))
    (loss, metrics, state), (other_loss, other_metrics, other_state) = results
    assert (loss, metrics) == (other_loss, other_metrics)
    assert all(torch.equal(tensor, other_state[key]) for key, tensor in state.items())


@pytest.mark.parametrize(("lent", "kind"), [(["0"], "cuda"), ([], "cpu"), (None, "cpu")])
def test_a_gpu_is_used_where_the_engine_lends_one(
    lent: list[str] | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimpleNamespace(is_initialized=lambda: lent is not None, get_gpu_ids=lambda: lent)
    monkeypatch.setitem(sys.modules, "ray", engine)
    assert training.lent_device().type == kind
    monkeypatch.delitem(sys.modules, "ray")
    assert training.lent_device().type == "cpu"


def test_an_evaluation_is_the_mean_over_rows_one_by_one(task: Task) -> None:
    """Though rows of one length are evaluated together: every answer is compared with its own label."""
    model, data = build_model(task.config, task.data, seed=0), task.train
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    rows = np.random.default_rng(0).permutation(70)[:40]
    whole = training.evaluate(model, task, data, rows)
    alone = [training.evaluate(model, task, data, rows[i : i + 1]) for i in range(len(rows))]
    for name in ("loss", "accuracy"):
        assert whole[name] == pytest.approx(np.mean([one[name] for one in alone]), rel=1e-5)
    assert len({one["loss"] for one in alone}) > 30
    # In several batches, too.
    several = training.evaluate(model, task, data, np.tile(rows, 4))
    assert several == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(("types", "kept"), [(0, False), (1, False), (2, True), (3, True)])
def test_models_with_two_kinds_of_segments_read_them(types: int, kept: bool) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(type_vocab_size=types))
    batch = {"input_ids": torch.zeros(1), "token_type_ids": torch.ones(1)}
    assert ("token_type_ids" in model_inputs(model, batch)) == kept


def test_batches_of_similar_lengths_come_in_any_order(task: Task) -> None:
    rows = np.arange(64)
    found = list(training.batches(task.train, rows, 4, np.random.default_rng(0)))
    means = [float(task.train.lengths(batch).mean()) for batch in found]
    assert sorted(means) not in (means, means[::-1])
    assert sorted(np.concatenate(found).tolist()) == rows.tolist()
    # Sorted by length, the batches follow each other.
    lengths = task.train.lengths(rows)
    assert sum(np.ptp(task.train.lengths(batch)) for batch in found) <= np.ptp(lengths)
    assert np.ptp(lengths) > 10
    # Among rows of one length, the seed decides which are together.
    other = training.batches(task.train, rows, 4, np.random.default_rng(1))
    assert {frozenset(batch) for batch in found} != {frozenset(batch) for batch in other}


def test_a_step_is_adamw_s_on_the_gradient_of_its_batch_alone(task: Task) -> None:
    config = task.config.model_copy(update={"dropout": 0.0, "lr": 1e-2, "weight_decay": 0.1})
    ours, by_hand = (build_model(config, task.data, seed=0) for _ in range(2))
    training.train(ours, replace(task, config=config), np.arange(24), 3)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, weight_decay=0.1)
    steps = list(training.batches(task.train, np.arange(24), 8, np.random.default_rng(3)))
    assert len(steps) == 3
    for rows in steps:
        for parameter in by_hand.parameters():
            parameter.grad = None
        inputs = task.train.batch(rows)
        by_hand(**inputs, labels=torch.from_numpy(task.data.train.labels[rows])).loss.backward()
        optimizer.step()
    expected = by_hand.state_dict()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=0)


KINDS: dict[str, dict[str, list[Any]]] = {
    "single": {"label": ["x", "y", "z"] * 8},
    "regression": {"label": [0.5, 1.5, -3.0] * 8},
    "multi": {"x": [True, False, True] * 8, "y": [True, False, False] * 8},
}
#: The headline metric is the first.
METRICS = {
    "single": ("accuracy", "macro_f1"),
    "regression": ("pearson", "spearman"),
    "multi": ("macro_f1", "micro_f1", "accuracy"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_training_is_that_of_evaluation(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "mine.parquet", text=[f"row {row}" for row in range(24)], **KINDS[kind])
    config = SimulationConfig(
        **{**SMALL, "train_limit": None, "test_limit": None}, data="mine", data_dir=tmp_path, dropout=0.0
    )
    task = task_of(config.to_json())
    assert (task.data.kind, task.data.metrics) == (kind, METRICS[kind])
    model = build_model(config, task.data, seed=0)
    with torch.no_grad():
        model.get_parameter("classifier.bias").copy_(torch.arange(len(task.data.label_names)))
    rows = np.arange(len(task.train))
    batch = task.objective.batch(task.train, rows, np.random.default_rng(0))
    loss = float(task.objective.loss(model.eval(), batch).detach())
    found = training.evaluate(model, task, task.train, rows)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert tuple(found) == (*task.objective.metrics, "loss")
    # Calibration is that of a single label.
    assert ("ece" in found, "calibrated_loss" in found) == (kind == "single",) * 2


def test_a_partition_is_counted_by_client_and_class(task: Task) -> None:
    names, sizes, counts = task.partition(0)
    assert tuple(names) == task.data.label_names
    assert sizes == [len(rows) for rows in task.clients(0)]
    for rows, of_client in zip(task.clients(0), counts, strict=True):
        assert of_client == np.bincount(task.data.train.labels[rows], minlength=7).tolist()


@pytest.mark.parametrize(("split", "said"), [("train", "training"), ("test", "held-out")])
def test_data_without_anything_to_predict_are_refused(split: str, said: str) -> None:
    task = task_of(SimulationConfig(task="mlm", **SMALL).to_json())
    model = build_model(task.config, task.data, seed=0)
    check_model(task, model)
    # The first token is a special one.
    encoded: Any = getattr(task, split)
    empty = replace(
        encoded, ids=[i[:1] for i in encoded.ids], segments=[s[:1] for s in encoded.segments]
    )
    with pytest.raises(DataError, match=f"goemotions_ekman: no {said} row has anything to predict"):
        check_model(replace(task, **{split: empty}), model)


def test_held_out_rows_are_needed_with_every_seed() -> None:
    settings = {**SMALL, "train_limit": 60, "clients": 4, "partition": "dirichlet:0.1"}
    task = task_of(SimulationConfig(**settings).to_json())
    arm = Arm.parse("aligned:loss#0+1")
    seed_of: dict[bool, int] = {}
    for seed in itertools.count():
        seed_of.setdefault(any(len(task.client_rows(seed, client)[1]) for client in (0, 1)), seed)
        if len(seed_of) == 2:
            break
    enough, lacking = seed_of[True], seed_of[False]
    for seeds in ((enough, lacking), (lacking, enough)):
        of = replace(task, config=task.config.model_copy(update={"seeds": seeds}))
        with pytest.raises(FedrotError, match=f"holdout 0.1 gives none with seed {lacking};"):
            check_held_out(of, arm)
    check_held_out(replace(task, config=task.config.model_copy(update={"seeds": (enough,)})), arm)
