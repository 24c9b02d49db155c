"""``labelled_rows``: what a classifier's last layer reads or answers, with labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fedrot.collect.hooks import watched
from fedrot.collect.random_inputs import forward_inputs
from fedrot.errors import FedrotError
from fedrot.task_head.outputs import OUTPUT_KINDS
from fedrot.tensors import Tensors, compute_dtype


def labelled_rows(
    model: nn.Module, batches: Iterable[Tensors], problem_type: str, task_head: str = ""
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Run a classifier; yield rows, their labels and the number of outputs by batch.

    Rows are the logits, or the inputs of the layer ``task_head``, float64 ``[rows,
    ...]`` on the model's device. Labels are int64 ``[rows]`` for one class a row, else
    float64 ``[rows, outputs]``. For token classifiers, every token is a row. Rows with
    a negative label, such as padding (-100), or with NaN are left out; a batch may then
    have no rows. While batches are drawn, the model is in evaluation mode and no
    gradients are recorded.

    Raises:
        FedrotError: there is no batch, no row has a label, the labels are not those of
            the problem, the model has no logits or predicts the next token, or the
            layer's outputs are not the logits.
    """
    name = type(model).__name__
    kind = OUTPUT_KINDS[problem_type]
    seen = False
    if name.endswith(("LMHeadModel", "ForCausalLM")):
        raise FedrotError(
            f"{name} predicts the next token and has no classes. Pass a model that "
            "classifies sequences, tokens or images."
        )
    if task_head and not _is_linear(model, task_head):
        raise FedrotError(
            f"The model has no linear layer '{task_head}'; see "
            "fedrot.task_head.task_head_of."
        )
    read: list[Tensor] = []

    def watch(name: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Keep the inputs, and return their indices as outputs.

        The logits then show which rows the model uses.
        """
        *places, width = inputs.shape
        outputs = output.shape[-1]
        config = getattr(model, "config", None)
        if outputs != getattr(config, "num_labels", outputs):
            raise _not_last(task_head)
        rows = inputs.reshape(-1, width)
        read.append(rows)
        indices = torch.arange(
            len(rows), dtype=compute_dtype(output), device=inputs.device
        )
        return indices.reshape(*places, 1).expand(*places, outputs).contiguous()

    with watched(model, [task_head] if task_head else [], watch):
        for batch in map(as_batch, batches):
            batch_labels = labels_in(batch)
            logits = getattr(model(**forward_inputs(model, batch)), "logits", None)
            if logits is None:
                raise FedrotError(
                    f"The output of {name} has no logits. Pass a model with one task "
                    "head."
                )
            labels = kind.check_labels(batch_labels.to(logits.device), logits)
            labelled = kind.has_label(labels)
            seen = seen or bool(labelled.any())
            rows = logits[labelled]
            if task_head:
                rows = _used(read, rows, task_head)
            yield rows.double(), labels[labelled], logits.shape[-1]
            read.clear()
    if not seen:
        raise FedrotError(
            "No row has a label: all are negative or NaN, or there is no batch. An "
            "iterator that was read before has none: pass a list, or a DataLoader."
        )


def labels_in(batch: Tensors) -> Tensor:
    """Return a batch's labels; raises ``FedrotError`` if it has none."""
    if "labels" not in batch:
        raise FedrotError(f"A batch has no 'labels', only: {', '.join(batch)}.")
    return batch["labels"]


def as_batch(batch: object) -> Tensors:
    """Return a batch whose labels are a tensor; they may be an array or a list.

    Raises:
        FedrotError: the batch is no mapping, or its labels are no numbers.
    """
    if not isinstance(batch, Mapping):
        raise FedrotError(
            f"A batch is a {type(batch).__name__}; give keyword arguments of forward, "
            "like {'input_ids': ..., 'labels': ...}."
        )
    if "labels" not in batch:
        return batch
    labels = batch["labels"]
    try:
        return {**batch, "labels": torch.as_tensor(labels)}
    except Exception as error:
        raise FedrotError(
            f"The labels of a batch are {labels!r:.60}. Give a tensor, an array or a "
            "list of numbers, one row each."
        ) from error


def _is_linear(model: nn.Module, task_head: str) -> bool:
    """Return whether a model has a linear layer of this name."""
    try:
        layer = model.get_submodule(task_head)
    except AttributeError:
        return False
    # PEFT runs a copy of a layer that it trains beside an adapter.
    return isinstance(getattr(layer, "original_module", layer), nn.Linear)


def _used(read: list[Tensor], logits: Tensor, task_head: str) -> Tensor:
    """Return the inputs of the task head whose indices are the logits.

    Args:
        logits: ``[rows, outputs]``.
    """
    places = logits[:, 0]
    # Only floats of so many bits hold every index exactly.
    exact = logits.dtype in (torch.float32, torch.float64)
    if not exact or len(read) != 1 or len(read[0]) > 2**24:
        raise _not_last(task_head)
    whole = (logits == places.floor().unsqueeze(1)).all()
    ascending = (places.diff() > 0).all()
    inside = ((places >= 0) & (places < len(read[0]))).all()
    if not bool(whole & ascending & inside):
        raise _not_last(task_head)
    return read[0][places.long()]


def _not_last(task_head: str) -> FedrotError:
    return FedrotError(
        f"The outputs of the layer '{task_head}' are not the model's logits. Give the "
        "name of the model's last linear layer; see fedrot.task_head.task_head_of."
    )
