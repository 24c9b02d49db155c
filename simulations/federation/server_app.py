"""The Flower ServerApp for ``flwr run``: the comparison of ``fedrot simulate`` in any federation."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrot.simulations.checks import check
from fedrot.simulations.federation.cells import cells_of, partitions_of, run_cell
from fedrot.simulations.federation.grids import OrderedGrid
from fedrot.simulations.folder import RunFolder, only_writer
from fedrot.simulations.settings import Experiment

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the comparison of the app's run configuration; results go to the folder ``out``.

    What is finished in the folder is skipped, as in ``fedrot simulate``. The first failure ends the run.

    Raises:
        ValueError: ``out`` is not an absolute path (Flower chooses the working directory).
        FileExistsError, FedrotError: the folder has other contents, see ``RunFolder``, or another run
            writes to it; or data, partition or model cannot be used.
        RuntimeError: the nodes are not the experiment's clients, or a round has no accepted update.
    """
    settings = dict(context.run_config)
    out = Path(str(settings.pop("out", "")))
    if not out.is_absolute():
        raise ValueError(f"out is '{out}'; give an absolute path, as in -c 'out=\"/data/run1\"'.")
    experiment = Experiment.from_flat(settings)
    check([experiment])
    with only_writer(out), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = RunFolder(out, [experiment], "flwr run", partitions_of([experiment]))
        missing = [cell for cell in cells_of([experiment]) if not folder.has(cell)]
        try:
            ordered = OrderedGrid(grid, experiment.clients)
            initial = defaultdict[int, dict[str, float]](dict)
            for cell in missing:
                known = initial[cell.seed]
                run, failure = run_cell(cell, ordered, Path(scratch), known, shared_cache=False)
                if failure is not None:
                    raise failure
                folder.add(cell, run.rows, run.alignment)
        finally:
            folder.write_rows()
