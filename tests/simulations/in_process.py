"""Simulations without Flower's engine: the same server and client apps, all in this process.

The engine takes tens of seconds to start its processes; what the apps compute does not depend on it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from tests.simulations.commands import invoke
from tests.strategies.fakes import FakeGrid


@contextmanager
def _random_state_of_its_own() -> Iterator[None]:
    """Draw random numbers that nobody else notices, as a client's own process does."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _Node:
    """A client app on a node with a partition of its own."""

    def __init__(self, app: ClientApp, partition: int, of: int) -> None:
        node = {"partition-id": partition, "num-partitions": of}
        self._app = app
        self._context = Context(1, 100 + partition, node, RecordDict(), {})

    def __call__(self, message: Message) -> Message:
        with _random_state_of_its_own():
            return self._app(message, self._context)


def _run_simulation(server_app: ServerApp, client_app: ClientApp, num_supernodes: int, **_: Any) -> None:
    """Do what ``flwr.simulation.run_simulation`` does."""
    nodes = {100 + i: _Node(client_app, i, num_supernodes) for i in range(num_supernodes)}
    server_app(FakeGrid(nodes), Context(1, 0, {}, RecordDict(), {}))


def simulated(out: Path, *arguments: object) -> str:
    """Run ``fedrot`` with these arguments and ``--out``; return what it printed.

    Flower's log goes to the run's folder, and back to where it went afterwards.
    """
    flwr = logging.getLogger("flwr")
    handlers, propagate = list(flwr.handlers), flwr.propagate
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flwr.simulation.run_simulation", _run_simulation)
            code, printed = invoke(*arguments, "--out", out)
    finally:
        flwr.handlers, flwr.propagate = handlers, propagate
    assert code == 0, printed
    return printed
