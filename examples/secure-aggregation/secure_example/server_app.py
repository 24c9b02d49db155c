"""The server: it sees the sum of the masked updates and no update."""

from __future__ import annotations

import torch
from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_PARAMS_RECORD
from flwr.serverapp import Grid, ServerApp

from secure_example.task import build_model, load_rows, loss_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Print the loss on held-out comments before and after the rounds."""
    config = context.run_config
    clients, rounds = int(config["clients"]), int(config["num-server-rounds"])
    model, test = build_model(), load_rows("test")
    before = loss_of(model, test)
    start = [tensor.numpy() for tensor in model.state_dict().values()]
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=ndarrays_to_parameters(start),
    )
    legacy = LegacyContext(context, ServerConfig(num_rounds=rounds), strategy)
    # Shares of the clients, not numbers: Flower takes no number of shares below three.
    secure = SecAggPlusWorkflow(
        num_shares=1.0, reconstruction_threshold=2 / 3, max_weight=int(config["rows"])
    )
    DefaultWorkflow(fit_workflow=secure)(grid, legacy)
    arrays = legacy.state.array_records[MAIN_PARAMS_RECORD].to_numpy_ndarrays()
    model.load_state_dict(
        dict(zip(model.state_dict(), map(torch.from_numpy, arrays), strict=True))
    )
    print(
        f"loss before: {before:.3f}, after {rounds} rounds: {loss_of(model, test):.3f}"
    )
