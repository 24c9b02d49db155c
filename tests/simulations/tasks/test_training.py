"""Local training: what an epoch sees, which random numbers decide it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig

from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.classification import Classification
from fedrot.simulations.tasks.objective import model_inputs
from tests.simulations.tasks.cases import changed, model_for, task_for


@pytest.fixture(scope="module")
def task():
    return task_for("bert")


@pytest.fixture
def seen(task, monkeypatch):
    """Return a function from epochs and seed to the rows of every step of a training on
    70 rows.
    """
    steps = []
    batch = Classification.batch

    def recorded(self, encoded, rows, rng):
        assert encoded is task.train
        steps.append(rows.tolist())
        return batch(self, encoded, rows, rng)

    monkeypatch.setattr(Classification, "batch", recorded)

    def rows_of(epochs, seed, of=task, rows=70):
        steps.clear()
        assert math.isfinite(
            training.train(model_for(of), of, np.arange(rows), seed, epochs)
        )
        return list(steps)

    return rows_of


def test_an_epoch_sees_every_row_once_and_a_part_is_its_first_steps(task, seen):
    two = seen(2, 0)
    assert len(two) == 18
    for epoch in (two[:9], two[9:]):
        assert sorted(row for step in epoch for row in step) == list(range(70))
    assert two[:9] != two[9:]
    for epochs, steps in ((0.01, 1), (0.25, 3), (1.0, 9), (1.5, 14)):
        assert seen(epochs, 0) == two[:steps]
    assert seen(0.5, 1) != two[:5]
    # 0.28 times 25 is more than 7 in floating-point numbers.
    assert len(seen(0.28, 0, changed(task, batch_size=2), 50)) == 7
    # Without epochs, those of the experiment.
    assert seen(None, 3, changed(task, local_epochs=0.5)) == seen(0.5, 3)


def test_the_loss_of_a_training_is_that_of_its_last_epoch(task, monkeypatch):
    def counted(_, model, __):
        assert model.training
        return next(model.parameters()).sum() * 0 + next(steps)

    monkeypatch.setattr(Classification, "loss", counted)
    for epochs, last in ((0.5, range(5)), (1.5, range(5, 14))):
        steps = iter(range(99))
        found = training.train(model_for(task).eval(), task, np.arange(70), 4, epochs)
        assert (found, next(steps)) == (pytest.approx(np.mean(last)), last.stop)


def test_steps_are_adamw_s_on_the_gradient_of_each_batch_alone(task):
    still = changed(task, dropout=0.0, lr=1e-2, weight_decay=0.1)
    ours, by_hand = (model_for(still) for _ in range(2))
    training.train(ours, still, np.arange(24), 3)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, weight_decay=0.1)
    steps = list(
        training.batches(task.train, np.arange(24), 8, np.random.default_rng(3))
    )
    assert len(steps) == 3
    for rows in steps:
        by_hand.zero_grad()
        labels = torch.from_numpy(task.data.train.labels[rows])
        by_hand(**task.train.batch(rows), labels=labels).loss.backward()
        optimizer.step()
    torch.testing.assert_close(
        ours.state_dict(), by_hand.state_dict(), atol=1e-4, rtol=0
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 300), size=st.integers(1, 9))
def test_batches_have_each_row_once_and_similar_lengths(seed, rows, size):
    lengths = np.random.default_rng(seed).integers(1, 40, 400)
    encoded = SimpleNamespace(lengths=lambda own: lengths[own])
    chosen = np.random.default_rng(seed).permutation(400)[:rows]
    found, again = (
        list(training.batches(encoded, chosen, size, np.random.default_rng(seed)))
        for _ in range(2)
    )
    assert sorted(row for batch in found for row in batch) == sorted(chosen)
    # One batch of each bucket of 16 may have fewer rows, only if it is the last.
    assert sum(len(batch) < size for batch in found) <= 1
    # Inside a bucket sorted batches follow each other.
    spread = sum(int(np.ptp(lengths[batch])) for batch in found)
    assert spread <= 39 * math.ceil(rows / (16 * size))
    assert all(map(np.array_equal, found, again))


def test_step_batches_are_random_rows_each_once_and_no_more_than_asked_for(task):
    model = model_for(task)

    def chosen(limit, seed):
        found = list(
            training.step_batches(task, model, np.arange(10, 60), limit, 8, seed)
        )
        assert sum(len(batch["labels"]) for batch in found) == min(limit, 50)
        assert {len(batch["labels"]) for batch in found} <= {8, limit % 8, 50 % 8}
        return [
            frozenset(line[line > 0].numpy().tobytes() for line in batch["input_ids"])
            for batch in found
        ]

    few = chosen(20, 0)
    assert chosen(20, 0) == few != chosen(20, 1)
    texts = [task.train.ids[row] for row in range(10, 60)]  # type: ignore[attr-defined]
    assert frozenset().union(*chosen(999, 0)) == {text.tobytes() for text in texts}


def test_models_with_two_kinds_of_segments_read_them():
    model = torch.nn.Linear(1, 1)
    for types in range(4):
        model.config = BertConfig(type_vocab_size=types)
        found = model_inputs(
            model, {"input_ids": torch.zeros(1), "token_type_ids": torch.ones(1)}
        )
        assert ("token_type_ids" in found) == (types >= 2)


def test_a_client_trains_on_none_of_its_held_out_rows():
    task = task_for(
        "bert", train_limit=90, clients=3, holdout=0.3, partition="dirichlet:1"
    )
    for seed in (0, 1):
        clients = task.clients(seed)
        assert sorted(np.concatenate(clients)) == list(range(90))
        names, counts = task.partition(seed)
        assert (tuple(names), len(counts)) == (task.data.label_names, 3)
        for client, rows in enumerate(clients):
            labels = task.data.train.labels[rows]
            assert counts[client] == np.bincount(labels, minlength=7).tolist()
            trained, held = map(set, task.client_rows(seed, client))
            assert trained == {*rows} - held
            for label, size in enumerate(counts[client]):
                of_class = held & {*rows[labels == label]}
                # Of two rows and more, one at least, and never all.
                wanted = min(max(round(0.3 * size), 1), max(size - 1, 0))
                assert len(of_class) == wanted
