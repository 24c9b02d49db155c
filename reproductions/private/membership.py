"""Tests of whether a row is among those whose sums a client sends.

Whoever tests knows the row's features and its class.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedrot.strategies import LabelledRows, Privacy
from fedrot.task_head.outputs import SINGLE
from fedrot.task_head.sums import ClassSums
from reproductions.heads.__main__ import federation_of
from reproductions.heads.closed import sums_of

#: Rows of a client, and seeds of the draw.
ROWS, SEEDS = (60, 150, 380, 1000, 10000), range(11, 16)
#: Rows of each side that are tested, rows to choose the outsiders from, and rows of
#: other clients.
TESTED, OUTSIDERS, OTHERS = 200, 400, 5000
#: Texts from which all are drawn, and their classes.
TEXTS, CLASSES = 15_900, 6
#: Share of the largest variance below which float32 tells none.
CONSTANT = 1e-6


def texts_features(
    folder: Path,
    data: str = "dair_emotion",
    size: int = TEXTS,
    tests: int = 0,
    read: str = "last",
) -> tuple[Tensor, Tensor, int]:
    """Return MiniLM's features and the classes of texts, and how many are training
    texts: at most ``size``. The others are at most ``tests`` test texts. ``read`` are
    layers.
    """
    federation = federation_of(data, 0, 0, folder, size=size, tests=tests, read=read)
    training = len(federation.cell.client)
    labels = federation.labels[: training + tests]
    features = federation.features(federation.start, np.arange(len(labels)))
    return features.double(), labels, training


def tests(
    features: Tensor, labels: Tensor, summed: Tensor, asked: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the server computes of rows from the sums over others.

    Args:
        summed: the places of the rows that are summed.
        asked: those of the rows that are tested, ``[rows]``.

    Returns:
        squared distances to the span of the scatter ``S``, and ``(h - m_c)^T S^-1 (h -
        m_c)`` times the number of rows.
    """
    packed = sums_of(features[summed], labels[summed], CLASSES).packed()
    sums = ClassSums.unpacked(packed, (CLASSES, features.shape[1]))
    values, vectors = torch.linalg.eigh(sums.within())
    least = CONSTANT * values[-1]
    away = features[asked] - sums.means()[labels[asked]]
    along = (away @ vectors).square()
    return along @ (values < least).double(), along @ (1 / values.clamp(min=least))


def areas(features: Tensor, labels: Tensor, rows: int, seed: int) -> dict[str, float]:
    """Return the areas under the curves of tests, and how many rows are sent."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    outsiders, others, mine = order.tensor_split([OUTSIDERS, OUTSIDERS + OTHERS])
    drawn = labels[mine[:rows]]
    data = LabelledRows(list, lambda: [{"labels": drawn}], list)
    (kept,) = Privacy().kept(data, SINGLE).training()
    own = mine[:rows][kept["labels"] >= 0]
    # Of a class that is not sent nothing is known.
    outsiders = outsiders[torch.isin(labels[outsiders], labels[own])]
    asked = torch.cat([own[:TESTED], outsiders[:TESTED]])
    span, leverage = tests(features, labels, own, asked)
    _, usual = tests(features, labels, others, asked)
    scores = {"span": span, "leverage": leverage, "ratio": leverage / usual}
    truth = torch.isin(asked, outsiders)
    found = {name: roc_auc_score(truth, score) for name, score in scores.items()}
    return {"rows": rows, "seed": seed, "sent": len(own), **found}
