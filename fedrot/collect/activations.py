"""Second moments of two models' activations on the same data (Verma & Elbayad 2024, section 3.1).

Where a group's units can be seen follows from its slots: they are the inputs of every ``Linear``
that reads them (FFN units after their activation, heads before the output projection, the residual
stream before each block), or, where nothing reads them as such, the outputs of those that write
them (queries and keys). Only group elements computed from these moments are ever applied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedrot.collect.random_inputs import random_inputs
from fedrot.errors import FedrotError
from fedrot.symmetry.actions import HeadRotation, InsideHeads
from fedrot.symmetry.groups import Group, Slice, Symmetry, check_symmetry
from fedrot.tensors import check_update
from fedrot.transport import Move

#: Which readers of the residual stream are looked at (Verma & Elbayad 2024, section 3.3).
RESIDUAL_SITES = ("last", "all", "first", "identity")

#: What is compared: correlations, covariances, or covariances of whitened heads.
Moments = Literal["correlation", "covariance", "whitened"]
MOMENTS = ("correlation", "covariance", "whitened")


@dataclass(frozen=True)
class Activations:
    """Cross moments of anchor and client units by group, scaled so that traces are at most 1.

    ``matrices`` are ``[n (anchor), n (client)]``, float64; ``within`` names each group's head
    permutation, if any.
    """

    matrices: Mapping[str, Tensor]
    within: Mapping[str, str] = field(repr=False)

    def cross(self, group: Group) -> Tensor | None:
        """Return a group's cross moments, None if there are none."""
        return self.matrices.get(group.name)

    def moved(self, moves: Iterable[Move]) -> Activations:
        """Return the moments after the client's units have been moved."""
        matrices = dict(self.matrices)
        for move in moves:
            for name in matrices:
                if move.group.name in (name, self.within[name]):
                    matrices[name] = move.group.kind.act(move.element, matrices[name], 1)
        return replace(self, matrices=matrices)


@dataclass
class _Moments:
    """Running sums over tokens."""

    count: int = 0
    shifts: tuple[Tensor, Tensor] | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, a: Tensor, c: Tensor) -> None:
        # Covariances do not change by a shift, but lose their digits where means are large.
        self.shifts = self.shifts or (a.mean(0), c.mean(0))
        a, c = a - self.shifts[0], c - self.shifts[1]
        self.count += len(a)
        parts = {"a": a.sum(0), "c": c.sum(0), "aa": a.mT @ a, "cc": c.mT @ c, "ac": a.mT @ c}
        for name, value in parts.items():
            value = value.double()
            self.sums[name] = self.sums[name].add_(value) if name in self.sums else value

    def centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the covariances of the anchor, of the client, and across."""
        n, s = max(self.count, 1), self.sums
        return (
            s["aa"] / n - torch.outer(s["a"], s["a"]) / n**2,
            s["cc"] / n - torch.outer(s["c"], s["c"]) / n**2,
            s["ac"] / n - torch.outer(s["a"], s["c"]) / n**2,
        )


def _scaled(kind: object, how: Moments, a: Tensor, c: Tensor, ac: Tensor) -> Tensor:
    """Turn covariances into cross moments whose trace is at most 1."""
    if how == "correlation":
        deviation = torch.outer(a.diagonal().clamp_min(0).sqrt(), c.diagonal().clamp_min(0).sqrt())
        floor = 1e-12 * float(deviation.max()) if deviation.numel() else 0.0
        return torch.where(deviation > floor, ac / deviation.clamp_min(floor or 1.0), 0.0) / len(ac)
    if how == "whitened" and isinstance(kind, HeadRotation):
        left, right = (torch.block_diag(*map(_inverse_root, _heads(kind, m))) for m in (a, c))
        return left @ ac @ right / len(ac)
    return ac / (a.trace() * c.trace()).sqrt().clamp_min(torch.finfo(torch.float64).tiny)


def _heads(kind: HeadRotation, m: Tensor) -> Tensor:
    stretches = range(0, len(m), kind.dim)
    return torch.stack([m[i : i + kind.dim, i : i + kind.dim] for i in stretches])


def _inverse_root(m: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(m)
    values = values.clamp_min(1e-6 * float(values.max().clamp_min(1e-30)))
    return vectors * values.rsqrt() @ vectors.mT


@dataclass(frozen=True)
class _Site:
    """Where a group's units appear: one stretch of a module's input or output."""

    group: Group
    module: str
    slice: Slice
    output: bool


def input_axis(module: nn.Module | None) -> int | None:
    """Return the axis of a module's weight that its input is contracted with, None if there is none."""
    if isinstance(module, nn.Linear):
        return 1
    # transformers' Conv1D, which this package does not import.
    return 0 if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def _sites(group: Group, model: nn.Module) -> list[_Site]:
    modules = dict(model.named_modules())
    read: list[_Site] = []
    written: list[_Site] = []
    for slot in group.slots:
        name = slot.tensor.removesuffix(".weight")
        axis = input_axis(modules.get(name))
        # Where query heads share a key head, keys and values alone show the group's units.
        if axis is not None and slot.size == _units(group):
            reads = slot.axis == axis
            (read if reads else written).append(_Site(group, name, slot.slice, output=not reads))
    return read or written


def _units(group: Group) -> int:
    """Return how many units a group acts on."""
    kind = group.kind
    return kind.heads * kind.dim if isinstance(kind, InsideHeads) else kind.units


@contextmanager
def _recorded(model: nn.Module, sites: Iterable[_Site], seen: Callable[[_Site, Tensor], None]) -> Any:
    """Call ``seen`` with every activation ``[..., units]`` while the context lasts."""
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for site in sites:

            def hook(module: nn.Module, args: Any, out: Any, site: _Site = site) -> None:
                seen(site, out if site.output else args[0])

            handle = modules[site.module].register_forward_hook(hook)
            stack.callback(handle.remove)
        yield


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode, and every module back into its own afterwards."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def without_padding(units: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``[..., units]`` as rows ``[tokens, units]``, those only that the attention mask shows."""
    if mask is not None and units.ndim == 3 and units.shape[:2].numel() == mask.numel():
        return units[mask.reshape(units.shape[:2]).bool()]
    return units.flatten(0, -2)


def _run(model: nn.Module, sites: Sequence[_Site], batch: Mapping[str, Tensor]) -> dict[_Site, Tensor]:
    """Return the activations of one batch as ``[tokens, units]``, without padding."""
    found: dict[_Site, Tensor] = {}
    read: dict[tuple[str, int], Tensor] = {}  # the tensors stay alive, so ids are not used twice
    mask = batch.get("attention_mask")

    def seen(site: _Site, tensor: Tensor) -> None:
        # Queries, keys and values read one and the same tensor: it counts once.
        key = (site.group.name, id(tensor))
        if key in read and not site.output:
            return
        read[key] = tensor
        units = site.slice.of(tensor, tensor.ndim - 1)
        found[site] = without_padding(units, mask)

    with _recorded(model, sites, seen):
        model(**batch)
    return found


def collect_activations(
    anchor: nn.Module,
    client: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    symmetry: Symmetry,
    residual: str = "all",
    heads: Moments = "covariance",
    units: Moments = "correlation",
) -> Activations:
    """Run both models on the same batches and return the moments of every group.

    Args:
        anchor: a ``torch`` model whose tensor names are the symmetry's. Left in its training mode,
            but run in evaluation mode and without gradients.
        client: the other model, of the same architecture.
        batches: keyword arguments of the models' forward; ``attention_mask`` ``[rows, tokens]``, if
            there is one, says which tokens count.
        symmetry: from ``symmetry_of``.
        residual: which readers of the residual stream count: ``first`` (what follows the embeddings),
            ``last`` (what the task head reads), ``all``, or ``identity`` (leave the stream as it is).
        heads: moments that rotations are fitted to.
        units: moments that permutations are fitted to; correlations are those of Eq. 1.

    Raises:
        FedrotError: no batch, or an unknown choice.
        UpdateError: a model's tensors are not the symmetry's.
    """
    check_symmetry(symmetry)
    for model in (anchor, client):
        if not isinstance(model, nn.Module):
            raise FedrotError(
                f"Activations come from running models, not from a {type(model).__name__}; pass the two "
                "models themselves."
            )
    if residual not in RESIDUAL_SITES:
        raise FedrotError(f"residual is '{residual}'; choose from {', '.join(RESIDUAL_SITES)}.")
    for name, choice, known in (("heads", heads, MOMENTS), ("units", units, MOMENTS[:2])):
        if choice not in known:
            raise FedrotError(f"{name} is '{choice}'; choose from {', '.join(known)}.")
    for model in (anchor, client):
        check_update(model.state_dict(), symmetry.shapes)
    sites = [site for group in symmetry.groups for site in _sites(group, anchor) if _usable(group)]
    if residual == "identity":
        sites = [site for site in sites if site.group.part != "residual"]
    moments: dict[str, dict[_Site, _Moments]] = {}
    with torch.no_grad(), evaluating(anchor, client):
        for batch in batches:
            ours, theirs = _run(anchor, sites, batch), _run(client, sites, batch)
            for site, a in ours.items():
                of_group = moments.setdefault(site.group.name, {})
                of_group.setdefault(site, _Moments()).add(a.float(), theirs[site].float())
    if not moments:
        raise FedrotError(
            "No activations were seen: pass at least one batch and a torch model of this family."
        )
    by_name = {group.name: group for group in symmetry.groups}
    matrices = {}
    for name, of_group in moments.items():
        group = by_name[name]
        how = heads if group.part == "attention" else units
        chosen = list(of_group.values())
        if group.part == "residual" and residual in ("first", "last"):
            chosen = chosen[:1] if residual == "first" else chosen[-1:]
        scaled = [_scaled(group.kind, how, *m.centred()) for m in chosen]
        matrices[name] = torch.stack(scaled).mean(0)
    return Activations(matrices, {name: by_name[name].within for name in matrices})


def probing(
    build: Callable[[], nn.Module],
    config: Mapping[str, Any],
    symmetry: Symmetry,
    rows: int | None = None,
    seed: int = 0,
) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Activations]:
    """Return a function from two models' tensors to their activations on random inputs.

    Args:
        build: returns a model whose ``state_dict`` has the symmetry's tensors.
        config: see ``random_inputs``.
        symmetry: from ``symmetry_of``.
        rows: random texts or images; None for ``random_inputs``' own number.
        seed: of the random inputs.
    """
    # ``build`` may return one and the same model every time, or one that its owner still needs.

    @cache
    def pair() -> tuple[nn.Module, nn.Module]:
        # Initialising them draws random numbers, which is not for others to notice.
        with torch.random.fork_rng(devices=[]):
            return copy.deepcopy(build()), copy.deepcopy(build())

    def evidence(anchor: Mapping[str, Tensor], client: Mapping[str, Tensor]) -> Activations:
        ours, theirs = pair()
        ours.load_state_dict(dict(anchor))
        theirs.load_state_dict(dict(client))
        return collect_activations(ours, theirs, random_inputs(config, rows, seed=seed), symmetry)

    return evidence


def _usable(group: Group) -> bool:
    return group.part in ("residual", "output", "attention", "ffn")
