"""``FedRotLoRA`` with PEFT clients that train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import torch
import transformers

from fedrot.lora import (
    adapter_tensors,
    load_adapter,
)
from tests.strategies.fakes import Message, reply

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


def client(index: int, rank: int = 3) -> Any:
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
        return reply(message, adapter_tensors(net), 64 + index, index)

    return train
