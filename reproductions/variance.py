"""Statistics of a model's units, and the repair of their variance after averaging (REPAIR).

The units of an average of models have a smaller variance than the units of the models: components that
are not aligned cancel. ``repair`` restores mean and deviation (Jordan et al. 2023) where a unit can be
rescaled alone: the gain and bias of a LayerNorm, the row and bias of a neuron before its activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrot.alignment import Alignment
from fedrot.collect.hooks import watched, without_padding
from fedrot.collect.random_inputs import forward_inputs
from fedrot.errors import FedrotError
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import Tensors

#: Units with a deviation below this share of their module's largest are constant: they are not scaled.
_CONSTANT = 1e-4


@dataclass(frozen=True)
class UnitStatistics:
    """Mean and standard deviation of every unit, by module; float64 ``[n]``."""

    mean: Tensors
    std: Tensors

    def moved(self, alignment: Alignment) -> UnitStatistics:
        """Return the statistics of the aligned model: they move like the modules' biases."""
        mean, std = dict(self.mean), dict(self.std)
        for move in alignment.moves:
            for slot in move.group.slots:
                module = slot.tensor.removesuffix(".bias")
                if slot.tensor.endswith(".bias") and module in mean:
                    mean[module] = move.on(mean[module], slot)
                    std[module] = move.on(std[module], slot).abs()
        return UnitStatistics(mean, std)


def average_statistics(
    statistics: Sequence[UnitStatistics], weights: Sequence[float] | None = None
) -> UnitStatistics:
    """Return the weighted mean of the means and of the deviations, the target of ``repair``."""
    weights = weights or [1.0] * len(statistics)
    shares = [weight / sum(weights) for weight in weights]

    def mean(values: Iterable[Tensors]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for share, by_module in zip(shares, values, strict=True):
            for name, value in by_module.items():
                found[name] = found[name] + share * value if name in found else share * value
        return found

    return UnitStatistics(mean(s.mean for s in statistics), mean(s.std for s in statistics))


def unit_statistics(model: nn.Module, batches: Iterable[Tensors], symmetry: Symmetry) -> UnitStatistics:
    """Return the statistics of a model's units on batches of keyword arguments of its forward.

    Tokens that ``attention_mask`` hides are left out. Raises ``FedrotError`` if there are no batches.
    """
    return _measured(model, batches, _sites(model, symmetry))


def variance_ratio(merged: UnitStatistics, target: UnitStatistics) -> dict[str, float]:
    """Return, by module, the merged model's mean variance divided by the target's; 1: no collapse."""
    return {
        name: float(merged.std[name].square().mean() / target.std[name].square().mean().clamp_min(1e-30))
        for name in merged.std
    }


def repair(
    model: nn.Module, target: UnitStatistics, batches: Iterable[Tensors], symmetry: Symmetry
) -> dict[str, Tensor]:
    """Return the tensors of ``model`` with every unit's mean and deviation set to the target's.

    Modules are repaired one after the other, each after a pass over ``batches`` that measures it. The
    model itself is not changed.
    """
    given = list(batches)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        for site in _sites(model, symmetry):
            now = _measured(model, given, [site])
            if site not in now.mean:
                continue
            mean, std = now.mean[site], now.std[site]
            varies = std > _CONSTANT * std.max()
            scale = torch.where(varies, target.std[site] / std.clamp_min(1e-30), 1.0)
            shift = target.mean[site] - scale * mean
            with torch.no_grad():
                weight = model.get_parameter(f"{site}.weight")
                bias = model.get_parameter(f"{site}.bias")
                factor = scale.to(weight)
                weight.mul_(factor if weight.ndim == 1 else factor[:, None])
                bias.mul_(scale.to(bias)).add_(shift.to(bias))
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}
    finally:
        model.load_state_dict(before)


def _sites(model: nn.Module, symmetry: Symmetry) -> list[str]:
    """Return the modules whose output units can be rescaled, in the order of registration."""
    found = set()
    modules = dict(model.named_modules())
    for group in symmetry.groups:
        if group.part not in ("residual", "output", "ffn"):
            continue
        for slot in group.slots:
            name = slot.tensor.removesuffix(".bias")
            module = modules.get(name)
            linear = isinstance(module, nn.Linear) and group.part != "residual"
            if slot.tensor.endswith(".bias") and (linear or isinstance(module, nn.LayerNorm)):
                found.add(name)
    return [name for name in modules if name in found]


def _measured(model: nn.Module, batches: Iterable[Tensors], sites: Sequence[str]) -> UnitStatistics:
    count: dict[str, int] = {}
    sums: dict[str, list[Tensor]] = {}
    mask: Tensor | None = None

    def seen(name: str, _: Tensor, output: Tensor) -> None:
        rows = without_padding(output, mask).double()
        parts = [rows.sum(0), rows.square().sum(0)]
        count[name] = count.get(name, 0) + len(rows)
        sums[name] = [a + b for a, b in zip(sums[name], parts, strict=True)] if name in sums else parts

    with watched(model, sites, seen):
        for batch in batches:
            mask = batch.get("attention_mask")
            model(**forward_inputs(model, batch))
    if sites and not sums:
        raise FedrotError("No units were seen: pass at least one batch and a model of this family.")
    mean = {name: first / count[name] for name, (first, _) in sums.items()}
    variance = {name: second / count[name] - mean[name] ** 2 for name, (_, second) in sums.items()}
    return UnitStatistics(mean, {name: v.clamp_min(0).sqrt() for name, v in variance.items()})
