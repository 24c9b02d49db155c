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
from fedrot.strategies.lora import ERROR
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


def rows(seed: int) -> list[dict[str, torch.Tensor]]:
    """Return batches of texts whose label is whether token 3 occurs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 30, (64, 6), generator=generator)
    labels = torch.randint(2, (64,), generator=generator)
    ids[labels == 1, 2] = 3
    pairs = zip(ids.split(16), labels.split(16), strict=True)
    return [{"input_ids": some, "labels": of} for some, of in pairs]


def client(index: int, rank: int = 3, sent: dict[int, AdapterUpdate] | None = None) -> Any:
    def train(message: Message) -> Message:
        (received,) = message.content.array_records.values()
        net = model(rank)
        load_adapter(net, received.to_torch_state_dict())
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        net.train()
        for batch in rows(index) * 2:
            optimizer.zero_grad()
            net(**batch).loss.backward()
            optimizer.step()
        tensors = adapter_tensors(net)
        answer = reply(message, tensors, 64 + index, index)
        if sent is None:
            return answer
        kinds = add_statistics(answer.content, message, net, rows(index))
        assert kinds == ("gram",)
        own, grams = LoraSettings.of(net.peft_config["default"]), fedrot.collect_gram(net, rows(index))
        sent[index] = AdapterUpdate(tensors, 64 + index, own, grams)
        return answer

    return train


def test_a_round_of_regmean_is_that_of_the_clients_matrices() -> None:
    sent, start = dict[int, AdapterUpdate](), adapter_tensors(model())
    options = AdapterOptions("regmean")
    strategy = FedRotLoRA(LORA, options, fraction_evaluate=0.0)
    grid = FakeGrid({100 + i: client(i, rank, sent) for i, rank in enumerate((3, 1, 2))})
    result = strategy.start(grid, ArrayRecord(start), 1)
    found = result.arrays.to_torch_state_dict()
    assert ERROR in result.train_metrics_clientapp[1]
    updates, settings = [sent[i] for i in range(3)], LoraSettings.of(LORA)
    expected, _ = average_adapters(updates, settings, options, previous=start)
    exact, _ = average_adapters(updates, settings, AdapterOptions("exact"), previous=start)
    assert found.keys() == start.keys()
    for pair in pairs_of(start):
        ours, theirs, others = (t[pair.b] @ t[pair.a] for t in (found, expected, exact))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
        assert torch.linalg.norm(ours - others) > 1e-2 * torch.linalg.norm(others)
    head = "base_model.model.classifier.weight"
    torch.testing.assert_close(found[head], exact[head])


def test_what_regmean_lacks_is_said_before_training_or_in_the_first_round() -> None:
    base = model().unload()
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], use_dora=True)
    dora = adapter_tensors(peft.get_peft_model(base, config))
    grid = FakeGrid({100 + i: client(i) for i in range(2)})
    for start, said in (
        (dora, r"has DoRA's magnitudes .* Take method='exact'"),
        (adapter_tensors(model()), r"no statistics 'gram'.*fedrot.strategies.add_statistics\("),
    ):
        assert not grid.asked
        strategy = FedRotLoRA(LORA, AdapterOptions("regmean"), fraction_evaluate=0.0)
        with pytest.raises(FedrotError, match=said):
            strategy.start(grid, ArrayRecord(start), 1)
