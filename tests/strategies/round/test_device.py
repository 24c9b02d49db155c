"""A round on an accelerator gives the model that the CPU gives; proved on a pretended one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian

import fedrot
from fedrot.aggregation import Fisher, RegMean
from fedrot.strategies import Aligned, FedRot, OtherBasis, Server
from tests.fedrot.pretend import Pretend
from tests.models import near
from tests.strategies.aggregating import (
    PERMUTATIONS,
    Client,
    answer,
    apart,
    ask,
    fishers,
    grams,
    headless,
    honest,
    scrambled,
)
from tests.strategies.classifier import SYMMETRY, build, permuted, state
from tests.strategies.fakes import tensors_of


class AlignedAdam(Aligned, FedAdam):
    pass


class AlignedMedian(Aligned, FedMedian):
    pass


WHOLE = fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL)
#: What goes through the device layer by layer.
STREAMED: dict[str, Callable[..., FedAvg]] = {
    "running": lambda **given: FedRot(SYMMETRY, **given),
    "global": lambda **given: FedRot(
        SYMMETRY, alignment=fedrot.AlignmentOptions(anchor="global"), **given
    ),
    "deterministic": lambda server=None, **given: FedRot(
        SYMMETRY, server=replace(server or Server(), deterministic=True), **given
    ),
    "whole": lambda **given: FedRot(SYMMETRY, alignment=WHOLE, **given),
    "adam": lambda **given: AlignedAdam(SYMMETRY, **given),
}
#: What goes there as a whole.
OTHERS: dict[str, Callable[..., FedAvg]] = {
    "other_basis": lambda **given: FedRot(SYMMETRY, other_basis=OtherBasis(build), **given),
    "median": lambda **given: AlignedMedian(SYMMETRY, **given),
}


def _played(strategy: FedAvg, clients: Sequence[Client]) -> Any:
    messages = ask(strategy, state(), len(clients))
    replies = [answer(m, c, i) for i, (m, c) in enumerate(zip(messages, clients, strict=True))]
    return strategy.aggregate_train(1, replies)


def _both(build_one: Callable[..., FedAvg], clients: Sequence[Client]) -> tuple[Any, Any]:
    """Return what a round gives on the CPU and on the device."""
    wanted = _played(build_one(), clients)
    with Pretend() as device:
        found = _played(build_one(server=Server(device="cuda")), clients)
        assert device.uploads > 0
    return wanted, found


@pytest.mark.parametrize("which", [*STREAMED, *OTHERS])
def test_a_round_on_the_device_is_that_on_the_cpu(which: str) -> None:
    clients = [replace(c, statistics={}) for c in scrambled(honest())]
    wanted, found = _both((STREAMED | OTHERS)[which], clients)
    assert apart(found[0], tensors_of(wanted[0])) <= 2e-6
    for key in ("accepted", "dropped"):
        name = f"fedrot-replies-{key}"
        assert found[1][name] == wanted[1][name]
    removed = "fedrot-share-removed"
    assert found[1][removed] == pytest.approx(wanted[1][removed], rel=1e-5)


def test_other_basis_replies_are_matched_there_too() -> None:
    """With activations of the models, which run on the host."""
    clients = [Client(permuted(near(state(), 0.02, i), i), 1.0 + i, {}) for i in range(3)]
    clients[0] = Client(near(state(), 0.02, 5), 2.0, {})
    wanted, found = _both(
        lambda **given: FedRot(SYMMETRY, other_basis=OtherBasis(build, at_clients=True), **given),
        clients,
    )
    assert found[1]["fedrot-groups-moved"] == wanted[1]["fedrot-groups-moved"] > 0
    assert apart(found[0], tensors_of(wanted[0])) <= 1e-5


@pytest.mark.parametrize(
    ("aggregation", "collect", "options"),
    [(RegMean, grams, fedrot.AlignmentOptions()), (Fisher, fishers, PERMUTATIONS)],
)
def test_statistics_go_to_the_device_too(
    aggregation: Any, collect: Any, options: fedrot.AlignmentOptions
) -> None:
    clients = scrambled(honest(collect), collect, options.parts)
    wanted, found = _both(
        lambda **given: FedRot(SYMMETRY, aggregation=aggregation, alignment=options, **given),
        clients,
    )
    assert apart(found[0], tensors_of(wanted[0])) <= 1e-5


@pytest.mark.parametrize("options", [fedrot.AlignmentOptions(), WHOLE])
def test_rows_that_were_not_trained_count_for_nothing_there_too(
    options: fedrot.AlignmentOptions,
) -> None:
    clients = [
        headless(replace(c, statistics={}), rows)
        for c, rows in zip(scrambled(honest()), ([0, 1], None, [0, 1, 2]), strict=True)
    ]
    wanted, found = _both(lambda **given: FedRot(SYMMETRY, alignment=options, **given), clients)
    assert apart(found[0], tensors_of(wanted[0])) <= 2e-6


@pytest.mark.parametrize("which", [*STREAMED, *OTHERS])
def test_a_round_leaves_nothing_on_the_device(which: str) -> None:
    with Pretend() as device:
        _played(
            (STREAMED | OTHERS)[which](server=Server(device="cuda")),
            [replace(c, statistics={}) for c in honest()],
        )
        assert device.peak > 0
        assert device.held == 0


def test_a_reply_that_is_not_finite_is_dropped_there_too() -> None:
    clients = [replace(c, statistics={}) for c in honest()]
    name = next(n for n, t in clients[1].update.items() if t.is_floating_point())
    clients[1].update[name] = torch.full_like(clients[1].update[name], torch.nan)
    wanted, found = _both(STREAMED["running"], clients)
    assert found[1]["fedrot-replies-dropped"] == 1
    assert apart(found[0], tensors_of(wanted[0])) <= 2e-6


def test_a_device_that_is_not_there_is_said_before_the_first_round() -> None:
    with pytest.raises(fedrot.FedrotError, match="device 'nowhere'"):
        FedRot(SYMMETRY, server=Server(device="nowhere"))
