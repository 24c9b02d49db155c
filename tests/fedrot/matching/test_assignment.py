"""The order of the neurons against full assignments, and certificates that are never
wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from torch import Tensor

from fedrot import AlignmentOptions, align, random_equivalent
from fedrot.matching import assignment
from fedrot.matching.anchor import Anchor
from fedrot.symmetry.actions import Permutation
from fedrot.symmetry.groups import Group, Slice, Slot
from tests import models
from tests.fedrot.oracles import Array, eye, normal, seeded
from tests.models import FEW, Names, State, near, state_of, symmetry_for

Solve = Callable[[Tensor, Tensor | None], tuple[Tensor | None, float]]


def _features(state: State, names: Names, layer: int) -> Array:
    """Return input, bias and output weights of every neuron, side by side, ``[neurons,
    features]``.
    """
    up = names.of(layer, "up")
    down = names.of(layer, "down")
    columns = (
        state[f"{up}.weight"],
        state[f"{up}.bias"][:, None],
        state[f"{down}.weight"].T,
    )
    return torch.cat([c.double() for c in columns], dim=1).numpy()


@pytest.mark.parametrize("regime", ["near", "shuffled", "noisy-shuffled", "unrelated"])
@pytest.mark.parametrize(
    ("name", "dtype"), [*zip(FEW, (torch.float64, torch.float32), strict=True)]
)
def test_permutation_is_the_full_assignment_s(
    name: str, regime: str, dtype: Any
) -> None:
    names = models.CASES[name].names
    options = AlignmentOptions(parts=("ffn",), chance=0)
    for seed in range(2):
        anchor = state_of(name, dtype=dtype)
        symmetry = symmetry_for(name)
        if regime == "unrelated":
            update = state_of(name, 20 + seed, dtype)
        else:
            update = near(anchor, 0.6 if regime == "noisy-shuffled" else 0.05, seed)
        if "shuffled" in regime:
            update = random_equivalent(update, symmetry, seed, ("ffn",))
        alignment = align(update, anchor, symmetry, options)
        elements = {move.group.layer: move.element for move in alignment.moves}
        for layer in range(2):
            mine = elements.get(layer, torch.arange(models.NEURONS)).numpy()
            ours, theirs = (
                _features(state, names, layer) for state in (anchor, update)
            )
            _, full = linear_sum_assignment(ours @ theirs.T, maximize=True)
            assert (mine == full).all()
            assert (full == np.arange(models.NEURONS)).all() == (regime == "near")
        assert [row["certified"] for row in alignment.report.rows()] == [
            regime == "near"
        ] * 2


def _blocks(
    anchor: Array, client: Array, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Cut features into three slots as a feed-forward block has them: input, bias,
    output.
    """
    third = max(1, (anchor.shape[1] - 1) // 2)
    a = torch.from_numpy(anchor).to(dtype)
    c = torch.from_numpy(client).to(dtype)
    cuts = [slice(0, third), slice(third, third + 1), slice(third + 1, None)]
    return [(a[:, cut], c[:, cut]) for cut in cuts if a[:, cut].shape[1]]


def _clustered(seed: int, n: int, width: int, spread: float) -> Array:
    """Return neurons around a few centres: a small spread makes near-duplicates."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(max(2, n // 4), width))
    return centres[rng.integers(len(centres), size=n)] + spread * rng.normal(
        size=(n, width)
    )


_NEURONS = given(
    seed=st.integers(0, 2**31),
    n=st.integers(2, 40),
    width=st.integers(3, 40),
    spread=st.sampled_from([0.0, 1e-7, 1e-5, 1e-3, 0.1, 1.0]),
    size=st.sampled_from([1e-4, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    columns=st.sampled_from([None, 1, 5, *assignment.QUICK_COLUMNS]),
)


def _nearest(one: Array, other: Array) -> Array:
    """Return the distance of every row to the nearest row of another number."""
    apart = cdist(one, other)
    np.fill_diagonal(apart, np.inf)
    return np.asarray(apart.min(1))


def _neurons(n: int) -> Group:
    return Group("ffn", 0, "ffn", Permutation(n), (Slot("w", 0, Slice(0, n)),))


@settings(max_examples=40, deadline=None)
@_NEURONS
def test_a_bound_holds_when_the_anchor_moves_towards_its_clients(
    seed: int,
    n: int,
    width: int,
    spread: float,
    size: float,
    dtype: Any,
    columns: Any,
) -> None:
    group = _neurons(n)
    start = torch.from_numpy(size * _clustered(seed, n, width, spread)).to(dtype)
    anchor = Anchor({"w": start})
    generator = seeded(seed)
    anchor.separation(group, columns)
    current = start
    for step in range(4):
        drift = (
            0.1
            * spread
            * size
            * torch.randn(start.shape, generator=generator, dtype=dtype)
        )
        client = current + drift
        anchor.note(
            {"ffn": False}, {"ffn": assignment.row_distances([(current, client)])}
        )
        share = 1 / (1 + step)
        current = torch.lerp(current, client, share)
        anchor = anchor.towards_last({"w": current}, share)
        rows = current.double().numpy()
        bound = anchor.separation(group, columns).numpy()
        assert (bound <= _nearest(rows, rows) * (1 + 1e-12)).all()


def test_far_apart_neurons_stay_certified_while_the_anchor_moves_little() -> None:
    group = _neurons(64)
    generator = seeded(0)
    current = torch.randn(64, 256, generator=generator)
    anchor = Anchor({"w": current})
    before = anchor.separation(group, None)
    for step in range(20):
        client = current + 0.02 * torch.randn(64, 256, generator=generator)
        distances = assignment.row_distances([(current, client)])
        assert assignment.certified(distances, anchor.separation(group, None))
        anchor.note({"ffn": False}, {"ffn": distances})
        current = torch.lerp(current, client, 1 / (1 + step))
        anchor = anchor.towards_last({"w": current}, 1 / (1 + step))
    assert (anchor.separation(group, None) > 0.7 * before).all()


@pytest.mark.parametrize("noted", [False, True])
def test_only_distances_of_the_last_client_stand_for_it(noted: bool) -> None:
    """Without them the bound is measured anew: an earlier client that was noted was not
    merged.
    """
    group = _neurons(3)
    anchor = Anchor({"w": torch.eye(3)})
    before = anchor.separation(group, None)
    if noted:
        anchor.note({"ffn": False}, {"ffn": torch.zeros(3)})
        anchor.note({"ffn": True}, {})
    moved = anchor.towards_last({"w": 0.1 * torch.eye(3)}, 1.0)
    assert torch.allclose(moved.separation(group, None), 0.1 * before, atol=1e-3)


def test_separation_is_tight_and_spans_row_blocks() -> None:
    n = assignment._ROWS + 100
    anchor = torch.randn(n, 24, generator=seeded(1))
    anchor[n - 1] = anchor[3] + 0.25
    true = torch.cdist(anchor.double(), anchor.double())
    true.fill_diagonal_(torch.inf)
    bound = assignment.separation([anchor[:, :10], anchor[:, 10:]])
    assert (bound <= true.amin(1)).all()
    assert (bound >= 0.99 * true.amin(1)).all()


@settings(max_examples=80, deadline=None)
@_NEURONS
def test_a_certificate_is_never_wrong(
    seed: int,
    n: int,
    width: int,
    spread: float,
    size: float,
    dtype: Any,
    columns: Any,
) -> None:
    """Whenever the identity is certified, no assignment is closer to the anchor."""
    rng = np.random.default_rng(seed + 1)
    anchor = size * _clustered(seed, n, width, spread)
    noise = size * rng.choice([1e-8, 1e-4, 1e-2, 0.3]) * rng.normal(size=anchor.shape)
    client = anchor + noise
    # Nearest neighbours trade places, partly: from half the way on, swapping them is
    # better.
    i = int(rng.integers(n))
    apart = cdist(anchor[i : i + 1], anchor)[0]
    apart[i] = np.inf
    j = int(apart.argmin())
    way = rng.choice([0.0, 0.4, 0.4999, 0.5001, 0.6, 1.0])
    client[[i, j]] += way * (anchor[[j, i]] - anchor[[i, j]])
    blocks = _blocks(anchor, client, dtype)
    bound = assignment.separation([a for a, _ in blocks], columns=columns)
    certified = assignment.certified(assignment.row_distances(blocks), bound)
    event(f"certified: {certified}")
    if certified:
        a, c = (
            torch.cat([b[i] for b in blocks], dim=1).double().numpy() for i in (0, 1)
        )
        cost = cdist(a, c, "sqeuclidean")
        rows, column = linear_sum_assignment(cost)
        assert np.trace(cost) <= cost[rows, column].sum() * (1 + 1e-9) + 1e-30


#: Widths of a gated block's slots: what keeps its sign (gate), and what may change it
#: (up, down), if anything may.
_SIDES = st.one_of(
    st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 80)),
)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 30),
    widths=_SIDES,
    spread=st.sampled_from([0.0, 1e-7, 1e-3, 0.3, 1.0]),
    size=st.sampled_from([1e-3, 0.1, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    columns=st.sampled_from([None, 1, 5, *assignment.QUICK_COLUMNS]),
)
def test_separation_never_exceeds_the_true_distance(
    seed: int,
    n: int,
    widths: Any,
    spread: float,
    size: float,
    dtype: Any,
    columns: Any,
) -> None:
    """Of signed neurons, over all others with either sign, and over the neuron's own
    negative.
    """
    gate, *signed = (
        factor * torch.from_numpy(_clustered(seed + i, n, width, spread)).to(dtype)
        for i, (width, factor) in enumerate(
            zip(widths, (1.0, size, size), strict=False)
        )
    )
    plain = [gate] if widths[0] else []
    kept = gate.double().numpy()
    turned = torch.cat([*signed, gate[:, :0]], dim=1).double().numpy()
    true = _nearest(np.hstack([kept, turned]), np.hstack([kept, turned]))
    if signed:
        apart = cdist(np.hstack([kept, turned]), np.hstack([kept, -turned]))
        true = np.minimum(true, apart.min(1))
    bound = assignment.separation(plain, signed, columns).numpy()
    assert bound.shape == (n,)
    assert (bound >= 0).all()
    assert (bound <= true * (1 + 1e-12)).all()


def test_the_separation_of_signed_neurons_is_tight() -> None:
    """Once where another neuron is nearest, once where the neuron's own negative is."""
    gate, up = normal(seeded(2), 2, 12, 40)
    one, other = (torch.cat([gate, sign * 3 * up], dim=1) for sign in (1, -1))
    others = torch.minimum(
        torch.cdist(one, one), torch.cdist(one, other)
    ).fill_diagonal_(torch.inf)
    assert torch.allclose(
        assignment.separation([gate], [3 * up]), others.amin(1), rtol=1e-9
    )
    itself = 2 * (0.05 * up).norm(dim=1)
    assert torch.allclose(assignment.separation([gate], [0.05 * up]), itself, rtol=1e-9)


def test_certificates_are_given_where_they_should_be() -> None:
    anchor = _clustered(3, 40, 30, 1.0)
    # Nearest neighbours that trade places: certified up to half the way, and not
    # beyond.
    pair = torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64)[:, None].expand(3, 9)
    for way, expected in ((0.49, True), (0.51, False), (0.7, False)):
        client = pair.clone()
        client[:2] += way * (pair[[1, 0]] - pair[:2])
        bound = assignment.separation([pair])
        assert (
            assignment.certified(
                assignment.row_distances([(pair, client)]), bound
            ).item()
            is expected
        )
    # A neuron that is exactly its anchor's is certified even next to its duplicate.
    twins = np.concatenate([anchor, anchor])
    blocks = _blocks(twins, twins, torch.float32)
    bound = assignment.separation([a for a, _ in blocks])
    assert assignment.certified(assignment.row_distances(blocks), bound)


@settings(max_examples=60, deadline=None)
@_NEURONS
def test_assignment_reaches_the_optimum(
    seed: int,
    n: int,
    width: int,
    spread: float,
    size: float,
    dtype: Any,
    columns: Any,
) -> None:
    """Its own shortcut included: the optimum's objective, up to the documented 1e-6 of
    the trace.
    """
    rng = np.random.default_rng(seed + 2)
    anchor = size * _clustered(seed, n, width, spread)
    order = rng.permutation(n) if rng.random() < 0.5 else np.arange(n)
    client = anchor[order] + size * rng.choice([0.0, 1e-6, 1e-2, 1.0]) * rng.normal(
        size=anchor.shape
    )
    blocks = _blocks(anchor, client, dtype)
    score = sum(a @ c.T for a, c in blocks)
    element, gain = assignment.assignment(score)
    a, c = (torch.cat([b[i] for b in blocks], dim=1).double().numpy() for i in (0, 1))
    exact = a @ c.T
    rows, column = linear_sum_assignment(exact, maximize=True)
    found = np.arange(n) if element is None else element.numpy()
    assert sorted(found) == list(range(n))
    size2 = float(np.linalg.norm(a) * np.linalg.norm(c))
    slack = 1e-6 * abs(np.trace(exact)) + width * torch.finfo(dtype).eps * size2
    assert exact[rows, found].sum() >= exact[rows, column].sum() - slack
    assert gain == pytest.approx(
        2 * (exact[rows, found].sum() - np.trace(exact)), abs=2 * slack
    )


def _all_signed(n: int) -> Iterator[tuple[int, ...]]:
    for order in itertools.permutations(range(1, n + 1)):
        for signs in itertools.product((1, -1), repeat=n):
            yield tuple(sign * unit for sign, unit in zip(signs, order, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 4),
    regime=st.sampled_from(["any", "near", "opposed"]),
)
def test_signed_assignment_equals_brute_force(seed: int, n: int, regime: str) -> None:
    score = normal(seeded(seed), n, n)
    if regime != "any":
        score = score + (8 if regime == "near" else -8) * eye(n)

    def value(element: Iterable[int]) -> float:
        return sum(
            float(score[i, abs(e) - 1]) * (1 if e > 0 else -1)
            for i, e in enumerate(element)
        )

    best = max(map(value, _all_signed(n)))
    element, gain = assignment.best_assignment(torch.zeros(()), score)
    found = list(range(1, n + 1)) if element is None else element.tolist()
    assert value(found) == pytest.approx(best, abs=2e-6 * abs(float(score.trace())))
    assert gain == pytest.approx(2 * (value(found) - float(score.trace())), abs=1e-9)
    assert (element is None) or regime != "near"
    if regime == "opposed":
        assert found == [-unit for unit in range(1, n + 1)]


def test_signed_assignment_leaves_units_without_evidence_as_they_are() -> None:
    """A zero score says nothing about the sign."""
    score = torch.diag(torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64))
    element, gain = assignment.best_assignment(torch.zeros(()), score)
    assert element is not None
    assert element.tolist() == [-1, 2, 3]
    assert gain == pytest.approx(4)
    assert assignment.best_assignment(torch.zeros(()), torch.zeros(3, 3)) == (None, 0.0)


@pytest.mark.parametrize("solve", [assignment.assignment, assignment.best_assignment])
@pytest.mark.parametrize("size", [1e-3, 1.0, -1.0, -1e5])
@pytest.mark.parametrize(("share", "accepted"), [(0.5e-6, False), (2e-6, True)])
def test_an_order_must_gain_more_than_a_millionth_of_the_trace(
    share: float, accepted: bool, size: float, solve: Solve
) -> None:
    """Two units that trade places; and, where signs are free, one that turns."""
    gain = share * abs(2 * size)
    score = torch.full((2, 2), size, dtype=torch.float64)
    score += gain / 2 * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    element, found = solve(score, None)
    assert (None if element is None else element.tolist()) == (
        [1, 0] if accepted else None
    )
    assert found == pytest.approx(2 * gain if accepted else 0.0, rel=1e-6)
    signed = torch.diag(torch.tensor([2 * abs(size), -gain / 2], dtype=torch.float64))
    element, found = solve(torch.zeros(()), signed)
    assert (None if element is None else element.tolist()) == (
        [1, -2] if accepted else None
    )
    assert found == pytest.approx(2 * gain if accepted else 0.0, rel=1e-6)
