"""Sites with rows of their own, and what a slow oracle says of their heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.clientapp import ClientApp
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    BertConfig,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from fedrot.lora import load_as_sent
from fedrot.strategies import LabelledRows, answer_with_sums
from fedrot.task_head.choice import SHRINKAGES
from fedrot.task_head.fit import fitted_task_head
from fedrot.task_head.sums import collect_classes
from tests.strategies.fakes import Client, node_of
from tests.strategies.fitting.classifiers import KINDS, OUTPUTS, SINGLE, Kind, Rows

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
        answer_with_sums(app, lambda message, context: data, folder)
        return node_of(app)


def sites_of(kind: Kind, count: int = 3) -> list[Site]:
    """Return sites of which each has more of some labels."""
    pairs = kind.pairs()[:count]
    return [
        Site(kind, *pair, kind.rows(200 + seed, 50), f"site {seed}")
        for seed, pair in enumerate(pairs)
    ]


def logits_of(kind: Kind, tensors: dict[str, Any], rows: Rows) -> np.ndarray:
    """Return a model's logits of the rows with a label, ``[rows, outputs]``."""
    model = kind.build()
    load = load_as_sent if kind.adapter else type(model).load_state_dict
    load(model, tensors)
    return kind.logits(model, rows)[labelled(rows)].numpy()


def labelled(rows: Rows) -> Any:
    labels = rows["labels"]
    return labels >= 0 if labels.dtype == torch.int64 else torch.ones(len(labels)) > 0


def labels_of(rows: Rows) -> np.ndarray:
    return rows["labels"][labelled(rows)].numpy()


def loss_of(kind: Kind, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    if kind.problem == "regression":
        return ((logits[:, 0] - labels) ** 2).astype(float)
    return kind.loss(torch.tensor(logits), torch.tensor(labels)).numpy()


def figures_of(kind: Kind, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return loss, accuracy and macro F1, by scikit-learn."""
    figures = {"loss": float(loss_of(kind, logits, labels).mean())}
    if kind.problem == "regression":
        return figures
    predicted = logits > 0 if labels.ndim > 1 else logits.argmax(1)
    present = np.flatnonzero(labels.sum(0)) if labels.ndim > 1 else np.unique(labels)
    actual = labels.astype(int)
    f1 = f1_score(actual, predicted, average="macro", labels=present, zero_division=0)
    return {**figures, "accuracy": accuracy_score(actual, predicted), "macro_f1": f1}


def alone_logits(site: Site, first: dict[str, Any], rows: Rows) -> np.ndarray:
    """Return what the best head on the site's own sums answers."""
    kind = site.kind
    model = kind.build()
    (load_as_sent if kind.adapter else type(model).load_state_dict)(model, first)
    sums = collect_classes(model, [site.training], kind.head, kind.problem)
    best = (np.inf, np.empty(0))
    for shrinkage in SHRINKAGES:
        weight, bias = fitted_task_head(sums, shrinkage)
        head = {f"{kind.head}.weight": weight.float()}
        if f"{kind.head}.bias" in first:
            head[f"{kind.head}.bias"] = torch.zeros(kind.outputs)
        chosen, reported = (
            logits_of(kind, {**first, **head}, own) + bias.numpy()
            for own in (site.held_out, rows)
        )
        for t in kind.temperatures:
            loss = loss_of(kind, chosen / t, labels_of(site.held_out)).mean()
            best = min(best, (loss, reported / t), key=lambda pair: pair[0])
    return best[1]


def own_shift(site: Site, priors: list[float], logits: Any) -> np.ndarray:
    """Return what the site's shares add to logits."""
    labels = labels_of(site.training)
    n = len(labels)
    if site.kind.problem == "regression":
        return np.array([(labels - logits[:, 0]).sum() / (n + 1)])
    pi = np.array(priors)
    if labels.ndim > 1:
        counts = labels.sum(0)
        yes = (counts + pi) / (n + 1) / pi
        no = (n - counts + 1 - pi) / (n + 1) / (1 - pi)
        return np.log(yes) - np.log(no)
    counts = np.bincount(labels, minlength=OUTPUTS)
    return np.log((counts + pi) / (n + 1) / pi)


def pooled_priors(sites: list[Site]) -> list[float]:
    """Return the shares of all training rows; no site has 1.5 times the median."""
    if sites[0].kind.problem == "regression":
        return []
    every = [labels_of(site.training) for site in sites]
    sizes = [len(labels) for labels in every]
    weights = [min(n, 1.5 * float(np.median(sizes))) / n for n in sizes]
    hot = [np.eye(OUTPUTS)[own] if own.ndim == 1 else own for own in every]
    counts = sum(w * h.sum(0) for w, h in zip(weights, hot, strict=True))
    return list(counts / sum(w * n for w, n in zip(weights, sizes, strict=True)))


def one_class(site: Site) -> Site:
    """Return a site whose training rows have one class."""
    labels = torch.ones_like(site.training["labels"])
    return replace(site, training={**site.training, "labels": labels})
