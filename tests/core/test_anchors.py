"""A round's anchors: the mean does not depend on the coordinates in which the clients reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import fedrot
from fedrot.aggregation import Mean
from tests.models import (
    FEW,
    State,
    config_of,
    largest_difference,
    logits,
    near,
    squared_distance,
    state_of,
)

ANCHORS = ("global", "running", "first", "medoid", "consensus")
ANCHOR = pytest.mark.parametrize("anchor", ANCHORS)
HEADS_TOO = fedrot.AlignmentOptions(parts=("heads", "attention", "ffn"))
WEIGHTS = (3.0, 1.0, 2.0, 5.0)

Round = list[tuple[State, float]]


def _clients(broadcast: State, scale: float = 0.1, count: int = 4) -> Round:
    return [(near(broadcast, scale, 30 + i), WEIGHTS[i]) for i in range(count)]


def _round(
    clients: Sequence[tuple[State, float]],
    broadcast: State,
    symmetry: fedrot.Symmetry,
    anchor: str,
    options: fedrot.AlignmentOptions | None = None,
) -> tuple[State, list[fedrot.AlignedUpdate]]:
    results = list(fedrot.align_round(clients, broadcast, symmetry, options, anchor))
    mean = Mean()
    for result in results:
        mean.add(result.tensors, result.weight)
    return mean.result(), results


def _spread(results: Sequence[fedrot.AlignedUpdate]) -> float:
    """Return the weighted squared distance of the aligned clients to their weighted mean."""
    total = sum(result.weight for result in results)
    mean = {
        name: torch.stack([r.weight / total * r.tensors[name] for r in results]).sum(0)
        for name in results[0].tensors
    }
    return sum(result.weight * squared_distance(result.tensors, mean) for result in results)


def test_the_anchors_have_their_names() -> None:
    assert set(fedrot.ANCHORS) == set(ANCHORS)


@ANCHOR
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("options", [None, HEADS_TOO], ids=["default", "heads"])
def test_scrambling_every_client_does_not_change_the_mean(
    name: str, anchor: str, options: fedrot.AlignmentOptions | None
) -> None:
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = _clients(broadcast)
    parts = options.parts if options else ("attention", "ffn")
    scrambled = [
        (fedrot.random_equivalent(update, symmetry, seed, parts), weight)
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


@ANCHOR
def test_far_clients_keep_their_function_and_move_closer(anchor: str) -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = [(state_of(name, 40 + i), WEIGHTS[i]) for i in range(4)]
    _, results = _round(clients, broadcast, symmetry, anchor)
    plain = [
        fedrot.AlignedUpdate(update, weight, results[i].alignment)
        for i, (update, weight) in enumerate(clients)
    ]
    assert _spread(results) < _spread(plain)
    for (update, weight), result in zip(clients, results, strict=True):
        assert result.weight == weight
        assert (logits(name, result.tensors) - logits(name, update)).abs().max() <= 1e-10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("regime", ["near", "far", "unrelated"])
def test_consensus_is_not_looser_than_the_running_mean(regime: str, seed: int) -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = [
        (
            state_of(name, 50 + 10 * seed + i)
            if regime == "unrelated"
            else near(broadcast, 0.1 if regime == "near" else 1.0, 50 + 10 * seed + i),
            WEIGHTS[i],
        )
        for i in range(4)
    ]
    scrambled = [
        (fedrot.random_equivalent(update, symmetry, seed + i), weight)
        for i, (update, weight) in enumerate(clients)
    ]
    spreads = {a: _spread(_round(scrambled, broadcast, symmetry, a)[1]) for a in ANCHORS}
    assert spreads["consensus"] <= spreads["running"] * (1 + 1e-9)


@ANCHOR
def test_one_client_is_aligned_to_the_broadcast_model(anchor: str) -> None:
    name = "bert-classifier"
    broadcast, update = state_of(name), state_of(name, 2)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    mean, results = _round([(update, 7.0)], broadcast, symmetry, anchor)
    expected = fedrot.align(update, broadcast, symmetry).apply(update)
    assert len(results) == 1
    assert largest_difference(results[0].tensors, expected) == 0
    assert largest_difference(mean, expected) <= 1e-15


@ANCHOR
def test_an_empty_round_yields_nothing(anchor: str) -> None:
    broadcast = state_of("bert-classifier")
    symmetry = fedrot.symmetry_of(config_of("bert-classifier"), broadcast)
    assert list(fedrot.align_round([], broadcast, symmetry, anchor=anchor)) == []
    assert list(fedrot.align_round(iter(()), broadcast, symmetry, anchor=anchor)) == []


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
        expected = fedrot.align(update, broadcast, symmetry).apply(update)
        assert largest_difference(result.tensors, expected) == 0


def test_first_aligns_the_others_to_the_aligned_first() -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = [(state_of(name, 60 + i), WEIGHTS[i]) for i in range(3)]
    _, results = _round(clients, broadcast, symmetry, "first")
    first = fedrot.align(clients[0][0], broadcast, symmetry).apply(clients[0][0])
    assert largest_difference(results[0].tensors, first) == 0
    for (update, _), result in zip(clients[1:], results[1:], strict=True):
        expected = fedrot.align(update, first, symmetry).apply(update)
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
        expected = fedrot.align(update, anchor, symmetry).apply(update)
        assert largest_difference(result.tensors, expected) <= 1e-8
        aligned.append((expected, weight))


def test_medoid_is_the_client_closest_to_the_others() -> None:
    """Against all pairs: aligned both ways, weighted, over the tensors that alignment compares."""
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    centre = state_of(name, 70)
    clients = [
        (near(centre, scale, 80 + i), WEIGHTS[i]) for i, scale in enumerate((0.9, 0.6, 0.05, 0.7))
    ]
    clients = [(fedrot.random_equivalent(u, symmetry, i), w) for i, (u, w) in enumerate(clients)]
    moved = {slot.tensor for group in symmetry.groups for slot in group.slots}
    spread = [0.0] * 4
    for i, (target, _) in enumerate(clients):
        for j, (update, weight) in enumerate(clients):
            if i != j:
                aligned = fedrot.align(update, target, symmetry).apply(update)
                pair = [{k: state[k] for k in moved} for state in (aligned, target)]
                spread[i] += weight * squared_distance(*pair)
    best = spread.index(min(spread))
    assert best == 2
    _, results = _round(clients, broadcast, symmetry, "medoid")
    anchor = fedrot.align(clients[best][0], broadcast, symmetry).apply(clients[best][0])
    assert largest_difference(results[best].tensors, anchor) == 0
    for i in (0, 1, 3):
        expected = fedrot.align(clients[i][0], anchor, symmetry).apply(clients[i][0])
        assert largest_difference(results[i].tensors, expected) == 0


def test_medoid_does_not_depend_on_the_order_of_replies_and_first_does() -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = _clients(broadcast, 0.2)
    turned = [clients[i] for i in (2, 0, 3, 1)]
    medoid, other = (_round(c, broadcast, symmetry, "medoid")[0] for c in (clients, turned))
    assert largest_difference(medoid, other) <= 1e-8
    first, swapped = (_round(c, broadcast, symmetry, "first")[0] for c in (clients, turned))
    assert largest_difference(first, swapped) > 1e-6


@pytest.mark.parametrize("anchor", ["global", "running", "first"])
def test_one_pass_anchors_read_their_updates_lazily(anchor: str) -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    read: list[int] = []

    def updates() -> Iterator[tuple[State, float]]:
        for i, client in enumerate(_clients(broadcast)):
            read.append(i)
            yield client

    results = fedrot.align_round(updates(), broadcast, symmetry, anchor=anchor)
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
        list(fedrot.align_round(clients, broadcast, symmetry, anchor=anchor))


def test_an_unknown_anchor_is_refused_at_once() -> None:
    broadcast = state_of("bert-classifier")
    symmetry = fedrot.symmetry_of(config_of("bert-classifier"), broadcast)
    with pytest.raises(fedrot.FedrotError, match="nearest") as caught:
        fedrot.align_round([], broadcast, symmetry, anchor="nearest")
    assert all(anchor in str(caught.value) for anchor in ANCHORS)
