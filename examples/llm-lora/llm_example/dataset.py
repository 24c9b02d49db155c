"""A client's share of the instructions, as batches of token ids."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from flwr.app import UserConfig
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import IidPartitioner
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n{output}"


@lru_cache(maxsize=1)
def _federated(name: str, partitions: int) -> FederatedDataset:
    return FederatedDataset(
        dataset=name, partitioners={"train": IidPartitioner(partitions)}
    )


def load_data(config: UserConfig, node: UserConfig, server_round: int) -> DataLoader:
    """Return batches of a client's rows, in an order of the round's own."""
    federated = _federated(
        str(config["static.dataset.name"]), int(node["num-partitions"])
    )
    rows = federated.load_partition(int(node["partition-id"]))
    tokenizer = AutoTokenizer.from_pretrained(str(config["model.name"]))
    length = int(config["train.seq-length"])
    pad = next(
        (i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None),
        0,
    )

    def batch(given: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [tokenizer(PROMPT.format(**row))["input_ids"][:length] for row in given]
        width = max(map(len, ids))
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
        padded = torch.tensor([row + [pad] * (width - len(row)) for row in ids])
        labels = padded.masked_fill(mask == 0, -100)
        return {"input_ids": padded, "attention_mask": mask, "labels": labels}

    order = torch.Generator().manual_seed(server_round)
    size = int(config["train.batch-size"])
    return DataLoader(
        rows, batch_size=size, shuffle=True, generator=order, collate_fn=batch
    )
