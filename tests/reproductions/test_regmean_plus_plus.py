"""RegMean++: layer by layer, on the inputs that the merged layers produce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BertConfig, GPT2Config

from fedrot.aggregation import RegMean
from fedrot.collect.gram import collect_gram
from fedrot.errors import FedrotError, UpdateError
from reproductions.regmean_plus_plus import Candidate, merge_order, regmean_plus_plus

CONFIGS: dict[str, Any] = {
    "bert": BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
    ),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=12, pad_token_id=0),
}


def built(family: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(CONFIGS[family]).eval()


def batches(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(1, 40, (8, 10), generator=generator)} for _ in range(3)]


def candidates(family: str) -> list[Candidate]:
    return [
        Candidate(built(family, seed).state_dict(), weight, lambda seed=seed: batches(seed))  # type: ignore[misc]
        for seed, weight in ((0, 1.0), (1, 3.0))
    ]


class Chain(nn.Module):
    """Linear layers one after the other, the smallest model with layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5, bias=False, dtype=torch.float64) for _ in range(3)])
        self.head = nn.Linear(5, 2, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def test_a_chain_by_hand() -> None:
    """Each layer is the least squares solution on what the merged layers before it produce."""
    models, data = [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(Chain())
        data.append(torch.randn(50, 5, dtype=torch.float64))
    weights = (1.0, 2.0)
    merged: list[Tensor] = []
    inputs = list(data)
    for name in ("layers.0", "layers.1", "layers.2", "head"):
        left, right = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for model, x, weight in zip(models, inputs, weights, strict=True):
            gram = x.T @ x / len(x)
            gram = 0.9 * gram + 0.1 * torch.diag(gram.diagonal())
            left = left + weight * model.get_submodule(name).weight @ gram  # type: ignore[operator]
            right = right + weight * gram
        merged.append(left @ torch.linalg.inv(right))
        inputs = [torch.tanh(x @ merged[-1].T) for x in inputs]
    found = regmean_plus_plus(
        Chain(),
        [
            Candidate(dict(model.state_dict()), weight, lambda x=x: [{"x": x}])  # type: ignore[misc]
            for model, x, weight in zip(models, data, weights, strict=True)
        ],
    )
    for tensor, expected in zip(found.values(), merged, strict=True):
        # Gram matrices are float32.
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_first_layer_is_regmeans_on_averaged_embeddings(family: str) -> None:
    both = candidates(family)
    found = regmean_plus_plus(built(family, 9), both)
    shell, plain = built(family, 9), RegMean()
    layer = set(merge_order(shell)[0])
    embeddings = {n: t for n, t in found.items() if "embed" in n or "wte" in n or "wpe" in n}
    for name, tensor in embeddings.items():
        mean = (both[0].tensors[name] + 3 * both[1].tensors[name]) / 4
        torch.testing.assert_close(tensor, mean.to(tensor.dtype))
    for candidate in both:
        shell.load_state_dict({**candidate.tensors, **embeddings})
        grams = collect_gram(shell, candidate.batches())
        own = {kind: {n: g for n, g in by.items() if n in layer} for kind, by in grams.items()}
        kept = {name: candidate.tensors[name] for name in layer}
        plain.add(kept, candidate.weight, {kind: by for kind, by in own.items() if by})
    for name, tensor in plain.result().items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_equal_models_come_back(family: str) -> None:
    (one, _) = candidates(family)
    found = regmean_plus_plus(built(family, 9), [one, one])
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


def test_rows_that_a_candidate_has_not_trained_are_the_others() -> None:
    one, other = candidates("bert")
    mask = {name: torch.tensor([False, True]) for name in ("classifier.weight", "classifier.bias")}
    part = Candidate(other.tensors, other.weight, other.batches, mask)
    found = regmean_plus_plus(built("bert", 9), [one, part])
    for name in mask:
        torch.testing.assert_close(found[name][0], one.tensors[name][0])
    second = "classifier.weight"
    assert not torch.allclose(found[second][1], one.tensors[second][1])


def test_the_order_of_merging() -> None:
    order = merge_order(built("bert", 0))
    assert [names[0].split("attention")[0] for names in order[:2]] == [
        "bert.encoder.layer.0.",
        "bert.encoder.layer.1.",
    ]
    last = {name.rpartition(".")[0] for name in order[2]}
    assert last == {"bert.pooler.dense", "classifier"}


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(FedrotError, match="at least one candidate"):
        regmean_plus_plus(built("bert", 0), [])
    with pytest.raises(FedrotError, match="no list of layers"):
        regmean_plus_plus(nn.Linear(2, 2), [Candidate(nn.Linear(2, 2).state_dict(), 1, list)])
    one, other = candidates("bert")
    small = {name: tensor for name, tensor in other.tensors.items() if "pooler" not in name}
    with pytest.raises(UpdateError, match="pooler"):
        regmean_plus_plus(built("bert", 0), [one, Candidate(small, 1, other.batches)])
