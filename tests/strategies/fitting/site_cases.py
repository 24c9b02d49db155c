"""Sites with rows of their own, and what a slow oracle says of their heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.clientapp import ClientApp
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor
from transformers import (
    BertConfig,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from fedrot.lora import load_as_sent
from fedrot.strategies import LabelledRows, Privacy, answer_with_sums
from tests.strategies.fakes import Client, node_of
from tests.strategies.fitting.classifiers import (
    KINDS,
    OUTPUTS,
    SINGLE,
    VARIANCE,
    Kind,
    Rows,
)

SMALL = {"vocab_size": 40, "num_labels": OUTPUTS}


class Tokens(Kind):
    """A class for each token but the first."""

    @cache  # noqa: B019
    def _model(self, rank: int) -> Any:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        config = BertConfig(**SMALL, **sizes, num_hidden_layers=1)
        return BertForTokenClassification(config).eval()


class Score(Kind):
    """A decoder, whose task head has no bias."""

    @property
    def head(self) -> str:
        return "score"

    @cache  # noqa: B019
    def _model(self, rank: int) -> Any:
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2}
        ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 39)
        config = GPT2Config(**SMALL, **sizes, **ids)
        return GPT2ForSequenceClassification(config).eval()


def _of_tokens(ids: Any) -> Any:
    labels = ids % OUTPUTS
    labels[:, 0] = -100
    return labels


CASES: dict[str, Kind] = {
    **{name: KINDS[name] for name in ("single", "multi", "regression", "adapter")},
    "tokens": Tokens(SINGLE.problem, lambda ids: _of_tokens(ids.clone()), SINGLE.loss),
    "score": Score(SINGLE.problem, SINGLE.label, SINGLE.loss),
}


@dataclass(frozen=True)
class Site:
    """Rows of a site; without ``test`` held-out rows report."""

    kind: Kind
    training: Rows
    held_out: Rows | None
    test: Rows | None
    name: str = ""
    report: bool = True

    def node(self, folder: Path | None = None) -> Client:
        app = ClientApp()
        test = None if self.test is None else lambda: [self.test]
        data = LabelledRows(
            self.kind.drawn,
            lambda: [self.training],
            lambda: [self.held_out] if self.held_out else [],
            test=test,
            name=self.name,
            report=self.report,
        )
        answer_with_sums(app, lambda message, context: data, folder, Privacy(1, 1))
        return node_of(app)


def sites_of(kind: Kind, count: int = 3) -> list[Site]:
    """Return sites of which each has more of some labels."""
    pairs = kind.pairs()[:count]
    return [
        Site(kind, *pair, kind.rows(200 + seed, 50), f"site {seed}")
        for seed, pair in enumerate(pairs)
    ]


def logits_of(kind: Kind, tensors: Any, rows: Rows) -> Tensor:
    """Return a model's logits of the rows with a label, ``[rows, outputs]``."""
    return kind.logits(loaded(kind, tensors), rows)[labelled(rows)]


def loaded(kind: Kind, tensors: Any) -> Any:
    model = kind.build()
    load = load_as_sent if kind.adapter else type(model).load_state_dict
    load(model, tensors)
    return model


def labelled(rows: Rows) -> Tensor:
    labels = rows["labels"]
    return labels >= 0 if labels.dtype == torch.int64 else torch.ones(len(labels)) > 0


def labels_of(rows: Rows) -> Tensor:
    return rows["labels"][labelled(rows)]


def by_class(rows: Rows) -> Tensor:
    """Return numbers of rows of each class, or with each label."""
    labels = labels_of(rows)
    hot = labels if labels.ndim > 1 else labels.unsqueeze(1) == torch.arange(OUTPUTS)
    return hot.double().sum(0)


def figures_of(kind: Kind, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return loss, accuracy and macro F1, by scikit-learn."""
    losses = kind.loss(logits, labels)
    if kind.problem == "regression":
        return {"loss": float(losses.mean() * VARIANCE)}
    predicted = logits > 0 if labels.ndim > 1 else logits.argmax(1)
    present = labels.sum(0).nonzero() if labels.ndim > 1 else labels.unique()
    both = labels.int(), predicted
    f1 = f1_score(*both, labels=present.flatten(), average="macro", zero_division=0)
    figures = {"accuracy": accuracy_score(*both), "macro_f1": f1}
    return {"loss": float(losses.mean()), **figures}


def priors_of(sites: list[Site]) -> list[float]:
    """Return the shares of all training rows; no site has 1.5 times the median."""
    if sites[0].kind.problem == "regression":
        return []
    sizes = [len(labels_of(site.training)) for site in sites]
    most = 1.5 * float(np.median(sizes))
    counts = [
        by_class(site.training) * min(1, most / n)
        for site, n in zip(sites, sizes, strict=True)
    ]
    return (sum(counts) / sum(min(n, most) for n in sizes)).tolist()
