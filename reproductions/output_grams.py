"""Gram matrices of gradients at the outputs of linear layers, the second factor of ``kfac``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn

from fedrot.collect.hooks import evaluating
from fedrot.collect.random_inputs import forward_inputs
from fedrot.collect.statistics import GRAMS, STATISTIC_KINDS, StatisticKind
from fedrot.errors import FedrotError
from fedrot.tensors import Tensors

#: Gram matrices of the gradients at the outputs of linear layers.
OUTPUTS = "output_gram"


def _stays(value: Tensor, slot: object, move: object) -> Tensor:
    raise FedrotError("Gram matrices of gradients cannot be moved; leave alignment out.")


def collect_output_grams(
    model: nn.Module, batches: Iterable[Tensors], *, max_batches: int | None = 16, seed: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Return for every linear layer ``sum over tokens of g g^T``, the mean over rows, float32.

    ``g`` is the gradient of ``log p(y|x)`` at the layer's output; ``y`` is drawn from the classifier's
    own probabilities, one for each row. Raises ``FedrotError`` if there is no batch.
    """
    generator, rows = torch.Generator().manual_seed(seed), 0
    sums: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def kept(name: str, output: Tensor) -> None:
        outputs[name] = output

    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    hooks = [
        layer.register_forward_hook(lambda _, __, output, name=name: kept(name, output))
        for name, layer in layers.items()
    ]
    try:
        with torch.enable_grad(), evaluating(model):
            for batch in islice(batches, max_batches):
                outputs.clear()
                likelihoods = model(**forward_inputs(model, batch)).logits.log_softmax(-1)
                drawn = torch.multinomial(likelihoods.detach().exp().cpu(), 1, generator=generator)
                total = likelihoods.gather(1, drawn.to(likelihoods.device)).sum()
                rows += len(drawn)
                gradients = torch.autograd.grad(total, [*outputs.values()])
                for name, gradient in zip(outputs, gradients, strict=True):
                    flat = gradient.flatten(0, -2)
                    sums[name] = sums.get(name, 0) + (flat.mT @ flat).double()
    finally:
        for hook in hooks:
            hook.remove()
    if not rows:
        raise FedrotError("No rows were given; pass at least one batch.")
    return {OUTPUTS: {f"{name}.weight": (total / rows).float() for name, total in sums.items()}}


#: The kind of statistics that ``KFac`` needs. Arms register it when they run.
OUTPUT_GRAMS = StatisticKind(
    OUTPUTS,
    STATISTIC_KINDS[GRAMS[0]].check,  # A row and a column for each row of the weight.
    _stays,
    "Gram matrix of gradients at the layer's outputs",
    collect=collect_output_grams,
    limit="max_batches",
    follows_rotations=False,
)
