"""The client: it trains, aligns its update to the received model, and masks it."""

from __future__ import annotations

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar

from fedrot import symmetry_of
from fedrot.strategies import align_mod
from secure_example.task import build_model, load_rows, train


class Institution(NumPyClient):
    """Trains on rows of its own."""

    def __init__(self, context: Context) -> None:
        node = context.node_config
        share, shares = int(node["partition-id"]), int(node["num-partitions"])
        self.rows = load_rows("train", share, shares, int(context.run_config["rows"]))
        self.epochs = int(context.run_config["epochs"])

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train the received model."""
        model = build_model()
        names = model.state_dict()
        model.load_state_dict(
            dict(zip(names, map(torch.from_numpy, parameters), strict=True))
        )
        train(model, self.rows, self.epochs)
        return (
            [tensor.numpy() for tensor in model.state_dict().values()],
            len(self.rows),
            {},
        )


def client_fn(context: Context) -> Client:
    """Return the node's client."""
    return Institution(context).to_client()


# Secure aggregation names no tensors, so align_mod gets the symmetry. The first mod is
# the outermost: updates are aligned, then masked.
model = build_model()
symmetry = symmetry_of(model.config, model.state_dict())
app = ClientApp(client_fn=client_fn, mods=[secaggplus_mod, align_mod(symmetry)])
