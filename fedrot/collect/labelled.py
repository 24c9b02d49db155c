"""A classifier's logits, labels and inputs of its last layer, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn

from fedrot.collect.hooks import watched
from fedrot.collect.random_inputs import forward_inputs
from fedrot.errors import FedrotError
from fedrot.problems import PROBLEMS
from fedrot.tensors import Tensors, compute_dtype


def labelled_logits(
    model: nn.Module, batches: Iterable[Tensors], problem: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a classifier; yield, batch by batch, logits ``[rows, outputs]`` and labels.

    Labels are int64 ``[rows]`` for one class a row, else float64 ``[rows, outputs]``. For token
    classifiers, every token is a row. Rows with a negative label, such as padding (-100), or with NaN
    are left out; a batch may then have no rows. The caller puts the model into evaluation mode.

    Raises:
        FedrotError: no row has a label, the labels are not those of the problem, the model has no
            logits, or the model predicts the next token.
    """
    name, kind, seen = type(model).__name__, PROBLEMS[problem], False
    if name.endswith(("LMHeadModel", "ForCausalLM")):
        raise FedrotError(
            f"{name} predicts the next token and has no classes. Pass a model that classifies "
            "sequences, tokens or images."
        )
    for batch in batches:
        if "labels" not in batch:
            raise FedrotError(f"A batch has no 'labels', only: {', '.join(batch)}.")
        logits = getattr(model(**forward_inputs(model, batch)), "logits", None)
        if logits is None:
            raise FedrotError(f"The output of {name} has no logits. Pass a model with one task head.")
        labels = kind.check_labels(batch["labels"].to(logits.device), logits)
        labelled = kind.has_label(labels)
        seen = seen or bool(labelled.any())
        yield logits[labelled], labels[labelled]
    if not seen:
        raise FedrotError("No row has a label: all are negative or NaN. Pass at least one that has.")


def read_inputs(
    model: nn.Module, batches: Iterable[Tensors], head: str, problem: str
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Run a classifier; yield, batch by batch, the inputs of its last layer, labels and outputs.

    The inputs are float64 ``[rows, inputs]`` on the model's device, labels those of ``labelled_logits``,
    and ``outputs`` is the number of the layer's outputs. While batches are drawn, the model is in
    evaluation mode and no gradients are recorded. For arguments and errors see
    ``fedrot.head.collect_classes``.
    """
    layer: object = None
    with suppress(AttributeError):
        layer = model.get_submodule(head)
        # PEFT runs a copy of a layer that it trains beside an adapter; the original has the same shape.
        layer = getattr(layer, "original_module", layer)
    if not isinstance(layer, nn.Linear):
        raise FedrotError(f"The model has no linear layer '{head}'; see fedrot.head.head_of.")
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
            yield _used(read, logits, head).double(), labels, outputs
            read.clear()


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
