"""The Flower ServerApp for ``flwr run``: the comparison of ``fedrot simulate`` in any
federation.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrot.simulations.checks import with_clients
from fedrot.simulations.cli.commands import console
from fedrot.simulations.engine import Machine
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.grids import OrderedGrid
from fedrot.simulations.simulate import simulate

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run ``simulate`` with the app's run configuration and nodes; results go to the
    folder ``out``.

    Raises:
        ValueError: ``out`` is not an absolute path (Flower chooses the working
            directory).
        FileExistsError, FedrotError, RuntimeError: as ``simulate`` and ``OrderedGrid``.
    """
    settings = dict(context.run_config)
    out = Path(str(settings.pop("out", "")))
    if not out.is_absolute():
        raise ValueError(
            f"out is '{out}'; give an absolute path, as in -c 'out=\"/data/run1\"'."
        )
    experiment = with_clients(Experiment.from_flat(settings))
    simulate(
        [experiment],
        out,
        "flwr run",
        console,
        Machine(workers=1, grid=OrderedGrid(grid, experiment.clients)),
    )
