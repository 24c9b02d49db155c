"""The model, a client's share of the data, training and evaluation."""

from __future__ import annotations

from functools import lru_cache

import torch
from datasets import DatasetDict
from flwr.app import UserConfig
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import IidPartitioner
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_model(config: UserConfig) -> nn.Module:
    """Return the classifier, for two classes."""
    name = str(config["model-name"])
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=2
    )
    return model


@lru_cache(maxsize=1)
def _federated(name: str, partitions: int) -> FederatedDataset:
    return FederatedDataset(
        dataset=name, partitioners={"train": IidPartitioner(partitions)}
    )


def load_data(config: UserConfig, node: UserConfig) -> list[DataLoader]:
    """Return a client's rows to train on, four in five, to choose by, and to report on.

    Rows that choose a model give it too good a score.
    """
    federated = _federated(str(config["dataset-name"]), int(node["num-partitions"]))
    rows = federated.load_partition(int(node["partition-id"]))
    split: DatasetDict = rows.train_test_split(test_size=0.2, seed=42)
    halves: DatasetDict = split["test"].train_test_split(test_size=0.5, seed=42)
    split = DatasetDict(
        {"train": split["train"], "choose": halves["train"], "report": halves["test"]}
    )
    tokenizer = AutoTokenizer.from_pretrained(str(config["model-name"]))
    tokens = split.map(
        lambda batch: tokenizer(
            batch["text"], truncation=True, max_length=int(config["max-length"])
        ),
        batched=True,
        remove_columns=["text"],
    ).rename_column("label", "labels")
    size, pad = int(config["batch-size"]), DataCollatorWithPadding(tokenizer)
    return [
        DataLoader(part, batch_size=size, shuffle=name == "train", collate_fn=pad)
        for name, part in tokens.items()
    ]


def train(
    model: nn.Module, loader: DataLoader, epochs: int, learning_rate: float
) -> float:
    """Train the model in place and return the mean loss."""
    model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    total, steps = 0.0, 0
    for _ in range(epochs):
        for batch in loader:
            loss = model(**batch.to(DEVICE)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
    return total / steps


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    model.to(DEVICE).eval()
    loss, right, rows = 0.0, 0, 0
    for batch in loader:
        output = model(**batch.to(DEVICE))
        size = len(batch["labels"])
        loss, rows = loss + size * output.loss.item(), rows + size
        right += int((output.logits.argmax(dim=-1) == batch["labels"]).sum())
    return loss / rows, right / rows
