"""A cell and its models: flat vectors of parameters, local training, heads, and how
good they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedrot.simulations.tasks.scores import evaluate_predictions
from fedrot.strategies.pooled_classifier import pooled
from fedrot.task_head.choice import SHRINKAGES
from fedrot.task_head.sums import ClassSums
from reproductions.heads import closed
from reproductions.heads.arms import Arm
from reproductions.heads.cell import Array, Cell

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


class _Reached(Exception):
    """The first trained layer has its input: what comes after is not needed."""


class Given(nn.Module):
    """In place of an encoder's embeddings: what the frozen layers gave out."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Tensor:
        return inputs_embeds


@dataclass(eq=False)
class Model:
    """Flat parameters, a head of best temperature, and held-out losses."""

    flat: Tensor
    head: closed.Head
    losses: closed.Losses


def layer_numbers(read: str, depth: int) -> list[int]:
    """Return the numbers of the layers that ``read`` names, from 1: ``last``, ``all``,
    or numbers with commas between them.
    """
    named = {"last": [depth], "all": [*range(1, depth + 1)]}
    numbers = named.get(read) or sorted({*map(int, read.split(","))})
    if not 1 <= numbers[0] <= numbers[-1] <= depth:
        raise ValueError(f"Layers {read} are to be read, and there are 1 to {depth}.")
    return numbers


class Federation:
    """A cell and a pretrained encoder, of which the upper ``layers`` are trained.

    The encoder is a model of ``transformers``, of BERT's or Llama's kind; it is used
    up.

    Args:
        pooling: of the tokens of a row: ``mean``, ``last``, or BERT's ``pooler``.
        bfloat16: whether the trained layers multiply in it (autocast), which is faster.
        read: see `layer_numbers`. The head reads the pooled tokens of these layers side
            by side; the last layer is read after the final norm.
    """

    #: The last arm whose rounds others can share, and its averages by round.
    shared: tuple[Arm | None, dict[int, Tensor]] = (None, {})

    def __init__(
        self,
        cell: Cell,
        encoder: Any,
        layers: int,
        pooling: str,
        bfloat16: bool = False,
        read: str = "last",
    ) -> None:
        if pooling == "pooler" and read != "last":
            raise ValueError("A pooler reads the last layer alone: read 'last'.")
        self.cell, self.encoder = cell, encoder.eval()
        self.pooling, self.bfloat16 = pooling, bfloat16
        self.lengths, self.labels = map(torch.from_numpy, (cell.lengths, cell.labels))
        encoder.config.use_cache = False
        stack = next(part for part in encoder.modules() if type(part) is nn.ModuleList)
        if not 1 <= layers <= len(stack):
            raise ValueError(f"Train 1 to {len(stack)} layers in place of {layers}.")
        frozen, numbers = len(stack) - layers, layer_numbers(read, len(stack))
        below = [number for number in numbers if number <= frozen]
        self.above = [number - frozen for number in numbers if number > frozen]
        self.hidden, self.below = self._run(stack[: frozen + 1], below)
        del stack[:frozen]
        if hasattr(encoder, "embeddings"):  # they would add positions
            encoder.embeddings = Given()
        else:
            encoder.set_input_embeddings(None)
        if pooling != "pooler":
            encoder.pooler = None
        self.width = self.hidden.shape[2] * len(numbers)
        self.size = cell.classes * (self.width + 1)  # of the head
        generator = torch.Generator().manual_seed(cell.seed)
        head = 0.02 * torch.randn(self.size, generator=generator)
        head[-cell.classes :] = 0
        body = nn.utils.parameters_to_vector(encoder.parameters()).detach()
        self.start = torch.cat([body, head])

    @torch.no_grad()
    def _run(self, stack: nn.ModuleList, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Return what the last layer of a stack takes in, and what is read of the
        layers below it with these numbers.
        """
        inputs: list[Tensor] = []
        states = []
        features = []

        def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs.append(given[0])
            if len(inputs) == len(stack):
                raise _Reached

        hooks = [layer.register_forward_pre_hook(keep) for layer in stack]
        ids = torch.from_numpy(self.cell.ids)
        for rows in torch.arange(len(ids)).split(READ):
            inputs.clear()
            mask = self.mask(rows, ids.shape[1])
            with suppress(_Reached):
                self.encoder(input_ids=ids[rows], attention_mask=mask)
            states.append(inputs[-1])
            features.append(self.pooled(inputs, numbers, rows))
        for hook in hooks:
            hook.remove()
        return torch.cat(states), torch.cat(features)

    def mask(self, rows: Tensor, tokens: int) -> Tensor:
        """Return which tokens of rows are no padding, ``[rows, tokens]``."""
        return torch.arange(tokens) < self.lengths[rows, None]

    def pooled(
        self, states: Sequence[Tensor], numbers: list[int], rows: Tensor
    ) -> Tensor:
        """Return the means of the tokens of rows, or their last tokens, of numbered
        states side by side.
        """
        found = [torch.empty(len(rows), 0)]
        for number in numbers:
            state = states[number]
            mask = self.mask(rows, state.shape[1])
            found.append(pooled(state, mask, self.pooling))
        return torch.cat(found, 1)

    def read(self, flat: Tensor, rows: Array) -> Tensor:
        """Return what the head of a model reads at some rows."""
        places = torch.from_numpy(rows)
        tokens = int(self.lengths[places].max())
        named = dict(self.encoder.named_parameters())
        parts = flat[: -self.size].split([part.numel() for part in named.values()])
        tensors = {
            name: part.view_as(named[name])
            for name, part in zip(named, parts, strict=True)
        }
        given = {
            "inputs_embeds": self.hidden[places, :tokens],
            "attention_mask": self.mask(places, tokens),
            "output_hidden_states": True,
        }
        with torch.autocast("cpu", torch.bfloat16, self.bfloat16):
            out = functional_call(self.encoder, tensors, (), given)
        if self.pooling == "pooler":
            return out.pooler_output
        trained = self.pooled(out.hidden_states, self.above, places)
        return torch.cat([self.below[places], trained], 1)

    @torch.no_grad()
    def features(self, flat: Tensor, rows: Array) -> Tensor:
        """Return the same for many rows."""
        order = np.argsort(self.cell.lengths[rows], kind="stable")
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
                flat = self.mean(ends, range(self.cell.clients))
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
