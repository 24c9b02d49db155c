"""The client: it knows nothing of alignment."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from huggingface_example import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model on the client's rows."""
    config = context.run_config
    model = task.build_model(config)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rows, *_ = task.load_data(config, context.node_config)
    loss = task.train(
        model, rows, int(config["local-epochs"]), float(config["learning-rate"])
    )
    metrics = {"num-examples": len(rows.dataset), "train-loss": loss}
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the received model on rows that the client uses for nothing else."""
    model = task.build_model(context.run_config)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    *_, rows = task.load_data(context.run_config, context.node_config)
    loss, accuracy = task.evaluate(model, rows)
    metrics = {"num-examples": len(rows.dataset), "loss": loss, "accuracy": accuracy}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
