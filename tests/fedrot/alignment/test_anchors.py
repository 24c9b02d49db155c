"""A round's anchors: the mean does not depend on the coordinates in which the clients
reply.
"""

from dataclasses import replace

import pytest
import torch

from fedrot import (
    WHOLE_MODEL,
    Activations,
    AlignmentOptions,
    UpdateError,
    align,
    align_round,
    random_equivalent,
    symmetry_of,
)
from fedrot.aggregation import Mean
from fedrot.alignment import anchors
from fedrot.alignment.anchors import (
    SAME_BASIS,
    RunningAnchor,
    base_cosine,
)
from fedrot.collect.activations import probing
from fedrot.matching.anchor import Anchor
from tests.models import (
    BARE,
    EAGER,
    EVERY,
    FULL,
    align_tensors,
    config_of,
    copied,
    largest_difference,
    near,
    same,
    squared_distance,
    state_of,
    symmetry_for,
)

ANCHOR = pytest.mark.parametrize("anchor", ["global", "running"])
NAME = "bert-classifier"
BASE, SYMMETRY = state_of(NAME), symmetry_for(NAME)
WHOLE = AlignmentOptions(parts=WHOLE_MODEL)
DEFAULT = {"attention", "ffn"}
WEIGHTS = (3.0, 1.0, 2.0, 5.0)


def _clients(scale=0.1):
    return [(near(BASE, scale, 30 + i), weight) for i, weight in enumerate(WEIGHTS)]


def _mean(clients):
    mean = Mean()
    for update, weight in clients:
        mean.add(update, weight)
    return mean.result()


def _round(clients, anchor, options=EAGER, **how):
    options = replace(options, anchor=anchor)
    results = list(align_round(clients, BASE, SYMMETRY, options, **how))
    return _mean([(dict(result.tensors), result.weight) for result in results]), results


def _parts(result):
    return {row.part for row in result.alignment.report.groups}


@ANCHOR
def test_clients_of_one_basis_are_averaged_as_they_are_and_others_brought_back(
    anchor,
):
    """Brought back, a client is fitted to the noise of its anchor too: by that the
    means differ.
    """
    clients = _clients()
    scrambled = [
        (random_equivalent(update, SYMMETRY, seed), weight)
        for seed, (update, weight) in enumerate(clients)
    ]
    honest, results = _round(clients, anchor, AlignmentOptions())
    assert not any(result.alignment.moves for result in results)
    assert same(honest, _mean(clients))
    found, _ = _round(scrambled, anchor, AlignmentOptions())
    lost = squared_distance(_mean(scrambled), honest)
    assert squared_distance(found, honest) < 1e-2 * lost


@ANCHOR
def test_each_update_is_aligned_to_its_anchor_and_inputs_stay(anchor):
    """To the broadcast model, or to the weighted mean of the aligned updates before
    it.
    """
    updates = [state_of(NAME, 60 + i) for i in range(len(WEIGHTS))]
    kept = [copied(state) for state in (BASE, *updates)]
    _, results = _round([*zip(updates, WEIGHTS, strict=True)], anchor)
    assert all(map(same, kept, (BASE, *updates)))
    aligned = []
    for result, update, weight in zip(results, updates, WEIGHTS, strict=True):
        to = BASE if anchor == "global" or not aligned else _mean(aligned)
        expected = align_tensors(update, to, SYMMETRY, EAGER)
        assert largest_difference(result.tensors, expected) <= 1e-8
        aligned.append((expected, weight))


@ANCHOR
def test_updates_are_read_lazily_and_a_bad_one_is_refused(anchor):
    clients = _clients()
    read = []
    clients[3][0]["bert.encoder.layer.0.intermediate.dense.weight"][0, 0] = float("nan")
    updates = (read.append(i) or client for i, client in enumerate(clients))
    options = AlignmentOptions(anchor=anchor)
    assert list(align_round([], BASE, SYMMETRY, options)) == []
    results = align_round(updates, BASE, SYMMETRY, options)
    for i in range(3):
        assert read == list(range(i))
        next(results)
    with pytest.raises(UpdateError, match="NaN or Inf"):
        next(results)


# Updates from other bases


@pytest.mark.parametrize("name", EVERY)
def test_embeddings_tell_one_base_from_another(name):
    base = state_of(name)

    def cosine(state, to=base):
        return base_cosine(state, to, symmetry_for(name))

    inside, across = (
        random_equivalent(base, symmetry_for(name), 1, parts)
        for parts in (FULL, ("residual",))
    )
    for state, expected in (
        (base, 1),
        (inside, 1),
        ({k: -v for k, v in base.items()}, -1),
    ):
        assert cosine(state) == pytest.approx(expected, abs=1e-12)
    assert cosine(near(base, 0.1)) > 0.98
    for other in (across, state_of(name, 5)):
        assert abs(cosine(other)) < 0.25
        assert cosine(other) == pytest.approx(cosine(base, other))


@pytest.mark.parametrize("compared", [2**20, 100])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_the_cosine_is_that_of_the_matrices_of_the_stream(
    ours, theirs, compared, monkeypatch
):
    """In any precision; of large ones, rows at even distances are compared."""
    monkeypatch.setattr(anchors, "_COMPARED", compared)
    one = state_of(NAME, dtype=ours)
    other = near(state_of(NAME, dtype=theirs), 0.7)
    rows = []
    for action in ("word", "position", "token_type"):
        name = f"bert.embeddings.{action}_embeddings.weight"
        step = -(-one[name].numel() // compared)
        both = (state[name].double()[::step].flatten() for state in (one, other))
        rows.append(torch.stack([*both]))
    left, right = torch.cat(rows, 1)
    expected = float(left @ right / (left.norm() * right.norm()))
    assert base_cosine(other, one, SYMMETRY) == pytest.approx(expected, abs=1e-5)


def test_where_nothing_can_be_compared_all_bases_are_one():
    for name in BARE:
        symmetry = symmetry_of(config_of(name), state_of(name))
        assert base_cosine(state_of(name, 5), state_of(name), symmetry) == 1
    zeros = {name: torch.zeros_like(tensor) for name, tensor in BASE.items()}
    for pair in ((zeros, BASE), (BASE, zeros)):
        assert base_cosine(*pair, SYMMETRY) == 1


@ANCHOR
def test_other_basis_updates_are_aligned_by_their_own_options_and_evidence(
    anchor,
):
    """Evidence is asked for only where the residual stream is matched; empty one
    changes nothing.
    """
    clients = _clients(0.02)
    asked = list[float]()
    moved = list(clients)
    for i in (1, 3):
        update, weight = clients[i]
        moved[i] = (random_equivalent(update, SYMMETRY, i, WHOLE_MODEL), weight)

    def evidence(to, update):
        asked.append(base_cosine(update, to, SYMMETRY))
        return Activations({}, {})

    def mean(clients, *options, **how):
        return _round(clients, anchor, *options, **how)[0]

    expected = mean(clients, other_basis=WHOLE, evidence=evidence)
    assert same(expected, mean(clients))
    mean(moved, other_basis=AlignmentOptions(parts=("heads", "ffn")), evidence=evidence)
    assert asked == []
    found, results = _round(moved, anchor, other_basis=WHOLE, evidence=evidence)
    assert largest_difference(found, expected) <= 1e-6
    assert [_parts(result) for result in results] == [DEFAULT, {*WHOLE_MODEL}] * 2
    assert len(asked) == 2
    assert max(asked) < SAME_BASIS
    assert same(found, mean(moved, other_basis=WHOLE))
    without, results = _round(moved, anchor)
    assert largest_difference(without, expected) > 0.1
    assert _parts(results[1]) == DEFAULT
    asked.clear()
    mean(clients[:2], WHOLE, evidence=evidence)
    assert len(asked) == 2
    assert min(asked) > 0.9


def test_evidence_decides_what_weights_leave_open():
    """Activations of both models, handed on as they were given: the oracle is ``align``
    itself.
    """
    broadcast = state_of(NAME, dtype=torch.float32)
    update = state_of(NAME, 5, torch.float32)
    drawn = []

    def initialised():
        before = torch.random.get_rng_state()
        model = EVERY[NAME].build("eager")
        drawn.append(not torch.equal(torch.random.get_rng_state(), before))
        return model

    config = config_of(NAME).to_dict()
    evidence = probing(initialised, config, SYMMETRY, rows=64, seed=1)
    before = torch.random.get_rng_state()
    seen = evidence(broadcast, update)
    # The models that it builds are initialised at random; the caller's random numbers
    # stay.
    assert torch.equal(torch.random.get_rng_state(), before)
    assert drawn == [True, True]
    (result,) = align_round(
        [(update, 1.0)],
        broadcast,
        SYMMETRY,
        replace(EAGER, anchor="global"),
        other_basis=WHOLE,
        evidence=evidence,
    )
    assert same(result.tensors, align_tensors(update, broadcast, SYMMETRY, WHOLE, seen))
    by_weights = align_tensors(update, broadcast, SYMMETRY, WHOLE)
    assert largest_difference(result.tensors, by_weights) > 1e-3


@ANCHOR
def test_clients_that_trained_far_from_one_start_share_a_basis(anchor):
    """Their cosine with the broadcast model is above the limit; that with each other is
    not.
    """
    updates = [near(BASE, 2.5, seed) for seed in (1, 2)]
    assert all(base_cosine(update, BASE, SYMMETRY) > SAME_BASIS for update in updates)
    assert base_cosine(*updates, SYMMETRY) < SAME_BASIS
    clients = [(update, 1.0) for update in updates]
    _, results = _round(clients, anchor, AlignmentOptions(), other_basis=WHOLE)
    assert [_parts(result) for result in results] == [DEFAULT, DEFAULT]


def test_the_running_anchor_moves_by_the_share_of_each_update(monkeypatch):
    """Bounds on its neurons shrink by as much."""
    shares = []
    move = Anchor.towards_last

    def recorded(anchor, tensors, share):
        shares.append(share)
        return move(anchor, tensors, share)

    monkeypatch.setattr(Anchor, "towards_last", recorded)
    _round([(near(BASE, 0.01, w), float(w)) for w in (1, 3, 4)], "running")
    assert shares == pytest.approx([1.0, 0.75, 0.5])


def test_an_anchor_forgets_whom_it_was_not_moved_towards():
    """An update is aligned to it and dropped; the next one is aligned to the broadcast
    model.
    """
    refused = list[Anchor]()

    def find(update, to):
        if any(to is anchor for anchor in refused):
            raise UpdateError("cannot be matched")
        return align(update, to, SYMMETRY)

    rule = RunningAnchor(Anchor(BASE), find)
    first, dropped, last = (near(BASE, 1e-3, seed) for seed in (1, 2, 3))
    rule.accept(rule.align(first).apply(first), 1.0)
    rule.align(dropped)
    refused.append(rule.current)
    rule.accept(rule.align(last).apply(last), 1.0)
    assert not rule.current.spread.along
    assert not rule.current._known.bounds
