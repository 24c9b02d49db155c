"""What chance removes: formula and null models against sampling, and the rule that uses
them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from transformers import BertConfig, BertForSequenceClassification

from fedrot import WHOLE_MODEL, AlignmentOptions, Symmetry, align, random_equivalent
from fedrot.alignment.anchors import align_round
from fedrot.matching import chance
from fedrot.matching.anchor import Anchor, Spread
from fedrot.matching.chance import line_of, null_models
from fedrot.matching.inside_heads import RotationSolver
from fedrot.matching.pairs import count_once
from fedrot.matching.problem import Problem
from fedrot.symmetry import Group, symmetry_of
from fedrot.symmetry.actions import HeadRotation, Permutation
from fedrot.symmetry.groups import Move, Slice, Slot, apply_moves
from tests import families
from tests.fedrot.oracles import normal, seeded
from tests.models import State

#: Members with rotations, phases and signs, with biases, ties, shared heads and
#: experts.
SHAPES = (
    "bert",
    "deberta-v3",
    "bart",
    "t5-gated",
    "gpt-neox",
    "gptj",
    "llama",
    "gemma3",
)


def bert(width: int = 64, heads: int = 2, layers: int = 1) -> tuple[State, Symmetry]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=2 * width,
            vocab_size=50,
        )
        state = BertForSequenceClassification(config).state_dict()
    return dict(state), symmetry_of(config, state)


def isotropic(state: State, scale: float, seed: int) -> State:
    """Return the state with noise of one variance on all entries."""
    generator = seeded(10_000 + seed)  # not the numbers that made the state
    return {
        name: tensor
        + scale * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in state.items()
    }


@pytest.mark.parametrize("name", SHAPES)
def test_near_an_anchor_chance_is_the_share_of_free_dimensions(name: str) -> None:
    """Biases, ties, shared heads, phases and signs are counted: sampled shares agree
    for every group.
    """
    state = families.state_of(name)
    symmetry = families.symmetry_for(name)
    found = defaultdict[str, float](float)
    expected = dict[str, float]()
    seeds = 12
    options = AlignmentOptions(parts=("attention",), chance=0)
    for seed in range(seeds):
        update = isotropic(state, 1e-4, seed)
        for row in align(update, state, symmetry, options).report.groups:
            assert row.chance is not None
            found[row.group] += row.found / row.before / seeds
            expected[row.group] = row.chance / row.before
    assert set(found) == {group.name for group in symmetry.select(("attention",))}
    free = {group.name: group.action.free for group in symmetry.groups}
    for group, share in found.items():
        # The sampled share is a mean of chi-squared variables: four standard errors.
        error = 4 * (2 / max(free[group], 1) / seeds) ** 0.5
        assert share == pytest.approx(expected[group], rel=error), group
        assert (expected[group] > 0) == (free[group] > 0)
    both = [sum(shares[group] for group in found) for shares in (found, expected)]
    assert both[0] == pytest.approx(
        both[1], rel=max(0.05, 4 * (2 / sum(free.values()) / seeds) ** 0.5)
    )


@pytest.mark.parametrize(
    ("name", "scale"),
    [(name, 1e-3) for name in families.KINDS]
    + [(name, 0.3) for name in ("bert", "llama", "gemma3", "t5")],
)
def test_noise_moves_hardly_any_group(name: str, scale: float) -> None:
    state = families.state_of(name)
    symmetry = families.symmetry_for(name)
    parts = tuple(
        part for part in ("heads", "attention", "ffn") if part not in symmetry.refused
    )
    options = AlignmentOptions(parts=parts)
    updates = (isotropic(state, scale, seed) for seed in range(8))
    rows = [
        row for u in updates for row in align(u, state, symmetry, options).report.groups
    ]
    assert len(rows) >= 20
    assert sum(row.moved > 0 for row in rows) <= 0.01 * len(rows)


def test_far_from_an_anchor_chance_is_drawn() -> None:
    """An independent sample of noisy clients loses what the report of one of them
    says.
    """
    state, symmetry = bert()
    parts = ("attention", "ffn")
    scale = 0.06
    found = defaultdict[str, float](float)
    claimed = defaultdict[str, float](float)
    for seed in range(8):
        judged = AlignmentOptions(parts=parts)
        for row in align(
            isotropic(state, scale, seed), state, symmetry, judged
        ).report.groups:
            assert row.chance is not None
            claimed[row.group] += row.chance / row.before / 8
        other = isotropic(state, scale, 100 + seed)
        moving = AlignmentOptions(parts=parts, chance=0)
        for row in align(other, state, symmetry, moving).report.groups:
            found[row.group] += row.found / row.before / 8
    assert len(found) == 3
    for group, share in found.items():
        assert claimed[group] == pytest.approx(share, rel=0.05, abs=5e-4), group


@pytest.mark.parametrize(
    ("anchor", "factor"), [("global", 0.0), ("running", 0.0), ("running", 1e6)]
)
def test_the_anchor_s_own_noise_is_accounted_for(anchor: str, factor: float) -> None:
    """The first client, the mean of k others, an anchor that contains the client: all
    as sampled.
    """
    state, symmetry = bert(heads=4)
    options = AlignmentOptions(parts=("attention",), chance=factor)
    found = torch.zeros(5)
    expected = torch.zeros(5)
    for seed in range(12):
        updates = [
            (isotropic(state, 1e-5, 10 * seed + k), 1.0 + (k == 2)) for k in range(5)
        ]
        results = align_round(updates, state, symmetry, replace(options, anchor=anchor))
        for k, result in enumerate(results):
            for row in result.alignment.report.groups:
                assert row.chance is not None
                found[k] += row.found / row.before
                expected[k] += row.chance / row.before
                assert bool(row.moved) is (factor == 0)
    # Where nothing is moved, ``found`` is an upper bound.
    excess = (found / expected - 1).tolist()
    assert all(-0.05 < e < (0.05 if factor == 0 else 0.15) for e in excess), excess


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 3.0), st.integers(2, 6))
def test_the_ceiling_is_never_below_the_best_gain(
    seed: int, scale: float, dim: int
) -> None:
    generator = seeded(seed)
    rows = normal(generator, 3, dim, 2 * dim)
    other = rows + scale * normal(generator, rows.shape)
    evidence = rows @ other.mT
    solver = RotationSolver()
    action = HeadRotation(3, dim)
    gains = torch.linalg.svdvals(evidence).sum(-1) - solver.still(action, evidence)
    ceiling = solver.ceiling(action, evidence)
    assert bool((ceiling >= gains - 1e-9).all())
    if scale < 1e-3:
        # Near the identity, units i and j gain |K_ij|^2 / (h_i + h_j), and have the
        # ceiling |K_ij|^2 (1 / h_i + 1 / h_j) / 4: it is this much larger at most, for
        # eigenvalues h of M.
        least, *_, most = torch.linalg.eigvalsh((evidence + evidence.mT) / 2).unbind(-1)
        larger = (least + most) ** 2 / (4 * least * most)
        assert bool(
            (ceiling - gains <= (larger - 1).clamp_min(0.5) * gains + 1e-6).all()
        )


@pytest.mark.parametrize(
    ("turned", "moving"),
    [((0, 1, 2), {0, 1, 2}), ((1,), {1}), ((0, 2), {0, 1, 2}), ((), set())],
)
def test_layers_with_evidence_move_and_most_of_them_speak_for_all(
    turned: Any, moving: Any
) -> None:
    """And what does not move stays the same object."""
    state, symmetry = bert(layers=3)
    other = random_equivalent(state, symmetry, 1, ("attention",))
    start = {
        n: (other if n.split(".layer.")[-1][0] in map(str, turned) else state)[n]
        for n in state
    }
    update = isotropic(start, 1e-3, 2)
    alignment = align(update, state, symmetry)
    assert {(m.group.part, m.group.layer) for m in alignment.moves} == {
        ("attention", i) for i in moving
    }
    moved = {s.tensor for m in alignment.moves for s in m.group.slots}
    for name, tensor in alignment.apply(update).items():
        assert (tensor is update[name]) == (name not in moved)
        torch.testing.assert_close(tensor, state[name], atol=1e-2, rtol=0)
    for row in alignment.report.groups:
        assert (row.moved > 0) == (row.part == "attention" and row.layer in moving)
        if not row.moved:
            assert row.before == row.after
            assert row.skipped is (row.part == "attention")
            assert row.found <= 1.2 * (row.chance or 0.0)
    if len(turned) == 3:
        assert alignment.report.found("attention") > 2 * (
            alignment.report.chance("attention") or 1
        )


def _group(heads: int, dim: int) -> Group:
    return Group("g", 0, "attention", HeadRotation(heads, dim), ())


ORDERS = Group("orders", 0, "ffn", Permutation(32), ())
LARGE = _group(12, 64)
ONE = _group(1, 2)

#: The group; distance, chance, factor and quantile of null models; what is required.
REQUIRED = [
    (LARGE, (100.0, 2.0, 1.5), 100 * 0.03 / 1.01),
    (LARGE, (100.0, 2.0, 3.0), 100 * 0.06 / 1.04),
    (LARGE, (100.0, 2.0, 0.0), 0),
    (LARGE, (0.0, 0.0, 1.5, 7.0), 0),
    # One angle may exceed twice chance by luck: the share of one dimension is a
    # chi-squared variable.
    (ONE, (1.0, 1e-4, 1.5), chi2.isf(1e-7, 1) * 1e-4),
    # Of turns, the lower of two quantiles: of the share, and of null models.
    (LARGE, (100.0, 2.0, 1.0, 2.001), 2.001),
    (ORDERS, (100.0, 0.0, 1.5), 0),
    (ORDERS, (100.0, 0.0, 1.5, 7.0), 7),
    (ORDERS, (100.0, 10.0, 1.5, 7.0), 100 * 0.15 / 1.05),
]


@pytest.mark.parametrize(("group", "given_", "expected"), REQUIRED)
def test_what_is_required_is_the_quantile_or_the_factor(
    group: Group, given_: Any, expected: float
) -> None:
    assert chance.requirement(group, *given_) == pytest.approx(expected, rel=0.01)
    assert chance.requirement(LARGE, 100.0, 2.0, 1.0) > 2.001
    for share in (0.3, 0.9, 0.99):
        assert share < chance.requirement(ONE, 1.0, share, 1.5) <= 1


@pytest.mark.parametrize(("free", "entries"), [(1, 4), (3, 10), (28, 100)])
def test_noise_exceeds_the_quantile_once_in_so_many_times(
    free: int, entries: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(chance, "ONCE_IN", 1000)
    noise = torch.randn(200_000, entries, generator=seeded(3)).square()
    share = noise[:, :free].sum(1) / noise.sum(1)
    exceeded = (
        (share > chance._quantile.__wrapped__(free, free / entries)).double().mean()
    )
    assert 0.0005 < exceeded < 0.0015


#: What groups removed, what was required, and which are beyond chance.
BEYOND = [
    ([2.0, 2.0, 0.1], [1.0, 1.0, 1.0], [True, True, True]),
    ([2.0, 2.0, 2.0, 0.1], [1.0] * 4, [True] * 4),
    ([1.0, 1.0, 0.1], [1.0] * 3, [True] * 3),
    ([9.0, 0.1, 0.1], [1.0, 1.0, 1.0], [True, False, False]),
    ([1.1, 1.1, 0.1, 0.1], [1.0] * 4, [True, True, False, False]),
    # Groups in place say nothing, and nothing is required of them.
    ([0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0], [True, True, False, True]),
    ([0.5, 0.0], [0.0, 0.0], [True, True]),
    ([], [], []),
]


@pytest.mark.parametrize(("gains", "needs", "expected"), BEYOND)
def test_most_groups_speak_for_all_of_their_action(
    gains: Any, needs: Any, expected: Any
) -> None:
    assert chance.beyond(gains, needs) == expected


def test_entries_are_counted_once() -> None:
    state, symmetry = bert(width=8, heads=2)
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    counts = {
        g.name.split(".")[-1]: count_once(g.slots, shapes)
        for g in symmetry.groups
        if g.part == "attention"
    }
    # Queries and keys with biases; values with biases, and output projections without.
    assert counts == {"qk": 2 * (64 + 8), "vo": 2 * 64 + 8}
    (qk,) = (g for g in symmetry.groups if g.name.endswith("qk"))
    assert count_once((*qk.slots, *qk.slots), shapes) == counts["qk"]
    both = (qk.slots[0], replace(qk.slots[0], axis=1))
    assert count_once(both, shapes) == 64


def test_null_models_keep_distance_and_projection() -> None:
    state, symmetry = bert()
    update = isotropic(state, 0.04, 4)
    for group in symmetry.groups:
        names = {slot.tensor for slot in group.slots}
        flat = [
            torch.cat([m[n].double().flatten() for n in sorted(names)])
            for m in (state, update)
        ]
        drawn = list(null_models({group: line_of(group, state, update)}, state, update))
        for model in drawn:
            assert {n for n in update if model[n] is not update[n]} == names
            null = torch.cat([model[n].double().flatten() for n in sorted(names)])
            assert (null - flat[0]).norm() == pytest.approx(
                (flat[1] - flat[0]).norm().item(), rel=0.1
            )
            slope = (flat[1] - null) @ flat[0] / (flat[0] @ flat[0])
            assert slope == pytest.approx(0, abs=0.1)
        # A group is drawn alike in every run, whatever is drawn beside it.
        apart = group.part in ("heads", "attention")
        beside = [g for g in symmetry.groups if apart and g.part == "ffn"]
        lines = {g: line_of(g, state, update) for g in (*beside, group)}
        again = next(null_models(lines, state, update))
        assert all(torch.equal(again[n], drawn[0][n]) for n in names)


def test_spread_of_a_mean_of_equals() -> None:
    spread = Spread()
    for k in range(1, 5):
        spread = spread.towards(1 / k, {"moved": True, "still": False})
        assert spread.across == pytest.approx(1 / k)
        assert spread.along["still"] == pytest.approx(1 / k)
        assert spread.along["moved"] == 0
    # Where the noise is only across, or only along.
    group = _group(2, 8)
    entries = 1000
    share = group.action.free / entries
    assert Spread(0.5).factor(group, entries) == 1
    expected = 3 / (share * 3 + (1 - share) * 1.5)
    assert Spread(0.5, {"g": 2.0}).factor(group, entries) == pytest.approx(expected)


@pytest.mark.parametrize(("part", "inner"), [("ffn", False), ("heads", True)])
@pytest.mark.parametrize("scale", [0.01, 0.1])
def test_what_noise_removes_stays_below_its_quantile(
    part: str, inner: bool, scale: float
) -> None:
    """Of orders of neurons, and of heads with the best rotation inside, from near to
    far.
    """
    state, symmetry = bert(16, heads=4)
    (group,) = (g for g in symmetry.groups if g.part == part)
    options = AlignmentOptions(
        parts=(part, "attention") if inner else (part,), chance=0
    )
    removed = []
    bounds = []
    for seed in range(20):
        null = isotropic(state, scale, seed)
        alignment = align(null, state, symmetry, options)
        (row,) = (row for row in alignment.report.groups if row.group == group.name)
        removed.append(row.found)
        for move in alignment.moves:
            if move.group is group:
                line = line_of(group, state, null)
                bounds.append(
                    (
                        row.found,
                        partial(chance.quantile, group, state, move.element, line),
                    )
                )
    mean = sum(removed) / len(removed)
    assert all(found < bound(mean, inner) for found, bound in bounds)
    # The bounds are not empty: orders that were really there are far beyond them.
    turned = random_equivalent(isotropic(state, 0.003, 1), symmetry, 2, (part,))
    report = align(turned, state, symmetry, AlignmentOptions(parts=(part,))).report
    assert all(row.moved for row in report.groups)


@pytest.mark.parametrize(
    ("parts", "draws"), [(("ffn",), 1), (("heads", "ffn"), chance.MOST_DRAWS)]
)
def test_a_large_group_is_drawn_once_and_a_small_one_beside_it_more_often(
    parts: Any, draws: int
) -> None:
    """More neurons than ``ENOUGH``, as BERT-base has in a layer."""
    state, symmetry = bert(16)
    ffn = next(group for group in symmetry.groups if group.part == "ffn")
    large = replace(ffn, action=replace(ffn.action, n=chance.ENOUGH + 100))
    groups = [
        large if group is ffn else group
        for group in symmetry.groups
        if group.part in parts
    ]
    lines = dict.fromkeys(groups, chance.NullLine(1.0, 0.1))
    assert len(list(null_models(lines, state, state))) == draws


def test_the_quantile_of_heads_counts_four_times_the_norm_of_those_that_move() -> None:
    state, symmetry = bert(16)
    (group,) = (g for g in symmetry.groups if g.part == "heads")
    norm = sum(
        float(s.of(state[s.tensor]).double().square().sum()) for s in group.slots
    )
    most = 2 * 0.5 * (2 * 1.2 * 4 * norm * math.log(chance.ONCE_IN * 100)) ** 0.5
    swapped = torch.tensor([1, 0])
    line = chance.NullLine(0.0, 0.5)
    assert chance.quantile(group, state, swapped, line, 3.0, True) == pytest.approx(
        3 + most
    )


def test_the_quantile_of_orders_bounds_all_of_them_together() -> None:
    state, symmetry = bert(16)
    (group,) = (g for g in symmetry.groups if g.part == "ffn")
    units = group.action.units
    entries = chance.entries_of(group, state)
    order = torch.arange(units)
    order[[3, 5, 8]] = order[[5, 8, 3]]
    moved = apply_moves(state, [Move(group, order)])
    blocks = [
        (s.of(moved[s.tensor]).double(), s.of(state[s.tensor]).double())
        for s in group.slots
    ]
    way = sum(float((m - a).square().sum()) for m, a in blocks)
    norm = sum(float(a.square().sum()) for _, a in blocks)
    bound = math.log(chance.ONCE_IN) + 3 * math.log(2 * units) + math.log(units)
    cosine = (1 - math.exp(-2 * bound / (entries - 2))) ** 0.5
    expected = (
        2 * 0.5 * (entries * (way - way**2 / (4 * norm))) ** 0.5 * cosine - 0.25 * way
    )
    line = chance.NullLine(0.25, 0.5)
    assert chance.quantile(group, state, order, line, 3.0, False) == pytest.approx(
        expected, rel=1e-6
    )


def test_groups_that_share_a_tensor_are_in_different_lists() -> None:
    def on(name: str, *tensors: str) -> Group:
        slots = tuple(Slot(tensor, 0, Slice(0, 4)) for tensor in tensors)
        return Group(name, 0, "attention", HeadRotation(2, 2), slots)

    groups = [
        on("a", "x"),
        on("b", "x", "y"),
        on("c", "z"),
        on("d", "y"),
        on("e", "z", "x"),
    ]
    batches = chance.without_common_tensors(groups)
    assert [[group.name for group in batch] for batch in batches] == [
        ["a", "c", "d"],
        ["b"],
        ["e"],
    ]
    assert chance.without_common_tensors([]) == []


def test_near_is_up_to_a_twentieth_of_the_anchor() -> None:
    state, symmetry = bert(16)
    group = next(g for g in symmetry.groups if g.part == "attention")
    problem = Problem(Anchor(state), state, symmetry, AlignmentOptions())
    most = 0.05 * problem.anchor.size(group)
    entries = chance.entries_of(group, state)
    assert chance.near_chance(problem, group, most) == pytest.approx(
        most * group.action.free / entries
    )
    assert chance.near_chance(problem, group, 1.0001 * most) is None


def test_a_multiple_of_the_anchor_has_no_noise_and_none_of_nothing_a_slope() -> None:
    state, symmetry = bert(16)
    group = next(g for g in symmetry.groups if g.part == "ffn")
    exact = {n: t.double() for n, t in state.items()}
    # Of some, the squared distance is negative by rounding, and its root would be
    # complex.
    for factor in (0.1, *(i / 20 for i in range(1, 60))):
        line = line_of(group, exact, {n: t * factor for n, t in exact.items()})
        assert line.slope == pytest.approx(factor)
        assert 0 <= line.size < 1e-6
    nothing = {name: torch.zeros_like(t) for name, t in state.items()}
    line = line_of(group, nothing, state)
    assert line.slope == 0
    norm = sum(
        float(s.of(state[s.tensor]).double().square().sum()) for s in group.slots
    )
    assert line.size == pytest.approx((norm / chance.entries_of(group, state)) ** 0.5)


def test_a_null_model_has_the_client_s_norm_and_projection_and_noise_of_its_own() -> (
    None
):
    """Equal noise in all layers would agree on an order of the stream: chance would be
    too large.
    """
    anchor, symmetry = bert(layers=2)
    client = {
        n: 2 * t + 0.02 * torch.randn(t.shape, generator=seeded(1))
        for n, t in anchor.items()
    }
    one, other = (f"bert.encoder.layer.{i}.attention.self.key.weight" for i in range(2))
    null = chance.null_model(anchor, client, symmetry.select(WHOLE_MODEL))
    noise = []
    for name in (one, other):
        a, c, drawn = (
            model[name].double().flatten() for model in (anchor, client, null)
        )
        assert float(drawn @ a / (a @ a)) == pytest.approx(
            float(c @ a / (a @ a)), rel=0.05
        )
        assert float(drawn.norm()) == pytest.approx(float(c.norm()), rel=0.05)
        noise.append(drawn - a * (drawn @ a) / (a @ a))
    assert abs(float(noise[0] @ noise[1] / (noise[0].norm() * noise[1].norm()))) < 0.2
    client[other] = client[one]
    null = chance.null_model(anchor, client, symmetry.select(WHOLE_MODEL))
    assert null[one] is null[other], "tied tensors are one"
