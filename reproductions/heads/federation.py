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
from fedrot.task_head.fit import fitted_task_heads
from reproductions.heads import closed
from reproductions.heads.arms import Arm
from reproductions.heads.cell import CLIENTS, Array, Cell

#: Rows of a step of training, and rows that are read at once without gradients.
BATCH, READ = 16, 256
PROBE_RATES, PROBE_ROUNDS, KERNEL_WIDTHS = (
    (1e-3, 3e-3, 1e-2, 3e-2),
    10,
    (0.25, 1.0, 4.0),
)


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
    """Flat parameters, a head of best temperature for what it reads of features, and
    held-out losses.
    """

    flat: Tensor
    head: closed.Head
    losses: closed.Losses
    reads: Callable[[Tensor], Tensor]


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
            self.hidden = torch.cat(
                [bert(part, attention_mask=part > 0)[0] for part in ids]
            )
        bert.encoder.layer, bert.embeddings = every[len(every) - layers :], Given()
        bert.pooler = bert.pooler if pooling == "pooler" else None
        self.width = self.hidden.shape[2]
        self.size = cell.classes * (self.width + 1)  # of the head
        head = 0.02 * torch.randn(
            self.size, generator=torch.Generator().manual_seed(cell.seed)
        )
        head[-cell.classes :] = 0
        self.start = torch.cat(
            [*(part.detach().flatten() for part in bert.parameters()), head]
        )

    def read(self, flat: Tensor, rows: Array) -> Tensor:
        """Return what the head of a model reads at some rows."""
        tokens, lengths = (
            int(self.lengths[rows].max()),
            torch.from_numpy(self.lengths[rows]),
        )
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
        return torch.cat([self.read(flat, rows[part]) for part in places])[
            np.argsort(order)
        ]

    def head(self, flat: Tensor) -> closed.Head:
        """Return the head of flat parameters, or the heads of several ``[models,
        parameters]``.
        """
        weight, bias = flat[..., -self.size :].tensor_split(
            [-self.cell.classes], dim=-1
        )
        return weight.unflatten(-1, (self.cell.classes, -1)), bias

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

    def heads(self, kind: str, features: Tensor) -> closed.Head:
        """Return the candidates of a kind, fitted to features of the training rows."""
        cell, labels = self.cell, self.labels[self.cell.training]
        if kind == "probe":
            return self._probed(features)
        if kind == "ccvr":
            return closed.drawn(features, labels, cell.classes, cell.seed)
        total = closed.sums_of(features, labels, cell.classes)
        if kind == "fedcof":
            client = torch.from_numpy(cell.client[cell.training])
            total = closed.from_means(features, labels, client, cell.classes)
        if kind == "means":
            return closed.nearest_mean(total)
        if kind in ("ridge", "fourier"):
            return closed.ridge(total)
        # On frozen features fedrot's heads are GH-OFL's (arXiv 2602.01186), with
        # fedrot's shrinkage.
        return fitted_task_heads(total, SHRINKAGES)

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
        held, labels = (
            self.features(flat, self.cell.held_out),
            self.labels[self.cell.held_out],
        )
        if not kind:
            return Model(
                flat,
                *closed.calibrated(held, labels, self.head(flat[None])),
                nn.Identity(),
            )
        features, found = self.features(flat, self.cell.training), []
        maps: list[Any] = [nn.Identity()]
        if kind == "fourier":
            total = closed.sums_of(
                features, self.labels[self.cell.training], self.cell.classes
            )
            maps = [
                partial(closed.fourier, total, width, self.cell.seed)
                for width in KERNEL_WIDTHS
            ]
        for reads in maps:
            head, losses = closed.calibrated(
                reads(held), labels, self.heads(kind, reads(features))
            )
            found.append(Model(flat, head, losses, reads))
        best = min(found, key=lambda model: model.losses.mean())
        if kind != "fourier":
            best.flat = torch.cat(
                [flat[: -self.size], *(part.flatten().float() for part in best.head)]
            )
        return best

    def measure(self, model: Model) -> dict[str, float]:
        """Return what is measured on test rows."""
        features = model.reads(self.features(model.flat, self.cell.test))
        logits, names = (
            closed.scores(features, model.head).numpy(),
            ("accuracy", "macro_f1", "ece"),
        )
        found = evaluate_predictions(
            "single", names, logits, self.cell.labels[self.cell.test]
        )
        return found | {"worst": self.cell.worst(logits.argmax(1))}
