"""label_skew_text: A Flower Baseline."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from fedrot.strategies import FedRot
from flwr.app import ArrayRecord, ConfigRecord, Message, UserConfig
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedProx, Strategy


class SameClients:
    """Mixin: half of the clients train, drawn by the seed, the same in all strategies.

    ``partitions`` has the partition of each node. The strategy behind asks all nodes.
    """

    def __init__(
        self, *args: Any, partitions: dict[int, int], seed: int, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.partitions, self.seed = partitions, seed

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages to the clients of the round."""
        # pylint: disable-next=no-member
        messages = super().configure_train(  # type: ignore[misc]
            server_round, arrays, config, grid
        )
        rng = np.random.default_rng([self.seed, 3, server_round])
        size = len(self.partitions)
        drawn = {*rng.choice(size, size // 2, replace=False).tolist()}
        return [m for m in messages if self.partitions[m.metadata.dst_node_id] in drawn]


class SameFedAvg(SameClients, FedAvg):
    """FedAvg with the same clients."""


class SameFedProx(SameClients, FedProx):
    """FedProx with the same clients."""


class SameFedRot(SameClients, FedRot):
    """FedRot with the same clients."""


def build_strategy(
    name: str, config: UserConfig, model_config: Any, partitions: dict[int, int]
) -> tuple[Strategy, ConfigRecord]:
    """Return a strategy by name, and what clients need to know of it."""
    same: dict[str, Any] = {"partitions": partitions, "seed": int(config["seed"])}
    same["fraction_evaluate"] = 0.0
    rates = {"head-only": "learning-rate-head", "fedrot": "learning-rate-fedrot"}
    told = ConfigRecord({"head-only": name == "head-only"})
    told["learning-rate"] = float(config[rates.get(name, "learning-rate")])
    if name in ("fedavg", "head-only"):
        return SameFedAvg(**same), told
    if name == "fedprox":
        return SameFedProx(proximal_mu=float(config["proximal-mu"]), **same), told
    if name == "fedrot":
        return SameFedRot(model_config, fit_head=True, **same), told
    raise ValueError(f"No strategy '{name}': head-only, fedavg, fedprox or fedrot")
