"""Gram matrices of real models against hooks and loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import fedrot
from tests.fedrot.collect.tiny import TINY, Batch, batch_of
from tests.fedrot.oracles import Array, seeded
from tests.models import (
    CASES,
    LAYERS,
    WIDTH,
    fresh_model,
    inputs,
    randomise,
)


def _rows(model: nn.Module, batches: Sequence[Batch], kinds: Sequence[str]) -> dict[str, list[Array]]:
    """Return what every module of these class names reads, token by token, without padding."""
    found: dict[str, list[Array]] = {}
    mask: list[Tensor] = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            values = args[0].double().numpy()
            for row in range(len(values)):
                if values.ndim == 2:
                    found.setdefault(name, []).append(values[row])
                    continue
                for token in range(values.shape[1]):
                    if bool(mask[-1][row, token]):
                        found.setdefault(name, []).append(values[row, token])

        return keep

    model = model.eval()
    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if type(module).__name__ in kinds
    ]
    with torch.no_grad():
        for batch in batches:
            mask.append(batch["attention_mask"])
            model(**batch)
    for handle in handles:
        handle.remove()
    return found


def _oracle(rows: Sequence[Array]) -> Array:
    total = np.zeros((len(rows[0]), len(rows[0])))
    for row in rows:
        total += np.outer(row, row)
    return np.asarray(total / len(rows))


def _close(found: Tensor, expected: Array, tolerance: float = 1e-5) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert np.abs(found.double().numpy() - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", [*CASES, "bert-mlm-untied", "roberta-tokens"])
def test_gram_matrices_equal_sums_over_tokens(name: str) -> None:
    model = fresh_model(name)
    batches = [batch_of(1), batch_of(2, rows=2, length=5, padding=1)]
    found = fedrot.collect_gram(model, batches)
    assert found.keys() == {"gram", "input_mean"}
    assert found["input_mean"].keys() == found["gram"].keys()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    expected = {
        key: rows
        for key, rows in _rows(model, batches, ["Linear"]).items()
        if id(model.get_submodule(key).weight) not in embeddings
    }
    assert found["gram"].keys() == {f"{key}.weight" for key in expected}
    names = CASES[name].names if name in CASES else None
    assert names is None or f"{names.of(1, 'down')}.weight" in found["gram"]
    for key, rows in expected.items():
        _close(found["gram"][f"{key}.weight"], _oracle(rows))
        _close(found["input_mean"][f"{key}.weight"], np.asarray(rows, np.float64).mean(0))


def test_padding_is_as_if_it_were_not_there() -> None:
    """Two sequences of 9 and 6 tokens in one batch, against each one alone and uncut."""
    model = fresh_model("bert-classifier")
    batch = inputs()
    together = fedrot.collect_gram(model, [batch])["gram"]
    whole = {"input_ids": batch["input_ids"][:1]}
    cut = {"input_ids": batch["input_ids"][1:, :6]}
    alone, short = (fedrot.collect_gram(model, [b])["gram"] for b in (whole, cut))
    for key, gram in together.items():
        per_sequence = key in ("bert.pooler.dense.weight", "classifier.weight")
        one, other = (1, 1) if per_sequence else (9, 6)
        expected = (one * alone[key] + other * short[key]) / (one + other)
        _close(gram, expected.double().numpy())
    in_turn = fedrot.collect_gram(model, [whole, cut])["gram"]
    assert all((in_turn[k] - g).abs().max() <= 1e-5 * g.abs().max() for k, g in together.items())


def test_no_token_to_read_gives_zeros() -> None:
    batch = batch_of(1)
    batch["attention_mask"] = torch.zeros_like(batch["attention_mask"])
    key = f"{CASES['bert-classifier'].names.of(0, 'query')}.weight"
    gram = fedrot.collect_gram(fresh_model("bert-classifier"), [batch])["gram"][key]
    assert torch.equal(gram, torch.zeros(WIDTH, WIDTH))


def test_choices_of_a_question_are_sequences_like_any_other() -> None:
    model = fresh_model("bert-choice")
    batch = {key: value[None] for key, value in batch_of(1).items()}
    flat = {key: value[0] for key, value in batch.items()}
    found = fedrot.collect_gram(model, [batch])["gram"]
    expected = fedrot.collect_gram(model.bert, [flat])["gram"]
    assert found.keys() == {"classifier.weight"} | {f"bert.{key}" for key in expected}
    for key, gram in expected.items():
        assert torch.equal(found[f"bert.{key}"], gram)


def test_query_key_and_value_hold_one_matrix() -> None:
    name = "distilbert-classifier"
    found = fedrot.collect_gram(fresh_model(name), [batch_of(1), batch_of(2)])["gram"]
    names = CASES[name].names
    for layer in range(LAYERS):
        query, key, value = (
            found[f"{names.of(layer, module)}.weight"] for module in ("query", "key", "value")
        )
        assert query is key is value
    assert len({id(gram) for gram in found.values()}) == len(found) - 2 * LAYERS


def test_tied_output_embeddings_have_none() -> None:
    tied = fedrot.collect_gram(fresh_model("bert-mlm"), [batch_of(1)])["gram"]
    apart = fedrot.collect_gram(fresh_model("bert-mlm-untied"), [batch_of(1)])["gram"]
    assert apart.keys() - tied.keys() == {"cls.predictions.decoder.weight"}
    assert "cls.predictions.transform.dense.weight" in tied


def test_shared_layers_gather_the_inputs_of_all_their_calls() -> None:
    """ALBERT runs one layer three times: its matrices are over all three inputs."""
    settings: dict[str, Any] = {**TINY, "num_hidden_layers": 3, "embedding_size": 6, "num_labels": 3}
    config = transformers.AlbertConfig(**settings)
    model = randomise(transformers.AlbertForSequenceClassification(config).double()).eval()
    batches = [batch_of(1), batch_of(2)]
    found = fedrot.collect_gram(model, batches)["gram"]
    rows = _rows(model, batches, ["Linear"])
    assert found.keys() == {f"{key}.weight" for key in rows}
    for key, values in rows.items():
        _close(found[f"{key}.weight"], _oracle(values))
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    query = f"{layer}.attention.query"
    assert len(rows[query]) == 3 * int(sum(int(b["attention_mask"].sum()) for b in batches))
    assert found[f"{query}.weight"] is found[f"{layer}.attention.value.weight"]
    assert found[f"{query}.weight"] is not found[f"{layer}.ffn.weight"]


def test_conv1d_has_a_kind_of_its_own() -> None:
    sizes: dict[str, Any] = {"n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 16, "num_labels": 3}
    tokens: dict[str, Any] = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(**sizes, **tokens)
    model = randomise(transformers.GPT2ForSequenceClassification(config).double()).eval()
    batches = [batch_of(1), batch_of(2)]
    found = fedrot.collect_gram(model, batches)
    assert found.keys() == {"gram", "gram_conv1d", "input_mean", "input_mean_conv1d"}
    assert found["gram"].keys() == {"score.weight"}
    rows = _rows(model, batches, ["Conv1D"])
    assert found["gram_conv1d"].keys() == {f"{key}.weight" for key in rows}
    for key, values in rows.items():
        weight = model.get_parameter(f"{key}.weight")
        gram = found["gram_conv1d"][f"{key}.weight"]
        assert len(gram) == weight.shape[0]
        _close(gram, _oracle(values))


def test_the_model_is_left_as_it_was() -> None:
    """Dropout is off while statistics are collected, and every module gets its own mode back."""
    model = fresh_model("bert-classifier").train()
    model.bert.encoder.layer[1].eval()
    model.bert.encoder.layer[0].attention.requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    assert len(set(modes.values())) == 2
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    first, second = (fedrot.collect_gram(model, [batch_of(1)])["gram"] for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(p, weights[n]) and p.grad is None for n, p in model.named_parameters())
    assert not model.bert.encoder.layer[0].attention.output.dense.weight.requires_grad
    assert model.classifier.weight.requires_grad
    assert not any(gram.requires_grad for gram in first.values())
    assert torch.is_grad_enabled()


class _Forks(nn.Module):
    """Two layers, on one input or on two, that fail on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(5, 5)
        self.dropout = nn.Dropout(0.5)

    def forward(
        self, x: Tensor, apart: bool = False, by_name: bool = False, fail: bool = False
    ) -> Tensor:
        y = self.right(x + 1 if apart else x)
        if fail:
            raise ValueError("out of luck")
        return torch.cat([self.left(input=x) if by_name else self.left(x), y], -1)


def test_a_failing_model_is_left_as_it_was() -> None:
    model = _Forks().train()
    model.dropout.eval()
    with pytest.raises(ValueError, match="luck"):
        fedrot.collect_gram(model, [{"x": torch.ones(2, 4), "fail": True}])  # type: ignore[dict-item]
    assert (model.training, model.left.training, model.dropout.training) == (True, True, False)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.is_grad_enabled()


def test_inputs_that_are_shared_in_the_first_batch_and_not_later_are_refused() -> None:
    batches: list[Any] = [{"x": torch.ones(2, 4), "apart": apart} for apart in (False, True)]
    with pytest.raises(fedrot.FedrotError, match=r"right\.weight.*left\.weight.*in some batches only"):
        fedrot.collect_gram(_Forks(), batches)


def test_inputs_that_are_shared_in_a_later_batch_only_have_matrices_of_their_own() -> None:
    x = torch.randn(6, 4, generator=seeded(1))
    batches: list[Any] = [{"x": x[:4], "apart": True}, {"x": x[4:]}]
    found = fedrot.collect_gram(_Forks(), batches)["gram"]
    read = x.double().numpy()
    _close(found["left.weight"], _oracle(list(read)))
    _close(found["right.weight"], _oracle([*(read[:4] + 1), *read[4:]]))


@pytest.mark.parametrize("apart", [False, True])
def test_any_model_of_linear_layers_will_do(apart: bool) -> None:
    x = torch.randn(6, 4, generator=seeded(1))
    batches: list[Any] = [{"x": x[:4], "apart": apart}, {"x": x[4:], "apart": apart}]
    found = fedrot.collect_gram(_Forks(), batches)["gram"]
    assert found.keys() == {"left.weight", "right.weight"}
    _close(found["left.weight"], _oracle(list(x.double().numpy())))
    _close(found["right.weight"], _oracle(list(x.double().numpy() + apart)))
    assert (found["left.weight"] is found["right.weight"]) != apart


def test_a_layer_may_be_called_by_keyword() -> None:
    x = torch.randn(6, 4, generator=seeded(1))
    batches: list[Any] = [{"x": x, "by_name": True}]
    found = fedrot.collect_gram(_Forks(), batches)["gram"]
    _close(found["left.weight"], _oracle(list(x.double().numpy())))


def test_labels_are_not_passed_on() -> None:
    """Labels of the wrong shape would fail in the loss."""
    model = fresh_model("bert-classifier")
    plain = fedrot.collect_gram(model, [batch_of(1)])["gram"]
    odd = fedrot.collect_gram(model, [{**batch_of(1), "labels": torch.ones(99)}])["gram"]
    assert all(torch.equal(plain[key], odd[key]) for key in plain)


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_batches_are_read_than_asked_for(most: int) -> None:
    taken = []

    def batches() -> Iterator[Batch]:
        for seed in range(5):
            taken.append(seed)
            yield batch_of(seed)

    model = fresh_model("bert-classifier")
    found = fedrot.collect_gram(model, batches(), max_batches=most)["gram"]
    assert taken == list(range(most))
    expected = fedrot.collect_gram(model, [batch_of(seed) for seed in range(most)])["gram"]
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_half_precision_models_give_float32() -> None:
    model = fresh_model("bert-classifier").to(torch.bfloat16)
    exact = fedrot.collect_gram(fresh_model("bert-classifier"), [batch_of(1)])["gram"]
    found = fedrot.collect_gram(model, [batch_of(1)])["gram"]
    assert found.keys() == exact.keys()
    for key, gram in found.items():
        assert gram.dtype == torch.float32
        assert (gram - exact[key]).abs().max() <= 0.1 * exact[key].abs().max()


def test_nothing_to_read_is_refused() -> None:
    model = fresh_model("bert-classifier")
    with pytest.raises(fedrot.FedrotError, match="batch"):
        fedrot.collect_gram(model, [])
    with pytest.raises(fedrot.FedrotError, match="batch"):
        fedrot.collect_gram(model, [batch_of(1)], max_batches=0)

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(fedrot.FedrotError, match="Linear"):
        fedrot.collect_gram(Norm(), [{"x": torch.ones(1, 2)}])
