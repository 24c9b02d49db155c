"""``labelled_logits``: a classifier's logits and the labels of its rows, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from fedrot.collect.random_inputs import forward_inputs
from fedrot.errors import FedrotError
from fedrot.tensors import Tensors


def labelled_logits(model: nn.Module, batches: Iterable[Tensors]) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a classifier; yield, batch by batch, logits ``[rows, classes]`` and int64 labels ``[rows]``.

    For token classifiers, every token is a row. Rows with a negative label, such as padding (-100), are
    left out; a batch may then have no rows. The caller puts the model into evaluation mode.

    Raises:
        FedrotError: no row has a label, the labels are not one class per row, the model has no logits,
            or the model predicts the next token.
    """
    kind, seen = type(model).__name__, False
    if kind.endswith(("LMHeadModel", "ForCausalLM")):
        raise FedrotError(
            f"{kind} predicts the next token and has no classes. Pass a model that classifies "
            "sequences, tokens or images."
        )
    for batch in batches:
        if "labels" not in batch:
            raise FedrotError(f"A batch has no 'labels', only: {', '.join(batch)}.")
        logits = getattr(model(**forward_inputs(model, batch)), "logits", None)
        if logits is None:
            raise FedrotError(f"The output of {kind} has no logits. Pass a model with one task head.")
        labels, (*places, classes) = batch["labels"].to(logits.device), logits.shape
        if labels.is_floating_point() or list(labels.shape) != places:
            raise FedrotError(
                f"The labels are {labels.dtype} {list(labels.shape)}, the logits {list(logits.shape)}. "
                f"Give integer labels of shape {places}, one class each."
            )
        labelled = labels >= 0
        labels = labels[labelled].long()
        if bool((labels >= classes).any()):
            raise FedrotError(
                f"A label is {int(labels.max())}, but the model has {classes} classes, 0 to "
                f"{classes - 1}. Build the model with the num_labels of the data."
            )
        seen = seen or labels.numel() > 0
        yield logits[labelled], labels
    if not seen:
        raise FedrotError("No row has a label. Pass at least one batch, with labels other than -100.")
