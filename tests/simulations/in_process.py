"""Simulations without Flower's engine: the same server and client apps, all in this process.

The engine takes tens of seconds to start its processes; what the apps compute does not depend on it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedrot.simulations.federation.local_grid import local_clients
from fedrot.strategies.flower_compat import outside_of_the_engine
from tests.simulations.commands import invoke


def _run_simulation(server_app: ServerApp, client_app: ClientApp, num_supernodes: int, **_: Any) -> None:
    """Do what ``flwr.simulation.run_simulation`` does."""
    with outside_of_the_engine():
        server_app(local_clients(client_app, num_supernodes), Context(1, 0, {}, RecordDict(), {}))


def simulated(out: Path, *arguments: object) -> str:
    """Run ``fedrot`` with these arguments and ``--out``, in one process; return what it printed.

    Flower's log goes to the run's folder, and back to where it went afterwards.
    """
    flwr = logging.getLogger("flwr")
    handlers, propagate = list(flwr.handlers), flwr.propagate
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flwr.simulation.run_simulation", _run_simulation)
            first = str(arguments[1]) if len(arguments) > 1 else "--"
            of_grid = arguments[0] == "simulate" and not first.startswith("--")
            alone = ("--workers", 1) if of_grid else ()
            code, printed = invoke(*arguments, *alone, "--out", out)
    finally:
        flwr.handlers, flwr.propagate = handlers, propagate
    assert code == 0, printed
    return printed
