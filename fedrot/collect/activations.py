"""Second moments of two models' activations on the same data.

Source: Verma & Elbayad 2024, section 3.1. A group's units are recorded at the inputs of
the linear layers that read them: FFN units after their activation, heads before the
output projection, the residual stream before each block. Units that no layer reads
(queries and keys) are recorded at the outputs of the layers that write them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from fedrot.collect.hooks import input_axis, masks_of, watched, without_padding
from fedrot.collect.random_inputs import forward_inputs, random_inputs
from fedrot.errors import FedrotError, UpdateError
from fedrot.symmetry.actions import InsideHeads
from fedrot.symmetry.canonical import check_folded
from fedrot.symmetry.groups import Group, Move, Slice, Symmetry, check_symmetry
from fedrot.tensors import Tensors, check_update

#: Choices of the layers at which the residual stream is recorded (Verma & Elbayad 2024,
#: section 3.3).
RESIDUAL_SITES = ("last", "all", "first", "identity")

Moments = Literal["correlation", "covariance"]
MOMENTS = ("correlation", "covariance")


@dataclass(frozen=True)
class Activations:
    """Cross moments of anchor and client units, scaled to traces of at most 1.

    ``matrices``, by group name, are float64 ``[n (anchor), n (client)]``. ``within``,
    by group name, is the head permutation that moves the group's heads, or an empty
    string.
    """

    matrices: Tensors
    within: Mapping[str, str] = field(repr=False)

    def moved(self, moves: Iterable[Move]) -> Activations:
        """Return the moments with the client's units moved."""
        matrices = dict(self.matrices)
        for move in moves:
            action = move.group.action
            for name, matrix in matrices.items():
                if move.group.name in (name, self.within[name]):
                    matrices[name] = action.act(move.element, matrix, 1)
        return replace(self, matrices=matrices)


@dataclass
class _Moments:
    """Running sums over tokens."""

    count: int = 0
    shifts: tuple[Tensor, Tensor] | None = None
    sums: Sequence[Tensor] = ()

    def add(
        self,
        a: Tensor,
        c: Tensor,
    ) -> None:
        # A shift does not change covariances; without a shift, large means would cost
        # digits.
        self.shifts = self.shifts or (a.mean(0), c.mean(0))
        shift_a, shift_c = self.shifts
        a = a - shift_a
        c = c - shift_c
        self.count += len(a)
        sums = (a.sum(0), c.sum(0), a.mT @ a, c.mT @ c, a.mT @ c)
        if not self.sums:
            self.sums = [new.double() for new in sums]
            return
        for total, new in zip(self.sums, sums, strict=True):
            total.add_(new)

    def check(self, group: str) -> None:
        """Raise ``UpdateError`` if the sums of one of the two models are not finite."""
        _, _, anchor, client, _ = self.sums
        for model, squares in (("anchor", anchor), ("client", client)):
            if not torch.isfinite(squares.diagonal()).all():
                raise UpdateError(
                    f"The {model}'s activations of '{group}' are not finite, or their "
                    "squares overflow. Check the client's training."
                )

    def centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the covariances of the anchor, of the client, and between the two."""
        n = max(self.count, 1)
        a, c, aa, cc, ac = self.sums
        return (
            _covariance(aa, a, a, n),
            _covariance(cc, c, c, n),
            _covariance(ac, a, c, n),
        )


def _covariance(
    products: Tensor,
    a: Tensor,
    b: Tensor,
    n: int,
) -> Tensor:
    """Return a covariance from sums of products, and sums of both factors."""
    return products / n - torch.outer(a, b) / n**2


def _scaled(
    how: str,
    a: Tensor,
    c: Tensor,
    ac: Tensor,
) -> Tensor:
    """Return cross moments with a trace of at most 1 from the covariances."""
    # Moments of constant activations are rounding errors: they become 0.
    if how == "correlation":
        of_anchor = a.diagonal().clamp_min(0).sqrt()
        deviation = torch.outer(of_anchor, c.diagonal().clamp_min(0).sqrt())
        floor = 0.0
        if deviation.numel():
            floor = 1e-12 * float(deviation.max())
        scaled = ac / deviation.clamp_min(floor or 1.0)
        return torch.where(deviation > floor, scaled, 0.0) / len(ac)
    traces = torch.stack([a.trace(), c.trace()]).clamp_min(0)
    size = traces.prod().sqrt()
    return torch.where(size > 1e-12 * traces.max(), ac / size, 0.0)


@dataclass(frozen=True)
class _Site:
    """A slice of a module's input or output that holds a group's units."""

    group: Group
    module: str
    slice: Slice
    output: bool


def _sites(
    group: Group,
    model: Module,
) -> list[_Site]:
    action = group.action
    units = action.units
    if isinstance(action, InsideHeads):
        units = action.heads * action.dim
    modules = dict(model.named_modules())
    sites = []
    for slot in group.slots:
        name = slot.tensor.removesuffix(".weight")
        axis = input_axis(modules.get(name))
        # If query heads share a key head, only keys and values have one entry per unit.
        if axis is not None and slot.size == units:
            sites.append(_Site(group, name, slot.slice, slot.axis != axis))
    read = [site for site in sites if not site.output]
    return read or sites


def _run(
    model: Module,
    sites: Sequence[_Site],
    batch: Tensors,
) -> dict[_Site, Tensor]:
    """Return the activations of one batch as ``[tokens, units]``, without padding.

    A module that runs several times counts every time.
    """
    by_module: dict[str, list[_Site]] = defaultdict(list)
    for site in sites:
        by_module[site.module].append(site)
    recorded: dict[_Site, list[Tensor]] = defaultdict(list)
    # The tensors stay alive in it, so that their ids stay unique.
    read: dict[tuple[str, int], Tensor] = {}

    def seen(
        module: str,
        inputs: Tensor,
        output: Tensor,
    ) -> None:
        for site in by_module[module]:
            tensor = output if site.output else inputs
            # Queries, keys and values read the same tensor, which counts once per
            # group.
            key = (site.group.name, id(tensor))
            if site.output or key not in read:
                read[key] = tensor
                units = site.slice.of(tensor, tensor.ndim - 1)
                # A copy: the model may change the tensor in place later.
                recorded[site].append(
                    without_padding(units, mask_of(module, inputs)).clone()
                )

    arguments = forward_inputs(model, batch)
    with watched(model, by_module, seen), masks_of(model, arguments) as mask_of:
        model(**arguments)
    return {site: torch.cat(rows) for site, rows in recorded.items()}


def collect_activations(
    anchor: Module,
    client: Module,
    batches: Iterable[Tensors],
    symmetry: Symmetry,
    residual: str = "all",
    heads: Moments = "covariance",
    units: Moments = "correlation",
) -> Activations:
    """Run both models on the same batches and return the moments of every group.

    Args:
        anchor: a ``torch`` model with the symmetry's tensor names; it is run in
            evaluation mode and without gradients, and its mode is restored.
        client: a second such model.
        batches: keyword arguments of the models' forward. ``attention_mask`` ``[rows,
            tokens]``, if present, excludes padding.
        symmetry: from ``symmetry_of``.
        residual: layers at which the residual stream is recorded: ``first`` (the first
            after the embeddings), ``last`` (the task head), ``all``, or ``identity``
            (none: the stream stays).
        heads: moments that rotations are fitted to, of heads and of the residual
            stream. A rotation of the units rotates covariances, but not correlations.
        units: moments that permutations are fitted to; Eq. 1 uses correlations.

    Raises:
        FedrotError: no batch, or an unknown choice.
        UpdateError: a model's tensors differ from the symmetry's, or are not canonical
            although the symmetry rotates the residual stream; or activations overflow.
    """
    check_symmetry(symmetry)
    _check_choice("residual", residual, RESIDUAL_SITES)
    _check_choice("heads", heads, MOMENTS)
    _check_choice("units", units, MOMENTS)
    for model in (anchor, client):
        if not isinstance(model, Module):
            raise FedrotError(
                f"The model is a {type(model).__name__}, not a torch module; pass the "
                "two models, not their tensors."
            )
        check_update(model.state_dict(), symmetry.shapes)
        check_folded(model.state_dict(), symmetry)
    parts = {"output", "attention", "ffn"}
    if residual != "identity":
        parts.add("residual")
    groups = [group for group in symmetry.groups if group.part in parts]
    sites = [site for group in groups for site in _sites(group, anchor)]
    moments: dict[Group, dict[_Site, _Moments]] = {}
    for batch in batches:
        of_anchor = _run(anchor, sites, batch)
        of_client = _run(client, sites, batch)
        for site, a in of_anchor.items():
            by_site = moments.setdefault(site.group, defaultdict(_Moments))
            by_site[site].add(a.float(), of_client[site].float())
    if not moments:
        raise FedrotError(
            "No activations were recorded: pass at least one batch and a torch model "
            "of this family. An iterator that was read before has no batch."
        )
    matrices = {}
    for group, by_site in moments.items():
        how = heads if isinstance(group.action, InsideHeads) else units
        chosen = list(by_site.values())
        if group.part == "residual":
            if residual == "first":
                chosen = chosen[:1]
            elif residual == "last":
                chosen = chosen[-1:]
        for site_moments in chosen:
            site_moments.check(group.name)
        scaled = [_scaled(how, *site_moments.centred()) for site_moments in chosen]
        matrices[group.name] = torch.stack(scaled).mean(0)
    return Activations(matrices, {group.name: group.within for group in moments})


def _check_choice(
    name: str,
    choice: str,
    choices: Sequence[str],
) -> None:
    if choice not in choices:
        raise FedrotError(f"{name} is '{choice}'; choose from {', '.join(choices)}.")


def probing(
    build: Callable[[], Module],
    config: Mapping[str, Any],
    symmetry: Symmetry,
    rows: int | None = None,
    seed: int = 0,
    *,
    batch_size: int = 128,
) -> Callable[[Tensors, Tensors], Activations]:
    """Return a function from the tensors of an anchor and a client to activations.

    Args:
        build: returns a model whose ``state_dict`` has the symmetry's tensors. It is
            called twice. The models are copied, and torch's random state is restored.
        config, rows, seed, batch_size: of ``random_inputs``.
        symmetry: from ``symmetry_of``.
    """

    # Built at the first use: a run without another basis needs no models.
    @cache
    def models() -> tuple[Module, Module]:
        with torch.random.fork_rng(devices=[]):
            return copy.deepcopy(build()), copy.deepcopy(build())

    def activations(
        anchor: Tensors,
        client: Tensors,
    ) -> Activations:
        of_anchor, of_client = models()
        of_anchor.load_state_dict(dict(anchor))
        of_client.load_state_dict(dict(client))
        return collect_activations(
            of_anchor,
            of_client,
            random_inputs(config, rows, batch_size=batch_size, seed=seed),
            symmetry,
        )

    return activations
