"""Clients that do not train: each replies with the received model plus a small
drift.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

#: Values of noise that a client draws; tensors repeat them, because drawing more would
#: take seconds.
NOISE = 2**20 + 7

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model with noise of the relative norm ``drift`` in every tensor."""
    client = int(context.node_config["partition-id"])
    drift = float(context.run_config["drift"])
    generator = np.random.default_rng(
        [client, int(message.content.config_records["config"]["number"])]
    )
    noise = generator.standard_normal(NOISE, dtype=np.float32)
    update = ArrayRecord()
    for name, array in message.content.array_records["arrays"].items():
        values = array.numpy()
        flat = values.reshape(-1)
        scale = drift * float(np.linalg.norm(flat)) / flat.size**0.5
        added = np.resize(np.roll(noise, -int(generator.integers(NOISE))), flat.size)
        update[name] = Array(values + np.float32(scale) * added.reshape(values.shape))
    metrics = MetricRecord({"num-examples": 10 * (client + 1)})
    return Message(RecordDict({"arrays": update, "metrics": metrics}), reply_to=message)
