"""The names of a classifier's task head, found in its tensors."""

from __future__ import annotations

from fedrot.errors import FedrotError
from fedrot.symmetry.resolve import TensorsOrShapes
from fedrot.task_head.outputs import OUTPUT_KINDS, outputs_of, problem_type_of

#: Names of the last linear layer in classifiers of transformers, without a prefix.
TASK_HEADS = (
    "classifier",
    "score",
    "classifier.out_proj",
    "classification_head.out_proj",
)


def task_head_of(config: object, tensors: TensorsOrShapes) -> str:
    """Return the name of the last linear layer of a classifier, such as ``score``.

    Args:
        config: a transformers configuration, or its dictionary.
        tensors: the model's state dict, or the shapes in it.

    Example: ``task_head_of(model.config, model.state_dict())``

    Raises:
        FedrotError: the model has no such layer, like a language model, or more than
            one (pass the layer's name yourself); or its problem_type is unknown.
        SymmetryError: ``config`` is not a configuration.
    """
    kind = OUTPUT_KINDS[problem_type_of(config)]
    outputs = outputs_of(config)
    names = []
    for name in _named_task_heads(tensors):
        weight = tensors[f"{name}.weight"]
        if tuple(getattr(weight, "shape", weight))[:1] == (outputs,):
            names.append(name)
    if len(names) == 1 and outputs >= kind.fewest_outputs:
        return names[0]
    which = f"more than one: {', '.join(names)}" if len(names) > 1 else "none"
    raise FedrotError(
        f"The task head of {outputs} classes needs one of the names "
        f"{', '.join(TASK_HEADS)}; the model has {which}. Use a model that classifies "
        "sequences, tokens or images, with num_labels of at least 2, or give the name "
        "of its last linear layer yourself."
    )


def adapter_task_head_of(tensors: TensorsOrShapes) -> str:
    """Return the name of a PEFT adapter's task head, one of its ``modules_to_save``.

    Args:
        tensors: the adapter's tensors, or their shapes.

    Example: ``adapter_task_head_of(adapter_tensors(model))``, such as
    ``base_model.model.classifier``

    Raises:
        FedrotError: the adapter has no task head, or more than one.
    """
    names = _named_task_heads(tensors)
    if len(names) == 1:
        return names[0]
    raise FedrotError(
        f"The adapter has {len(names)} layers named {', '.join(TASK_HEADS)}. Train one "
        "beside the adapter: LoraConfig(task_type='SEQ_CLS'), or modules_to_save."
    )


def _named_task_heads(tensors: TensorsOrShapes) -> list[str]:
    """Return the layers that are named like a task head."""
    ends = tuple(f".{name}.weight" for name in TASK_HEADS)
    return [
        name.removesuffix(".weight") for name in tensors if f".{name}".endswith(ends)
    ]


def task_head_names(task_head: str) -> tuple[str, str]:
    """Return the names of a task head's tensors: weight and bias."""
    return f"{task_head}.weight", f"{task_head}.bias"
