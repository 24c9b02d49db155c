"""Secure aggregation: clients align before they mask, and the server sees the sum
only.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_PARAMS_RECORD

import fedrot
from fedrot.strategies import align_mod
from tests.models import largest_difference as difference
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import FakeGrid, failure

ROUNDS = 2
WEIGHTS = (10, 20, 30)

#: A client's masked sum is rounded to 16 / 2^22; with three of them and two rounds.
ROUNDING = 3 * ROUNDS * 16 / 2**22
ALIGN = align_mod(SYMMETRY)


def expected(clients=(0, 1, 2)):
    """Return the average of updates that are nearest to the received model where they
    are.

    So the unscrambled average is what comes out, without an oracle for the alignment.
    """
    total = sum(WEIGHTS[i] for i in clients)
    factor = sum(WEIGHTS[i] * (1 + 0.05 * (i + 1)) for i in clients) / total
    return {name: factor**ROUNDS * t for name, t in state().items()}


def when_asked(message, context, call_next):
    """Align in the arms that do."""
    align = message.content.config_records["fitins.config"]["align"]
    return ALIGN(message, context, call_next) if align else call_next(message, context)


class Node(NumPyClient):
    def __init__(self, client):
        self.client = client

    def fit(self, parameters, config):
        received = dict(
            zip(SYMMETRY.shapes, map(torch.from_numpy, parameters), strict=True)
        )
        update = {
            n: (1 + 0.05 * (self.client + 1)) * t.float() for n, t in received.items()
        }
        if config["scramble"]:
            update = fedrot.random_equivalent(update, SYMMETRY, self.client)
        if self.client == config.get("broken"):
            next(iter(update.values()))[:] = torch.nan
        return [t.numpy() for t in update.values()], WEIGHTS[self.client], {}


def node_of(context):
    return Node(int(context.node_config["partition-id"])).to_client()


app = ClientApp(client_fn=node_of, mods=[secaggplus_mod, when_asked])


def aggregate(grid, config):
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=len(WEIGHTS),
        min_available_clients=len(WEIGHTS),
        initial_parameters=ndarrays_to_parameters(
            [t.numpy() for t in state().values()]
        ),
        on_fit_config_fn=lambda server_round: config,
    )
    context = LegacyContext(
        Context(1, 1, {}, RecordDict(), {}), ServerConfig(num_rounds=ROUNDS), strategy
    )
    secure = SecAggPlusWorkflow(
        num_shares=3, reconstruction_threshold=2, max_weight=sum(WEIGHTS), timeout=240
    )
    DefaultWorkflow(fit_workflow=secure)(grid, context)
    arrays = context.state.array_records[MAIN_PARAMS_RECORD].to_numpy_ndarrays()
    return dict(zip(SYMMETRY.shapes, map(torch.from_numpy, arrays), strict=True))


class SecureGrid(FakeGrid):
    @property
    def run(self):
        return SimpleNamespace(run_id=1)


def in_process(client):
    context = Context(1, 100 + client, {"partition-id": client}, RecordDict(), {})

    def answer(message):
        try:
            return app(copy.deepcopy(message), context)
        except Exception:
            return failure(message)

    return answer


def play(**config):
    nodes = {100 + i: in_process(i) for i in range(len(WEIGHTS))}
    return aggregate(SecureGrid(nodes), config)


def test_the_masked_sum_of_aligned_updates_is_the_unscrambled_average():
    for scramble, align in ((False, True), (True, True), (True, False)):
        apart = difference(play(scramble=scramble, align=align), expected())
        assert apart < ROUNDING if align else apart > 0.1


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_a_broken_client_drops_out_and_the_others_go_on(
    warnings,
):
    others = expected((0, 2))
    result = play(scramble=True, align=True, broken=1)
    assert difference(result, others) < ROUNDING * sum(WEIGHTS) / 40
    # Without alignment nobody looks, and its NaN, as an integer, is a finite number
    # like any other.
    lost = play(scramble=False, align=False, broken=1)
    assert difference(lost, others) > 0.1
    assert all(bool(torch.isfinite(t).all()) for t in lost.values())
