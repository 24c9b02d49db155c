"""label_skew_text: A Flower Baseline."""

from typing import Any

from fedrot.strategies import LabelledRows, answer_with_sums
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from label_skew_text.dataset import Division, load_clients
from label_skew_text.model import Setup, build_model
from label_skew_text.model import train as train_fn

app = ClientApp()


def load_data(context: Context) -> tuple[Division, int]:
    """Return the division, and which of its clients this is."""
    partitions = int(context.node_config["num-partitions"])
    client = int(context.node_config["partition-id"])
    return load_clients(context.run_config, partitions), client


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the received model on the client's rows."""
    config: Any = msg.content["config"]
    received: Any = msg.content["arrays"]
    model = build_model(Setup.of(context.run_config))
    model.load_state_dict(received.to_torch_state_dict())
    data, client = load_data(context)
    numbers = data.epoch(client, int(config["server-round"]))
    train_fn(
        model,
        data.rows.batches(numbers),
        float(config["learning-rate"]),
        float(config.get("proximal-mu", 0.0)),
        bool(config["head-only"]),
    )
    metrics = MetricRecord({"num-examples": len(numbers)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.query("partition")
def partition(msg: Message, context: Context) -> Message:
    """Tell the server which client of the division this node is."""
    metrics = MetricRecord({"partition-id": int(context.node_config["partition-id"])})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


def labelled_rows(_: Message, context: Context) -> LabelledRows:
    """Return the rows over which the client sums."""
    data, client = load_data(context)
    training, held_out = data.of(client, data.training), data.of(client, data.held_out)
    return LabelledRows(
        lambda: build_model(Setup.of(context.run_config)),
        lambda: [*data.rows.read(training)],
        lambda: [*data.rows.read(held_out)],
    )


answer_with_sums(app, labelled_rows)
