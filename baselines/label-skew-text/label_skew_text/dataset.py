"""label_skew_text: A Flower Baseline."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from flwr.app import UserConfig
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import DirichletPartitioner
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from label_skew_text.model import Setup, hidden_states

BATCH_SIZE, MAX_LENGTH, HELD_OUT = 16, 48, 0.25

Numbers = NDArray[np.int64]
Batch = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """Texts behind the frozen layers: ``[rows, tokens, width]``, and their labels."""

    hidden: Tensor
    lengths: Tensor
    labels: Tensor

    def batches(self, numbers: Numbers, size: int = BATCH_SIZE) -> Iterator[Batch]:
        """Yield some rows in their order, without padding that no row needs."""
        for part in torch.from_numpy(numbers).split(size):
            lengths = self.lengths[part]
            tokens = int(lengths.max())
            yield {
                "inputs_embeds": self.hidden[part, :tokens],
                "attention_mask": (torch.arange(tokens) < lengths[:, None]).long(),
                "labels": self.labels[part],
            }

    def read(self, numbers: Numbers | None = None) -> Iterator[Batch]:
        """Yield some rows, by default all, in the order of their lengths."""
        chosen = np.arange(len(self.labels)) if numbers is None else numbers
        order = np.argsort(self.lengths.numpy()[chosen], kind="stable")
        return self.batches(chosen[order], 64)


@dataclass(frozen=True, eq=False)
class Division:
    """Rows, the client of each, and the numbers of those to train on or to hold out."""

    rows: Rows
    client: Numbers
    training: Numbers
    held_out: Numbers
    seed: int

    def epoch(self, client: int, server_round: int) -> Numbers:
        """Return a client's training rows in the order of a round."""
        rng = np.random.default_rng([self.seed, 2, server_round + 100])
        return self.of(client, rng.permutation(self.training))

    def of(self, client: int, numbers: Numbers) -> Numbers:
        """Return those of some rows that a client has."""
        return numbers[self.client[numbers] == client]


def load_clients(config: UserConfig, partitions: int) -> Division:
    """Return the training rows, divided by Dirichlet's distribution over labels."""
    skew, seed = float(config["concentration"]), int(config["seed"])
    return _divided(str(config["dataset"]), Setup.of(config), partitions, skew, seed)


def load_test(config: UserConfig) -> Rows:
    """Return the test rows, which are the same for all seeds."""
    federated = _federated(str(config["dataset"]), 1, 1.0, 0)
    return _read(federated.load_split("test"), Setup.of(config))


@lru_cache(maxsize=1)
def _divided(
    dataset: str, setup: Setup, partitions: int, skew: float, seed: int
) -> Division:
    federated = _federated(dataset, partitions, skew, seed)
    rng, held_out = np.random.default_rng([seed, 1]), []
    train = federated.load_split("train")
    client = np.zeros(len(train), np.int64)
    for number in range(partitions):
        own = np.sort(federated.load_partition(number)["number"])
        client[own] = number
        held_out.append(rng.permutation(own)[: round(HELD_OUT * len(own))])
    held = np.sort(np.concatenate(held_out))
    training = np.setdiff1d(np.arange(len(train)), held)
    return Division(_read(train, setup), client, training, held, seed)


def _federated(
    dataset: str, partitions: int, skew: float, seed: int
) -> FederatedDataset:
    """Return a data set, from the hub or a folder, cut to the rows of a run."""

    def cut(splits: DatasetDict) -> DatasetDict:
        train, test = splits["train"], splits["test"]
        rng = np.random.default_rng([seed, 0])
        train = train.select(rng.choice(len(train), min(1600, len(train)), False))
        train = train.add_column("number", range(len(train)))
        order = np.random.default_rng(0).permutation(len(test))
        return DatasetDict(train=train, test=test.select(order[:1000]))

    partitioner = DirichletPartitioner(
        partitions, "label", skew, min_partition_size=1, shuffle=False, seed=seed
    )
    return FederatedDataset(
        dataset=dataset,
        partitioners={"train": partitioner},
        preprocessor=cut,
        shuffle=False,
    )


def _read(split: Dataset, setup: Setup) -> Rows:
    tokenizer = AutoTokenizer.from_pretrained(setup.name)
    tokens = tokenizer(
        [*split["text"]],
        truncation=True,
        max_length=MAX_LENGTH,
        padding=True,
        return_tensors="pt",
    )
    hidden = hidden_states(setup, tokens["input_ids"], tokens["attention_mask"])
    lengths = tokens["attention_mask"].sum(1)
    return Rows(hidden, lengths, torch.tensor([*split["label"]]))
