"""Language modelling: what is hidden, and what a perplexity is the mean of."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from fedrot.simulations.data import IGNORED, tokenizers
from fedrot.simulations.data.encode import EncodedText
from fedrot.simulations.data.read import DataError
from fedrot.simulations.data.tokenizers import bundled_tokenizer
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.language import MaskedLanguageModelling
from tests.simulations.tasks.cases import changed, model_for, task_for

VOCABULARY = task_for("mlm bert").objective


@pytest.fixture(scope="module")
def task():
    return task_for("mlm bert")


def encoded_of(ids, pad_id=0):
    """Return rows of these tokens, as labels are not used."""
    rows = [np.asarray(row) for row in ids]
    return EncodedText(
        np.zeros(len(ids)), rows, [np.zeros_like(row) for row in rows], pad_id
    )


def hidden(task, encoded, seed):
    """Return the tokens and the labels of a batch of all rows; without a seed of an
    evaluation.
    """
    rng = None if seed is None else np.random.default_rng(seed)
    batch = task.objective.batch(encoded, np.arange(len(encoded)), rng)
    return batch["input_ids"].numpy(), batch["labels"].numpy()


def test_fifteen_per_cent_are_hidden_as_bert_does_it(task):
    tokens = np.random.default_rng(0).integers(5, 6000, (2000, 102))
    tokens[:, 0], tokens[:, -1] = 2, 3
    encoded = encoded_of([*tokens[:-1], np.insert(tokens[-1], 1, [9] * 8)])
    ids = encoded.batch(np.arange(2000))["input_ids"].numpy()
    shown, labels = hidden(task, encoded, 1)
    chosen = labels != IGNORED
    assert (chosen.sum(axis=1)[:-1] == 15).all()
    assert np.array_equal(labels[chosen], ids[chosen])
    assert np.array_equal(shown[~chosen], ids[~chosen])
    fates = shown[chosen]
    masked = fates == VOCABULARY.mask
    kept = fates == ids[chosen]
    # 30000 tokens: five standard deviations are 0.012 of 0.8 and 0.009 of 0.1.
    assert masked.mean() == pytest.approx(0.8, abs=0.012)
    assert kept.mean() == pytest.approx(0.1, abs=0.009)
    others = fates[~masked & ~kept]
    assert np.isin(others, VOCABULARY.ordinary).all()
    assert len(np.unique(others)) > 2000
    # Every place is as likely as any other.
    assert chosen[:-1, 1:101].mean(axis=0) == pytest.approx(
        np.full(100, 0.15), abs=0.04
    )


@pytest.mark.parametrize("seed", [0, None])
def test_at_least_one_token_is_hidden_and_no_special_one_or_padding(task, seed):
    # [CLS] a [UNK] [SEP], and a mask in the text itself; padding is an ordinary token
    # here.
    rows = [[2, 77 + row, (1, VOCABULARY.mask)[row % 2], 3] for row in range(100)]
    _, labels = hidden(
        task, encoded_of([*rows, [2, 9, 9, 9, 9, 9, 9, 3]], pad_id=77), seed
    )
    assert ((labels[:-1] != IGNORED) == [False, True, *[False] * 6]).all()
    _, none = hidden(task, encoded_of([[2, 1, 3], [2, 3, 3]]), seed)
    assert (none == IGNORED).all()


def test_evaluation_masks_do_not_depend_on_the_batch(task):
    rows = np.arange(40)

    def places(batch_rows):
        batch = task.objective.batch(task.test, batch_rows)
        chosen = (batch["labels"] != IGNORED).numpy()
        assert (batch["input_ids"].numpy()[chosen] == VOCABULARY.mask).all()
        return {
            row: [(at, int(labels[at])) for at in np.flatnonzero(hidden)]
            for row, labels, hidden in zip(
                batch_rows, batch["labels"], chosen, strict=True
            )
        }

    together = places(rows)
    assert places(rows[::-1]) == together
    for row in rows:
        assert places(rows[[row]]) == {row: together[row]}
        words = len(task.test.ids[row]) - 2  # type: ignore[attr-defined]
        assert len(together[row]) == max(1, round(0.15 * words))


def test_accuracy_is_the_share_of_hidden_tokens_and_a_hopeless_perplexity_infinite(
    task,
):
    rows = np.arange(len(task.test))
    labels = task.objective.batch(task.test, rows)["labels"]
    tokens = labels[labels != IGNORED]
    common = int(tokens.mode().values)
    sure = model_for(task)
    for bias, loss in ((20.0, (5, 25)), (1e4, (1e3, 1e5))):
        with torch.no_grad():
            sure.get_parameter("cls.predictions.bias")[common] = bias
        found = training.evaluate(sure, task, task.test, rows)
        assert found["accuracy"] == pytest.approx(
            float((tokens == common).float().mean())
        )
        assert loss[0] < found["loss"] < loss[1]
    assert found["pseudo_perplexity"] == math.inf


@pytest.mark.parametrize(
    ("name", "ids", "usable"),
    [
        ("mlm bert", [[2, 9, 3], [2, 3], [2, 1, 3]], [0]),
        ("clm gpt2", [[7, 8], [7], [2, 3]], [0, 2]),
    ],
)
def test_rows_with_nothing_to_predict_are_passed_over(name, ids, usable):
    task = task_for(name)
    encoded = encoded_of(ids)
    odd = replace(task, train=encoded)
    model = model_for(task)
    assert task.objective.usable(encoded, np.arange(3)).tolist() == usable
    found = training.evaluate(model, odd, encoded, np.arange(3))
    assert found == training.evaluate(model, odd, encoded, np.array(usable))
    assert all(
        map(math.isnan, training.evaluate(model, odd, encoded, np.array([1])).values())
    )
    (batch,) = training.step_batches(
        odd, model, np.array([*usable, *[1] * 20]), len(usable), 8, 0
    )
    assert len(batch["labels"]) == len(usable)
    single = changed(odd, batch_size=1)
    assert math.isfinite(training.train(model, single, np.arange(3), 0))


def test_the_token_that_ends_a_text_is_predicted_where_it_is_that_of_padding_too():
    """GPT-2's tokenizer has one token for both."""
    objective = task_for("clm gpt2").objective
    batch = objective.batch(
        encoded_of([[7, 8, 3], [7, 3]], pad_id=3),
        np.arange(2),
        np.random.default_rng(0),
    )
    assert batch["labels"].tolist() == [[7, 8, 3], [7, 3, IGNORED]]


@pytest.mark.parametrize("mask", ["[MASK]", "<mask>", "<none>"])
def test_mask_tokens_by_family(mask, task, monkeypatch):
    tokenizer = Tokenizer(
        models.WordLevel({"a": 0, "<s>": 1, mask: 7, "b": 6000}, unk_token="a")
    )
    tokenizer.add_special_tokens(["<s>"])
    monkeypatch.setattr(tokenizers, "tokenizer_for", lambda _: tokenizer)
    if mask == "<none>":
        with pytest.raises(DataError, match="no mask token"):
            MaskedLanguageModelling(task.experiment, task.data)
        return
    found = MaskedLanguageModelling(task.experiment, task.data)
    assert (found.mask, found.special.tolist()) == (7, [1, 7])
    # The model has no embedding of token 6000.
    assert found.ordinary.tolist() == [0]
    assert VOCABULARY.special.tolist() == [0, 1, 2, 3, 4]
    assert VOCABULARY.ordinary.tolist() == list(
        range(5, bundled_tokenizer().get_vocab_size())
    )
