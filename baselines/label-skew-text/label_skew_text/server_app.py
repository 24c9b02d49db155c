"""label_skew_text: A Flower Baseline."""

from typing import Any

from fedrot.strategies import fit_task_head
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from label_skew_text.dataset import load_test
from label_skew_text.model import Setup, build_model, predict
from label_skew_text.strategy import build_strategy
from label_skew_text.utils import scores, write_row

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategies one after the other, and evaluate each on the test rows."""
    config = context.run_config
    model = build_model(Setup.of(config), int(config["seed"]))
    initial, test = ArrayRecord(model.state_dict()), load_test(config)
    partitions = partitions_of(grid)
    done: dict[str, ArrayRecord] = {"": initial}

    def trained(name: str) -> ArrayRecord:
        if name not in done:
            given = build_strategy(name, config, model.config, partitions)
            strategy, train_config = given
            rounds = int(config["num-server-rounds"])
            result = strategy.start(grid, initial, rounds, train_config=train_config)
            done[name] = result.arrays
        return done[name]

    for name in str(config["strategies"]).split(","):
        before, plus, _ = name.rpartition("+fit")
        arrays = trained(before if plus else name)
        if plus:
            arrays = fit_task_head(grid, arrays, model.config).arrays
        model.load_state_dict(arrays.to_torch_state_dict())
        write_row(config, name, scores(*predict(model, test.read())))


def partitions_of(grid: Grid) -> dict[int, int]:
    """Ask the nodes which client of the division each is."""
    nodes = grid.get_node_ids()
    ask = [Message(RecordDict(), node, "query.partition") for node in nodes]
    found = {}
    for answer in grid.send_and_receive(ask):
        metrics: Any = answer.content["metrics"]
        found[answer.metadata.src_node_id] = int(metrics["partition-id"])
    return found
