"""``FedRotLoRA`` with PEFT clients that train."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers

from fedrot.lora import AdapterOptions
from fedrot.strategies import FedRotLoRA
from fedrot.strategies.lora import ERROR_OF_FACTORS
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


def model() -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(
        transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)), LORA
    )


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
