"""Clients: one is honest, one scrambles its update, one sends NaN, one dies."""

from __future__ import annotations

import time
from pathlib import Path

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from scenario.task import (
    BROKEN,
    DYING,
    SCRAMBLED,
    TRAINING,
    build_model,
    examples,
    trained,
)

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return what this client makes of the model."""
    import torch  # noqa: F401  (to_torch_state_dict works only where torch is imported already)

    client = int(context.node_config["partition-id"])
    server_round = int(message.content["config"]["server-round"])
    if client == DYING and server_round == 2:
        _wait_for_the_end(Path(str(context.run_config["out"])))
    update = trained(
        message.content["arrays"].to_torch_state_dict(), client, server_round
    )
    if client == SCRAMBLED:
        import fedrot

        symmetry = fedrot.symmetry_of(build_model().config, update)
        update = fedrot.random_equivalent(update, symmetry, seed=server_round)
    if client == BROKEN:
        update["classifier.weight"][0, 0] = float("nan")
    content = RecordDict(
        {
            "arrays": ArrayRecord(update),
            "metrics": MetricRecord({"num-examples": examples(client)}),
            "client": ConfigRecord({"partition-id": client}),
        }
    )
    return Message(content, reply_to=message)


def _wait_for_the_end(out: Path) -> None:
    (out / TRAINING).touch()
    time.sleep(600)
    raise RuntimeError("Nobody killed this client.")
