"""``largest_inputs``: bounds of the features that a task head reads."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrot.symmetry.resolve import settings_of
from fedrot.tensors import Tensors

#: What precedes the task head, by ``model_type``, and the end of its name: a layer
#: whose output goes through tanh, or a norm.
_TANH = {
    **dict.fromkeys(("bert", "albert"), ("pooler.dense", "pooler")),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "mpnet"), ("classifier.dense",)
    ),
    **dict.fromkeys(("bart", "t5"), ("classification_head.dense",)),
}
_NORMS = {
    **{"vit": "vit.layernorm", "gpt2": "transformer.ln_f"},
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3"), "model.norm"),
}


def largest_inputs(config: object, tensors: Tensors, task_head: str) -> Tensor | None:
    """Return the largest absolute value that each input of a task head can have,
    float64 ``[inputs]``.

    1 after tanh; ``|g| sqrt(d) + |b|`` after a norm of ``d`` units with gain ``g`` and
    bias ``b``. None for other models, and if other layers stand before the head.

    Args:
        config: a transformers configuration, or its dictionary.
        tensors: the model's state dict, in its order.
        task_head: the layer's name, from ``task_head_of``.

    Example: ``largest_inputs(model.config, model.state_dict(), "classifier")``
    """
    names, kind = list(tensors), str(settings_of(config).get("model_type"))
    before = names[names.index(f"{task_head}.weight") - 1].rpartition(".")[0]
    size = tensors[f"{task_head}.weight"].shape[1]
    if before.endswith(_TANH.get(kind, ())):
        return torch.ones(size, dtype=torch.float64)
    if before != _NORMS.get(kind):
        return None
    bias = tensors.get(f"{before}.bias", torch.zeros(()))
    return tensors[f"{before}.weight"].double().abs() * size**0.5 + bias.double().abs()
