"""A cell and its models: flat vectors of parameters, local training, heads, and how
good they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedrot.simulations.tasks.scores import evaluate_predictions
from fedrot.task_head.choice import SHRINKAGES
from fedrot.task_head.sums import ClassSums
from reproductions.heads import closed
from reproductions.heads.arms import Arm
from reproductions.heads.cell import CLIENTS, Array, Cell

#: Rows of a step of training, and rows that are read at once without gradients.
BATCH, READ = 16, 256
#: LP-FT's probes.
PROBE_RATES, PROBE_ROUNDS = (1e-3, 3e-3, 1e-2, 3e-2), 10


def epoch(
    loss: Callable[[Tensor, Array], Tensor],
    start: Tensor,
    rows: Array,
    arm: Arm,
    correction: Any = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return a client's flat parameters after an epoch, and the mean gradient on the
    way.

    ``loss`` takes flat parameters and numbers of rows. Adam starts anew. ``correction``
    is SCAFFOLD's ``c - c_i``, and the gradient its new ``c_i``: for plain steps its
    option II, ``c_i - c + (start - end) / (steps rate)``.
    """
    flat, total = start.clone().requires_grad_(), torch.zeros_like(start)
    kind = torch.optim.SGD if arm.sgd else torch.optim.Adam
    optimiser = kind([flat], lr=arm.rate, fused=True)
    batches = np.split(rows, range(BATCH, len(rows), BATCH))
    for batch in batches:
        (gradient,) = torch.autograd.grad(loss(flat, batch), flat)
        total += gradient
        flat.grad = gradient + arm.pull * (flat.detach() - start) + correction
        optimiser.step()
    return flat.detach(), total / len(batches)


class Given(nn.Module):
    """In place of a BERT's embeddings: what the frozen layers gave out."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Tensor:
        return inputs_embeds


@dataclass(eq=False)
class Model:
    """Flat parameters, a head of best temperature, and held-out losses."""

    flat: Tensor
    head: closed.Head
    losses: closed.Losses


class Federation:
    """A cell and a pretrained BERT, of which the upper ``layers`` are trained; ``bert``
    is used up.

    ``bfloat16``: whether the body multiplies in it (autocast), which is faster.
    """

    def __init__(
        self,
        cell: Cell,
        bert: Any,
        layers: int,
        pooling: str,
        bfloat16: bool = False,
    ) -> None:
        self.bfloat16 = bfloat16
        self.cell, self.bert, every = cell, bert.eval(), bert.encoder.layer
        self.lengths, self.labels = (cell.ids > 0).sum(1), torch.from_numpy(cell.labels)
        bert.encoder.layer = every[: len(every) - layers]
        with torch.no_grad():
            ids = torch.from_numpy(cell.ids).split(READ)
            states = [bert(part, attention_mask=part > 0)[0] for part in ids]
        self.hidden = torch.cat(states)
        bert.encoder.layer, bert.embeddings = every[len(every) - layers :], Given()
        bert.pooler = bert.pooler if pooling == "pooler" else None
        self.width = self.hidden.shape[2]
        self.size = cell.classes * (self.width + 1)  # of the head
        generator = torch.Generator().manual_seed(cell.seed)
        head = 0.02 * torch.randn(self.size, generator=generator)
        head[-cell.classes :] = 0
        body = nn.utils.parameters_to_vector(bert.parameters()).detach()
        self.start = torch.cat([body, head])

    def read(self, flat: Tensor, rows: Array) -> Tensor:
        """Return what the head of a model reads at some rows."""
        lengths = torch.from_numpy(self.lengths[rows])
        tokens = int(lengths.max())
        mask = torch.arange(tokens) < lengths[:, None]
        named = dict(self.bert.named_parameters())
        parts = flat[: -self.size].split([part.numel() for part in named.values()])
        tensors = {
            name: part.view_as(named[name])
            for name, part in zip(named, parts, strict=True)
        }
        given = {"inputs_embeds": self.hidden[rows, :tokens], "attention_mask": mask}
        with torch.autocast("cpu", torch.bfloat16, self.bfloat16):
            out = functional_call(self.bert, tensors, (), given)
        mean = (out.last_hidden_state * mask[..., None]).sum(1) / lengths[:, None]
        return mean if self.bert.pooler is None else out.pooler_output

    @torch.no_grad()
    def features(self, flat: Tensor, rows: Array) -> Tensor:
        """Return the same for many rows."""
        order = np.argsort(self.lengths[rows], kind="stable")
        places = np.split(order, range(READ, len(order), READ))
        features = torch.cat([self.read(flat, rows[part]) for part in places])
        return features[np.argsort(order)]

    def head(self, flat: Tensor) -> closed.Head:
        """Return the head of flat parameters, or the heads of several ``[models,
        parameters]``.
        """
        classes = self.cell.classes
        weight, bias = flat[..., -self.size :].tensor_split([-classes], dim=-1)
        return weight.unflatten(-1, (classes, -1)), bias

    def with_head(self, flat: Tensor, head: closed.Head) -> Tensor:
        """Return flat parameters with another head."""
        return torch.cat([flat[: -self.size], closed.flattened(head)])

    def loss(
        self, flat: Tensor, rows: Array, read: Any = None, offset: Tensor | float = 0.0
    ) -> Tensor:
        """Return the mean loss of rows; ``read`` has their features, ``offset`` is
        added to logits.
        """
        features = self.read(flat, rows) if read is None else read[rows]
        logits = functional.linear(features, *self.head(flat)) + offset
        return functional.cross_entropy(logits, self.labels[rows])

    def mean(self, flats: Sequence[Tensor], clients: Sequence[int]) -> Tensor:
        """Return FedAvg's mean, weighted by training rows."""
        rows = torch.from_numpy(self.cell.counts[clients].sum(1))
        return (rows / rows.sum()) @ torch.stack([*flats])

    def sums(self, features: Tensor, rows: Array) -> ClassSums:
        """Return the sums over rows with these features."""
        return closed.sums_of(features, self.labels[rows], self.cell.classes)

    def heads(self, kind: str, features: Tensor) -> closed.Head:
        """Return the candidates of a kind, fitted to features of the training rows."""
        cell, labels = self.cell, self.labels[self.cell.training]
        if kind == "probe":
            return self._probed(features)
        if kind == "ccvr":
            return closed.drawn(features, labels, cell.classes, cell.seed)
        total = self.sums(features, cell.training)
        if kind == "fedcof":
            client = torch.from_numpy(cell.client[cell.training])
            total = closed.from_means(features, labels, client, cell.classes)
        if kind == "means":
            return closed.nearest_mean(total)
        if kind == "ridge":
            return closed.ridge(total)
        # On frozen features fedrot's heads are GH-OFL's (arXiv 2602.01186), with
        # fedrot's shrinkage.
        return closed.of_fedrot(total, SHRINKAGES)

    def _probed(self, features: Tensor) -> closed.Head:
        """Return LP-FT's probes (Kumar et al., ICLR 2022) by rate: FedAvg of heads,
        with all clients.
        """
        read = torch.zeros(len(self.labels), features.shape[1])
        read[self.cell.training] = features
        loss, found = partial(self.loss, read=read), []
        for rate in PROBE_RATES:
            flat = self.start[-self.size :]
            for number in range(PROBE_ROUNDS):
                ends = [
                    epoch(loss, flat, own, Arm(rate))[0]
                    for own in self.cell.batches(-1 - number)
                ]
                flat = self.mean(ends, range(CLIENTS))
            found.append(flat)
        return self.head(torch.stack(found))

    def evaluate(self, flat: Tensor, kind: str = "") -> Model:
        """Return a model with the best head of a kind and temperature, or with its own
        head.

        A head of its own keeps its scale; only what is measured is at the best
        temperature.
        """
        training, rows = self.cell.training, self.cell.held_out
        held, labels = self.features(flat, rows), self.labels[rows]
        if not kind:
            head, losses = closed.calibrated(held, labels, self.head(flat[None]))
            return Model(flat, head, losses)
        heads = self.heads(kind, self.features(flat, training))
        head, losses = closed.calibrated(held, labels, heads)
        return Model(self.with_head(flat, head), head, losses)

    def measure(self, model: Model) -> dict[str, float]:
        """Return what is measured on test rows."""
        features = self.features(model.flat, self.cell.test)
        logits = closed.scores(features, model.head).numpy()
        labels = self.cell.labels[self.cell.test]
        names = ("accuracy", "macro_f1", "ece")
        found = evaluate_predictions("single", names, logits, labels)
        return found | {"worst": self.cell.worst(logits.argmax(1))}
