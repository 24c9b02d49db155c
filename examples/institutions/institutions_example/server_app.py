"""The server: it averages the institutions' models once as they are, and once
aligned.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedrot.strategies import FedRot, OtherBasis
from institutions_example.task import build_model, load_rows, loss_of

app = ServerApp()


def each_alone(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Return the loss of each institution's own model, instead of their mean."""
    return MetricRecord(
        {
            f"institution {r['client']['partition-id']}": r["metrics"]["loss"]
            for r in replies
        }
    )


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Print the losses on held-out comments: of each model alone, and of the two
    averages.
    """
    width = int(context.run_config["width"])
    model, test = build_model(width), load_rows("test")
    strategies = {
        "plain average": FedRot(
            alignment=None, fraction_evaluate=0.0, train_metrics_aggr_fn=each_alone
        ),
        "aligned average": FedRot(
            model.config,
            fraction_evaluate=0.0,
            other_basis=OtherBasis(lambda: build_model(width)),
        ),
    }
    losses: dict[str, float] = {}
    start = ArrayRecord(model.state_dict())
    for name, strategy in strategies.items():
        result = strategy.start(grid, start, num_rounds=1)
        if not losses:
            losses |= sorted(result.train_metrics_clientapp[1].items())
        model.load_state_dict(result.arrays.to_torch_state_dict())
        losses[name] = loss_of(model, test)
    for name, loss in losses.items():
        print(f"loss of {name}: {loss:.3f}")
