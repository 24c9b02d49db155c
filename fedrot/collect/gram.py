"""Gram matrices of the inputs of linear layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice

from torch import Tensor
from torch.nn import Module

from fedrot.collect.hooks import input_axis, masks_of, watched, without_padding
from fedrot.collect.random_inputs import forward_inputs
from fedrot.collect.statistics import GRAM, GRAM_CONV1D, Collected, collects
from fedrot.errors import FedrotError
from fedrot.tensors import TensorDict, Tensors

#: Ids and versions of the tensors that a layer has read in a batch.
_Calls = tuple[tuple[int, int], ...]


def _readers(model: Module) -> dict[str, str]:
    """Return, by name, the kind of Gram matrix of linear modules with their own weight.

    Weights shared with an embedding or another layer have no single input to regress
    on; these weights are averaged.
    """
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(map(id, module._parameters.values()))
    readers = {}
    # A module with several names has a weight under each of them, and all have its
    # matrix.
    for name, module in model.named_modules(remove_duplicate=False):
        axis = input_axis(module)
        if axis is not None and uses[id(module.weight)] == 1:
            readers[name] = GRAM if axis else GRAM_CONV1D
    return readers


class _Inputs:
    """Sums over the inputs of layers.

    Layers that read the same tensors in every call share them.

    Attributes:
        sums: by layer, Gram matrix of the inputs, float64.
        same: the layer whose sums are those of a layer, since the first batch in which
            it ran.
    """

    def __init__(self) -> None:
        self.sums: TensorDict = {}
        self.same: dict[str, str] = {}
        self._count: Counter[str] = Counter()
        #: What layers have read in a batch: tensors, and how often each had been
        #: changed in place.
        self._read: dict[str, list[tuple[Tensor, int]]] = defaultdict(list)

    def add(
        self,
        name: str,
        tensor: Tensor,
        mask: Tensor | None,
    ) -> None:
        """Add what a layer reads.

        It is added at once: the model may change the tensor in place later.
        """
        version = 0 if tensor.is_inference() else tensor._version
        self._read[name].append((tensor, version))
        if self.same.get(name, name) != name:
            return
        rows = without_padding(tensor, mask).float()
        gram = (rows.mT @ rows).double()
        if name in self.sums:
            self.sums[name].add_(gram)
        else:
            self.sums[name] = gram
        self._count[name] += len(rows)

    def end(self) -> None:
        """End a batch.

        Raises ``FedrotError`` if layers that share sums have read other tensors.
        """
        firsts: dict[_Calls, str] = {}
        for name in self._read:
            if name in self.same:
                continue
            first = firsts.setdefault(self._calls(name), name)
            self.same[name] = first
            if first != name:
                del self.sums[name], self._count[name]
        for name, first in self.same.items():
            if self._calls(name) != self._calls(first):
                raise FedrotError(
                    f"The layers '{first}.weight' and '{name}.weight' read the same "
                    "inputs in some batches only. Collect their statistics from "
                    "batches that take the same path through the model."
                )
        self._read.clear()

    def averages(self) -> TensorDict:
        """Return the means over inputs, float32, of the layers that have sums."""
        return {
            name: (total / max(self._count[name], 1)).float()
            for name, total in self.sums.items()
        }

    def _calls(self, name: str) -> _Calls:
        read = self._read.get(name, ())
        return tuple((id(tensor), version) for tensor, version in read)


# The matrices of Conv1D layers are collected together with the others.
@collects(GRAM)
def collect_gram(
    model: Module,
    batches: Iterable[Tensors],
    *,
    max_batches: int | None = 100,
) -> Collected:
    """Return the Gram matrix of the inputs of every linear layer.

    Source: Jin et al. 2023, section 3.3. The result is ``{"gram": {weight: G}}``, with
    ``gram_conv1d`` for ``Conv1D``. ``G = X^T X / n`` over the ``n`` tokens in
    ``attention_mask`` (in ``decoder_attention_mask`` for a decoder's layers that do not
    read the encoder's output), uncentred, float32 ``[in, in]``. Sums over batches are
    float64. Layers with the same inputs (query, key and value) share one matrix. A
    layer that runs several times for a batch counts every time. Weights that are tied
    to another module (output embeddings) have none.

    Args:
        model: any ``torch`` model with ``Linear`` or ``Conv1D`` layers; it is run in
            evaluation mode and without gradients, and its mode is restored.
        batches: keyword arguments of the model's forward; ``labels`` are not passed on.
        max_batches: None for all; Jin et al., Table 6, find no gain beyond 100.

    Raises:
        FedrotError: no batch, or no such layer.
    """
    readers = _readers(model)
    inputs = _Inputs()

    def seen(
        name: str,
        tensor: Tensor,
        output: Tensor,
    ) -> None:
        inputs.add(name, tensor, mask_of(name, tensor))

    with watched(model, readers, seen):
        for batch in islice(batches, max_batches):
            arguments = forward_inputs(model, batch)
            with masks_of(model, arguments) as mask_of:
                model(**arguments)
            inputs.end()
    if not inputs.sums:
        raise FedrotError(
            "No inputs of linear layers were recorded: pass at least one batch and a "
            "model with Linear or Conv1D layers. An iterator that was read before has "
            "no batch."
        )
    averages = inputs.averages()
    collected: Collected = {}
    for name, first in inputs.same.items():
        of_kind = collected.setdefault(readers[name], {})
        of_kind[f"{name}.weight"] = averages[first]
    return collected
