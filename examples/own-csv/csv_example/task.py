"""A site's rows, the model, training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pandas as pd
import torch
from flwr.app import UserConfig
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Site:
    """A site's name and its batches.

    Attributes:
        training: three in five rows, from which the model learns.
        held_out: one in five, by which the task head is chosen.
        test: one in five, which chooses nothing: the site's figures are of these.
    """

    name: str
    training: list[Batch]
    held_out: list[Batch]
    test: list[Batch]


def label_names(config: UserConfig) -> list[str]:
    """Return the names of all classes, in the order of the model's outputs."""
    return [name.strip() for name in str(config["labels"]).split(",")]


def build_model(config: UserConfig) -> nn.Module:
    """Return the classifier, with the names of its classes."""
    names = label_names(config)
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        str(config["model-name"]),
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={name: place for place, name in enumerate(names)},
    )
    return model.to(DEVICE)


def csv_of(config: UserConfig, node: UserConfig) -> Path:
    """Return the node's csv: from its own configuration, or of the folder."""
    if "csv" in node:
        return Path(str(node["csv"]))
    folder = str(config["data-folder"])
    if not folder:
        raise ValueError(
            "This node has no csv. Start it with --node-config "
            "'csv=\"/path/site.csv\"', or give a folder in simulation, "
            "-c 'data-folder=\"/path\"'."
        )
    files = sorted(Path(folder).glob("*.csv"))
    place = int(node["partition-id"])
    if place >= len(files):
        raise ValueError(
            f"{folder} has {len(files)} csv files, but this is client {place + 1}. "
            f"Give num-supernodes={len(files)}."
        )
    return files[place]


def load_site(config: UserConfig, node: UserConfig) -> Site:
    """Return the node's rows; the split is the same in every call."""
    path = csv_of(config, node).resolve()
    name = str(node.get("site", path.stem))
    settings = tuple(
        str(config[key])
        for key in ("model-name", "labels", "text-column", "label-column")
    )
    sizes = int(config["batch-size"]), int(config["max-length"])
    return _load(path, name, settings, sizes)


@lru_cache(maxsize=1)
def _load(
    path: Path, name: str, settings: tuple[str, ...], sizes: tuple[int, int]
) -> Site:
    model_name, labels, text, label = settings
    size, length = sizes
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    for column in (text, label):
        if column not in table:
            raise ValueError(
                f"{path} has no column '{column}', but {', '.join(table)}. Give "
                "text-column and label-column."
            )
    names = [part.strip() for part in labels.split(",")]
    unknown = table[~table[label].isin(names)]
    if len(unknown):
        raise ValueError(
            f"{path}, row {unknown.index[0] + 2}: the label "
            f"'{unknown[label].iloc[0]}' is none of {', '.join(names)}."
        )
    places = {class_name: place for place, class_name in enumerate(names)}
    tokenizer = AutoTokenizer.from_pretrained(model_name)

    def batches(rows: pd.DataFrame) -> list[Batch]:
        made = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            encoded = tokenizer(
                part[text].tolist(),
                truncation=True,
                padding=True,
                max_length=length,
                return_tensors="pt",
            )
            targets = torch.tensor([places[value] for value in part[label]])
            made.append({**encoded, "labels": targets})
        return made

    shuffled = table.sample(frac=1, random_state=0)
    fifth = len(table) // 5
    return Site(
        name,
        training=batches(shuffled[2 * fifth :]),
        held_out=batches(shuffled[:fifth]),
        test=batches(shuffled[fifth : 2 * fifth]),
    )


def on_device(batch: Batch) -> Batch:
    """Return a batch on the model's device."""
    return {name: value.to(DEVICE) for name, value in batch.items()}


def rows_in(batches: list[Batch]) -> int:
    """Return the number of rows."""
    return sum(len(batch["labels"]) for batch in batches)


def train(
    model: nn.Module, batches: list[Batch], epochs: int, learning_rate: float
) -> float:
    """Train the model in place and return the mean loss of a row."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    total, rows = 0.0, 0
    for _ in range(epochs):
        for place in torch.randperm(len(batches)).tolist():
            batch = on_device(batches[place])
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch["labels"])
            rows += len(batch["labels"])
    return total / rows


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch]) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    model.eval()
    loss, right = 0.0, 0
    for batch in map(on_device, batches):
        output = model(**batch)
        loss += output.loss.item() * len(batch["labels"])
        right += int((output.logits.argmax(dim=-1) == batch["labels"]).sum())
    rows = rows_in(batches)
    return loss / rows, right / rows
