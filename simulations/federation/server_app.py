"""The Flower ServerApp for ``flwr run``: the cells of ``fedrot simulate`` in any federation."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.experiment import run_cells
from fedrot.simulations.federation.ordered_grid import OrderedGrid
from fedrot.simulations.federation.runner import check
from fedrot.simulations.federation.store import RunFolder, cells_of, partitions_of
from fedrot.simulations.folder_lock import only_writer

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the comparison of the app's run configuration; results go to the folder ``out``.

    Cells that are finished in the folder are skipped, as in ``fedrot simulate``.

    Raises:
        ValueError: ``out`` is not an absolute path (Flower chooses the working directory).
        FileExistsError, FedrotError: the folder has other contents, see ``RunFolder``, or another run
            writes to it; or data, partition or model cannot be used.
        RuntimeError: the nodes are not the configuration's clients, or a round has no accepted update.
    """
    settings = dict(context.run_config)
    out = Path(str(settings.pop("out", "")))
    if not out.is_absolute():
        raise ValueError(f"out is '{out}'; give an absolute path, as in -c 'out=\"/data/run1\"'.")
    config = SimulationConfig.from_flat(settings)
    check([config])
    with only_writer(out):
        _fill(RunFolder(out, [config], "flwr run"), config, grid)


def _fill(store: RunFolder, config: SimulationConfig, grid: Grid) -> None:
    """Run the cells that a folder lacks; the first failure ends the run."""
    store.partitions(partitions_of([config]))
    missing = [cell for cell in cells_of([config]) if not store.finished(cell)]
    complete = False
    try:
        with tempfile.TemporaryDirectory(prefix="fedrot-", ignore_cleanup_errors=True) as scratch:
            ordered = OrderedGrid(grid, config.clients)
            for cell, rows, failure in run_cells(missing, ordered, Path(scratch), shared_cache=False):
                if failure is not None:
                    raise failure
                store.add(cell, rows)
                store.publish(cell)
        complete = True
    finally:
        store.close(complete)
