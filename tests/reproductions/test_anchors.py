"""The anchors ``first`` and ``medoid``: what they are, and what every anchor has to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fedrot
import reproductions.anchors  # noqa: F401
from fedrot.strategies import FedRot
from tests.fedrot import test_anchors as of_anchors
from tests.fedrot.matching import test_chance as of_chance
from tests.fedrot.test_anchors import WEIGHTS, _clients, _round
from tests.models import EAGER, FEW, config_of, largest_difference, near, squared_distance, state_of
from tests.strategies import test_some_clients_differ as of_clients
from tests.strategies.round import test_device as of_devices
from tests.strategies.round import test_guard as of_guard
from tests.strategies.round import test_hostile_updates as of_hostile_updates
from tests.strategies.round import test_streaming as of_streaming

ANCHORS = ("first", "medoid")
ANCHOR = pytest.mark.parametrize("anchor", ANCHORS)

#: What holds for every anchor, by the tests of fedrot's own.
CONTRACT: tuple[Callable[[str], None], ...] = (
    of_anchors.test_by_default_clients_of_one_basis_are_averaged_as_they_are_and_others_brought_back,
    of_anchors.test_far_clients_keep_their_function_and_move_closer,
    of_anchors.test_one_client_is_aligned_to_the_broadcast_model,
    of_anchors.test_an_empty_round_yields_nothing,
    of_anchors.test_inputs_of_a_round_are_not_changed,
    of_anchors.test_a_bad_update_is_refused_in_every_round,
    of_anchors.test_other_basis_updates_are_aligned_by_their_own_options,
    of_anchors.test_without_other_basis_updates_their_options_do_not_matter,
    of_anchors.test_evidence_is_asked_for_only_where_the_residual_stream_is_matched,
    of_anchors.test_clients_that_trained_far_from_one_start_share_a_basis,
)


@ANCHOR
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__.removeprefix("test_"))
def test_what_every_anchor_has_to_do(check: Callable[[str], None], anchor: str) -> None:
    check(anchor)


@ANCHOR
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("options", [EAGER, of_anchors.HEADS_TOO], ids=["default", "heads"])
def test_scrambling_every_client_does_not_change_the_mean(
    name: str, anchor: str, options: fedrot.AlignmentOptions
) -> None:
    of_anchors.test_scrambling_every_client_does_not_change_the_mean(name, anchor, options)


@pytest.mark.parametrize(
    ("anchor", "factor"), [("first", 0.0), ("first", 1e6), ("medoid", 0.0), ("medoid", 1e5)]
)
def test_the_anchor_s_own_noise_is_accounted_for(anchor: str, factor: float) -> None:
    of_chance.test_the_anchor_s_own_noise_is_accounted_for(anchor, factor)


def test_first_reads_its_updates_lazily() -> None:
    of_anchors.test_one_pass_anchors_read_their_updates_lazily("first")


# In strategies


def test_the_medoid_is_chosen_without_what_overflows_or_was_matched_elsewhere() -> None:
    of_hostile_updates.test_a_bias_that_overflows_in_canonical_form_chooses_no_anchor("medoid")
    of_clients.test_beside_a_client_that_matched_itself_the_others_keep_their_own_alignment("medoid")


@ANCHOR
def test_a_round_on_the_device_is_that_on_the_cpu(anchor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**given: Any) -> FedRot:
        return FedRot(of_devices.SYMMETRY, alignment=fedrot.AlignmentOptions(anchor=anchor), **given)

    monkeypatch.setitem(of_devices.OTHERS, anchor, build)
    of_devices.test_a_round_on_the_device_is_that_on_the_cpu(anchor)
    of_devices.test_a_round_leaves_nothing_on_the_device(anchor)


@pytest.mark.parametrize("better", ["plain", "aligned"])
def test_a_guarded_round_on_a_device(better: str) -> None:
    of_guard.test_a_round_on_a_device("first", better)


@pytest.mark.parametrize(("anchor", "held"), [("first", False), ("medoid", True)])
def test_the_first_update_is_no_reason_to_wait(anchor: str, held: bool) -> None:
    strategy = FedRot(of_streaming.CONFIG, alignment=fedrot.AlignmentOptions(anchor=anchor))
    assert of_streaming.most_alive(strategy) == (of_streaming.COUNT if held else 1)


def test_first_aligns_the_others_to_the_aligned_first() -> None:
    name = "bert-classifier"
    broadcast = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), broadcast)
    clients = [(state_of(name, 60 + i), WEIGHTS[i]) for i in range(3)]
    _, results = _round(clients, broadcast, symmetry, "first")
    first = fedrot.align(clients[0][0], broadcast, symmetry, EAGER).apply(clients[0][0])
    assert largest_difference(results[0].tensors, first) == 0
    for (update, _), result in zip(clients[1:], results[1:], strict=True):
        expected = fedrot.align(update, first, symmetry, EAGER).apply(update)
        assert largest_difference(result.tensors, expected) == 0


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
                aligned = fedrot.align(update, target, symmetry, EAGER).apply(update)
                pair = [{k: state[k] for k in moved} for state in (aligned, target)]
                spread[i] += weight * squared_distance(*pair)
    best = spread.index(min(spread))
    assert best == 2
    _, results = _round(clients, broadcast, symmetry, "medoid")
    anchor = fedrot.align(clients[best][0], broadcast, symmetry, EAGER).apply(clients[best][0])
    assert largest_difference(results[best].tensors, anchor) == 0
    for i in (0, 1, 3):
        expected = fedrot.align(clients[i][0], anchor, symmetry, EAGER).apply(clients[i][0])
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
