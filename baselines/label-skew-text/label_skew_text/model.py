"""label_skew_text: A Flower Baseline."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from flwr.app import UserConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModel
from transformers.modeling_outputs import SequenceClassifierOutput


class Setup(NamedTuple):
    """A pretrained BERT, how many of its upper layers are trained, and the classes."""

    name: str
    layers: int
    classes: int

    @classmethod
    def of(cls, config: UserConfig) -> Setup:
        """Read the run's configuration."""
        layers, classes = int(config["trained-layers"]), int(config["num-classes"])
        return cls(str(config["model"]), layers, classes)


class _Given(nn.Module):
    """In the place of embeddings: what the frozen layers gave out."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Tensor:
        """Return the input."""
        return inputs_embeds


class Classifier(nn.Module):
    """The upper layers of a BERT, the mean of its tokens, and a linear task head.

    The names of the tensors are those of ``BertForSequenceClassification``.
    """

    def __init__(self, bert: Any, classes: int, seed: int) -> None:
        super().__init__()
        self.bert, self.config, width = bert, bert.config, bert.config.hidden_size
        self.classifier = nn.Linear(width, classes)
        generator = torch.Generator().manual_seed(seed)
        drawn = 0.02 * torch.randn(classes * (width + 1), generator=generator)
        with torch.no_grad():
            self.classifier.weight.copy_(drawn[:-classes].view(classes, width))
            self.classifier.bias.zero_()

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Return logits ``[rows, classes]``, and the loss if there are labels."""
        found = self.bert(inputs_embeds=inputs_embeds, attention_mask=attention_mask)
        mask = attention_mask[..., None]
        mean = (found.last_hidden_state * mask).sum(1) / mask.sum(1)
        logits = self.classifier(mean)
        loss = None if labels is None else cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def build_model(setup: Setup, seed: int = 0) -> Classifier:
    """Return the part of the model that clients train; the seed draws the task head."""
    bert = deepcopy(_pretrained(setup.name))
    layers = bert.encoder.layer
    bert.encoder.layer = layers[len(layers) - setup.layers :]
    bert.embeddings = _Given()
    bert.config.num_hidden_layers = setup.layers
    bert.config.num_labels = setup.classes
    return Classifier(bert, setup.classes, seed)


@torch.no_grad()
def hidden_states(setup: Setup, ids: Tensor, mask: Tensor) -> Tensor:
    """Return what the frozen layers give out, ``[rows, tokens, width]``."""
    bert = deepcopy(_pretrained(setup.name))
    layers = bert.encoder.layer
    bert.encoder.layer = layers[: len(layers) - setup.layers]
    found = torch.zeros(*ids.shape, bert.config.hidden_size)
    lengths = mask.sum(1)
    for part in lengths.argsort().split(64):
        given = slice(int(lengths[part].max()))
        tokens, real = ids[part, given], mask[part, given]
        found[part, given] = bert(tokens, attention_mask=real).last_hidden_state
    return found


@lru_cache(maxsize=1)
def _pretrained(name: str) -> Any:
    bert = AutoModel.from_pretrained(name, add_pooling_layer=False, dtype=torch.float32)
    return bert.eval()  # also in training: no dropout


def train(
    model: Classifier,
    batches: Iterable[dict[str, Tensor]],
    learning_rate: float,
    proximal_mu: float = 0.0,
    head_only: bool = False,
) -> None:
    """Train one epoch with Adam; FedProx's mu pulls to the start."""
    model.bert.requires_grad_(not head_only)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    start = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.Adam(weights, lr=learning_rate)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        for weight, first in zip(weights, start, strict=True):
            if proximal_mu and weight.grad is not None:
                weight.grad += proximal_mu * (weight.detach() - first)
        optimizer.step()


@torch.no_grad()
def predict(
    model: Classifier, batches: Iterable[dict[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the labels of all rows, and what the model takes for them."""
    found = [(batch["labels"], model(**batch).logits.argmax(1)) for batch in batches]
    labels, guess = zip(*found, strict=True)
    return torch.cat(labels), torch.cat(guess)
