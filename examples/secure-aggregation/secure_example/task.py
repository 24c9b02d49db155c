"""The model, the comments that it classifies by emotion, training and evaluation."""

from __future__ import annotations

from importlib import resources

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
)

BUNDLED = resources.files("fedrot.simulations.data") / "bundled"
LENGTH, VOCABULARY, EMOTIONS = 48, 6000, 7


def build_model() -> nn.Module:
    """Return a small GPT-2 with a head for the emotions, always the same."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        num_labels=EMOTIONS,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    return GPT2ForSequenceClassification(config)


def load_rows(
    split: str, share: int = 0, shares: int = 1, limit: int | None = None
) -> TensorDataset:
    """Return every ``shares``-th comment of a split as tokens, mask and label."""
    with resources.as_file(BUNDLED) as folder:
        table = pd.read_parquet(folder / "goemotions_ekman" / f"{split}.parquet")[
            share::shares
        ][:limit]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            pad_token="[PAD]",
            padding_side="right",
        )
    tokens = tokenizer(
        table["text"].tolist(),
        truncation=True,
        padding="max_length",
        max_length=LENGTH,
        return_tensors="pt",
    )
    labels = torch.tensor(table["label"].to_numpy(), dtype=torch.long)
    return TensorDataset(tokens["input_ids"], tokens["attention_mask"], labels)


def train(model: nn.Module, rows: TensorDataset, epochs: int) -> None:
    """Train the model in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for ids, mask, labels in DataLoader(rows, batch_size=32, shuffle=True):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def loss_of(model: nn.Module, rows: TensorDataset) -> float:
    """Return the mean loss."""
    model.eval()
    total = 0.0
    for ids, mask, labels in DataLoader(rows, batch_size=100):
        total += (
            len(ids)
            * model(input_ids=ids, attention_mask=mask, labels=labels).loss.item()
        )
    return total / len(rows)
