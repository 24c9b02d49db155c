"""The Flower ServerApp for ``flwr run``: ``fedrot simulate`` in a federation of your own."""

from __future__ import annotations

import threading
from logging import INFO
from pathlib import Path

from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.experiment import run_cells
from fedrot.simulations.federation.run_folder import RunFolder
from fedrot.simulations.federation.runner import check

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the comparison of the app's run configuration; results go to the folder ``out``.

    Raises:
        ValueError: ``out`` is not an absolute path (Flower chooses the working directory).
        FedrotError: data, partition or model cannot be used.
    """
    settings = dict(context.run_config)
    out = Path(str(settings.pop("out", "")))
    if not out.is_absolute():
        raise ValueError(f"out is '{out}'; give an absolute path, as in -c 'out=\"/data/run1\"'.")
    config = SimulationConfig.from_flat(settings)
    check([config])
    folder = RunFolder(out, [config.model_dump(mode="json")], "flwr run")
    complete = False

    def progress(description: str, server_round: int, rounds: int) -> None:
        log(INFO, "%s: round %d/%d", description, server_round, rounds)

    try:
        run_cells(grid, config, folder, threading.Event(), progress, shared_cache=False)
        complete = True
    finally:
        folder.close(complete)
