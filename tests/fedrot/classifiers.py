"""Classifiers of every family with labelled inputs, and what a loop over their rows finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from fedrot.errors import FedrotError
from fedrot.head import ClassSums
from fedrot.problems import SINGLE
from tests.families import inputs
from tests.fedrot.collect.tiny import TINY
from tests.fedrot.oracles import Array, seeded
from tests.models import inputs as tokens
from tests.models import randomise

CLASSES = 3

#: The last linear layer of every family's classifiers of sequences, tokens and images.
LAST = {
    **dict.fromkeys(("bert", "albert", "deberta", "deberta-v2", "modernbert-biased"), "classifier"),
    **dict.fromkeys(("vit", "vit-plain", "clip-classifier"), "classifier"),
    **dict.fromkeys(("deberta-embedding", "gpt-neox-tokens", "falcon-rw"), "classifier"),
    **dict.fromkeys(("camembert", "mpnet"), "classifier.out_proj"),
    **dict.fromkeys(("t5-classifier", "bart-classifier"), "classification_head.out_proj"),
    **dict.fromkeys(("gpt2-classifier", "gptj-whole", "falcon-11b", "opt-projected"), "score"),
    **dict.fromkeys(("llama-biased", "qwen2", "phi3-partial"), "score"),
}
#: Those that label every token.
TOKENS = ("deberta-embedding", "gpt-neox-tokens", "falcon-rw")
#: Those that read the last token, at the layer that all tokens pass.
DECODERS = tuple(name for name, head in LAST.items() if head == "score")

Batch = dict[str, Tensor]


def batch_for(name: str, rows: int, seed: int = 0) -> Batch:
    """Return inputs of a family's classifier with labels; the second row and padding have none."""
    batch = inputs(name, rows)
    shape = batch["input_ids"].shape if name in TOKENS else (rows,)
    batch["labels"] = torch.randint(CLASSES, shape, generator=seeded(seed))
    if name in TOKENS:
        batch["labels"][batch["attention_mask"] == 0] = -100
    batch["labels"][1:2] = -100
    return batch


def unlabelled(batch: Batch) -> Batch:
    """Return a batch without its labels."""
    return {key: value for key, value in batch.items() if key != "labels"}


def rows_of(model: Any, batches: Sequence[Batch], name: str) -> tuple[Array, Array, Array]:
    """Return the inputs of the last layer, the labels and the logits of every row that has a label."""
    seen: list[Tensor] = []
    layer = model.get_submodule(LAST[name])
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    rows = []
    for batch in batches:
        with torch.no_grad():
            logits = model.eval()(**unlabelled(batch)).logits
        features = seen.pop()
        for row, label in enumerate(batch["labels"]):
            if name in TOKENS:
                places = [place for place in range(len(label)) if label[place] >= 0]
                rows += [(features[row, i], label[i], logits[row, i]) for i in places]
            elif label >= 0:
                # The texts are padded on the right.
                last = int(batch["attention_mask"][row].sum()) - 1 if name in DECODERS else ...
                rows.append((features[row][last], label, logits[row]))
    handle.remove()
    features, labels, logits = (torch.stack(each).double().numpy() for each in zip(*rows, strict=True))
    return features, labels.astype(int), logits


def loss_of(logits: Array, labels: Array, temperature: float) -> Array:
    """Return the cross entropy of every row, from its definition."""
    apart = (logits - logits.max(1, keepdims=True)) / temperature
    return np.log(np.exp(apart).sum(1)) - apart[np.arange(len(labels)), labels]


def sums_of(features: Array, labels: Array, problem: str = SINGLE, outputs: int = CLASSES) -> ClassSums:
    """Return the sums over rows; the labels are classes ``[rows]``, or values ``[rows, outputs]``."""
    one_hot = (labels.reshape(len(labels), -1) == np.arange(outputs)).astype(float)
    factors = one_hot if problem == SINGLE else np.insert(labels, 0, 1, axis=1)
    terms = (factors.sum(0), factors.T @ features, features.T @ features)
    counts, sums, gram = map(torch.from_numpy, terms)
    return ClassSums(counts, sums, gram, problem)


def leaves_the_model_as_it_was(collect: Callable[[Any, list[Batch]], Tensor], fails: bool) -> None:
    """Check that collecting from a model that is trained changes and draws nothing, also if it fails."""
    settings: dict[str, Any] = {**TINY, "num_labels": CLASSES, "hidden_dropout_prob": 0.5}
    model = randomise(transformers.BertForSequenceClassification(transformers.BertConfig(**settings)))
    model.train()
    model.bert.encoder.eval()
    batch = {**tokens(), "labels": torch.tensor([2, 0])}
    model(**batch).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    before, random = _traces(model), torch.get_rng_state()
    with pytest.raises(FedrotError, match="A label is 7") if fails else nullcontext():
        second = {**batch, "labels": torch.tensor([0, 7])} if fails else batch
        one, two = (collect(model, [batch, second]) for _ in range(2))
        assert torch.equal(one, two)  # no dropout
    assert _traces(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert all(torch.equal(t, tensors[name]) for name, t in model.state_dict().items())
    # Its own logits come back: a layer's output may have been replaced.
    assert bool(model(**batch).logits.requires_grad)


def _traces(model: nn.Module) -> list[Any]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return [hooks, [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]]
