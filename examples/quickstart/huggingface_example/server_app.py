"""The server: FedRot in the place of FedAvg."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedrot.strategies import FedRot
from huggingface_example.task import build_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; the log shows what alignment did in each."""
    config = context.run_config
    model = build_model(config)
    strategy = FedRot(
        model.config,
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=float(config["fraction-evaluate"]),
        aggregation=str(config["aggregation"]),
    )
    rounds = int(config["num-server-rounds"])
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
