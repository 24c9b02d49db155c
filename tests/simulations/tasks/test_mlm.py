"""Masked language modelling: what is hidden, what is measured, and that training learns."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models

from fedrot import random_equivalent, symmetry_of
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.encoding import IGNORED, bundled_tokenizer
from fedrot.simulations.data.sources import DataError
from fedrot.simulations.models.build import build_model, model_config
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.language import Vocabulary, for_evaluation, for_training
from fedrot.simulations.tasks.objectives import MaskedLanguageModelling
from fedrot.simulations.tasks.task import Task, task_of
from tests.models import CASES, fresh_model
from tests.simulations.data.wordpiece import SPECIAL_TOKENS

SMALL: dict[str, Any] = {
    "task": "mlm",
    "train_limit": 96,
    "test_limit": 80,
    "width": 32,
    "heads": 2,
    "max_length": 32,
    "clients": 2,
}
VOCABULARY = Vocabulary.of(bundled_tokenizer())
METRICS = ("pseudo_perplexity", "accuracy", "loss")


@pytest.fixture(scope="module")
def task() -> Task:
    return task_of(SimulationConfig(**SMALL).to_json())


@pytest.fixture(scope="module")
def model(task: Task) -> torch.nn.Module:
    return build_model(task.config, task.data, seed=0)


def objective_of(task: Task) -> MaskedLanguageModelling:
    assert isinstance(task.objective, MaskedLanguageModelling)
    return task.objective


def text(rows: int, tokens: int, padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random ordinary tokens between [CLS] and [SEP], then padding."""
    ids = np.random.default_rng(0).integers(5, 6000, (rows, tokens))
    ids[:, 0], ids[:, tokens - padding - 1], ids[:, tokens - padding :] = 2, 3, 0
    attended = np.ones_like(ids)
    attended[:, tokens - padding :] = 0
    return ids, attended


def test_the_bundled_tokenizer_has_five_special_tokens() -> None:
    assert VOCABULARY.special.tolist() == list(range(len(SPECIAL_TOKENS)))
    assert VOCABULARY.mask == SPECIAL_TOKENS.index("[MASK]")
    assert VOCABULARY.ordinary.tolist() == list(range(5, bundled_tokenizer().get_vocab_size()))


def test_fifteen_per_cent_are_hidden_as_bert_does_it() -> None:
    ids, attended = text(2000, 106, padding=4)
    before = ids.copy()
    shown, labels = for_training(ids, attended, VOCABULARY, np.random.default_rng(1))
    assert np.array_equal(ids, before)
    chosen = labels != IGNORED
    assert (chosen.sum(axis=1) == 15).all()
    assert np.array_equal(labels[chosen], ids[chosen])
    assert np.array_equal(shown[~chosen], ids[~chosen])
    fates = shown[chosen]
    masked, kept = fates == VOCABULARY.mask, fates == ids[chosen]
    # 30000 tokens: five standard deviations are 0.012 of 0.8 and 0.009 of 0.1.
    assert masked.mean() == pytest.approx(0.8, abs=0.012)
    assert kept.mean() == pytest.approx(0.1, abs=0.009)
    strangers = fates[~masked & ~kept]
    assert np.isin(strangers, VOCABULARY.ordinary).all()
    assert len(np.unique(strangers)) > 2000
    # Every place is as likely as any other.
    assert chosen[:, 1:101].mean(axis=0) == pytest.approx(np.full(100, 0.15), abs=0.04)


def test_at_least_one_token_is_hidden_and_no_special_one_ever() -> None:
    ids, attended = text(400, 5, padding=1)
    # [CLS] a [UNK] [SEP] [PAD], and a mask that stands in the text itself.
    ids[:, 2], ids[1::2, 2] = 1, VOCABULARY.mask
    for_rows = for_evaluation(ids, attended, VOCABULARY, np.arange(len(ids)))[1]
    for labels in (for_training(ids, attended, VOCABULARY, np.random.default_rng(0))[1], for_rows):
        assert ((labels != IGNORED) == [False, True, False, False, False]).all()
    ids[:, 1] = 1
    assert (for_evaluation(ids, attended, VOCABULARY, np.arange(len(ids)))[1] == IGNORED).all()


def test_training_masks_come_from_the_generator_alone() -> None:
    ids, attended = text(50, 40)
    first, again = np.random.default_rng(7), np.random.default_rng(7)
    once = for_training(ids, attended, VOCABULARY, first)
    assert all(map(np.array_equal, once, for_training(ids, attended, VOCABULARY, again)))
    assert not np.array_equal(once[1], for_training(ids, attended, VOCABULARY, first)[1])


def test_evaluation_masks_do_not_depend_on_the_batch(task: Task) -> None:
    objective, rows = objective_of(task), np.arange(40)

    def hidden(batch_rows: np.ndarray) -> dict[int, list[tuple[int, int]]]:
        batch = objective.fixed_batch(task.test, batch_rows)
        places = (batch["labels"] != IGNORED).numpy()
        assert (batch["input_ids"].numpy()[places] == VOCABULARY.mask).all()
        return {
            int(row): [(int(at), int(batch["labels"][i, at])) for at in np.flatnonzero(places[i])]
            for i, row in enumerate(batch_rows)
        }

    together = hidden(rows)
    assert hidden(rows[::-1]) == together
    assert {row: found for row in rows for found in hidden(rows[[row]]).values()} == together
    lengths = [len(task.test.ids[row]) - 2 for row in rows]
    assert [len(together[row]) for row in rows] == [max(1, round(0.15 * n)) for n in lengths]


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("-mlm")])
def test_the_loss_is_that_of_transformers(name: str) -> None:
    model = fresh_model(name)
    ids = torch.randint(6, model.config.vocab_size, (3, 7))
    labels = torch.where(torch.rand(ids.shape) < 0.3, ids, IGNORED)
    labels[0, 0] = ids[0, 0]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    model.eval()
    expected = model(**batch).loss
    ours = MaskedLanguageModelling(VOCABULARY).loss(model, batch)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(model(**batch).loss, expected)


def test_the_pseudo_perplexity_of_a_naive_loop(task: Task, model: torch.nn.Module) -> None:
    rows = np.array([71, 3, 3, 18, 40, 0, 66])
    model.eval()
    log2, hits = [], []
    for row in rows:
        batch = objective_of(task).fixed_batch(task.test, np.array([row]))
        (labels,) = batch.pop("labels")
        with torch.no_grad():
            (probabilities,) = model(**batch).logits.double().softmax(dim=-1)
        for place, label in enumerate(labels.tolist()):
            if label != IGNORED:
                log2.append(math.log2(probabilities[place, label]))
                hits.append(int(probabilities[place].argmax()) == label)
    expected = 2 ** (-sum(log2) / len(log2))
    found = training.evaluate(model, task, task.test, rows)
    assert tuple(found) == METRICS
    assert found["pseudo_perplexity"] == pytest.approx(expected, rel=1e-5)
    assert found["loss"] == pytest.approx(math.log(expected), rel=1e-6)
    assert found["accuracy"] == pytest.approx(np.mean(hits))
    again = training.evaluate(model, task, task.test, rows[::-1].copy())
    assert again["loss"] == pytest.approx(found["loss"], rel=1e-6)


def test_a_scrambled_model_has_the_same_pseudo_perplexity(task: Task, model: torch.nn.Module) -> None:
    rows, state = np.arange(30), model.state_dict()
    symmetry = symmetry_of(model_config(task.config, task.data), state)
    other = copy.deepcopy(model)
    other.load_state_dict(random_equivalent(state, symmetry, seed=1))
    theirs = training.evaluate(other, task, task.test, rows)
    assert theirs == pytest.approx(training.evaluate(model, task, task.test, rows), rel=1e-5)


def test_training_lowers_the_loss_and_is_reproducible(task: Task) -> None:
    longer = replace(task, config=task.config.model_copy(update={"local_epochs": 6, "lr": 5e-3}))
    rows = np.arange(len(task.data.train))

    def trained(seed: int) -> tuple[float, dict[str, float]]:
        model = build_model(task.config, task.data, seed=0)
        loss = training.train(model, longer, rows, seed)
        return loss, training.evaluate(model, task, task.train, rows)

    fresh = training.evaluate(build_model(task.config, task.data, 0), task, task.train, rows)
    loss, after = trained(seed=3)
    assert after["loss"] < fresh["loss"] - 1.5
    assert after["pseudo_perplexity"] < 0.3 * fresh["pseudo_perplexity"]
    assert trained(seed=3) == (loss, after)
    assert trained(seed=4)[0] != loss


def test_rows_without_an_ordinary_token_are_passed_over(task: Task, model: torch.nn.Module) -> None:
    ids = [*task.train.ids[:3], np.array([2, 3]), np.array([2, 1, 3])]
    odd = replace(task.train, ids=ids, segments=[np.zeros_like(row) for row in ids])
    everything = np.arange(5)
    assert task.objective.usable(odd, everything).tolist() == [0, 1, 2]
    found = training.evaluate(model, task, odd, everything)
    assert found == pytest.approx(training.evaluate(model, task, task.train, np.arange(3)))
    nothing = training.evaluate(model, task, odd, np.array([3, 4]))
    assert tuple(nothing) == METRICS
    assert all(map(math.isnan, nothing.values()))
    assert math.isnan(training.train(copy.deepcopy(model), replace(task, train=odd), everything[3:], 0))
    one_at_a_time = task.config.model_copy(update={"batch_size": 1})
    assert math.isfinite(
        training.train(
            copy.deepcopy(model), replace(task, config=one_at_a_time, train=odd), everything, 0
        )
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_model_has_no_metrics(task: Task, model: torch.nn.Module, value: float) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(broken.parameters())).fill_(value)
    found = training.evaluate(broken, task, task.test, np.arange(4))
    assert tuple(found) == METRICS
    assert all(map(math.isnan, found.values()))


def test_a_hopeless_loss_is_measured_and_its_perplexity_infinite(
    task: Task, model: torch.nn.Module
) -> None:
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.get_parameter("cls.predictions.bias")[5:100] = 1e4
    found = training.evaluate(wrong, task, task.test, np.arange(40))
    assert found["loss"] > 1e3
    assert found["pseudo_perplexity"] == math.inf


def test_pairs_stay_pairs_and_scores_do_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / "glue" / "stsb"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        table = {"sentence1": ["a cat sat"] * 8, "sentence2": ["a dog ran"] * 8}
        pq.write_table(
            pa.table({**table, "label": [float(i) / 2 for i in range(8)]}), folder / f"{split}.parquet"
        )
    settings = {**SMALL, "train_limit": None, "test_limit": None, "data": "stsb", "data_dir": tmp_path}
    task = task_of(SimulationConfig(**settings).to_json())
    model = build_model(task.config, task.data, seed=0)
    assert task.test.segments[0].tolist()[-4:] == [1, 1, 1, 1]
    found = training.evaluate(model, task, task.test, np.arange(8))
    assert found["pseudo_perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(DataError, match=r"no mask token .* choose another model"):
        Vocabulary.of(tokenizer)


@pytest.mark.parametrize("mask", ["[MASK]", "<mask>"])
def test_mask_tokens_by_family(mask: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, mask: 7}, unk_token="a"))
    tokenizer.add_special_tokens(["<s>"])
    vocabulary = Vocabulary.of(tokenizer)
    assert (vocabulary.mask, vocabulary.special.tolist()) == (7, [1, 7])
    assert vocabulary.ordinary.tolist() == [0]


def test_a_pretrained_encoder_is_used(tmp_path: Path) -> None:
    task = task_of(SimulationConfig(**{**SMALL, "model": "minilm", "test_limit": 8}).to_json())
    model = build_model(task.config, task.data, seed=0)
    assert type(model).__name__ == "BertForMaskedLM"
    assert objective_of(task).vocabulary.mask == 103
    symmetry_of(model_config(task.config, task.data), model.state_dict())
    found = training.evaluate(model, task, task.test, np.arange(8))
    assert math.isfinite(found["pseudo_perplexity"])


def test_the_bundled_model_is_a_masked_language_model(task: Task) -> None:
    build: Callable[..., torch.nn.Module] = build_model
    first, second = (build(task.config, task.data, seed=5).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["cls.predictions.bias"].shape == (bundled_tokenizer().get_vocab_size(),)
    assert task.config.setting == "goemotions_ekman, iid, mlm"


def test_tokens_of_all_batches_count_alike(task: Task, model: torch.nn.Module) -> None:
    """More rows than one batch has."""
    rows = np.arange(80)
    labels = objective_of(task).fixed_batch(task.test, rows)["labels"]
    hidden = labels[labels != IGNORED]
    common = int(hidden.mode().values)
    sure = copy.deepcopy(model)
    with torch.no_grad():
        sure.get_parameter("cls.predictions.bias")[common] = 20
    found = training.evaluate(sure, task, task.test, rows)
    assert found["accuracy"] == pytest.approx(float((hidden == common).float().mean()))
    assert found["accuracy"] > 0
    parts = rows[:30], rows[30:]
    each = [training.evaluate(sure, task, task.test, part)["loss"] for part in parts]
    weights = [int((labels[part] != IGNORED).sum()) for part in parts]
    assert found["loss"] == pytest.approx(np.average(each, weights=weights), rel=1e-5)


def test_step_batches_have_rows_with_something_to_predict(task: Task, model: torch.nn.Module) -> None:
    ids = [np.array([2, 3])] * 20 + [np.array([2, 9, 3])] * 5
    odd = replace(task.train, ids=ids, segments=[np.zeros_like(row) for row in ids])
    found = training.step_batches(replace(task, train=odd), model, np.arange(25), 4, 32, 0)
    (batch,) = found
    assert batch["labels"].tolist() == [[IGNORED, 9, IGNORED]] * 4


def test_padding_is_never_hidden_though_its_token_is_an_ordinary_one() -> None:
    ids, attended = text(50, 12, padding=6)
    ids[:, 6:] = 77
    for labels in (
        for_training(ids, attended, VOCABULARY, np.random.default_rng(0))[1],
        for_evaluation(ids, attended, VOCABULARY, np.arange(50))[1],
    ):
        assert ((labels != IGNORED).sum(axis=1) == 1).all()
        assert (labels[:, 6:] == IGNORED).all()
