"""What chance removes: formula and null models against sampling, and the rule that uses
them.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification

from fedrot import WHOLE_MODEL, AlignmentOptions, align, random_equivalent
from fedrot.alignment.anchors import align_round
from fedrot.matching import chance
from fedrot.matching.anchor import Anchor, Spread
from fedrot.matching.candidates import without_common_tensors
from fedrot.matching.chance import line_of, null_models
from fedrot.matching.inside_heads import RotationSolver
from fedrot.matching.pairs import count_once
from fedrot.matching.problem import Problem
from fedrot.symmetry import Group, symmetry_of
from fedrot.symmetry.actions import HeadRotation, Permutation
from fedrot.symmetry.groups import Move, Slice, Slot, apply_moves
from tests import families
from tests.fedrot.oracles import normal, seeded
from tests.models import FULL, cast, movable, tensors_of

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


def bert(width=64, heads=2, layers=1):
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


def isotropic(state, scale, seed):
    """Return the state with noise of one variance on all entries."""
    generator = seeded(10_000 + seed)  # not the numbers that made the state
    return {
        name: tensor
        + scale * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in state.items()
    }


def shares(rows):
    """Return the shares of the distance that groups removed and that chance removes."""
    assert all(row.chance is not None for row in rows)
    found = torch.tensor([[row.found, row.chance] for row in rows])
    return (found / torch.tensor([[row.before] for row in rows])).T


def rows_of(*how):
    """Return the rows of a report, by group."""
    return align(*how).report.groups


def flat(state, group):
    """Return the tensors that a group acts on, in one vector."""
    names = sorted(tensors_of([group]))
    return torch.cat([state[name].double().flatten() for name in names])


def squared(group, state):
    """Return the sum of the squares of a group's slices."""
    blocks = (slot.of(state[slot.tensor]) for slot in group.slots)
    return sum(float(block.double().square().sum()) for block in blocks)


@pytest.mark.parametrize("name", SHAPES)
def test_near_an_anchor_chance_is_the_share_of_free_dimensions(name):
    """Biases, ties, shared heads, phases and signs are counted: sampled shares agree
    for every group.
    """
    state = families.state_of(name)
    symmetry = families.symmetry_for(name)
    options = AlignmentOptions(parts=("attention",), chance=0)
    groups = symmetry.select(options.parts)
    reports = [
        rows_of(isotropic(state, 1e-4, seed), state, symmetry, options)
        for seed in range(12)
    ]
    assert {row.group for row in reports[0]} == {group.name for group in groups}
    found, expected = torch.stack([shares(rows) for rows in reports]).mean(0)
    free = {group.name: group.action.free for group in groups}
    for row, share, claimed in zip(reports[0], found, expected, strict=True):
        # The sampled share is a mean of chi-squared variables: four standard errors.
        error = 4 * (2 / max(free[row.group], 1) / 12) ** 0.5
        assert float(share) == pytest.approx(float(claimed), rel=error), row.group
        assert (claimed > 0) == (free[row.group] > 0)
    error = max(0.05, 4 * (2 / sum(free.values()) / 12) ** 0.5)
    assert float(found.sum()) == pytest.approx(float(expected.sum()), rel=error)


@pytest.mark.parametrize(
    ("name", "scale"),
    [(name, 1e-3) for name in families.KINDS]
    + [(name, 0.3) for name in ("bert", "llama", "gemma3", "t5")],
)
def test_noise_moves_hardly_any_group(name, scale):
    state = families.state_of(name)
    symmetry = families.symmetry_for(name)
    options = AlignmentOptions(movable(symmetry, FULL))
    rows = [
        row
        for seed in range(8)
        for row in rows_of(isotropic(state, scale, seed), state, symmetry, options)
    ]
    assert len(rows) >= 20
    assert sum(row.moved > 0 for row in rows) <= 0.01 * len(rows)


def test_far_from_an_anchor_chance_is_drawn():
    """An independent sample of noisy clients loses what the report of one of them
    says.
    """
    state, symmetry = bert()
    judged = AlignmentOptions(parts=("attention", "ffn"))
    moving = replace(judged, chance=0)
    found, claimed = torch.zeros(2, 3)
    for seed in range(8):
        update, other = (isotropic(state, 0.06, s) for s in (seed, 100 + seed))
        claimed += shares(rows_of(update, state, symmetry, judged))[1] / 8
        rows = rows_of(other, state, symmetry, moving)
        found += torch.tensor([row.found / row.before for row in rows]) / 8
    for share, said in zip(found, claimed, strict=True):
        assert float(said) == pytest.approx(float(share), rel=0.05, abs=5e-4)


@pytest.mark.parametrize(
    ("anchor", "factor"), [("global", 0.0), ("running", 0.0), ("running", 1e6)]
)
def test_the_anchor_s_own_noise_is_accounted_for(anchor, factor):
    """The first client, the mean of k others, an anchor that contains the client: all
    as sampled.
    """
    state, symmetry = bert(heads=4)
    options = AlignmentOptions(parts=("attention",), chance=factor, anchor=anchor)
    sums = torch.zeros(5, 2)
    for seed in range(12):
        updates = [
            (isotropic(state, 1e-5, 10 * seed + k), 1.0 + (k == 2)) for k in range(5)
        ]
        for k, result in enumerate(align_round(updates, state, symmetry, options)):
            rows = result.alignment.report.groups
            sums[k] += shares(rows).sum(1)
            assert all(bool(row.moved) is (factor == 0) for row in rows)
    # Where nothing is moved, ``found`` is an upper bound.
    excess = sums[:, 0] / sums[:, 1] - 1
    assert excess.min() > -0.05
    assert excess.max() < (0.05 if factor == 0 else 0.15)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 3.0), st.integers(2, 6))
def test_the_ceiling_is_never_below_the_best_gain(seed, scale, dim):
    rows, noise = normal(seeded(seed), 2, 3, dim, 2 * dim)
    evidence = rows @ (rows + scale * noise).mT
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
        larger = (least + most) ** 2 / (4 * least * most) - 1
        assert bool((ceiling - gains <= larger.clamp_min(0.5) * gains + 1e-6).all())


@pytest.mark.parametrize(
    ("turned", "moving"),
    [((0, 1, 2), {0, 1, 2}), ((1,), {1}), ((0, 2), {0, 1, 2}), ((), set())],
)
def test_layers_with_evidence_move_and_most_of_them_speak_for_all(turned, moving):
    """And what does not move stays the same object."""
    state, symmetry = bert(layers=3)
    other = random_equivalent(state, symmetry, 1, ("attention",))
    turned_layers = tuple(f"bert.encoder.layer.{layer}." for layer in turned)
    start = {
        name: (other if name.startswith(turned_layers) else state)[name]
        for name in state
    }
    update = isotropic(start, 1e-3, 2)
    alignment = align(update, state, symmetry)
    report = alignment.report
    groups = [move.group for move in alignment.moves]
    assert {(g.part, g.layer) for g in groups} == {("attention", i) for i in moving}
    moved = tensors_of(groups)
    for name, tensor in alignment.apply(update).items():
        assert (tensor is update[name]) == (name not in moved)
        assert_close(tensor, state[name], atol=1e-2, rtol=0)
    for row in report.groups:
        attention = row.part == "attention"
        assert (row.moved > 0) == (attention and row.layer in moving)
        if not row.moved:
            assert row.before == row.after
            assert row.skipped is attention
            assert row.found <= 1.2 * (row.chance or 0.0)
    if len(turned) == 3:
        assert report.found("attention") > 2 * (report.chance("attention") or 1)


def _group(heads, dim):
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
def test_what_is_required_is_the_quantile_or_the_factor(group, given_, expected):
    assert chance.threshold(group, *given_) == pytest.approx(expected, rel=0.01)
    assert chance.threshold(LARGE, 100.0, 2.0, 1.0) > 2.001
    for share in (0.3, 0.9, 0.99):
        assert share < chance.threshold(ONE, 1.0, share, 1.5) <= 1


@pytest.mark.parametrize(("free", "entries"), [(1, 4), (3, 10), (28, 100)])
def test_noise_exceeds_the_quantile_once_in_so_many_times(free, entries, monkeypatch):
    monkeypatch.setattr(chance, "ONCE_IN", 1000)
    noise = torch.randn(200_000, entries, generator=seeded(3)).square()
    share = noise[:, :free].sum(1) / noise.sum(1)
    exceeded = (
        (share > chance._beta_quantile.__wrapped__(free, free / entries))
        .double()
        .mean()
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
def test_most_groups_speak_for_all_of_their_action(gains, needs, expected):
    assert chance.beyond(gains, needs) == expected


def test_null_models_keep_distance_and_projection():
    state, symmetry = bert()
    update = isotropic(state, 0.04, 4)
    for group in symmetry.groups:
        names = tensors_of([group])
        anchor, client = (flat(model, group) for model in (state, update))
        drawn = list(null_models({group: line_of(group, state, update)}, state, update))
        for model in drawn:
            assert {n for n in update if model[n] is not update[n]} == names
            null = flat(model, group)
            distance = float((client - anchor).norm())
            assert float((null - anchor).norm()) == pytest.approx(distance, rel=0.1)
            assert abs((client - null) @ anchor / (anchor @ anchor)) < 0.1
        # A group is drawn alike in every run, whatever is drawn beside it.
        apart = group.part in ("heads", "attention")
        beside = symmetry.select(("ffn",)) if apart else ()
        lines = {g: line_of(g, state, update) for g in (*beside, group)}
        again = next(null_models(lines, state, update))
        assert all(torch.equal(again[n], drawn[0][n]) for n in names)


def test_spread_of_a_mean_of_equals():
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
def test_what_noise_removes_stays_below_its_quantile(part, inner, scale):
    """Of orders of neurons, and of heads with the best rotation inside, from near to
    far.
    """
    state, symmetry = bert(16, heads=4)
    (group,) = symmetry.select((part,))
    options = AlignmentOptions((part, "attention") if inner else (part,), chance=0)
    removed = []
    bounds = []
    for seed in range(20):
        null = isotropic(state, scale, seed)
        alignment = align(null, state, symmetry, options)
        rows = {row.group: row.found for row in alignment.report.groups}
        removed.append(rows[group.name])
        for move in alignment.moves:
            if move.group is group:
                how = (group, state, move.element, line_of(group, state, null))
                bounds.append((removed[-1], partial(chance.quantile_of_null, *how)))
    mean = sum(removed) / len(removed)
    assert all(found < bound(mean, inner) for found, bound in bounds)
    # The bounds are not empty: orders that were really there are far beyond them.
    turned = random_equivalent(isotropic(state, 0.003, 1), symmetry, 2, (part,))
    rows = rows_of(turned, state, symmetry, AlignmentOptions(parts=(part,)))
    assert all(row.moved for row in rows)


@pytest.mark.parametrize(
    ("parts", "draws"), [(("ffn",), 1), (("heads", "ffn"), chance.MOST_DRAWS)]
)
def test_a_large_group_is_drawn_once_and_a_small_one_beside_it_more_often(parts, draws):
    """More neurons than ``ENOUGH``, as BERT-base has in a layer."""
    state, symmetry = bert(16)
    *others, ffn = symmetry.select(parts)
    large = replace(ffn, action=replace(ffn.action, n=chance.ENOUGH + 100))
    lines = dict.fromkeys([*others, large], chance.NullLine(1.0, 0.1))
    assert len(list(null_models(lines, state, state))) == draws


def test_the_quantile_of_heads_counts_four_times_the_norm_of_those_that_move():
    state, symmetry = bert(16)
    (group,) = symmetry.select(("heads",))
    norm = squared(group, state)
    most = 2 * 0.5 * (2 * 1.2 * 4 * norm * math.log(chance.ONCE_IN * 100)) ** 0.5
    line = chance.NullLine(0.0, 0.5)
    found = chance.quantile_of_null(group, state, torch.tensor([1, 0]), line, 3.0, True)
    assert found == pytest.approx(3 + most)


def test_the_quantile_of_orders_bounds_all_of_them_together():
    state, symmetry = bert(16)
    (group,) = symmetry.select(("ffn",))
    units = group.action.units
    entries = count_once(group.slots, state)
    order = torch.arange(units)
    order[[3, 5, 8]] = order[[5, 8, 3]]
    moved = apply_moves(state, [Move(group, order)])
    way = squared(group, {n: moved[n].double() - t for n, t in state.items()})
    bound = math.log(chance.ONCE_IN) + 3 * math.log(2 * units) + math.log(units)
    cosine = (1 - math.exp(-2 * bound / (entries - 2))) ** 0.5
    length = way - way**2 / (4 * squared(group, state))
    expected = 2 * 0.5 * (entries * length) ** 0.5 * cosine - 0.25 * way
    line = chance.NullLine(0.25, 0.5)
    found = chance.quantile_of_null(group, state, order, line, 3.0, False)
    assert found == pytest.approx(expected, rel=1e-6)


def test_groups_that_share_a_tensor_are_in_different_lists():
    tensors = {"a": "x", "b": "xy", "c": "z", "d": "y", "e": "zx"}
    groups = [
        Group(name, 0, "ffn", ORDERS.action, [Slot(t, 0, Slice(0, 4)) for t in touched])
        for name, touched in tensors.items()
    ]
    batches = without_common_tensors(groups)
    names = ["".join(group.name for group in batch) for batch in batches]
    assert names == ["acd", "b", "e"]
    assert without_common_tensors([]) == []


def test_near_is_up_to_a_twentieth_of_the_anchor_and_entries_count_once():
    """Queries and keys have biases; values do, and output projections do not."""
    state, symmetry = bert(width=8, heads=2)
    problem = Problem(Anchor(state), state, symmetry, AlignmentOptions())
    counts = {"qk": 2 * (64 + 8), "vo": 2 * 64 + 8}
    for group in symmetry.select(("attention",)):
        entries = counts.pop(group.name.split(".")[-1])
        assert count_once(group.slots, state) == entries
        assert count_once((*group.slots, *group.slots), state) == entries
        slot = group.slots[0]
        assert count_once((slot, replace(slot, axis=1)), state) == 64
        most = 0.05 * problem.anchor.size(group)
        near = most * group.action.free / entries
        assert chance.near_chance(problem, group, most) == pytest.approx(near)
        assert chance.near_chance(problem, group, 1.0001 * most) is None
    assert not counts


def test_a_multiple_of_the_anchor_has_no_noise_and_none_of_nothing_a_slope():
    state, symmetry = bert(16)
    (group,) = symmetry.select(("ffn",))
    exact = cast(state, torch.float64)
    # Of some, the squared distance is negative by rounding, and its root would be
    # complex.
    for factor in (0.1, *(i / 20 for i in range(1, 60))):
        line = line_of(group, exact, {n: t * factor for n, t in exact.items()})
        assert line.slope == pytest.approx(factor)
        assert 0 <= line.size < 1e-6
    line = line_of(group, {name: 0 * t for name, t in state.items()}, state)
    assert line.slope == 0
    size = (squared(group, state) / count_once(group.slots, state)) ** 0.5
    assert line.size == pytest.approx(size)


def test_a_null_model_has_the_client_s_norm_and_projection_and_noise_of_its_own():
    """Equal noise in all layers would agree on an order of the stream: chance would be
    too large.
    """
    anchor, symmetry = bert(layers=2)
    client = {
        n: 2 * t + 0.02 * torch.randn(t.shape, generator=seeded(1))
        for n, t in anchor.items()
    }
    groups = symmetry.select(WHOLE_MODEL)
    one, other = (f"bert.encoder.layer.{i}.attention.self.key.weight" for i in range(2))
    null = chance.null_model(anchor, client, groups)
    noise = []
    for name in (one, other):
        a, c, drawn = (
            model[name].double().flatten() for model in (anchor, client, null)
        )
        slope = drawn @ a / (a @ a)
        assert float(slope) == pytest.approx(float(c @ a / (a @ a)), rel=0.05)
        assert float(drawn.norm()) == pytest.approx(float(c.norm()), rel=0.05)
        rest = drawn - a * slope
        noise.append(rest / rest.norm())
    assert abs(noise[0] @ noise[1]) < 0.2
    client[other] = client[one]
    null = chance.null_model(anchor, client, groups)
    assert null[one] is null[other], "tied tensors are one"
