"""The server: FedRot with a fitted head, and a figure for every site."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from transformers import AutoTokenizer

from csv_example.task import build_model
from fedrot.strategies import FedRot, Reporting

app = ServerApp()


def each_site(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Return the mean of the sites, and the accuracy and test rows of each."""
    metrics = aggregate_metricrecords(replies, weighted_by)
    for reply in replies:
        name = reply["site"]["name"]
        metrics[f"{name}: accuracy"] = reply["metrics"]["accuracy"]
        metrics[f"{name}: test rows"] = reply["metrics"]["num-examples"]
    return metrics


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, print a line for each site, and save the model."""
    config = context.run_config
    out = str(config["out"])
    model = build_model(config)
    strategy = FedRot(
        model.config,
        fit_head=True,
        evaluate_metrics_aggr_fn=each_site,
        reporting=Reporting(rows=Path(out) / "rows.jsonl") if out else None,
    )
    rounds = int(config["num-server-rounds"])
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    for name, value in result.evaluate_metrics_clientapp[rounds].items():
        print(f"{name}: {value:.3f}")
    if out:
        model.load_state_dict(result.arrays.to_torch_state_dict())
        # A site puts its own shares of classes in their place, see site_model.
        model.config.fedrot = {"priors": strategy.priors}
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(str(config["model-name"])).save_pretrained(out)
