"""Secure aggregation: clients align before they mask, and the server sees the sum only."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_PARAMS_RECORD
from flwr.serverapp import Grid

import fedrot
from fedrot.strategies import align_mod
from reproductions.adapter_symmetry import adapter_symmetry
from tests.fedrot.lora.test_averaging import adapter
from tests.models import State
from tests.models import largest_difference as difference
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import Client, FakeGrid, failure

ROOT = Path(__file__).parents[2]
ROUNDS, WEIGHTS = 2, (10, 20, 30)

#: A client's masked sum is rounded to 16 / 2^22; with three of them and two rounds.
ROUNDING = 3 * ROUNDS * 16 / 2**22


@dataclass(frozen=True)
class Case:
    """What clients train and align.

    Attributes:
        start: the tensors at the start.
        options: of the alignment; the groups of its parts are scrambled.
    """

    symmetry: fedrot.Symmetry
    start: State
    options: fedrot.AlignmentOptions = field(default_factory=fedrot.AlignmentOptions)

    @cached_property
    def align(self) -> Any:
        return align_mod(self.symmetry, self.options)


ADAPTER = {name: tensor.float() for name, tensor in adapter(3).items()}
#: The adapter is too small for a test against chance.
EVERYTHING = fedrot.AlignmentOptions(parts=("adapters",), chance=0)
CASES = {
    "model": Case(SYMMETRY, state()),
    "adapter": Case(adapter_symmetry(ADAPTER), ADAPTER, EVERYTHING),
}


def trained(received: State, client: int) -> State:
    """Return an update that is nearest to the received model in the coordinates that it has.

    So the unscrambled average is what comes out, without an oracle for the alignment.
    """
    return {name: (1 + 0.05 * (client + 1)) * t.float() for name, t in received.items()}


def expected(case: str = "model") -> State:
    factor = sum(w * (1 + 0.05 * (i + 1)) for i, w in enumerate(WEIGHTS)) / sum(WEIGHTS)
    return {name: factor**ROUNDS * t for name, t in CASES[case].start.items()}


class Node(NumPyClient):
    """A client that scrambles what it sends where it is told to."""

    def __init__(self, client: int) -> None:
        self.client = client

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        case = CASES[config["case"]]
        received = dict(zip(case.start, map(torch.from_numpy, parameters), strict=True))
        update = trained(received, self.client)
        if config["scramble"]:
            update = fedrot.random_equivalent(
                update, case.symmetry, self.client, parts=case.options.parts
            )
        if self.client == config.get("broken"):
            next(iter(update.values()))[:] = torch.nan
        return [t.numpy() for t in update.values()], WEIGHTS[self.client], {}


def when_asked(message: Message, context: Context, call_next: Any) -> Message:
    """Align in the arms that do."""
    config = message.content.config_records["fitins.config"]
    align = CASES[str(config["case"])].align
    return align(message, context, call_next) if config["align"] else call_next(message, context)


def node_of(context: Context) -> Any:
    return Node(int(context.node_config["partition-id"])).to_client()


app = ClientApp(client_fn=node_of, mods=[secaggplus_mod, when_asked])


def aggregate(grid: Grid, config: dict[str, Any], case: str = "model") -> State:
    """Return the tensors after all rounds of secure aggregation."""
    start = CASES[case].start
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=len(WEIGHTS),
        min_available_clients=len(WEIGHTS),
        initial_parameters=ndarrays_to_parameters([t.numpy() for t in start.values()]),
        on_fit_config_fn=lambda server_round: {"case": case, **config},
    )
    context = LegacyContext(
        Context(1, 1, {}, RecordDict(), {}), ServerConfig(num_rounds=ROUNDS), strategy
    )
    secure = SecAggPlusWorkflow(
        num_shares=3, reconstruction_threshold=2, max_weight=sum(WEIGHTS), timeout=240
    )
    DefaultWorkflow(fit_workflow=secure)(grid, context)
    arrays = context.state.array_records[MAIN_PARAMS_RECORD].to_numpy_ndarrays()
    return dict(zip(start, map(torch.from_numpy, arrays), strict=True))


# In this process


class SecureGrid(FakeGrid):
    """A grid for Flower's legacy workflows."""

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)


def in_process(client: int) -> Client:
    """Return a node with a state of its own, whose exceptions become error replies."""
    context = Context(1, 100 + client, {"partition-id": client}, RecordDict(), {})

    def answer(message: Message) -> Message:
        try:
            return app(copy.deepcopy(message), context)
        except Exception:
            return failure(message)

    return answer


def play(case: str = "model", **config: Any) -> State:
    nodes = {100 + i: in_process(i) for i in range(len(WEIGHTS))}
    return aggregate(SecureGrid(nodes), config, case)


@pytest.mark.parametrize("case", CASES)
def test_the_masked_sum_of_aligned_updates_is_the_unscrambled_average(case: str) -> None:
    for scramble, align in ((False, True), (True, True), (True, False)):
        apart = difference(play(case, scramble=scramble, align=align), expected(case))
        assert apart < ROUNDING if align else apart > 0.1


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_a_broken_client_drops_out_and_the_others_go_on(warnings: Callable[[], str]) -> None:
    factor = sum(w * (1 + 0.05 * (i + 1)) for i, w in enumerate(WEIGHTS) if i != 1) / (10 + 30)
    others = {name: factor**ROUNDS * t for name, t in state().items()}
    result = play(scramble=True, align=True, broken=1)
    assert difference(result, others) < ROUNDING * sum(WEIGHTS) / 40
    # Without alignment nobody looks, and its NaN, as an integer, is a finite number like any other.
    lost = play(scramble=False, align=False, broken=1)
    assert difference(lost, others) > 0.1
    assert all(bool(torch.isfinite(t).all()) for t in lost.values())


# Through Flower's engine


def engine(path: str) -> None:
    """Run the aligned rounds in a simulation; called in a process of its own."""
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        found = aggregate(grid, {"scramble": True, "align": True})
        np.savez(path, **{name: tensor.numpy() for name, tensor in found.items()})

    local = {"address": "local", "num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    backend: Any = {"init_args": local, "client_resources": resources}
    run_simulation(server, app, num_supernodes=len(WEIGHTS), backend_config=backend)


def started_with(mark: str) -> set[psutil.Process]:
    """Return the processes that inherited this mark, and their children."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FEDROT_TEST") == mark:
                found |= {process, *process.children(recursive=True)}
    return found


def test_three_simulated_clients(tmp_path: Path) -> None:
    path, mark = tmp_path / "results.npz", uuid.uuid4().hex
    environment = {
        **os.environ,
        "FEDROT_TEST": mark,
        "FLWR_HOME": str(tmp_path),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    code = f"from tests.strategies.test_secagg import engine; engine({str(path)!r})"
    streams: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 400, "check": False}
    try:
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, cwd=tmp_path, env=environment, **streams)
    finally:
        for process in started_with(mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert path.exists(), result.stdout + result.stderr
    with np.load(path) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in SYMMETRY.shapes}
    assert difference(found, expected()) < ROUNDING
