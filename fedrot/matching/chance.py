"""Chance levels: formula and null models for the squared distance that alignment removes from noise.

The best element is a maximum, so it removes some distance whatever a client has learned. Suppose that
the client's difference from the anchor is isotropic and small beside the anchor. Then a group with ``k``
free dimensions on ``n`` entries removes the share ``k / n`` of its squared norm: the part along the
group's orbit. Elsewhere a null model is drawn and matched like a client: ``t a + s g`` with standard
Gaussian ``g``, where ``t`` and ``s`` give it the client's projection on the anchor and its distance.

A group moves if it removes more than a quantile of what noise removes, see ``requirement``.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedrot.matching.problem import Problem, Spread, count_once, entries_once
from fedrot.symmetry.actions import Orders
from fedrot.symmetry.groups import Group
from fedrot.symmetry.moves import Move
from fedrot.tensors import SMALLEST_NORM, Tensors

#: The share ``k / n`` holds up to this ratio of the squared distance to the anchor's squared norm.
NEAR = 0.05

#: Null models are drawn until their free dimensions or units are so many, but at most ``MOST_DRAWS``.
ENOUGH, MOST_DRAWS = 2000, 8

#: From noise alone, a group exceeds ``requirement`` once in so many times at most. So at most 1 % of
#: rounds move anything by noise, in rounds of up to 100,000 pairs of client and group.
ONCE_IN = 10_000_000

#: The values on the grid of ``quantile``: so many, each larger than the one before by this factor.
_LEVELS, _STEP = 100, 1.2


def chance_known(problem: Problem) -> bool:
    """Return whether chance can be told: not where groups depend on each other or activations count."""
    return not problem.options.coupled and problem.activations is None


def near_chance(problem: Problem, group: Group, before: float) -> float | None:
    """Return the squared distance that chance removes from a group, None if no formula tells it.

    Whether chance changes an order or a sign depends on the single units.
    """
    if not chance_known(problem) or not group.kind.free:
        return None
    anchor = problem.anchor
    share = near_share(group, anchor.tensors, anchor.size(group), before, anchor.spread)
    return None if share is None else share * before


def near_share(
    group: Group, tensors: Tensors, size: float, before: float, spread: Spread
) -> float | None:
    """Return the share of a group's squared distance that chance removes near an anchor.

    Args:
        tensors: of the anchor.
        size: the sum of the squared norms of the group's blocks there.
        before: the group's squared distance to it.
        spread: of the anchor.

    Returns:
        None if the distance is not small beside the anchor.
    """
    if before > NEAR * size:
        return None
    entries = entries_of(group, tensors)
    return group.kind.free / entries * spread.factor(group, entries)


def entries_of(group: Group, tensors: Tensors) -> int:
    """Return the number of entries that a group acts on, each counted once."""
    return count_once(group.slots, {s.tensor: tuple(tensors[s.tensor].shape) for s in group.slots})


def requirement(
    group: Group, before: float, chance: float, factor: float, quantile: float = math.inf
) -> float:
    """Return the squared distance that a group has to remove to be beyond chance.

    It is ``factor`` times chance. Noise removes more than that now and then: then it is a quantile of
    what noise removes, see ``ONCE_IN``. Near the anchor, the share that a group with free dimensions
    removes has a beta distribution. Of large shares the factor multiplies the odds
    ``share / (1 - share)``: less than all is required.

    Args:
        before: the group's squared distance to the anchor.
        chance: the squared distance that chance removes on average.
        factor: ``AlignmentOptions.chance``.
        quantile: see the function ``quantile``, where null models were drawn.
    """
    if factor == 0 or before <= 0 or (chance <= 0 and quantile == math.inf):
        return 0.0
    share = min(max(chance / before, 0.0), 1.0)
    times = factor * share / (1 + (factor - 1) * share)
    of_share = before * _quantile(group.kind.free, share) if group.kind.free else math.inf
    return max(before * times, min(of_share, quantile))


def required(
    problem: Problem, group: Group, before: float, chance: float | None, quantile: float = math.inf
) -> float:
    """Return the squared distance that a group of a problem has to remove to be beyond chance.

    Inside a moved head it is nothing: the head's place was chosen for the best element. Without a
    normal scale no element is beyond chance.
    """
    if not _scaled(problem, group, before):
        return math.inf
    if chance is None or group.within in problem.applied:
        return 0.0
    return requirement(group, before, chance, problem.options.chance, quantile)


def least(problem: Problem, group: Group, before: float) -> float:
    """Return a lower bound of ``required``, for groups that need not be solved exactly."""
    chance = near_chance(problem, group, before)
    needed = required(problem, group, before, chance)
    times = 0.0 if chance is None else problem.options.chance * chance
    return needed if needed == math.inf else min(needed, times)


def _scaled(problem: Problem, group: Group, before: float) -> bool:
    """Return whether anchor and client can be compared: their blocks are not 0 or denormal.

    Products of smaller numbers vanish in float32, so that the best element would be rounding.
    """
    if before <= problem.anchor.size(group) / 4:
        return True  # neither can be 0
    pairs = problem.pairs(group)
    blocks = (torch.stack([torch.linalg.vector_norm(t) for t in pair]) for pair in pairs)
    return float(torch.stack(list(blocks)).amax(0).min()) >= SMALLEST_NORM


def quantile(
    group: Group, anchor: Tensors, element: Tensor, line: NullLine, mean: float, inner: bool
) -> float:
    """Return what the best element removes from noise at most, but once in ``ONCE_IN`` times.

    On the null model ``t a + s g``, an element ``h`` removes ``2 s <h a, g> - t |h a - a|^2``.

    *Orders of units*: across ``a``, ``g`` has no preferred direction. On ``n`` entries, the cosine of
    one element with it exceeds ``x`` with a probability of at most ``(1 - x^2)^((n - 2) / 2)``. There
    are at most ``(2 k)^m`` orders with signs that move ``m`` of ``k`` units: the bound is for all
    together.

    *Other elements* are infinitely many. What the best one removes is a Lipschitz function of ``g``. It
    exceeds its mean by ``u`` with a probability of at most ``exp(-u^2 / (8 s^2 D))``, where ``D`` is the
    largest ``|h a - h' a|^2`` (Gaussian concentration; Boucheron, Lugosi and Massart 2013, Theorem 5.6).
    Here ``h'`` is the identity, and ``D`` is that of the best element. As it is not known before, the
    bound holds on a grid of ``_LEVELS`` values together. With elements inside the units, ``h`` and
    ``h'`` have them, and ``D`` is at most four times the squared norm of the moved units.

    Args:
        anchor: the anchor's tensors.
        element: the best one found.
        line: the null model.
        mean: what the best element removes from noise on average.
        inner: whether units that move also get the best elements inside them, as heads do.
    """
    move, way, norm = Move(group, element), 0.0, 0.0
    for slot in group.slots:
        tensor = anchor[slot.tensor].detach().double()
        moved = move.on(tensor, slot)
        way += float((2 * tensor[moved != tensor] if inner else moved - tensor).square().sum())
        norm += float(slot.of(tensor).square().sum())
    if inner or not isinstance(group.kind, Orders):
        return mean + 2 * line.size * math.sqrt(2 * _STEP * way * math.log(ONCE_IN * _LEVELS))
    units, entries = group.kind.units, entries_of(group, anchor)
    orders = int(group.kind.moved(element).sum()) * math.log(2 * units) + math.log(units)
    cosine = math.sqrt(-math.expm1(-2 * (math.log(ONCE_IN) + orders) / max(entries - 2, 1)))
    across = math.sqrt(max(way - way**2 / (4 * norm), 0.0)) if norm else 0.0
    return 2 * line.size * math.sqrt(entries) * across * cosine - line.slope * way


def beyond(gains: Sequence[float], required: Sequence[float]) -> list[bool]:
    """Return which groups of one action remove enough: all of them if the median group does.

    Clients turn in all layers or in none, as a rule: what more than half of the groups show is evidence
    for the others. A single layer is evidence for itself alone.
    """
    both = list(zip(gains, required, strict=True))
    judged = [gain / needed for gain, needed in both if needed > 0]
    together = bool(judged) and statistics.median(judged) >= 1
    return [together or gain >= needed for gain, needed in both]


@lru_cache(maxsize=4096)
def _quantile(free: int, share: float) -> float:
    """Return the share that isotropic noise exceeds once in ``ONCE_IN`` times, given its mean."""
    from scipy.special import betaincinv

    if not 0 < share < 1:
        return share
    return float(betaincinv(free / 2, free / 2 * (1 / share - 1), 1 - 1 / ONCE_IN))


@dataclass(frozen=True)
class NullLine:
    """A null model ``t a + s g`` of a client: ``slope`` is ``t``, ``size`` is ``s``."""

    slope: float
    size: float

    def drawn(self, a: Tensor, generator: torch.Generator) -> Tensor:
        """Return a random tensor in place of the anchor's tensor ``a``."""
        noise = torch.randn(a.shape, generator=generator, dtype=torch.float32)
        return self.slope * a + self.size * noise.to(a)


def line_of(group: Group, anchor: Tensors, client: Tensors) -> NullLine:
    """Return the null model of a client on the entries that a group acts on."""
    return _line(entries_once(group.slots, anchor, client), entries_of(group, anchor))


def null_models(lines: Mapping[Group, NullLine], anchor: Tensors, client: Tensors) -> Iterator[Tensors]:
    """Yield null models of a client: its tensors, with those of some groups replaced.

    The groups share no tensor. The numbers are drawn on the CPU with a seed of each group's own, so that
    every run draws the same.
    """
    seeds = {group.name: zlib.crc32(group.name.encode()) for group in lines}
    generators = {name: torch.Generator().manual_seed(seed) for name, seed in seeds.items()}
    fewest = min(max(group.kind.free, group.kind.units) for group in lines)
    for _ in range(min(-(-ENOUGH // fewest), MOST_DRAWS)):
        drawn = {}
        for group, line in lines.items():
            for name in dict.fromkeys(slot.tensor for slot in group.slots):
                drawn[name] = line.drawn(anchor[name].detach(), generators[group.name])
        yield {**client, **drawn}


def _line(pairs: Iterable[tuple[Tensor, Tensor]], entries: int) -> NullLine:
    """Return the null model of blocks, as pairs of anchor and client."""
    products = torch.zeros(3, dtype=torch.float64)
    for pair in pairs:
        a, c = (t.double().flatten() for t in pair)
        products += torch.stack([a @ a, a @ c, c @ c]).cpu()
    aa, ac, cc = products.tolist()
    # An anchor without a normal scale would need a slope that overflows float32.
    slope = ac / aa if aa > SMALLEST_NORM**2 else 0.0
    return NullLine(slope, (max(cc - slope * ac, 0.0) / max(entries, 1)) ** 0.5)


def without_common_tensors(groups: Iterable[Group]) -> list[list[Group]]:
    """Return the groups in lists within which no two act on one tensor."""
    batches: list[tuple[list[Group], set[str]]] = []
    for group in groups:
        tensors = {slot.tensor for slot in group.slots}
        batch = next((batch for batch in batches if not batch[1] & tensors), None)
        if batch is None:
            batch = ([], set())
            batches.append(batch)
        batch[0].append(group)
        batch[1].update(tensors)
    return [batch for batch, _ in batches]


def null_model(anchor: Tensors, client: Tensors, groups: Iterable[Group]) -> dict[str, Tensor]:
    """Return one null model for groups that depend on each other.

    Each tensor on which they act is replaced by a random one of its own ``t`` and ``s``; tied tensors
    stay tied.
    """
    drawn: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    null = dict(client)
    for name in dict.fromkeys(slot.tensor for group in groups for slot in group.slots):
        c, a = client[name].detach(), anchor[name].detach()
        key = (c.data_ptr(), tuple(c.shape))
        if key not in drawn:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn[key] = _line([(a, c)], a.numel()).drawn(a, generator)
        null[name] = drawn[key]
    return null
