"""Arms whose task head is fitted to the clients' rows after every round, not only after the last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from flwr.app import ArrayRecord, Message, MetricRecord

from fedrot.simulations.arm import READERS, TASK_HEAD, Arm
from fedrot.simulations.federation.arm_strategies import ArmStrategy


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


class Measured(ArmStrategy):
    """``FedRot`` for one cell; every round is evaluated with the better of two heads.

    Clients go on from the model without it.
    """

    def fits_head_after(self, server_round: int) -> bool:
        return server_round > 0


class EachRoundArm(Arm):
    """An arm whose head is fitted after every round, for the clients."""

    strategy: ClassVar[Any] = EachRound


class MeasuredArm(Arm):
    """An arm whose head is fitted after every round, for the evaluation only."""

    strategy: ClassVar[Any] = Measured


#: The ends of such arms' names.
ENDS: Mapping[str, type[Arm]] = {
    f"{TASK_HEAD}-each-round": EachRoundArm,
    f"{TASK_HEAD}-measured": MeasuredArm,
}


def read_task_head(text: str) -> Arm | None:
    """Read ``plain+task-head-each-round`` or ``-measured``; None if it is another arm."""
    for end, kind in ENDS.items():
        if text.endswith(end):
            arm = Arm.parse(text.removesuffix(end) + TASK_HEAD)
            return kind.model_validate({**dict(arm), "name": text})
    return None


READERS.append(read_task_head)
