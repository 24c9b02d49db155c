"""Pairs of models that are hard to align, and which tensors a part may touch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fedrot
from tests.fedrot.oracles import seeded
from tests.models import CASES, DIM, FEW, Names, State, largest_difference, near, state_of

#: The modules of a layer that a part acts on.
MODULES = {
    "attention": ("query", "key", "value", "output"),
    "heads": ("query", "key", "value", "output"),
    "rescale": ("query", "key", "value", "output"),
    "ffn": ("up", "down"),
}


def touched_by(names: Names, parts: tuple[str, ...], layers: tuple[int, ...] = (0, 1)) -> set[str]:
    """Return the tensors that the parts act on: output biases of ``output`` and ``down`` excluded."""
    found = set()
    for layer in layers:
        for module in {m for part in parts for m in MODULES[part]}:
            found.add(f"{names.of(layer, module)}.weight")
            if module not in ("output", "down"):
                found.add(f"{names.of(layer, module)}.bias")
    return found


def only(state: State, names: set[str]) -> State:
    """Return the tensors of these names."""
    return {name: state[name] for name in names}


def _opposed(state: State, names: Names) -> State:
    return {name: -tensor for name, tensor in state.items()}


def _near(state: State, names: Names) -> State:
    return near(state, 0.05)


def _barely(state: State, names: Names) -> State:
    return near(state, 1e-9)


def _far(state: State, names: Names) -> State:
    return near(state, 1.5)


def _large(state: State, names: Names) -> State:
    return {name: 1e3 * tensor for name, tensor in near(state, 0.2).items()}


def _small(state: State, names: Names) -> State:
    return {name: 1e-6 * tensor for name, tensor in near(state, 0.2).items()}


def _zero(state: State, names: Names) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def _conflicting(state: State, names: Names) -> State:
    """Heads and neurons shuffled differently in every module: no single order serves them all."""
    out = near(state, 0.05)
    for layer in range(2):
        for shift, module in enumerate(("query", "key", "value"), start=0):
            for leaf in ("weight", "bias"):
                key = f"{names.of(layer, module)}.{leaf}"
                out[key] = out[key].roll(shift * DIM, 0)
        output, up = f"{names.of(layer, 'output')}.weight", f"{names.of(layer, 'up')}.weight"
        out[output] = out[output].roll(3 * DIM, 1)
        out[up] = out[up].roll(1, 0)
    return out


def _unequal_scales(state: State, names: Names) -> State:
    """Queries and values decide everything in some heads, keys and outputs in the others."""
    out = near(state, 0.3)
    for layer in range(2):
        out[f"{names.of(layer, 'query')}.weight"][: 2 * DIM] *= 100
        out[f"{names.of(layer, 'key')}.weight"][2 * DIM :] *= -100
        out[f"{names.of(layer, 'value')}.weight"][DIM:] *= 1e-3
    return out


def _unrelated(state: State, names: Names) -> State:
    name = next(n for n in FEW if CASES[n].names == names)
    return state_of(name, seed=7)


#: Clients of an anchor, by what is hard about them.
PAIRS: dict[str, Callable[[State, Names], State]] = {
    "near": _near,
    "barely": _barely,
    "far": _far,
    "unrelated": _unrelated,
    "opposed": _opposed,
    "large": _large,
    "small": _small,
    "zero": _zero,
    "conflicting": _conflicting,
    "unequal-scales": _unequal_scales,
}


def scrambled(
    anchor: State, symmetry: fedrot.Symmetry, parts: tuple[str, ...], count: int = 2
) -> list[tuple[State, State, fedrot.Alignment]]:
    """Return clients near the anchor and aligned to it, each scrambled, and the way back.

    The difference between a client and its scrambled self is then a coordinate change and no more.
    """
    options = fedrot.AlignmentOptions(parts=parts, chance=0, canonical=False)
    found = []
    for seed in range(count):
        client = near(anchor, 0.02, seed + 1)
        for _ in range(2):
            client = fedrot.align(client, anchor, symmetry, options).apply(client)
        moved = fedrot.random_equivalent(client, symmetry, 5 + seed, parts)
        alignment = fedrot.align(moved, anchor, symmetry, options)
        assert largest_difference(alignment.apply(moved), client) <= 1e-9
        found.append((client, moved, alignment))
    return found


def with_other_gains(state: State, symmetry: fedrot.Symmetry, seed: int) -> State:
    """Return the same function with other gains, biases of norms, and redundant attention biases."""
    out, rng = dict(state), seeded(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=rng, dtype=torch.float64)

    for fold in symmetry.folds:
        gain = 0.5 + noise(out[fold.gain]).abs()
        shift = noise(gain) if fold.bias and fold.holds_bias else torch.zeros_like(gain)
        out[fold.gain] = gain * out[fold.gain]
        if fold.bias:
            out[fold.bias] = gain * out[fold.bias] + shift
        for reader in fold.readers:
            weight = out[reader.weight]
            by_input = gain if reader.axis == weight.ndim - 1 else gain[:, None]
            out[reader.weight] = weight / by_input
            if fold.bias and fold.holds_bias:
                lost = torch.tensordot(out[reader.weight], shift, dims=([reader.axis], [0]))
                out[reader.bias] = out[reader.bias] - lost
    for redundant in symmetry.redundant_biases:
        before = out[redundant.bias.tensor].clone()
        entries = redundant.bias.slice.of(before, 0)
        added = noise(entries)
        redundant.bias.slice.write(before, 0, entries + added)
        out[redundant.bias.tensor] = before
        if redundant.read is not None:
            units = redundant.read.rows(out[redundant.read.tensor], torch.float64)
            by_head = added.unflatten(0, (redundant.heads, -1))
            constant = by_head.repeat_interleave(len(units) // len(added), 0).flatten()
            out[redundant.taken_up] = out[redundant.taken_up] - constant @ units
    return out
