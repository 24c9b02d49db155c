"""An institution: it trains a model of its own once, and shares it whenever it is
asked.
"""

from __future__ import annotations

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from institutions_example.task import build_model, load_rows, loss_of, train

app = ClientApp()


@app.train()
def share(message: Message, context: Context) -> Message:
    """Answer with the institution's model; what the server sent is not used."""
    if "arrays" not in context.state:
        _train(context)
    content = RecordDict(
        {name: context.state[name] for name in ("arrays", "metrics", "client")}
    )
    return Message(content, reply_to=message)


def _train(context: Context) -> None:
    """Train from a start that no other institution has, and keep the model in the
    node's state.
    """
    config, node = context.run_config, context.node_config
    client, clients = int(node["partition-id"]), int(node["num-partitions"])
    rows = load_rows("train", client, clients, int(config["rows"]))
    model = build_model(int(config["width"]), seed=1 + client)
    train(model, rows, int(config["epochs"]))
    metrics = {"num-examples": len(rows), "loss": loss_of(model, load_rows("test"))}
    context.state["arrays"] = ArrayRecord(model.state_dict())
    context.state["metrics"] = MetricRecord(metrics)
    context.state["client"] = ConfigRecord({"partition-id": client})
