"""A round's anchors: the mean does not depend on the coordinates in which the clients
reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedrot import (
    WHOLE_MODEL,
    Activations,
    AlignmentOptions,
    Symmetry,
    UpdateError,
    align,
    align_round,
    random_equivalent,
    symmetry_of,
)
from fedrot.aggregation import Mean
from fedrot.alignment import anchors
from fedrot.alignment.align import Alignment
from fedrot.alignment.anchors import (
    SAME_BASIS,
    AlignedUpdate,
    RunningAnchor,
    base_cosine,
)
from fedrot.collect.activations import probing
from fedrot.matching.anchor import Anchor
from fedrot.tensors import Tensors
from tests.models import (
    BARE,
    EAGER,
    EVERY,
    FULL,
    State,
    align_tensors,
    config_of,
    largest_difference,
    near,
    squared_distance,
    state_of,
    symmetry_for,
)

ANCHOR = pytest.mark.parametrize("anchor", ["global", "running"])
NAME = "bert-classifier"
WHOLE = AlignmentOptions(parts=WHOLE_MODEL)
DEFAULT = {"attention", "ffn"}
WEIGHTS = (3.0, 1.0, 2.0, 5.0)

Round = list[tuple[State, float]]


def _clients(broadcast: State, scale: float = 0.1) -> Round:
    return [
        (near(broadcast, scale, 30 + i), weight) for i, weight in enumerate(WEIGHTS)
    ]


def _mean(clients: Round) -> State:
    mean = Mean()
    for update, weight in clients:
        mean.add(update, weight)
    return mean.result()


def _round(
    clients: Round,
    broadcast: State,
    symmetry: Symmetry,
    anchor: str,
    options: AlignmentOptions = EAGER,
    **given: Any,
) -> tuple[State, list[AlignedUpdate]]:
    options = replace(options, anchor=anchor)
    results = list(align_round(clients, broadcast, symmetry, options, **given))
    return _mean([(dict(result.tensors), result.weight) for result in results]), results


def _parts(result: AlignedUpdate) -> set[str]:
    return {row.part for row in result.alignment.report.groups}


@ANCHOR
def test_clients_of_one_basis_are_averaged_as_they_are_and_others_brought_back(
    anchor: str,
) -> None:
    """Brought back, a client is fitted to the noise of its anchor too: by that the
    means differ.
    """
    broadcast, symmetry, defaults = (
        state_of(NAME),
        symmetry_for(NAME),
        AlignmentOptions(),
    )
    clients = _clients(broadcast)
    scrambled = [
        (random_equivalent(update, symmetry, seed), weight)
        for seed, (update, weight) in enumerate(clients)
    ]
    honest, results = _round(clients, broadcast, symmetry, anchor, defaults)
    assert not any(result.alignment.moves for result in results)
    assert largest_difference(honest, _mean(clients)) == 0
    found, _ = _round(scrambled, broadcast, symmetry, anchor, defaults)
    lost = squared_distance(_mean(scrambled), honest)
    assert squared_distance(found, honest) < 1e-2 * lost


@ANCHOR
def test_each_update_is_aligned_to_its_anchor_and_inputs_stay(anchor: str) -> None:
    """To the broadcast model, or to the weighted mean of the aligned updates before
    it.
    """
    broadcast = state_of(NAME)
    symmetry = symmetry_for(NAME)
    clients = [(state_of(NAME, 60 + i), weight) for i, weight in enumerate(WEIGHTS)]
    _, results = _round(clients, broadcast, symmetry, anchor)
    aligned = []
    for i, (result, weight) in enumerate(zip(results, WEIGHTS, strict=True)):
        to = broadcast if anchor == "global" or i == 0 else _mean(aligned)
        update = state_of(NAME, 60 + i)
        assert largest_difference(clients[i][0], update) == 0
        expected = align_tensors(update, to, symmetry, EAGER)
        assert largest_difference(result.tensors, expected) <= 1e-8
        aligned.append((expected, weight))
    assert largest_difference(broadcast, state_of(NAME)) == 0


@ANCHOR
def test_updates_are_read_lazily_and_a_bad_one_is_refused(anchor: str) -> None:
    broadcast = state_of(NAME)
    symmetry = symmetry_for(NAME)
    clients = _clients(broadcast)
    read = list[int]()
    clients[3][0]["bert.encoder.layer.0.intermediate.dense.weight"][0, 0] = float("nan")

    def updates() -> Iterator[tuple[State, float]]:
        for i, client in enumerate(clients):
            read.append(i)
            yield client

    options = AlignmentOptions(anchor=anchor)
    assert list(align_round([], broadcast, symmetry, options)) == []
    results = align_round(updates(), broadcast, symmetry, options)
    assert read == []
    for i in range(3):
        next(results)
        assert read == list(range(i + 1))
    with pytest.raises(UpdateError, match="NaN or Inf"):
        next(results)


# Updates from other bases


@pytest.mark.parametrize("name", EVERY)
def test_embeddings_tell_one_base_from_another(name: str) -> None:
    base = state_of(name)
    symmetry = symmetry_for(name)
    inside = random_equivalent(base, symmetry, 1, FULL)
    for same in (base, inside):
        assert base_cosine(same, base, symmetry) == pytest.approx(1, abs=1e-12)
    assert base_cosine(near(base, 0.1), base, symmetry) > 0.98
    assert base_cosine(
        {k: -v for k, v in base.items()}, base, symmetry
    ) == pytest.approx(-1)
    for other in (
        random_equivalent(base, symmetry, 1, ("residual",)),
        state_of(name, 5),
    ):
        assert abs(base_cosine(other, base, symmetry)) < 0.25
        assert base_cosine(other, base, symmetry) == pytest.approx(
            base_cosine(base, other, symmetry)
        )


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
    ours: Any,
    theirs: Any,
    compared: int,
    monkeypatch: Any,
) -> None:
    """In any precision; of large ones, rows at even distances are compared."""
    monkeypatch.setattr(anchors, "_COMPARED", compared)
    one = state_of(NAME, dtype=ours)
    other = near(state_of(NAME, dtype=theirs), 0.7)
    names = [
        f"bert.embeddings.{action}_embeddings.weight"
        for action in ("word", "position", "token_type")
    ]
    steps = [-(-one[name].numel() // compared) for name in names]
    left, right = (
        torch.cat(
            [
                s[n].double()[::step].flatten()
                for n, step in zip(names, steps, strict=True)
            ]
        )
        for s in (one, other)
    )
    expected = float(left @ right / (left.norm() * right.norm()))
    assert base_cosine(other, one, symmetry_for(NAME)) == pytest.approx(
        expected, abs=1e-5
    )


def test_where_nothing_can_be_compared_all_bases_are_one() -> None:
    for name in BARE:
        symmetry = symmetry_of(config_of(name), state_of(name))
        assert base_cosine(state_of(name, 5), state_of(name), symmetry) == 1
    base = state_of(NAME)
    zeros = {k: torch.zeros_like(v) for k, v in base.items()}
    assert base_cosine(zeros, base, symmetry_for(NAME)) == 1
    assert base_cosine(base, zeros, symmetry_for(NAME)) == 1


@ANCHOR
def test_other_basis_updates_are_aligned_by_their_own_options_and_evidence(
    anchor: str,
) -> None:
    """Evidence is asked for only where the residual stream is matched; empty one
    changes nothing.
    """
    broadcast = state_of(NAME)
    symmetry = symmetry_for(NAME)
    clients = _clients(broadcast, 0.02)
    asked = list[float]()
    moved = list(clients)
    for i in (1, 3):
        update = random_equivalent(clients[i][0], symmetry, i, WHOLE_MODEL)
        moved[i] = (update, clients[i][1])

    def evidence(to: State, update: State) -> Activations:
        asked.append(base_cosine(update, to, symmetry))
        return Activations({}, {})

    given = (broadcast, symmetry, anchor)
    plain, _ = _round(clients, *given)
    expected, _ = _round(clients, *given, other_basis=WHOLE, evidence=evidence)
    assert largest_difference(expected, plain) == 0
    inside = AlignmentOptions(parts=("heads", "ffn"))
    _round(moved, *given, other_basis=inside, evidence=evidence)
    assert asked == []
    found, results = _round(moved, *given, other_basis=WHOLE, evidence=evidence)
    assert largest_difference(found, expected) <= 1e-6
    assert [_parts(result) for result in results] == [
        DEFAULT,
        {*WHOLE_MODEL},
    ] * 2
    assert len(asked) == 2
    assert max(asked) < SAME_BASIS
    again, _ = _round(moved, *given, other_basis=WHOLE)
    assert largest_difference(found, again) == 0
    without, results = _round(moved, *given)
    assert largest_difference(without, expected) > 0.1
    assert _parts(results[1]) == DEFAULT
    asked.clear()
    _round(clients[:2], *given, WHOLE, evidence=evidence)
    assert len(asked) == 2
    assert min(asked) > 0.9


def test_evidence_decides_what_weights_leave_open() -> None:
    """Activations of both models, handed on as they were given: the oracle is ``align``
    itself.
    """
    broadcast = state_of(NAME, dtype=torch.float32)
    update = state_of(NAME, 5, torch.float32)
    symmetry = symmetry_for(NAME)
    drawn = [0]

    def initialised() -> Any:
        before = torch.random.get_rng_state()
        model = EVERY[NAME].build("eager")
        drawn[0] += not torch.equal(torch.random.get_rng_state(), before)
        return model

    evidence = probing(
        initialised, config_of(NAME).to_dict(), symmetry, rows=64, seed=1
    )
    before = torch.random.get_rng_state()
    seen = evidence(broadcast, update)
    # The models that it builds are initialised at random; the caller's random numbers
    # stay.
    assert torch.equal(torch.random.get_rng_state(), before)
    assert drawn == [2]
    given = {"other_basis": WHOLE, "evidence": evidence}
    _, (result,) = _round([(update, 1.0)], broadcast, symmetry, "global", **given)
    expected = align_tensors(update, broadcast, symmetry, WHOLE, seen)
    assert largest_difference(result.tensors, expected) == 0
    by_weights = align_tensors(update, broadcast, symmetry, WHOLE)
    assert largest_difference(result.tensors, by_weights) > 1e-3


@ANCHOR
def test_clients_that_trained_far_from_one_start_share_a_basis(anchor: str) -> None:
    """Their cosine with the broadcast model is above the limit; that with each other is
    not.
    """
    base = state_of(NAME)
    symmetry = symmetry_for(NAME)
    updates = [near(base, 2.5, seed) for seed in (1, 2)]
    assert all(base_cosine(update, base, symmetry) > SAME_BASIS for update in updates)
    assert base_cosine(*updates, symmetry) < SAME_BASIS
    given = [(update, 1.0) for update in updates]
    _, results = _round(
        given, base, symmetry, anchor, AlignmentOptions(), other_basis=WHOLE
    )
    assert [_parts(result) for result in results] == [DEFAULT, DEFAULT]


def test_the_running_anchor_moves_by_the_share_of_each_update(
    monkeypatch: Any,
) -> None:
    """Bounds on its neurons shrink by as much."""
    shares = []
    move = Anchor.towards_last

    def recorded(anchor: Anchor, tensors: Any, share: float) -> Anchor:
        shares.append(share)
        return move(anchor, tensors, share)

    monkeypatch.setattr(Anchor, "towards_last", recorded)
    base = state_of(NAME)
    updates = [
        (near(base, 0.01, seed), weight)
        for seed, weight in ((1, 1.0), (2, 3.0), (3, 4.0))
    ]
    _round(updates, base, symmetry_for(NAME), "running")
    assert shares == pytest.approx([1.0, 0.75, 0.5])


def test_an_anchor_forgets_whom_it_was_not_moved_towards() -> None:
    """An update is aligned to it and dropped; the next one is aligned to the broadcast
    model.
    """
    base = state_of(NAME)
    symmetry = symmetry_for(NAME)
    broadcast = Anchor(base)
    refused = list[Anchor]()

    def find(update: Tensors, to: Anchor) -> Alignment:
        if any(to is one for one in refused):
            raise UpdateError("cannot be matched")
        return align(update, to, symmetry)

    rule = RunningAnchor(broadcast, find)
    first, dropped, last = (near(base, 1e-3, seed) for seed in (1, 2, 3))
    rule.accept(rule.align(first).apply(first), 1.0)
    rule.align(dropped)
    refused.append(rule.current)
    rule.accept(rule.align(last).apply(last), 1.0)
    assert not rule.current.spread.along
    assert not rule.current._known.bounds
