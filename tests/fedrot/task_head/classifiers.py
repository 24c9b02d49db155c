"""Classifiers of every family with labelled inputs, and what a loop over their rows
finds.
"""

import numpy as np
import torch

from fedrot.task_head.losses import TEMPERATURES, LossSums
from fedrot.task_head.outputs import REGRESSION, SINGLE
from fedrot.task_head.sums import ClassSums
from tests.families import inputs
from tests.fedrot.oracles import seeded

CLASSES = 3

#: The last linear layer of every family's classifiers of sequences, tokens and images.
LAST = {
    **dict.fromkeys(
        ("bert", "albert", "deberta", "deberta-v2", "modernbert-biased"), "classifier"
    ),
    **dict.fromkeys(("vit", "vit-plain", "clip-classifier"), "classifier"),
    **dict.fromkeys(
        ("deberta-embedding", "gpt-neox-tokens", "falcon-rw"), "classifier"
    ),
    **dict.fromkeys(("camembert", "mpnet"), "classifier.out_proj"),
    **dict.fromkeys(
        ("t5-classifier", "bart-classifier"), "classification_head.out_proj"
    ),
    **dict.fromkeys(
        ("gpt2-classifier", "gptj-whole", "falcon-11b", "opt-projected"), "score"
    ),
    **dict.fromkeys(("llama-biased", "qwen2", "phi3-partial"), "score"),
}
#: Those that label every token.
TOKENS = ("deberta-embedding", "gpt-neox-tokens", "falcon-rw")
#: Those that read the last token, at the layer that all tokens pass.
DECODERS = tuple(name for name, head in LAST.items() if head == "score")


def batch_for(name, rows, seed=0):
    """Return inputs of a family's classifier with labels; the second row and padding
    have none.
    """
    batch = inputs(name, rows)
    shape = batch["input_ids"].shape if name in TOKENS else (rows,)
    batch["labels"] = torch.randint(CLASSES, shape, generator=seeded(seed))
    if name in TOKENS:
        batch["labels"][batch["attention_mask"] == 0] = -100
    batch["labels"][1:2] = -100
    return batch


def unlabelled(batch):
    """Return a batch without its labels."""
    return {key: value for key, value in batch.items() if key != "labels"}


def rows_of(model, batches, name):
    """Return the inputs of the last layer, the labels and the logits of every row that
    has a label.
    """
    seen = []
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
                last = (
                    int(batch["attention_mask"][row].sum()) - 1
                    if name in DECODERS
                    else ...
                )
                rows.append((features[row][last], label, logits[row]))
    handle.remove()
    features, labels, logits = (
        torch.stack(each).double().numpy() for each in zip(*rows, strict=True)
    )
    return features, labels.astype(int), logits


def loss_of(logits, labels, temperature):
    """Return the cross entropy of every row, from its definition."""
    apart = (logits - logits.max(1, keepdims=True)) / temperature
    return np.log(np.exp(apart).sum(1)) - apart[np.arange(len(labels)), labels]


def answer(*means, rows=100, deviation=0.0):
    """Return a client's losses of models, by their means.

    Losses of rows differ from the first model's by the means' difference, with a
    deviation.
    """
    grid = torch.tensor(means).double().unsqueeze(1).repeat(1, len(TEMPERATURES))
    squares = (grid - grid[0]) ** 2 + deviation**2
    counts = torch.tensor([rows, *[0] * len(means)]).double()
    return LossSums(grid * rows, squares * rows, counts)


def sums_of(features, labels, problem=SINGLE, outputs=CLASSES):
    """Return the sums over rows; the labels are classes ``[rows]``, or values ``[rows,
    outputs]``.
    """
    one_hot = (labels.reshape(len(labels), -1) == np.arange(outputs)).astype(float)
    factors = one_hot if problem == SINGLE else np.insert(labels, 0, 1, axis=1)
    if problem == REGRESSION:
        factors = np.concatenate([factors, labels**2], axis=1)
    terms = (factors.sum(0), factors.T @ features, features.T @ features)
    counts, sums, gram = map(torch.from_numpy, terms)
    return ClassSums(counts, sums, gram, problem)
