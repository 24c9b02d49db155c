"""Gram matrices of the inputs of linear layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from torch import Tensor, nn

from fedrot.collect.hooks import input_axis, masks_of, watched, without_padding
from fedrot.collect.random_inputs import forward_inputs
from fedrot.collect.statistics import GRAMS, collects
from fedrot.errors import FedrotError
from fedrot.tensors import Tensors


@dataclass(frozen=True)
class _Reader:
    """The weight of a linear module: its name, and the axis that the module's inputs
    multiply.
    """

    weight: str
    axis: int


def _readers(model: nn.Module) -> dict[str, _Reader]:
    """Return, by name, every linear module with a weight of its own.

    Weights shared with an embedding or another layer have no single input to regress
    on; these weights are averaged.
    """
    parameters = (p for module in model.modules() for p in module._parameters.values())
    uses = Counter(id(parameter) for parameter in parameters)
    # A module with several names has a weight under each of them, and all have its
    # matrix.
    modules = model.named_modules(remove_duplicate=False)
    axes = {name: input_axis(module) for name, module in modules}
    return {
        name: _Reader(f"{name}.weight", axis)
        for name, axis in axes.items()
        if axis is not None and uses[id(model.get_submodule(name).weight)] == 1
    }


class _Inputs:
    """Sums over the inputs of layers; layers that read the same tensors in every call
    share them.

    Attributes:
        sums: by layer, Gram matrix of the inputs, float64.
        same: the layer whose sums are those of a layer, since the first batch in which
            it ran.
    """

    def __init__(self, readers: Mapping[str, _Reader]) -> None:
        self.sums: dict[str, Tensor] = {}
        self.same: dict[str, str] = {}
        self._readers, self._count = readers, dict[str, int]()
        #: What layers have read in a batch: tensors, and how often each had been
        #: changed in place.
        self._read: dict[str, list[tuple[Tensor, int]]] = {}

    def add(self, name: str, given: Tensor, mask: Tensor | None) -> None:
        """Add what a layer reads, at once: the model may change the tensor in place
        later.
        """
        version = 0 if given.is_inference() else given._version
        self._read.setdefault(name, []).append((given, version))
        if self.same.get(name, name) != name:
            return
        rows = without_padding(given, mask).float()
        gram = (rows.mT @ rows).double()
        self.sums[name] = self.sums[name].add_(gram) if name in self.sums else gram
        self._count[name] = self._count.get(name, 0) + len(rows)

    def end(self) -> None:
        """End a batch; raises ``FedrotError`` if layers that share sums have read other
        tensors.
        """
        firsts: dict[tuple[tuple[int, int], ...], str] = {}
        for name in [name for name in self._read if name not in self.same]:
            self.same[name] = firsts.setdefault(self._calls(name), name)
            if self.same[name] != name:
                del self.sums[name], self._count[name]
        for name, first in self.same.items():
            if self._calls(name) != self._calls(first):
                raise FedrotError(
                    f"The layers '{self._readers[first].weight}' and "
                    f"'{self._readers[name].weight}' read the same inputs in some "
                    "batches only. Collect their statistics from batches that take the "
                    "same path through the model."
                )
        self._read.clear()

    def averages(self) -> dict[str, Tensor]:
        """Return the Gram matrices of the layers that have sums, float32, averaged over
        inputs.
        """
        return {
            name: (own / max(self._count[name], 1)).float()
            for name, own in self.sums.items()
        }

    def _calls(self, name: str) -> tuple[tuple[int, int], ...]:
        return tuple(
            (id(tensor), version) for tensor, version in self._read.get(name, ())
        )


# The matrices of Conv1D layers are collected together with the others.
@collects(GRAMS[1])
def collect_gram(
    model: nn.Module,
    batches: Iterable[Tensors],
    *,
    max_batches: int | None = 100,
) -> dict[str, dict[str, Tensor]]:
    """Return the Gram matrix of the inputs of every linear layer (Jin et al. 2023,
    section 3.3).

    The result is ``{"gram": {weight: G}}``, with ``gram_conv1d`` for ``Conv1D``. ``G =
    X^T X / n`` over the ``n`` tokens in ``attention_mask`` (in
    ``decoder_attention_mask`` for a decoder's layers that do not read the encoder's
    output), uncentred, float32 ``[in, in]``. Sums over batches are float64. Layers with
    the same inputs (query, key and value) share one matrix. A layer that runs several
    times for a batch counts every time. Weights that are tied to another module (output
    embeddings) have none.

    Args:
        model: any ``torch`` model with ``Linear`` or ``Conv1D`` layers; it is run in
            evaluation mode and without gradients, and its mode is restored.
        batches: keyword arguments of the model's forward; ``labels`` are not passed on.
        max_batches: None for all; Jin et al., Table 6, find no gain beyond 100.

    Raises:
        FedrotError: no batch, or no such layer.
    """
    readers = _readers(model)
    inputs = _Inputs(readers)

    def seen(name: str, given: Tensor, output: Tensor) -> None:
        inputs.add(name, given, mask_of(name, given))

    with watched(model, readers, seen):
        for batch in islice(batches, max_batches):
            given = forward_inputs(model, batch)
            with masks_of(model, given) as mask_of:
                model(**given)
            inputs.end()
    if not inputs.sums:
        raise FedrotError(
            "No inputs of linear layers were recorded: pass at least one batch and a "
            "model with Linear or Conv1D layers."
        )
    averages = inputs.averages()
    collected: dict[str, dict[str, Tensor]] = {}
    for name, first in inputs.same.items():
        collected.setdefault(GRAMS[readers[name].axis], {})[readers[name].weight] = (
            averages[first]
        )
    return collected
