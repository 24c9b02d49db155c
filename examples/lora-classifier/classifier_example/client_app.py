"""The client: an ordinary PEFT client with a rank of its own."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import PeftModel

from classifier_example import task
from fedrot.lora import adapter_tensors, load_adapter
from fedrot.strategies import adapter_record

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received adapter on the client's rows."""
    config = context.run_config
    model = received(message, context)
    rows, _ = task.load_data(config, context.node_config)
    loss = task.train(
        model, rows, int(config["local-epochs"]), float(config["learning-rate"])
    )
    adapter = {name: tensor.cpu() for name, tensor in adapter_tensors(model).items()}
    metrics = {"num-examples": len(rows.dataset), "train-loss": loss}
    content = RecordDict(
        {"arrays": ArrayRecord(adapter), "metrics": MetricRecord(metrics)}
    )
    content["fedrot-adapter"] = adapter_record(model.peft_config["default"])
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the received adapter on rows that the client does not train on."""
    model = received(message, context)
    _, rows = task.load_data(context.run_config, context.node_config)
    loss, accuracy = task.evaluate(model, rows)
    metrics = {"num-examples": len(rows.dataset), "loss": loss, "accuracy": accuracy}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def received(message: Message, context: Context) -> PeftModel:
    """Return the model with the received adapter, reduced to this client's rank."""
    ranks, client = (
        task.ranks(context.run_config),
        int(context.node_config["partition-id"]),
    )
    model = task.build_model(context.run_config, ranks[client % len(ranks)])
    load_adapter(model, message.content["arrays"].to_torch_state_dict())
    return model
