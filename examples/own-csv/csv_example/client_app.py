"""A site: it trains, is evaluated on its own rows, and answers with sums."""

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

from csv_example import task
from fedrot.strategies import LabelledRows, answer_with_sums

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model on the site's training rows."""
    config = context.run_config
    site = task.load_site(config, context.node_config)
    model = task.build_model(config)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = task.train(
        model,
        site.training,
        int(config["local-epochs"]),
        float(config["learning-rate"]),
    )
    metrics = {"num-examples": task.rows_in(site.training), "train-loss": loss}
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the received model on the site's test rows; the site says its name."""
    site = task.load_site(context.run_config, context.node_config)
    model = task.build_model(context.run_config)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss, accuracy = task.evaluate(model, site.test)
    rows = task.rows_in(site.test)
    metrics = {"num-examples": rows, "loss": loss, "accuracy": accuracy}
    content = RecordDict(
        {
            "metrics": MetricRecord(metrics),
            "site": ConfigRecord({"name": site.name}),
        }
    )
    return Message(content, reply_to=message)


def labelled(message: Message, context: Context) -> LabelledRows:
    """Return what the task head is fitted to, what chooses it, and what reports."""
    site = task.load_site(context.run_config, context.node_config)
    return LabelledRows(
        lambda: task.build_model(context.run_config),
        lambda: list(map(task.on_device, site.training)),
        lambda: list(map(task.on_device, site.held_out)),
        lambda: list(map(task.on_device, site.test)),
        name=site.name,
    )


answer_with_sums(app, labelled)
