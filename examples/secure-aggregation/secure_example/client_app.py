"""The client: it trains, aligns its update to the received model, sums what RegMean needs, and masks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import Context, Message
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar
from torch.utils.data import TensorDataset

from fedrot import collect_gram, symmetry_of
from fedrot.aggregation import Statistics
from fedrot.strategies import align_mod, regmean_mod
from secure_example.task import batches, build_model, load_rows, train


def rows_of(context: Context) -> TensorDataset:
    """Return the node's own rows."""
    node = context.node_config
    share, shares = int(node["partition-id"]), int(node["num-partitions"])
    return load_rows("train", share, shares, int(context.run_config["rows"]))


class Institution(NumPyClient):
    """Trains on rows of its own."""

    def __init__(self, context: Context) -> None:
        self.rows = rows_of(context)
        self.epochs = int(context.run_config["epochs"])

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train the received model."""
        model = build_model()
        names = model.state_dict()
        model.load_state_dict(dict(zip(names, map(torch.from_numpy, parameters), strict=True)))
        train(model, self.rows, self.epochs)
        return [tensor.numpy() for tensor in model.state_dict().values()], len(self.rows), {}


def client_fn(context: Context) -> Client:
    """Return the node's client."""
    return Institution(context).to_client()


def grams(message: Message, context: Context, tensors: Mapping[str, torch.Tensor]) -> Statistics:
    """Return Gram matrices of the aligned model; called if the server asks for the sums of RegMean."""
    aligned = build_model()
    aligned.load_state_dict(dict(tensors))
    return collect_gram(aligned, batches(rows_of(context)))


# Secure aggregation names no tensors: align_mod gets the symmetry, and regmean_mod the names. The first
# mod is the outermost: updates are aligned, then turned into sums if the server asks, then masked.
model = build_model()
symmetry = symmetry_of(model.config, model.state_dict())
app = ClientApp(
    client_fn=client_fn,
    mods=[secaggplus_mod, regmean_mod(model.state_dict(), grams), align_mod(symmetry)],
)
