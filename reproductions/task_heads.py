"""Arms that are evaluated with a fitted task head after every round, not only after the last."""

from __future__ import annotations

from typing import Any, ClassVar

from fedrot.simulations.arm import READERS, TASK_HEAD, Arm
from fedrot.simulations.federation.arm_strategies import ArmStrategy


class Measured(ArmStrategy):
    """``FedRot`` for one cell; every round is evaluated with the better of two heads.

    Clients go on from the model without it.
    """

    def fits_head_after(self, server_round: int) -> bool:
        return server_round > 0


class MeasuredArm(Arm):
    """An arm whose head is fitted after every round, for the evaluation only."""

    strategy: ClassVar[Any] = Measured


#: The end of such arms' names.
MEASURED = f"{TASK_HEAD}-measured"


def read_measured(text: str) -> Arm | None:
    """Read ``plain+task-head-measured``; None if it is another arm."""
    if not text.endswith(MEASURED):
        return None
    arm = Arm.parse(text.removesuffix(MEASURED) + TASK_HEAD)
    return MeasuredArm.model_validate({**dict(arm), "name": text})


READERS.append(read_measured)
