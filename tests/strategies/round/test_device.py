"""A round on an accelerator gives the model that the CPU gives; proved on a pretended
one.
"""

import itertools
from dataclasses import replace

import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAdam, FedMedian

import fedrot
from fedrot.aggregation import Fisher, RegMean
from fedrot.strategies import Aligned, FedRot, Guard, OtherBasis, Server
from tests.fedrot.pretend import Pretend
from tests.models import EAGER, near
from tests.strategies.aggregating import (
    PERMUTATIONS,
    Client,
    apart,
    fishers,
    grams,
    headless,
    honest,
    play,
    scrambled,
)
from tests.strategies.classifier import SYMMETRY, WHOLE, build, permuted, state
from tests.strategies.fakes import tensors_of

CUDA = Server(device="cuda")


def behind(strategy):
    aligned = type("Behind", (Aligned, strategy), {})
    return lambda **given: aligned(SYMMETRY, alignment=EAGER, **given)


def fedrot_with(**fixed):
    return lambda **given: FedRot(SYMMETRY, **fixed, **given)


CALLS = itertools.count()
#: Bytes that rounds have left on the device.
LEFT = []


def growing(number, arrays):
    """Return a larger number for the aligned mean, which is evaluated after the plain
    one.
    """
    return MetricRecord({"loss": next(CALLS)})


#: What goes through the device layer by layer, and then what goes there as a whole;
#: models that show what chance removes are drawn in some of them.
SETUPS = {
    "running": fedrot_with(),
    "deterministic": lambda server=None: FedRot(
        SYMMETRY, server=replace(server or Server(), deterministic=True)
    ),
    "whole model": fedrot_with(alignment=WHOLE),
    "adam": behind(FedAdam),
    "other basis": fedrot_with(other_basis=OtherBasis(options=WHOLE)),
    "median": behind(FedMedian),
    "guard": fedrot_with(
        guard=Guard("loss", higher_is_better=True, evaluate=growing), alignment=EAGER
    ),
}


def _both(build_one, clients):
    """Return what a round gives on the CPU and on the device, and note what it leaves
    there.
    """
    wanted = play(build_one(), clients)
    with Pretend() as device:
        found = play(build_one(server=CUDA), clients)
        assert device.uploads > 0
        LEFT.append(device.held)
    return wanted, found


def _bare():
    return [replace(client, statistics={}) for client in scrambled(honest())]


@pytest.mark.parametrize("name", SETUPS)
def test_a_round_on_the_device_is_that_on_the_cpu_and_leaves_nothing_there(
    name,
):
    wanted, found = _both(SETUPS[name], _bare())
    assert LEFT[-1] == 0
    assert apart(found[0], tensors_of(wanted[0])) <= 2e-6
    for key in ("fedrot-replies-accepted", "fedrot-replies-dropped"):
        assert found[1][key] == wanted[1][key]
    removed = "fedrot-share-removed"
    assert found[1][removed] == pytest.approx(wanted[1][removed], rel=1e-5)


def test_replies_of_another_basis_are_matched_there_too():
    """With activations of the models, which run on the host."""
    clients = [
        Client(permuted(near(state(), 0.02, i), i), 1.0 + i, {}) for i in range(3)
    ]
    clients[0] = Client(near(state(), 0.02, 5), 2.0, {})
    wanted, found = _both(
        fedrot_with(other_basis=OtherBasis(build, at_clients=True)), clients
    )
    assert found[1]["fedrot-groups-moved"] == wanted[1]["fedrot-groups-moved"] > 0
    assert apart(found[0], tensors_of(wanted[0])) <= 1e-5


@pytest.mark.parametrize(
    ("aggregation", "collect", "options"),
    [(RegMean, grams, fedrot.AlignmentOptions()), (Fisher, fishers, PERMUTATIONS)],
)
def test_statistics_go_to_the_device_too(aggregation, collect, options):
    clients = scrambled(honest(collect), collect, options.parts)
    wanted, found = _both(
        fedrot_with(aggregation=aggregation, alignment=options), clients
    )
    assert apart(found[0], tensors_of(wanted[0])) <= 1e-5


def test_rows_that_were_not_trained_count_for_nothing_there_too():
    options = fedrot.AlignmentOptions(anchor="global")
    clients = [
        headless(c, rows)
        for c, rows in zip(_bare(), ([0, 1], None, [0, 1, 2]), strict=True)
    ]
    wanted, found = _both(fedrot_with(alignment=options), clients)
    assert apart(found[0], tensors_of(wanted[0])) <= 2e-6
