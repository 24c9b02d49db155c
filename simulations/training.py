"""Local training and evaluation, the same bits for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data import TextData, evaluate_predictions
from fedrot.simulations.models import Encoded

#: Batches are drawn from this many batches' worth of shuffled rows, sorted by length.
_BUCKET = 16


def batches(
    encoded: Encoded, rows: np.ndarray, size: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield shuffled batches of rows of similar length, each row once."""
    shuffled = rng.permutation(rows)
    found: list[np.ndarray] = []
    for start in range(0, len(shuffled), size * _BUCKET):
        bucket = shuffled[start : start + size * _BUCKET]
        lengths = np.array([len(encoded.ids[row]) for row in bucket])
        ordered = bucket[np.argsort(lengths, kind="stable")]
        found += [ordered[i : i + size] for i in range(0, len(ordered), size)]
    for index in rng.permutation(len(found)):
        yield found[index]


def train(
    model: torch.nn.Module, encoded: Encoded, rows: np.ndarray, config: SimulationConfig, seed: int
) -> float:
    """Train in place for ``local_epochs`` with AdamW; return the mean loss of the last epoch."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True
    )
    model.train()
    losses: list[float] = []
    for _ in range(config.local_epochs):
        losses = []
        for batch in batches(encoded, rows, config.batch_size, rng):
            labels = torch.from_numpy(encoded.labels[batch])
            loss = model(**_inputs(model, encoded.batch(batch)), labels=labels).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return float(np.mean(losses)) if losses else float("nan")


def predict(model: torch.nn.Module, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
    """Return the logits ``[len(rows), outputs]`` in the order of ``rows``."""
    order = np.argsort([len(encoded.ids[row]) for row in rows], kind="stable")
    model.eval()
    outputs: list[np.ndarray] = []
    with torch.inference_mode():
        for start in range(0, len(order), 128):
            batch = rows[order[start : start + 128]]
            outputs.append(model(**_inputs(model, encoded.batch(batch))).logits.float().numpy())
    joined = np.concatenate(outputs)
    result = np.empty_like(joined)
    result[order] = joined
    return result


def evaluate(
    model: torch.nn.Module, data: TextData, encoded: Encoded, rows: np.ndarray
) -> dict[str, float]:
    """Return the data set's metrics and the loss on the given rows; NaN where there are none."""
    if not len(rows):
        return dict.fromkeys((*data.metrics, "loss"), float("nan"))
    return evaluate_predictions(
        data.kind, data.metrics, predict(model, encoded, rows), encoded.labels[rows]
    )


def _inputs(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """DistilBERT and RoBERTa-like models have no segments."""
    if getattr(model.config, "type_vocab_size", 0) < 2:
        batch.pop("token_type_ids")
    return batch
