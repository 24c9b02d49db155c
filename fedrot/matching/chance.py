"""Chance levels: formula and null models for what alignment removes from noise.

The best element is a maximum, so it removes some distance from any client, even from
noise. Suppose that the client's difference from the anchor is isotropic and small
beside the anchor. Then a group with ``k`` free dimensions on ``n`` entries removes the
share ``k / n`` of the squared distance: the part along the group's orbit. Otherwise a
null model is drawn and matched like a client: ``t a + s g`` with standard Gaussian
``g``. Its projection on the anchor ``a`` and its distance are the client's, by ``t``
and ``s``.

A group moves if it removes more than a quantile of what noise removes, see
``threshold``.
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

from fedrot.matching.pairs import count_once, entries_once, norms
from fedrot.matching.problem import Problem
from fedrot.symmetry.actions import Orders
from fedrot.symmetry.groups import Group, Move
from fedrot.tensors import SMALLEST_NORM, TensorDict, Tensors

#: The share ``k / n`` holds up to this ratio of the squared distance to the anchor's
#: squared norm.
NEAR = 0.05

#: Null models are drawn until they have this many free dimensions or units, at most
#: ``MOST_DRAWS``.
ENOUGH = 2000
MOST_DRAWS = 8

#: Noise exceeds ``threshold`` at most once in this many groups. So noise moves a
#: group in at most 1 % of the rounds, if a round has up to 100,000 pairs of client and
#: group.
ONCE_IN = 10_000_000

#: The grid of ``quantile_of_null``: the number of values, and the ratio of each to the
#: one before.
_LEVELS = 100
_STEP = 1.2


def chance_known(problem: Problem) -> bool:
    """Return whether chance is known.

    It is if groups are independent and no activations are used.
    """
    return not problem.options.coupled and problem.activations is None


def near_chance(
    problem: Problem,
    group: Group,
    before: float,
) -> float | None:
    """Return the squared distance that chance removes from a group.

    None without a formula: there is none for orders and signs, because their chance
    depends on the single units, or if the distance ``before`` is not small beside the
    anchor.
    """
    anchor = problem.anchor
    free = group.action.free
    if not chance_known(problem) or not free or before > NEAR * anchor.size(group):
        return None
    entries = count_once(group.slots, anchor.tensors)
    return free / entries * anchor.spread.factor(group, entries) * before


def threshold(
    group: Group,
    before: float,
    chance: float,
    factor: float,
    quantile: float = math.inf,
) -> float:
    """Return the squared distance beyond chance, given what chance removes.

    It is the larger of ``factor`` times chance and a quantile of what noise removes,
    see ``ONCE_IN``. Near the anchor, the share that a group with free dimensions
    removes from noise has a beta distribution. The factor multiplies the odds ``share /
    (1 - share)``, so that never the whole distance is required.

    Args:
        before: the group's squared distance to the anchor.
        chance: the squared distance that chance removes on average.
        factor: ``AlignmentOptions.chance``.
        quantile: of ``quantile_of_null``, if null models were drawn.
    """
    if factor == 0 or before <= 0 or (chance <= 0 and quantile == math.inf):
        return 0.0
    share = min(max(chance / before, 0.0), 1.0)
    times = factor * share / (1 + (factor - 1) * share)
    if group.action.free:
        quantile = min(before * _beta_quantile(group.action.free, share), quantile)
    return max(before * times, quantile)


def threshold_of(
    problem: Problem,
    group: Group,
    before: float,
    chance: float | None,
    quantile: float = math.inf,
) -> float:
    """Return the squared distance that a group of a problem has to remove to move.

    It is that of ``threshold``, but 0 inside a moved head, because the head's place was
    chosen for the best element. It is infinite if all blocks of the anchor or of the
    client are 0 or denormal.
    """
    if before > problem.anchor.size(group) / 4:  # else neither can be 0
        largest = norms(problem.pairs(group)).amax(0)
        # Products of smaller numbers vanish in float32; the best element would be a
        # rounding error.
        if not largest.min() >= SMALLEST_NORM:
            return math.inf
    if chance is None or group.within in problem.applied:
        return 0.0
    return threshold(
        group,
        before,
        chance,
        problem.options.chance,
        quantile,
    )


def lower_threshold(
    problem: Problem,
    group: Group,
    before: float,
) -> float:
    """Return a lower bound of ``threshold_of``.

    A group whose gain is certainly smaller need not be solved exactly.
    """
    chance = near_chance(problem, group, before)
    needed = threshold_of(problem, group, before, chance)
    if chance is None or needed == math.inf:
        return needed
    return min(needed, problem.options.chance * chance)


def quantile_of_null(
    group: Group,
    anchor: Tensors,
    element: Tensor,
    line: NullLine,
    mean: float,
    inner: bool,
) -> float:
    """Return a distance that noise exceeds at most once in ``ONCE_IN`` times.

    It is the distance that the best element removes. On the null model ``t a + s g``,
    an element ``h`` removes ``2 s <h a, g> - t |h a - a|^2``.

    *Orders of units*: orthogonal to ``a``, ``g`` has no preferred direction. On ``n``
    entries, the cosine of one element with ``g`` exceeds ``x`` with a probability of at
    most ``(1 - x^2)^((n - 2) / 2)``. At most ``(2 k)^m`` orders with signs move ``m``
    of ``k`` units: the bound holds for all of them.

    *Other elements* are infinitely many. The distance that the best one removes is a
    Lipschitz function of ``g``. It exceeds its mean by ``u`` with a probability of at
    most ``exp(-u^2 / (8 s^2 D))``, where ``D`` is the largest ``|h a - h' a|^2``
    (Gaussian concentration; Boucheron, Lugosi and Massart 2013, Theorem 5.6). Here
    ``h'`` is the identity, and ``D`` is that of the best element. The draw determines
    this ``D``, so the bound holds for a grid of ``_LEVELS`` values at once. If heads
    also get elements inside them, these are parts of ``h`` and ``h'``, and ``D`` is at
    most four times the squared norm of the moved units.

    Args:
        anchor: the anchor's tensors.
        element: the best element found.
        line: the null model.
        mean: the distance that the best element removes from noise on average.
        inner: whether units that move also get the best elements inside them, as heads
            do.
    """
    move = Move(group, element)
    way = 0.0
    norm = 0.0
    for slot in group.slots:
        tensor = anchor[slot.tensor].detach().double()
        moved = move.on(tensor, slot)
        step = 2 * tensor[moved != tensor] if inner else moved - tensor
        way += float(step.square().sum())
        norm += float(slot.of(tensor).square().sum())
    if inner or not isinstance(group.action, Orders):
        spread = 2 * _STEP * way * math.log(ONCE_IN * _LEVELS)
        return mean + 2 * line.size * math.sqrt(spread)
    units = group.action.units
    entries = count_once(group.slots, anchor)
    # Logarithms of numbers of orders: those of the moved units, and how many move.
    orders = int(group.action.moved(element).sum()) * math.log(2 * units)
    orders += math.log(units)
    orders += math.log(ONCE_IN)
    exponent = -2 * orders / max(entries - 2, 1)
    cosine = math.sqrt(-math.expm1(exponent))
    across = 0.0
    if norm:
        across = math.sqrt(max(way - way**2 / (4 * norm), 0.0))
    return 2 * line.size * math.sqrt(entries) * across * cosine - line.slope * way


def beyond(
    gains: Sequence[float],
    thresholds: Sequence[float],
) -> list[bool]:
    """Return which groups of one action remove enough.

    Clients usually rotate in all layers or in none. So if more than half of the groups
    are beyond chance (the median is), all are accepted. A single group is evidence only
    for itself.
    """
    both = list(zip(gains, thresholds, strict=True))
    judged = [gain / needed for gain, needed in both if needed > 0]
    together = bool(judged) and statistics.median(judged) >= 1
    return [together or gain >= needed for gain, needed in both]


@lru_cache(maxsize=4096)
def _beta_quantile(
    free: int,
    share: float,
) -> float:
    """Return the share that noise of a mean ``share`` exceeds once in ``ONCE_IN``."""
    from scipy.special import betaincinv

    if not 0 < share < 1:
        return share
    return float(betaincinv(free / 2, free / 2 * (1 / share - 1), 1 - 1 / ONCE_IN))


@dataclass(frozen=True)
class NullLine:
    """A null model ``t a + s g`` of a client: ``slope`` is ``t``, ``size`` is ``s``."""

    slope: float
    size: float

    def drawn(
        self,
        a: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Return a random tensor in place of the anchor's tensor ``a``."""
        noise = torch.randn(a.shape, generator=generator, dtype=torch.float32)
        return self.slope * a + self.size * noise.to(a)


def line_of(
    group: Group,
    anchor: Tensors,
    client: Tensors,
) -> NullLine:
    """Return the null model of a client on the entries that a group acts on."""
    return _line(
        entries_once(group.slots, anchor, client), count_once(group.slots, anchor)
    )


def null_models(
    lines: Mapping[Group, NullLine],
    anchor: Tensors,
    client: Tensors,
) -> Iterator[Tensors]:
    """Yield null models of a client: its tensors, with those of some groups replaced.

    The groups must share no tensor. Numbers are drawn on the CPU, with a seed for each
    group that is the same in every run.
    """
    generators = {group.name: _generator(group.name) for group in lines}
    fewest = min(max(group.action.free, group.action.units) for group in lines)
    for _ in range(min(-(-ENOUGH // fewest), MOST_DRAWS)):
        null = dict(client)
        for group, line in lines.items():
            generator = generators[group.name]
            for name in dict.fromkeys(slot.tensor for slot in group.slots):
                null[name] = line.drawn(anchor[name].detach(), generator)
        yield null


def _generator(name: str) -> torch.Generator:
    """Return a generator with a seed that is the same for a name in every run."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def _line(
    pairs: Iterable[tuple[Tensor, Tensor]],
    entries: int,
) -> NullLine:
    """Return the null model of blocks, as pairs of anchor and client."""
    products = torch.zeros(3, dtype=torch.float64)
    for a, c in pairs:
        a = a.double().flatten()
        c = c.double().flatten()
        products += torch.stack([a @ a, a @ c, c @ c]).cpu()
    aa, ac, cc = products.tolist()
    # If the anchor is 0 or denormal, the slope would overflow float32.
    slope = ac / aa if aa > SMALLEST_NORM**2 else 0.0
    variance = max(cc - slope * ac, 0.0) / max(entries, 1)
    return NullLine(slope, variance**0.5)


def null_model(
    anchor: Tensors,
    client: Tensors,
    groups: Iterable[Group],
) -> TensorDict:
    """Return one null model for groups that depend on each other.

    Each tensor that the groups act on is replaced by a random tensor, with a ``t`` and
    ``s`` for each. Tied tensors stay tied.
    """
    drawn: dict[tuple[int, torch.Size], Tensor] = {}
    null = dict(client)
    for name in dict.fromkeys(slot.tensor for group in groups for slot in group.slots):
        c = client[name].detach()
        # Tied tensors have the same memory.
        key = (c.data_ptr(), c.shape)
        if key not in drawn:
            a = anchor[name].detach()
            line = _line([(a, c)], a.numel())
            drawn[key] = line.drawn(a, _generator(name))
        null[name] = drawn[key]
    return null
