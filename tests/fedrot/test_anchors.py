"""A round's anchors: the mean does not depend on the coordinates in which the clients reply."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedrot
from fedrot.aggregation import Mean
from fedrot.alignment import Alignment
from fedrot.anchors import SAME_BASIS, AlignedUpdate, RunningAnchor, base_cosine
from fedrot.collect.activations import probing
from fedrot.matching.problem import Anchor
from fedrot.tensors import Tensors
from tests.models import (
    BARE,
    EAGER,
    EVERY,
    FEW,
    State,
    config_of,
    largest_difference,
    logits,
    near,
    squared_distance,
    state_of,
    symmetry_for,
)

ANCHORS = ("global", "running")
ANCHOR = pytest.mark.parametrize("anchor", ANCHORS)
WHOLE = fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL)
HEADS_TOO = fedrot.AlignmentOptions(parts=("heads", "attention", "ffn"), chance=0)
WEIGHTS = (3.0, 1.0, 2.0, 5.0)

Round = list[tuple[State, float]]


def _clients(broadcast: State, scale: float = 0.1, count: int = 4) -> Round:
    return [(near(broadcast, scale, 30 + i), WEIGHTS[i]) for i in range(count)]


def _round(
    clients: Sequence[tuple[State, float]],
    broadcast: State,
    symmetry: fedrot.Symmetry,
    anchor: str,
    options: fedrot.AlignmentOptions = EAGER,
    **given: Any,
) -> tuple[State, list[AlignedUpdate]]:
    results = list(
        fedrot.align_round(
            clients,
            broadcast,
            symmetry,
            replace(options or fedrot.AlignmentOptions(), anchor=anchor),
            **given,
        )
    )
    mean = Mean()
    for result in results:
        mean.add(result.tensors, result.weight)
    return mean.result(), results


def _spread(results: Sequence[AlignedUpdate]) -> float:
    """Return the weighted squared distance of the aligned clients to their weighted mean."""
    total = sum(result.weight for result in results)
    mean = {
        name: torch.stack([r.weight / total * r.tensors[name] for r in results]).sum(0)
        for name in results[0].tensors
    }
    return sum(result.weight * squared_distance(result.tensors, mean) for result in results)


def test_the_anchors_have_their_names() -> None:
    assert set(fedrot.anchors.ANCHORS) >= set(ANCHORS)


@ANCHOR
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("options", [EAGER, HEADS_TOO], ids=["default", "heads"])
def test_scrambling_every_client_does_not_change_the_mean(
    name: str, anchor: str, options: fedrot.AlignmentOptions
) -> None:
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = _clients(broadcast)
    scrambled = [
        (fedrot.random_equivalent(update, symmetry, seed, options.parts), weight)
        for seed, (update, weight) in enumerate(clients)
    ]
    expected, _ = _round(clients, broadcast, symmetry, anchor, options)
    found, results = _round(scrambled, broadcast, symmetry, anchor, options)
    assert largest_difference(found, expected) <= 1e-8
    assert [result.weight for result in results] == [weight for _, weight in clients]
    plain = Mean()
    for update, weight in scrambled:
        plain.add(update, weight)
    assert largest_difference(plain.result(), expected) > 0.1
    for (update, _), result in zip(scrambled, results, strict=True):
        assert (logits(name, result.tensors) - logits(name, update)).abs().max() <= 1e-10


@pytest.mark.parametrize("anchor", ANCHORS)
def test_by_default_clients_of_one_basis_are_averaged_as_they_are_and_others_brought_back(
    anchor: str,
) -> None:
    """Brought back, a client is fitted to the noise of its anchor too: by that the means differ."""
    name, defaults = "bert-classifier", fedrot.AlignmentOptions()
    broadcast, symmetry = state_of(name), symmetry_for(name)
    clients = _clients(broadcast)
    scrambled = [
        (fedrot.random_equivalent(update, symmetry, seed), weight)
        for seed, (update, weight) in enumerate(clients)
    ]
    plain, lost = Mean(), Mean()
    for (update, weight), (other, _) in zip(clients, scrambled, strict=True):
        plain.add(update, weight)
        lost.add(other, weight)
    honest, results = _round(clients, broadcast, symmetry, anchor, defaults)
    assert not any(result.alignment.moves for result in results)
    assert largest_difference(honest, plain.result()) == 0
    found, _ = _round(scrambled, broadcast, symmetry, anchor, defaults)
    assert squared_distance(found, honest) < 1e-2 * squared_distance(lost.result(), honest)


@ANCHOR
def test_far_clients_keep_their_function_and_move_closer(anchor: str) -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = [(state_of(name, 40 + i), WEIGHTS[i]) for i in range(4)]
    _, results = _round(clients, broadcast, symmetry, anchor)
    plain = [
        AlignedUpdate(update, weight, results[i].alignment) for i, (update, weight) in enumerate(clients)
    ]
    assert _spread(results) < _spread(plain)
    for (update, weight), result in zip(clients, results, strict=True):
        assert result.weight == weight
        assert (logits(name, result.tensors) - logits(name, update)).abs().max() <= 1e-10


@ANCHOR
def test_one_client_is_aligned_to_the_broadcast_model(anchor: str) -> None:
    name = "bert-classifier"
    broadcast, update = state_of(name), state_of(name, 2)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    mean, results = _round([(update, 7.0)], broadcast, symmetry, anchor)
    expected = fedrot.align(update, broadcast, symmetry, EAGER).apply(update)
    assert len(results) == 1
    assert largest_difference(results[0].tensors, expected) == 0
    assert largest_difference(mean, expected) <= 1e-15


@ANCHOR
def test_an_empty_round_yields_nothing(anchor: str) -> None:
    broadcast = state_of("bert-classifier")
    symmetry = fedrot.symmetry_of(config_of("bert-classifier"), broadcast)
    assert (
        list(fedrot.align_round([], broadcast, symmetry, fedrot.AlignmentOptions(anchor=anchor))) == []
    )
    assert (
        list(fedrot.align_round(iter(()), broadcast, symmetry, fedrot.AlignmentOptions(anchor=anchor)))
        == []
    )


@ANCHOR
def test_inputs_of_a_round_are_not_changed(anchor: str) -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = [
        (fedrot.random_equivalent(update, symmetry, 1), weight) for update, weight in _clients(broadcast)
    ]
    kept = [{k: v.clone() for k, v in d.items()} for d in (broadcast, *(u for u, _ in clients))]
    _round(clients, broadcast, symmetry, anchor)
    for before, now in zip(kept, (broadcast, *(u for u, _ in clients)), strict=True):
        assert all(torch.equal(before[k], now[k]) for k in before)


def test_global_aligns_every_client_to_the_broadcast_model() -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = [(state_of(name, 60 + i), WEIGHTS[i]) for i in range(3)]
    _, results = _round(clients, broadcast, symmetry, "global")
    for (update, _), result in zip(clients, results, strict=True):
        expected = fedrot.align(update, broadcast, symmetry, EAGER).apply(update)
        assert largest_difference(result.tensors, expected) == 0


def test_running_aligns_to_the_weighted_mean_of_those_before() -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = [(state_of(name, 60 + i), WEIGHTS[i]) for i in range(4)]
    _, results = _round(clients, broadcast, symmetry, "running")
    aligned: Round = []
    for (update, weight), result in zip(clients, results, strict=True):
        anchor = broadcast
        if aligned:
            total = sum(w for _, w in aligned)
            anchor = {k: torch.stack([w / total * t[k] for t, w in aligned]).sum(0) for k in broadcast}
        expected = fedrot.align(update, anchor, symmetry, EAGER).apply(update)
        assert largest_difference(result.tensors, expected) <= 1e-8
        aligned.append((expected, weight))


@ANCHOR
def test_updates_are_read_lazily(anchor: str) -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    read: list[int] = []

    def updates() -> Iterator[tuple[State, float]]:
        for i, client in enumerate(_clients(broadcast)):
            read.append(i)
            yield client

    results = fedrot.align_round(updates(), broadcast, symmetry, fedrot.AlignmentOptions(anchor=anchor))
    assert read == []
    for i in range(4):
        next(results)
        assert read == list(range(i + 1))


@ANCHOR
def test_a_bad_update_is_refused_in_every_round(anchor: str) -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = _clients(broadcast)
    clients[2][0]["bert.encoder.layer.0.intermediate.dense.weight"][0, 0] = float("nan")
    with pytest.raises(fedrot.UpdateError, match="NaN or Inf"):
        list(fedrot.align_round(clients, broadcast, symmetry, fedrot.AlignmentOptions(anchor=anchor)))


def test_an_unknown_anchor_is_refused_at_once() -> None:
    broadcast = state_of("bert-classifier")
    symmetry = fedrot.symmetry_of(config_of("bert-classifier"), broadcast)
    with pytest.raises(fedrot.FedrotError, match="nearest") as caught:
        fedrot.align_round([], broadcast, symmetry, fedrot.AlignmentOptions(anchor="nearest"))
    assert all(anchor in str(caught.value) for anchor in ANCHORS)


# Updates from other bases


@pytest.mark.parametrize("name", EVERY)
def test_embeddings_tell_one_base_from_another(name: str) -> None:
    base, symmetry = state_of(name), symmetry_for(name)
    inside = fedrot.random_equivalent(base, symmetry, 1, ("heads", "attention", "rescale", "ffn"))
    for same in (base, inside):
        assert base_cosine(same, base, symmetry) == pytest.approx(1, abs=1e-12)
    assert base_cosine(near(base, 0.1), base, symmetry) > 0.98
    for wide, narrow in itertools.permutations((torch.float64, torch.float32, torch.bfloat16), 2):
        mixed = ({key: value.to(dtype) for key, value in base.items()} for dtype in (wide, narrow))
        assert base_cosine(*mixed, symmetry) == pytest.approx(1, abs=1e-5)
    assert base_cosine({k: -v for k, v in base.items()}, base, symmetry) == pytest.approx(-1)
    permuted = fedrot.random_equivalent(base, symmetry, 1, ("residual",))
    for other in (permuted, state_of(name, 5)):
        assert abs(base_cosine(other, base, symmetry)) < 0.25
        assert base_cosine(other, base, symmetry) == pytest.approx(base_cosine(base, other, symmetry))


def test_the_cosine_is_that_of_the_matrices_of_the_stream() -> None:
    name = "bert-classifier"
    one, other = state_of(name), near(state_of(name), 0.7)
    names = [f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")]
    left, right = (torch.cat([s[n].flatten() for n in names]) for s in (one, other))
    expected = float(left @ right / (left.norm() * right.norm()))
    assert base_cosine(other, one, symmetry_for(name)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_cosine_of_low_precision_is_that_of_its_values(dtype: torch.dtype) -> None:
    name = "bert-classifier"
    one, other = (state_of(name, seed, dtype) for seed in (0, 5))
    doubles = [{k: v.double() for k, v in s.items()} for s in (one, other)]
    expected = base_cosine(doubles[0], doubles[1], symmetry_for(name))
    assert base_cosine(one, other, symmetry_for(name)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", BARE)
def test_where_nothing_can_be_compared_all_bases_are_one(name: str) -> None:
    symmetry = fedrot.symmetry_of(config_of(name), state_of(name))
    assert base_cosine(state_of(name, 5), state_of(name), symmetry) == 1


def test_embeddings_of_zeros_are_not_foreign() -> None:
    name = "bert-classifier"
    base = state_of(name)
    zeros = {k: torch.zeros_like(v) for k, v in base.items()}
    assert base_cosine(zeros, base, symmetry_for(name)) == 1
    assert base_cosine(base, zeros, symmetry_for(name)) == 1


@ANCHOR
def test_other_basis_updates_are_aligned_by_their_own_options(anchor: str) -> None:
    name = "bert-classifier"
    broadcast, symmetry = state_of(name), symmetry_for(name)
    clients = _clients(broadcast, 0.02)
    moved = list(clients)
    for i in (1, 3):
        update = fedrot.random_equivalent(clients[i][0], symmetry, i, fedrot.WHOLE_MODEL)
        moved[i] = (update, clients[i][1])
    expected, _ = _round(clients, broadcast, symmetry, anchor, other_basis=WHOLE)
    found, results = _round(moved, broadcast, symmetry, anchor, other_basis=WHOLE)
    assert largest_difference(found, expected) <= 1e-6
    assert {g.part for g in results[0].alignment.report.groups} == {"attention", "ffn"}
    assert {g.part for g in results[1].alignment.report.groups} == set(fedrot.WHOLE_MODEL)
    without, results = _round(moved, broadcast, symmetry, anchor)
    assert largest_difference(without, expected) > 0.1
    assert {g.part for g in results[1].alignment.report.groups} == {"attention", "ffn"}


@ANCHOR
def test_without_other_basis_updates_their_options_do_not_matter(anchor: str) -> None:
    name = "bert-classifier"
    broadcast, symmetry = state_of(name), symmetry_for(name)
    clients = _clients(broadcast)
    expected, _ = _round(clients, broadcast, symmetry, anchor)
    found, _ = _round(clients, broadcast, symmetry, anchor, other_basis=WHOLE, evidence=_unwanted)
    assert largest_difference(found, expected) == 0


def _unwanted(anchor: Any, update: Any) -> fedrot.Activations:
    raise AssertionError("nobody matches the residual stream")


def _counted(asked: list[float], symmetry: fedrot.Symmetry) -> Any:
    """Return evidence of nothing that notes the cosine of each pair it is asked about."""

    def evidence(to: State, update: State) -> fedrot.Activations:
        asked.append(base_cosine(update, to, symmetry))
        return fedrot.Activations({}, {})

    return evidence


@ANCHOR
def test_evidence_is_asked_for_only_where_the_residual_stream_is_matched(anchor: str) -> None:
    name = "bert-classifier"
    broadcast, symmetry = state_of(name), symmetry_for(name)
    clients = _clients(broadcast, 0.02)
    clients[2] = (state_of(name, 5), clients[2][1])
    asked: list[float] = []
    evidence = _counted(asked, symmetry)
    found, _ = _round(clients, broadcast, symmetry, anchor, other_basis=WHOLE, evidence=evidence)
    assert asked
    assert max(asked) < 0.25
    # Empty evidence changes nothing.
    expected, _ = _round(clients, broadcast, symmetry, anchor, other_basis=WHOLE)
    assert largest_difference(found, expected) == 0
    inside = fedrot.AlignmentOptions(parts=("heads", "ffn"))
    _round(clients, broadcast, symmetry, anchor, other_basis=inside, evidence=_unwanted)
    asked.clear()
    _round(clients[:2], broadcast, symmetry, anchor, WHOLE, evidence=evidence)
    assert len(asked) >= 2
    assert min(asked) > 0.9


def test_evidence_decides_what_weights_leave_open() -> None:
    """Activations of both models, handed on as they were given: the oracle is ``align`` itself."""
    name = "bert-classifier"
    broadcast, update = state_of(name, dtype=torch.float32), state_of(name, 5, torch.float32)
    symmetry = symmetry_for(name)
    build = EVERY[name].build
    evidence = probing(lambda: build("eager"), config_of(name).to_dict(), symmetry, rows=64, seed=1)
    _, (result,) = _round(
        [(update, 1.0)], broadcast, symmetry, "global", other_basis=WHOLE, evidence=evidence
    )
    seen = evidence(broadcast, update)
    expected = fedrot.align(update, broadcast, symmetry, WHOLE, seen).apply(update)
    assert largest_difference(result.tensors, expected) == 0
    by_weights = fedrot.align(update, broadcast, symmetry, WHOLE).apply(update)
    assert largest_difference(result.tensors, by_weights) > 1e-3


def test_probing_draws_nothing_from_the_caller_s_random_numbers() -> None:
    """Though the models that it builds are initialised at random."""
    name = "bert-classifier"
    build, drawn = EVERY[name].build, [0]

    def initialised() -> Any:
        before = torch.random.get_rng_state()
        model = build("eager")
        drawn[0] += not torch.equal(torch.random.get_rng_state(), before)
        return model

    evidence = probing(initialised, config_of(name).to_dict(), symmetry_for(name), rows=2)
    before = torch.random.get_rng_state()
    evidence(state_of(name, dtype=torch.float32), state_of(name, 5, torch.float32))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert drawn == [2]


@ANCHOR
def test_clients_that_trained_far_from_one_start_share_a_basis(anchor: str) -> None:
    """Their cosine with the broadcast model is above the limit; that with each other is not."""
    name = "bert-classifier"
    base, symmetry = state_of(name), symmetry_for(name)
    updates = [near(base, 2.5, seed) for seed in (1, 2)]
    assert all(base_cosine(update, base, symmetry) > SAME_BASIS for update in updates)
    assert base_cosine(*updates, symmetry) < SAME_BASIS
    other_basis = fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL)
    given = [(update, 1.0) for update in updates]
    results = list(
        fedrot.align_round(given, base, symmetry, fedrot.AlignmentOptions(anchor=anchor), other_basis)
    )
    assert len(results) == 2
    for result in results:
        assert {row.part for row in result.alignment.report.groups} == {"attention", "ffn"}


def test_the_running_anchor_moves_by_the_share_of_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds on its neurons shrink by as much."""
    shares = []
    move = Anchor.towards_last

    def recorded(anchor: Anchor, tensors: Any, share: float) -> Anchor:
        shares.append(share)
        return move(anchor, tensors, share)

    monkeypatch.setattr(Anchor, "towards_last", recorded)
    name = FEW[0]
    base = state_of(name)
    updates = [(near(base, 0.01, seed), weight) for seed, weight in ((1, 1.0), (2, 3.0), (3, 4.0))]
    _round(updates, base, symmetry_for(name), "running")
    assert shares == pytest.approx([1.0, 0.75, 0.5])


def test_an_anchor_forgets_whom_it_was_not_moved_towards() -> None:
    """An update is aligned to it and dropped; the next one is aligned to the broadcast model."""
    name = FEW[0]
    base, symmetry = state_of(name), symmetry_for(name)
    broadcast, refused = Anchor(base), list[Anchor]()

    def find(update: Tensors, to: Anchor) -> Alignment:
        if any(to is one for one in refused):
            raise fedrot.UpdateError("cannot be matched")
        return fedrot.align(update, to, symmetry)

    rule = RunningAnchor(broadcast, find)
    first, dropped, last = (near(base, 1e-3, seed) for seed in (1, 2, 3))
    rule.accept(rule.align(first).apply(first), 1.0)
    rule.align(dropped)
    refused.append(rule.current)
    rule.accept(rule.align(last).apply(last), 1.0)
    assert not rule.current.spread.along
    assert not rule.current._known.bounds
