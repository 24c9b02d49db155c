"""The order of the neurons against full assignments, and certificates that are never
wrong.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from fedrot import AlignmentOptions, align, random_equivalent
from fedrot.matching import assignment
from fedrot.matching.anchor import Anchor
from fedrot.symmetry.actions import Permutation
from fedrot.symmetry.groups import Group, Slice, Slot
from tests import models
from tests.fedrot.oracles import eye, normal, seeded
from tests.models import FEW, near, state_of, symmetry_for


def _features(state, names, layer):
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
def test_permutation_is_the_full_assignment_s(name, regime, dtype):
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


def _nearest(one, other):
    """Return the distance of every row to the nearest row of another number."""
    apart = cdist(one, other)
    np.fill_diagonal(apart, np.inf)
    return np.asarray(apart.min(1))


@dataclass(frozen=True)
class Neurons:
    """Neurons around a few centres: a small spread makes near-duplicates."""

    seed: int
    n: int
    width: int
    spread: float
    size: float
    dtype: torch.dtype
    columns: int | None

    def features(self, more=0, width=0, size=0):
        """Return features ``[n, width]``."""
        rng = np.random.default_rng(self.seed + more)
        centres = rng.normal(size=(max(2, self.n // 4), width or self.width))
        chosen = centres[rng.integers(len(centres), size=self.n)]
        noise = rng.normal(size=chosen.shape)
        return (size or self.size) * (chosen + self.spread * noise)

    def blocks(self, *sides):
        """Cut features of both sides into the slots of a feed-forward block: input,
        bias, output.
        """
        third = max(1, (self.width - 1) // 2)
        widths = [third, 1, self.width - third - 1]
        cut = [torch.from_numpy(s).to(self.dtype).split(widths, 1) for s in sides]
        return [block for block in zip(*cut, strict=True) if block[0].shape[1]]


NEURONS = st.builds(
    Neurons,
    seed=st.integers(0, 2**31),
    n=st.integers(2, 40),
    width=st.integers(3, 40),
    spread=st.sampled_from([0.0, 1e-7, 1e-5, 1e-3, 0.1, 1.0]),
    size=st.sampled_from([1e-4, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    columns=st.sampled_from([None, 1, 5, *assignment.QUICK_COLUMNS]),
)


def side_by_side(blocks):
    """Return the features of both sides as they were rounded, float64."""
    return [torch.cat(side, 1).double().numpy() for side in zip(*blocks, strict=True)]


def group_of(n):
    return Group("ffn", 0, "ffn", Permutation(n), (Slot("w", 0, Slice(0, n)),))


def followed(anchor, client, share):
    """Return the anchor moved towards a client, and the client's distances."""
    current = anchor.tensors["w"]
    distances = assignment.row_distances([(current, client)])
    anchor.note({"ffn": False}, {"ffn": distances})
    moved = torch.lerp(current, client, share)
    return anchor.towards_last({"w": moved}, share), distances


@settings(max_examples=40, deadline=None)
@given(NEURONS)
def test_a_bound_holds_when_the_anchor_moves_towards_its_clients(
    case,
):
    group = group_of(case.n)
    start = torch.from_numpy(case.features()).to(case.dtype)
    anchor = Anchor({"w": start})
    generator = seeded(case.seed)
    anchor.separation(group, case.columns)
    for step in range(4):
        noise = torch.randn(start.shape, generator=generator, dtype=case.dtype)
        client = anchor.tensors["w"] + 0.1 * case.spread * case.size * noise
        anchor, _ = followed(anchor, client, 1 / (1 + step))
        rows = anchor.tensors["w"].double().numpy()
        bound = anchor.separation(group, case.columns).numpy()
        assert (bound <= _nearest(rows, rows) * (1 + 1e-12)).all()


def test_far_apart_neurons_stay_certified_while_the_anchor_moves_little():
    group = group_of(64)
    generator = seeded(0)
    anchor = Anchor({"w": torch.randn(64, 256, generator=generator)})
    before = anchor.separation(group, None)
    for step in range(20):
        bound = anchor.separation(group, None)
        noise = torch.randn(64, 256, generator=generator)
        client = anchor.tensors["w"] + 0.02 * noise
        anchor, distances = followed(anchor, client, 1 / (1 + step))
        assert assignment.certified(distances, bound)
    assert (anchor.separation(group, None) > 0.7 * before).all()


@pytest.mark.parametrize("noted", [False, True])
def test_only_distances_of_the_last_client_stand_for_it(noted):
    """Without them the bound is measured anew: an earlier client that was noted was not
    merged.
    """
    group = group_of(3)
    anchor = Anchor({"w": torch.eye(3)})
    before = anchor.separation(group, None)
    if noted:
        anchor.note({"ffn": False}, {"ffn": torch.zeros(3)})
        anchor.note({"ffn": True}, {})
    moved = anchor.towards_last({"w": 0.1 * torch.eye(3)}, 1.0)
    assert torch.allclose(moved.separation(group, None), 0.1 * before, atol=1e-3)


@settings(max_examples=80, deadline=None)
@given(NEURONS)
def test_a_certificate_is_never_wrong(case):
    """Whenever the identity is certified, no assignment is closer to the anchor."""
    rng = np.random.default_rng(case.seed + 1)
    anchor = case.features()
    noise = rng.choice([1e-8, 1e-4, 1e-2, 0.3]) * rng.normal(size=anchor.shape)
    client = anchor + case.size * noise
    # Nearest neighbours trade places, partly: from half the way on, swapping them is
    # better.
    i = int(rng.integers(case.n))
    apart = cdist(anchor[i : i + 1], anchor)[0]
    apart[i] = np.inf
    j = int(apart.argmin())
    way = rng.choice([0.0, 0.4, 0.4999, 0.5001, 0.6, 1.0])
    client[[i, j]] += way * (anchor[[j, i]] - anchor[[i, j]])
    blocks = case.blocks(anchor, client)
    bound = assignment.separation([a for a, _ in blocks], columns=case.columns)
    certified = assignment.certified(assignment.row_distances(blocks), bound)
    event(f"certified: {certified}")
    if certified:
        cost = cdist(*side_by_side(blocks), "sqeuclidean")
        best = cost[linear_sum_assignment(cost)].sum()
        assert np.trace(cost) <= best * (1 + 1e-9) + 1e-30


#: Widths of a gated block's slots: what keeps its sign (gate), and what may change it
#: (up, down), if anything may.
_SIDES = st.one_of(
    st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 80)),
)


@settings(max_examples=120, deadline=None)
@given(NEURONS, _SIDES)
def test_separation_never_exceeds_the_true_distance(case, widths):
    """Of signed neurons, over all others with either sign, and over the neuron's own
    negative; with all columns it is the distance but for rounding.
    """
    sizes = (1.0, case.size, case.size)
    gate, *signed = (
        torch.from_numpy(case.features(i, width, sizes[i])).to(case.dtype)
        for i, width in enumerate(widths)
    )
    plain = [gate] if widths[0] else []
    kept, turned = (
        torch.cat([*blocks, gate[:, :0]], dim=1).double().numpy()
        for blocks in (plain, signed)
    )
    here = np.hstack([kept, turned])
    true = _nearest(here, here)
    if signed:
        true = np.minimum(true, cdist(here, np.hstack([kept, -turned])).min(1))
    # Rows are compared in blocks of so many.
    with patch.object(assignment, "_ROWS", 16):
        bound = assignment.separation(plain, signed, case.columns).numpy()
    assert bound.shape == (case.n,)
    assert (bound >= 0).all()
    assert (bound <= true * (1 + 1e-12)).all()
    if case.columns is None:
        largest = np.linalg.norm(here, axis=1).max()
        rounding = 2e-3 * largest if case.dtype == torch.float32 else 1e-6 * largest
        assert (bound >= true * (1 - 1e-9) - rounding).all()


def test_the_separation_of_signed_neurons_is_tight():
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


def test_certificates_are_given_where_they_should_be():
    # Nearest neighbours that trade places: certified up to half the way, and not
    # beyond.
    def certified(client, anchor):
        distances = assignment.row_distances([(anchor, client)])
        return bool(assignment.certified(distances, assignment.separation([anchor])))

    pair = torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64)[:, None].expand(3, 9)
    for way, expected in ((0.49, True), (0.51, False), (0.7, False)):
        client = pair.clone()
        client[:2] += way * (pair[[1, 0]] - pair[:2])
        assert certified(client, pair) is expected
    # A neuron that is exactly its anchor's is certified even next to its duplicate.
    twins = torch.randn(40, 30, generator=seeded(3)).repeat(2, 1)
    assert certified(twins, twins)


@settings(max_examples=60, deadline=None)
@given(NEURONS)
def test_assignment_reaches_the_optimum(case):
    """Its own shortcut included: the optimum's objective, up to the documented 1e-6 of
    the trace.
    """
    rng = np.random.default_rng(case.seed + 2)
    anchor = case.features()
    order = rng.permutation(case.n) if rng.random() < 0.5 else np.arange(case.n)
    noise = rng.choice([0.0, 1e-6, 1e-2, 1.0]) * rng.normal(size=anchor.shape)
    blocks = case.blocks(anchor, anchor[order] + case.size * noise)
    element, gain = assignment.assignment(sum(a @ c.T for a, c in blocks))
    a, c = side_by_side(blocks)
    exact = a @ c.T
    here = np.trace(exact)
    best = exact[linear_sum_assignment(exact, maximize=True)].sum()
    found = np.arange(case.n) if element is None else element.numpy()
    assert sorted(found) == list(range(case.n))
    reached = exact[range(case.n), found].sum()
    rounding = torch.finfo(case.dtype).eps * np.linalg.norm(a) * np.linalg.norm(c)
    slack = 1e-6 * abs(here) + case.width * rounding
    assert reached >= best - slack
    assert gain == pytest.approx(2 * (reached - here), abs=2 * slack)


def _all_signed(n):
    for order in itertools.permutations(range(1, n + 1)):
        for signs in itertools.product((1, -1), repeat=n):
            yield tuple(np.multiply(signs, order))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 4),
    shift=st.sampled_from([0, 8, -8]),
)
def test_signed_assignment_equals_brute_force(seed, n, shift):
    """Of any scores, and of clients near the anchor and opposed to it."""
    score = normal(seeded(seed), n, n) + shift * eye(n)
    trace = float(score.trace())

    def value(element):
        return sum(
            float(score[i, abs(e) - 1]) * np.sign(e) for i, e in enumerate(element)
        )

    element, gain = assignment.best_assignment(torch.zeros(()), score)
    found = list(range(1, n + 1)) if element is None else element.tolist()
    best = max(map(value, _all_signed(n)))
    assert value(found) == pytest.approx(best, abs=2e-6 * abs(trace))
    assert gain == pytest.approx(2 * (value(found) - trace), abs=1e-9)
    assert element is None or shift <= 0
    if shift < 0:
        assert found == [-unit for unit in range(1, n + 1)]


def test_signed_assignment_leaves_units_without_evidence_as_they_are():
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
    share, accepted, size, solve
):
    """Two units that trade places; and, where signs are free, one that turns."""
    gain = share * abs(2 * size)
    plain = torch.full((2, 2), size, dtype=torch.float64)
    plain += gain / 2 * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    signed = torch.diag(torch.tensor([2 * abs(size), -gain / 2], dtype=torch.float64))
    for scores, expected in (
        ((plain, None), [1, 0]),
        ((torch.zeros(()), signed), [1, -2]),
    ):
        element, found = solve(*scores)
        assert (element is not None) == accepted
        assert not accepted or element.tolist() == expected
        assert found == pytest.approx(2 * gain if accepted else 0.0, rel=1e-6)
