"""The client: an ordinary PEFT client."""

from __future__ import annotations

import itertools

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedrot.lora import adapter_tensors, load_adapter
from fedrot.strategies import adapter_record
from llm_example.dataset import load_data
from llm_example.models import DEVICE, get_model, learning_rate

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received adapter for some steps on the client's rows."""
    config, asked = context.run_config, message.content["config"]
    model = get_model(config)
    load_adapter(model, message.content["arrays"].to_torch_state_dict())
    model.to(DEVICE).train()
    server_round = int(asked["server-round"])
    rows = load_data(config, context.node_config, server_round)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate(config, server_round))
    endless = itertools.chain.from_iterable(itertools.repeat(rows))
    losses = []
    for batch in itertools.islice(endless, int(config["train.max-steps"])):
        loss = model(**{name: tensor.to(DEVICE) for name, tensor in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    metrics = {
        "num-examples": len(rows.dataset),
        "train-loss": sum(losses) / len(losses),
    }
    adapter = {name: tensor.cpu() for name, tensor in adapter_tensors(model).items()}
    content = RecordDict(
        {"arrays": ArrayRecord(adapter), "metrics": MetricRecord(metrics)}
    )
    content["fedrot-adapter"] = adapter_record(model.peft_config["default"])
    return Message(content, reply_to=message)
