"""``labelled_logits``: a classifier's logits and the labels of its rows, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from fedrot.collect.random_inputs import forward_inputs
from fedrot.errors import FedrotError
from fedrot.problems import PROBLEMS
from fedrot.tensors import Tensors


def labelled_logits(
    model: nn.Module, batches: Iterable[Tensors], problem: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a classifier; yield, batch by batch, logits ``[rows, outputs]`` and labels.

    Labels of classes are int64 ``[rows]``, others float64 ``[rows, outputs]``. For token classifiers,
    every token is a row. Rows with a negative label, such as padding (-100), or of NaN are left out; a
    batch may then have no rows. The caller puts the model into evaluation mode.

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
        raise FedrotError(
            "No row has a label. Pass at least one batch, with labels other than -100 and NaN."
        )
