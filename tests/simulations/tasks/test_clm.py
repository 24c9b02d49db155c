"""Causal language modelling: what is predicted, the perplexity by hand, and every small decoder."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrot.simulations.config import TASKS, SimulationConfig
from fedrot.simulations.data.encoding import IGNORED, bundled_tokenizer
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.objectives import OBJECTIVES
from fedrot.simulations.tasks.task import Task, task_of

SMALL: dict[str, Any] = {
    "task": "clm",
    "train_limit": 96,
    "test_limit": 60,
    "layers": 1,
    "width": 32,
    "heads": 2,
    "max_length": 32,
    "clients": 2,
}
DECODERS = TASKS["clm"].architectures


@pytest.fixture(scope="module", params=DECODERS)
def task(request: pytest.FixtureRequest) -> Task:
    return task_of(SimulationConfig(**SMALL, architecture=request.param).to_json())


@pytest.fixture(scope="module")
def model(task: Task) -> torch.nn.Module:
    return build_model(task.config, task.data, seed=0)


class Fixed(torch.nn.Module):
    """After token ``a``, token ``b`` has probability ``table[a, b]``, whatever came before."""

    def __init__(self, table: torch.Tensor, like: torch.nn.Module) -> None:
        super().__init__()
        self.config = like.config
        self.output = torch.nn.Embedding.from_pretrained(table.log())
        self.last = torch.nn.Identity()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.last

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return type("Output", (), {"logits": self.last(self.output(input_ids))})


def test_the_perplexity_weighs_tokens_and_not_batches(task: Task, model: torch.nn.Module) -> None:
    # One row of 2 tokens and twenty of 4, in batches of 16: a mean of batches would be another one.
    ids = [np.array([2, 3])] + [np.array([2, 5, 6, 3])] * 20
    odd = replace(
        task.train, ids=ids, segments=[np.zeros_like(row) for row in ids], labels=np.zeros(21)
    )  # fmt: skip
    table = torch.full((8, 8), 0.01)
    table[2, 3], table[2, 5], table[5, 6], table[6, 3] = 0.5, 0.25, 0.125, 0.5
    table = table / table.sum(dim=1, keepdim=True)
    surprise = [-math.log(float(table[a, b])) for a, b in ((2, 3), (2, 5), (5, 6), (6, 3))]
    expected = (surprise[0] + 20 * sum(surprise[1:])) / 61
    found = training.evaluate(Fixed(table, model), task, odd, np.arange(21))
    assert tuple(found) == ("perplexity", "loss")
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_the_perplexity_of_a_naive_loop(task: Task, model: torch.nn.Module) -> None:
    rows = np.array([41, 3, 18, 40, 0])
    model.eval()
    surprises = []
    for row in rows:
        ids = torch.from_numpy(task.test.batch(np.array([row]))["input_ids"].numpy())
        for length in range(1, ids.shape[1]):
            with torch.no_grad():
                logits = model(input_ids=ids[:, :length]).logits[0, -1].double()
            surprises.append(-float(logits.log_softmax(dim=0)[ids[0, length]]))
    found = training.evaluate(model, task, task.test, rows)
    assert found["loss"] == pytest.approx(np.mean(surprises), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_the_loss_is_that_of_transformers(task: Task, model: torch.nn.Module) -> None:
    model.eval()
    rows = np.array([0, 1, 2])
    batch = task.objective.batch(task.train, rows, np.random.default_rng(0))
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()
    inputs = {name: value for name, value in batch.items() if name != "token_type_ids"}
    torch.testing.assert_close(task.objective.loss(model, batch), model(**inputs).loss)


def test_training_lowers_the_perplexity_and_is_reproducible(task: Task) -> None:
    rows = np.arange(len(task.train))

    def trained() -> dict[str, float]:
        model = build_model(task.config, task.data, seed=0)
        faster = replace(task, config=task.config.model_copy(update={"lr": 5e-3}))
        training.train(model, faster, rows, 3, 4)
        return training.evaluate(model, task, task.train, rows)

    fresh = training.evaluate(build_model(task.config, task.data, 0), task, task.train, rows)
    assert fresh["perplexity"] == pytest.approx(bundled_tokenizer().get_vocab_size(), rel=0.2)
    after = trained()
    assert after["perplexity"] < 0.3 * fresh["perplexity"]
    assert trained() == after


def test_a_single_token_predicts_nothing(task: Task, model: torch.nn.Module) -> None:
    ids = [np.array([7]), *task.train.ids[:2]]
    odd = replace(task.train, ids=ids, segments=[np.zeros_like(row) for row in ids])
    assert task.objective.usable(odd, np.arange(3)).tolist() == [1, 2]
    assert all(map(math.isnan, training.evaluate(model, task, odd, np.array([0])).values()))
    assert math.isnan(training.train(copy.deepcopy(model), replace(task, train=odd), np.array([0]), 0))


def test_the_token_that_ends_a_text_is_predicted_where_it_is_that_of_padding_too(task: Task) -> None:
    """GPT-2's tokenizer has one token for both."""
    ids = [np.array([7, 8, 3]), np.array([7, 3])]
    odd = replace(task.train, ids=ids, segments=[np.zeros_like(row) for row in ids], pad_id=3)
    labels = task.objective.batch(odd, np.arange(2), np.random.default_rng(0))["labels"]
    assert labels.tolist() == [[7, 8, 3], [7, 3, IGNORED]]


def test_a_diverged_model_has_no_metrics(task: Task, model: torch.nn.Module) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(broken.parameters())).fill_(math.nan)
    found = training.evaluate(broken, task, task.test, np.arange(4))
    assert tuple(found) == ("perplexity", "loss")
    assert all(map(math.isnan, found.values()))


def test_a_pretrained_decoder_is_used(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    # As GPT-2 comes: no padding token.
    settings = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=6000, eos_token_id=3)
    GPT2LMHeadModel(settings).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=bundled_tokenizer()).save_pretrained(tmp_path)
    for name, kind in (("clm", "GPT2LMHeadModel"), ("classification", "GPT2ForSequenceClassification")):
        config = SimulationConfig(**{**SMALL, "task": name, "model": str(tmp_path)})
        task = task_of(config.to_json())
        assert task.test.batch(np.arange(4))["input_ids"][0, -1] == 3
        model = build_model(config, task.data, seed=0)
        assert type(model).__name__ == kind
        assert math.isfinite(training.evaluate(model, task, task.test, np.arange(20))["loss"])


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("ner", "image")])
def test_every_architecture_of_a_task_is_built(name: str) -> None:
    for architecture in TASKS[name].architectures:
        config = SimulationConfig(**{**SMALL, "task": name, "architecture": architecture})
        task = task_of(config.to_json())
        model = build_model(config, task.data, seed=0)
        assert model.config.model_type == architecture
        loss = task.objective.loss(
            model, task.objective.batch(task.train, np.arange(5), np.random.default_rng(0))
        )
        assert math.isfinite(float(loss.detach()))


def test_every_task_has_an_objective() -> None:
    assert list(OBJECTIVES) == list(TASKS)
