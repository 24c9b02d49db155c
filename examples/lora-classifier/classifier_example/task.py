"""The model with its adapter, a client's share of the data, training and evaluation."""

from __future__ import annotations

from functools import lru_cache

import torch
from datasets import DatasetDict
from flwr.app import UserConfig
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import IidPartitioner
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_model(config: UserConfig, rank: int) -> PeftModel:
    """Return the classifier, for two classes, with a LoRA adapter of this rank.

    Layers that the pretrained model lacks are the same everywhere.
    """
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(
        str(config["model-name"]), num_labels=2
    )
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=rank,
        lora_alpha=int(config["lora-alpha"]),
        target_modules=str(config["lora-targets"]).split("+"),
    )
    return get_peft_model(base, lora)


def ranks(config: UserConfig) -> list[int]:
    """Return the ranks that clients have in turns."""
    return [int(rank) for rank in str(config["lora-ranks"]).split("+")]


@lru_cache(maxsize=1)
def _federated(name: str, partitions: int) -> FederatedDataset:
    return FederatedDataset(
        dataset=name, partitioners={"train": IidPartitioner(partitions)}
    )


def load_data(config: UserConfig, node: UserConfig) -> tuple[DataLoader, DataLoader]:
    """Return a client's rows to train on, four in five, and its rows to evaluate on."""
    federated = _federated(str(config["dataset-name"]), int(node["num-partitions"]))
    rows = federated.load_partition(int(node["partition-id"]))
    split: DatasetDict = rows.train_test_split(test_size=0.2, seed=42)
    tokenizer = AutoTokenizer.from_pretrained(str(config["model-name"]))
    tokens = split.map(
        lambda batch: tokenizer(
            batch["text"], truncation=True, max_length=int(config["max-length"])
        ),
        batched=True,
        remove_columns=["text"],
    ).rename_column("label", "labels")
    size, pad = int(config["batch-size"]), DataCollatorWithPadding(tokenizer)
    return (
        DataLoader(tokens["train"], batch_size=size, shuffle=True, collate_fn=pad),
        DataLoader(tokens["test"], batch_size=size, collate_fn=pad),
    )


def train(
    model: nn.Module, loader: DataLoader, epochs: int, learning_rate: float
) -> float:
    """Train the model in place and return the mean loss."""
    model.to(DEVICE).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
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
