"""Arms whose task head is fitted to the clients' rows after every round, not only after the last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from flwr.app import ArrayRecord, Message, MetricRecord

from fedrot.simulations.arm import READERS, TASK_HEAD, Arm
from fedrot.simulations.federation.arm_strategies import ArmStrategy

#: Ends the name of such an arm.
EACH_ROUND = f"{TASK_HEAD}-each-round"


class EachRound(ArmStrategy):
    """``FedRot`` for one cell; clients go on from the model with the better of two heads."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        # The last round's head is fitted where its model is evaluated.
        if arrays is not None and server_round < self.cell.task.config.rounds:
            arrays = self.with_fitted_head(server_round, arrays)
        return arrays, metrics


class EachRoundArm(Arm):
    """An arm whose head is fitted after every round."""

    strategy: ClassVar[Any] = EachRound


def read_each_round(text: str) -> Arm | None:
    """Read ``plain+task-head-each-round``; None if it is another arm."""
    if not text.endswith(EACH_ROUND):
        return None
    arm = Arm.parse(text.removesuffix(EACH_ROUND) + TASK_HEAD)
    return EachRoundArm.model_validate({**dict(arm), "name": text})


READERS.append(read_each_round)
