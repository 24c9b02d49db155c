"""``FedRotLoRA`` with PEFT clients that train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
import transformers

import fedrot
from fedrot.errors import FedrotError
from fedrot.lora import (
    AdapterOptions,
    AdapterUpdate,
    LoraSettings,
    adapter_tensors,
    average_adapters,
    load_adapter,
)
from fedrot.lora.adapters import pairs_of
from fedrot.strategies import FedRotLoRA, add_statistics
from fedrot.strategies.lora import ERROR_OF_FACTORS
from fedrot.strategies.wire.records import STATISTICS
from tests.strategies.fakes import ArrayRecord, FakeGrid, Message, reply

LORA = peft.LoraConfig(
    task_type="SEQ_CLS", r=3, lora_alpha=6, lora_dropout=0.0, target_modules=["query", "value", "dense"]
)
SIZES: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def model(rank: int = 3) -> Any:
    torch.manual_seed(0)
    base = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    return peft.get_peft_model(base, replace(LORA, r=rank))


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts whose label is whether token 3 occurs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 30, (64, 6), generator=generator)
    labels = torch.randint(2, (64,), generator=generator)
    ids[labels == 1, 2] = 3
    return ids, labels


def client(index: int) -> Any:
    def train(message: Message) -> Message:
        (received,) = message.content.array_records.values()
        net = model()
        loaded = peft.set_peft_model_state_dict(net, received.to_torch_state_dict())
        assert not loaded.unexpected_keys
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        ids, labels = rows(index)
        for _ in range(10):
            loss = net(input_ids=ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        tensors = peft.get_peft_model_state_dict(net, save_embedding_layers=False)
        return reply(message, {n: t.detach() for n, t in tensors.items()}, len(ids), index)

    return train


@pytest.mark.parametrize("options", [None, AdapterOptions("exact")], ids=str)
def test_a_federation_of_adapters_learns(options: AdapterOptions | None) -> None:
    net = model()
    start = {
        name: tensor.detach().clone()
        for name, tensor in peft.get_peft_model_state_dict(net, save_embedding_layers=False).items()
    }

    def loss() -> float:
        ids, labels = rows(99)
        with torch.inference_mode():
            return float(net(input_ids=ids, labels=labels).loss)

    before = loss()
    strategy = FedRotLoRA(LORA, options, fraction_evaluate=0.0)
    grid = FakeGrid({100 + i: client(i) for i in range(3)})
    result = strategy.start(grid, ArrayRecord(start), 3)
    loaded = peft.set_peft_model_state_dict(net, result.arrays.to_torch_state_dict())
    assert not loaded.unexpected_keys
    assert loss() < 0.5 * before
    assert 0 < result.train_metrics_clientapp[3][ERROR_OF_FACTORS] < 1


# Clients that send Gram matrices


def loader(index: int) -> list[dict[str, torch.Tensor]]:
    ids, labels = rows(index)
    return [
        {"input_ids": some, "labels": of}
        for some, of in zip(ids.split(16), labels.split(16), strict=True)
    ]


def asked_client(index: int, rank: int = 3, sent: dict[int, Any] | None = None) -> Any:
    """Return a client that trains an adapter of a rank, and adds the statistics that it is asked for."""

    def train(message: Message) -> Message:
        (received,) = message.content.array_records.values()
        net = model(rank)
        load_adapter(net, received.to_torch_state_dict())
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        net.train()
        for batch in loader(index):
            optimizer.zero_grad()
            net(**batch).loss.backward()
            optimizer.step()
        tensors = adapter_tensors(net)
        answer = reply(message, tensors, 64 + index, index)
        kinds = add_statistics(answer.content, message, net, loader(index))
        if sent is not None:
            grams = fedrot.collect_gram(net, loader(index))
            sent[index] = AdapterUpdate(
                tensors, 64 + index, LoraSettings.of(net.peft_config["default"]), grams
            )
            assert kinds == ("gram",)
        return answer

    return train


def test_a_round_of_regmean_is_that_of_the_clients_matrices() -> None:
    sent: dict[int, AdapterUpdate] = {}
    start = adapter_tensors(model())
    options = AdapterOptions("regmean")
    strategy = FedRotLoRA(LORA, options, fraction_evaluate=0.0)
    grid = FakeGrid({100 + i: asked_client(i, rank, sent) for i, rank in enumerate((3, 1, 2))})
    result = strategy.start(grid, ArrayRecord(start), 1)
    found = result.arrays.to_torch_state_dict()
    updates = [sent[i] for i in range(3)]
    settings = LoraSettings.of(LORA)
    expected, _ = average_adapters(updates, settings, options, previous=start)
    exact, _ = average_adapters(updates, settings, AdapterOptions("exact"), previous=start)
    assert found.keys() == start.keys()
    for pair in pairs_of(start):
        ours, theirs, others = (t[pair.b] @ t[pair.a] for t in (found, expected, exact))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
        assert torch.linalg.norm(ours - others) > 1e-2 * torch.linalg.norm(others)
    head = "base_model.model.classifier.weight"
    torch.testing.assert_close(found[head], exact[head])


def test_a_federation_of_regressed_adapters_learns(caplog: pytest.LogCaptureFixture) -> None:
    net = model()

    def loss() -> float:
        ids, labels = rows(99)
        with torch.inference_mode():
            return float(net(input_ids=ids, labels=labels).loss)

    before = loss()
    strategy = FedRotLoRA(LORA, AdapterOptions("regmean"), fraction_evaluate=0.0)
    grid = FakeGrid({100 + i: asked_client(i) for i in range(3)})
    with caplog.at_level("INFO", logger="flwr"):
        result = strategy.start(grid, ArrayRecord(adapter_tensors(net)), 8)
    load_adapter(net, result.arrays.to_torch_state_dict())
    assert loss() < 0.5 * before
    lines = [record.getMessage() for record in caplog.records]
    assert any("Adapters: regmean, gauge 'keep-a', alpha 0.9" in line for line in lines)
    assert any("every reply needs 'gram'; clients call" in line for line in lines)


def test_replies_without_matrices_end_the_first_round_with_the_call_to_write() -> None:
    strategy = FedRotLoRA(LORA, AdapterOptions("regmean"), fraction_evaluate=0.0)
    grid = FakeGrid({100 + i: client(i) for i in range(2)})
    with pytest.raises(FedrotError, match=r"no statistics 'gram'.*fedrot.strategies.add_statistics\("):
        strategy.start(grid, ArrayRecord(adapter_tensors(model())), 1)


def test_a_method_without_statistics_asks_for_none() -> None:
    seen: list[Any] = []

    def look(message: Message) -> Message:
        seen.append(dict(message.content.config_records["config"]))
        return client(0)(message)

    strategy = FedRotLoRA(LORA, AdapterOptions("exact"), fraction_evaluate=0.0)
    strategy.start(FakeGrid({100: look, 101: look}), ArrayRecord(adapter_tensors(model())), 1)
    assert all(STATISTICS not in config for config in seen)


def test_magnitudes_are_refused_before_clients_train() -> None:
    torch.manual_seed(0)
    base = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], use_dora=True)
    start = adapter_tensors(peft.get_peft_model(base, config))
    strategy = FedRotLoRA(config, AdapterOptions("regmean"), fraction_evaluate=0.0)
    grid = FakeGrid({100 + i: client(i) for i in range(2)})
    with pytest.raises(FedrotError, match=r"has DoRA's magnitudes .* Take method='exact'"):
        strategy.start(grid, ArrayRecord(start), 1)
    assert not grid.asked
