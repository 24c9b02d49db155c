"""``read_inputs``: the inputs of a classifier's last layer, and the labels of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fedrot.collect.hooks import watched
from fedrot.collect.labelled import labelled_logits
from fedrot.errors import FedrotError
from fedrot.tensors import Tensors, compute_dtype


def read_inputs(
    model: nn.Module,
    batches: Iterable[Tensors],
    head: str,
    problem: str,
    seen: Callable[[Tensor, Tensor, int], None],
) -> None:
    """Call ``seen(inputs, labels, outputs)`` for every batch of labelled rows that a classifier reads.

    The inputs of the task head are float64 ``[rows, inputs]`` on the model's device. Labels are those of
    ``labelled_logits``; ``outputs`` is their number. Arguments, rows and errors are those of
    ``fedrot.head.collect_classes``.
    """
    layer = _layer(model, head)
    outputs, size = layer.weight.shape
    expected = getattr(getattr(model, "config", None), "num_labels", outputs)
    read: list[Tensor] = []

    def watch(name: str, given: Tensor, output: Tensor) -> Tensor:
        """Keep the inputs and return their indices as outputs: the logits then show which are used."""
        if outputs != expected:
            raise _not_last(head)
        read.append(given.reshape(-1, size))
        places = torch.arange(len(read[-1]), dtype=compute_dtype(output), device=given.device)
        return places.reshape(*given.shape[:-1], 1).repeat(*[1] * (given.ndim - 1), outputs)

    with watched(model, [head], watch):
        for logits, labels in labelled_logits(model, batches, problem):
            seen(_used(read, logits, head).double(), labels, outputs)
            read.clear()


def _layer(model: nn.Module, head: str) -> nn.Linear:
    """Return the layer of this name."""
    layer = dict(model.named_modules()).get(head)
    if not isinstance(layer, nn.Linear):
        raise FedrotError(f"The model has no linear layer '{head}'; see fedrot.head.head_of.")
    return layer


def _used(read: list[Tensor], logits: Tensor, head: str) -> Tensor:
    """Return the inputs of the task head whose indices are the logits ``[rows, outputs]``."""
    places = logits[:, 0]
    exact = logits.dtype in (torch.float32, torch.float64) and len(read) == 1 and len(read[0]) <= 2**24
    if not (
        exact
        and bool((logits == places.floor().unsqueeze(1)).all())
        and bool((places.diff() > 0).all())
        and bool(((places >= 0) & (places < len(read[0]))).all())
    ):
        raise _not_last(head)
    return read[0][places.long()]


def _not_last(head: str) -> FedrotError:
    return FedrotError(
        f"The outputs of the layer '{head}' are not the model's logits. Give the name of the model's "
        "last linear layer; see fedrot.head.head_of."
    )
