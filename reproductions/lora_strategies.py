"""The strategies ``RivalLoRA`` and ``FedAvgRivalLoRA``: rival averages of LoRA adapters
in Flower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.lora.averaging import AdapterOptions, checked_adapter_options
from fedrot.strategies import AlignedLoRA
from fedrot.strategies.lora import AdapterSchema
from fedrot.strategies.round.inbox import Schema
from fedrot.tensors import Shaped, Tensors
from reproductions.lora_clients import FOLDS, TRAIN
from reproductions.lora_rivals import RivalOptions, without_residuals


class RivalLoRA(AlignedLoRA):
    """``AlignedLoRA`` by ``RivalOptions``: clients are told which factors to train, and
    get residuals.

    Clients call ``reproductions.lora_clients.train_only(model, config)`` before they
    train, and ``load_folded`` or ``load_first`` in place of
    ``fedrot.lora.load_adapter``.

    Raises:
        FedrotError: as ``AlignedLoRA``; or ``residual="fold"`` is asked for and the
            base strategy is not FedAvg. In the first round: ``freeze-a`` is asked for
            and embeddings are adapted.
    """

    adapters: RivalOptions

    def __init__(
        self,
        settings: object,
        adapters: AdapterOptions | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        given = checked_adapter_options(adapters)
        if not isinstance(given, RivalOptions):
            given = RivalOptions(given.method, given.gauge)
        super().__init__(settings, given, *args, **kwargs)
        if self.adapters.folds and self.wrapped_class is not FedAvg:
            raise FedrotError(
                "residual='fold' changes the base weights, for which "
                f"{self.wrapped_class.__name__} has no step. Take FedAvgRivalLoRA, or "
                "residual='drop'."
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Tell the clients which factors they train, and whether a residual will
        come.
        """
        tables = [name for name in arrays if "lora_embedding_A" in name]
        if tables and self.adapters.schedule == "freeze-a":
            raise FedrotError(
                f"'{tables[0]}' is 0 at the start, as PEFT draws adapters of "
                "embeddings: with schedule='freeze-a' it would stay so. Adapt no "
                "embeddings, or take 'alternate'."
            )
        config[TRAIN] = self.adapters.trained(server_round)
        if self.adapters.folds:
            config[FOLDS] = True
        return super().configure_train(server_round, arrays, config, grid)

    def check_own_messages(self, messages: Sequence[Message]) -> None:
        """Refuse messages that do not say which factors to train, where the answer is
        not: both.
        """
        configs = (c for m in messages for c in m.content.config_records.values())
        must_say = self.adapters.schedule != "both" or self.adapters.folds
        if must_say and not any(TRAIN in config for config in configs):
            raise FedrotError(
                f"The messages of {type(self).__name__} do not say which factors to "
                "train, or that a residual will come. Let its configure_train call "
                "super().configure_train(server_round, arrays, config, grid), and "
                "change the messages that this returns."
            )

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, **kwargs: Any
    ) -> Result:
        """As ``ReplyStrategy.start``, also with a checkpoint that has residuals."""
        if self.checkpoints is not None and self.checkpoints.rounds():
            saved = self.checkpoints.newest().result.arrays
            adapter = without_residuals(saved)
            # The initial adapter has none, and would be another model.
            residuals = {n: array for n, array in saved.items() if n not in adapter}
            initial_arrays = ArrayRecord({**initial_arrays, **residuals})
        return super().start(grid, initial_arrays, *args, **kwargs)

    def schema(self, broadcast: Tensors) -> Schema:
        """Return the tensors that a reply may hold: an adapter, whose residuals are
        left out.
        """
        return RivalSchema(
            without_residuals(broadcast), self.adapters.averaging.any_rank
        )


class FedAvgRivalLoRA(RivalLoRA, FedAvg):
    """FedAvg for LoRA adapters by ``RivalOptions``."""


@dataclass(frozen=True)
class RivalSchema(AdapterSchema):
    """Adapters as ``AdapterSchema`` takes them; residuals that clients send back are
    left out.
    """

    def read(self, arrays: ArrayRecord, copy: bool) -> dict[str, Tensor]:
        """Return a reply's tensors as ``Schema`` does."""
        return super().read(ArrayRecord(without_residuals(arrays)), copy)

    def check(self, given: Mapping[str, Shaped]) -> None:
        """Raise ``UpdateError`` as ``AdapterSchema`` does."""
        super().check(without_residuals(given))
