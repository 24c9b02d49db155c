"""Controls that look like alignment but are no symmetry: they change what the model
computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedrot.collect.hooks import input_axis, watched, without_padding
from fedrot.errors import FedrotError
from fedrot.symmetry import Symmetry

#: Added to deviations, so that constant units have no correlation.
_SMALL = 1e-8


def ignore_heads(
    anchor: nn.Module,
    client: nn.Module,
    symmetry: Symmetry,
    batches: Sequence[Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Permute the units of every attention layer as if there were no heads
    (*Ignore-Heads*).

    Verma & Elbayad (2024), section 3.2 and Table 1: one permutation of all units, of
    queries, keys and values alike, by the correlation of the units' outputs. Units
    change their heads, so that the client computes another function afterwards. Returns
    the client's tensors.

    Raises:
        FedrotError: no layer has heads of its own for queries, keys and values.
    """
    state = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    readers = _output_projections(client, symmetry)
    ours, theirs = (
        _correlated(model, list(readers.values()), batches)
        for model in (anchor, client)
    )
    for layer, module in readers.items():
        # Row i: which unit of the client is most like unit i of the anchor.
        _, order = linear_sum_assignment(-(ours[module].T @ theirs[module]).numpy())
        for group in symmetry.groups:
            if group.layer == layer and group.part == "attention":
                for slot in group.slots:
                    tensor = state[slot.tensor]
                    moved = slot.of(tensor).index_select(
                        slot.axis, torch.from_numpy(order)
                    )
                    slot.slice.write(tensor, slot.axis, moved.clone())
    return state


def _output_projections(model: nn.Module, symmetry: Symmetry) -> dict[int, str]:
    """Return the module that reads all heads' outputs, by layer."""
    groups = [group for group in symmetry.groups if group.part == "attention"]
    found: dict[int, str] = {}
    for group in groups:
        for slot in group.slots:
            module = slot.tensor.removesuffix(".weight")
            # Queries and keys have one group, values and the output projection another.
            if not slot.contravariant or module == slot.tensor:
                continue
            if input_axis(model.get_submodule(module)) == slot.axis:
                found[group.layer] = module
    sizes = {
        layer: {s.size for g in groups if g.layer == layer for s in g.slots}
        for layer in found
    }
    if not found or any(len(of_layer) > 1 for of_layer in sizes.values()):
        raise FedrotError(
            "Ignore-heads needs attention whose queries have keys and values of their "
            "own."
        )
    return found


def _correlated(
    model: nn.Module, modules: Sequence[str], batches: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the standardised inputs of modules, ``[tokens, units]``, scaled to unit
    columns.
    """
    rows: dict[str, list[Tensor]] = {module: [] for module in modules}
    mask: Tensor | None = None

    def seen(name: str, given: Tensor, output: Tensor) -> None:
        rows[name].append(without_padding(given, mask).double())

    with watched(model, modules, seen):
        for batch in batches:
            mask = batch.get("attention_mask")
            model(**{name: value for name, value in batch.items() if name != "labels"})
    found = {}
    for name, parts in rows.items():
        units = torch.cat(parts)
        centred = units - units.mean(dim=0)
        found[name] = centred / (centred.norm(dim=0) + _SMALL * np.sqrt(len(units)))
    return found
