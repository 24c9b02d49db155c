"""The server: FedRot for two rounds; model, metrics and report go to the folder
``out``.
"""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from fedrot.strategies import FedRot
from fedrot.strategies.settings import Reporting
from scenario.task import CLIENTS, ROUNDS, build_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and write down what came of it."""
    out = Path(str(context.run_config["out"]))
    out.mkdir(parents=True)
    model = build_model()
    strategy = FedRot(
        model.config,
        reporting=Reporting(rows=out / "alignment.jsonl"),
        min_available_nodes=len(CLIENTS),
        fraction_evaluate=0.0,
    )
    result = strategy.start(
        grid, ArrayRecord(model.state_dict()), num_rounds=ROUNDS, timeout=300
    )
    save_file(result.arrays.to_torch_state_dict(), out / "model.safetensors")
    metrics = {
        number: dict(record)
        for number, record in result.train_metrics_clientapp.items()
    }
    (out / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
