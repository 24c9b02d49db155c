"""Arms of Flower's strategies, as rivals over rounds: ``fedavgm``, ``fedadam``, ``fedprox``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from flwr.serverapp.strategy import FedAdam, FedAvgM, FedProx
from pydantic import Field
from torch import nn

from fedrot.simulations.arm import READERS, Arm, pairs
from fedrot.simulations.federation.arm_strategies import ArmRun, CellStrategy
from fedrot.strategies import Aligned


class FlowerCell(CellStrategy, Aligned):
    """Mixin for a cell of one of Flower's strategies, which aligns nothing."""

    def __init__(self, cell: ArmRun, model: nn.Module, report: Path) -> None:
        arm = cell.arm
        assert isinstance(arm, FlowerArm)
        super().__init__(cell, model, report, alignment=None, **arm.given)


class AvgMCell(FlowerCell, FedAvgM):
    """``FedAvgM`` for one cell."""


class AdamCell(FlowerCell, FedAdam):
    """``FedAdam`` for one cell."""


class ProxCell(FlowerCell, FedProx):
    """``FedProx`` for one cell; the simulation's clients add its term to their loss."""


#: By name: the strategy of a cell, and its arguments with their defaults here.
STRATEGIES: Mapping[str, tuple[Any, Mapping[str, float]]] = {
    "fedavgm": (AvgMCell, {"server_momentum": 0.9, "server_learning_rate": 1.0}),
    "fedadam": (AdamCell, {"eta": 0.01, "tau": 1e-3}),
    "fedprox": (ProxCell, {"proximal_mu": 0.1}),
}
_NAME = re.compile(rf"(?P<name>{'|'.join(STRATEGIES)})(\((?P<given>[^)]*)\))?")


class FlowerArm(Arm):
    """An arm such as ``fedadam(eta=0.01)``."""

    strategy: ClassVar[Any] = staticmethod(
        lambda cell, model, report: STRATEGIES[cell.arm.of_flower][0](cell, model, report)
    )

    of_flower: str
    given: Mapping[str, float] = Field(default_factory=dict)


def read_flower_strategy(text: str) -> Arm | None:
    """Read an arm of ``STRATEGIES``, None for other names; raises ``ValueError`` for wrong arguments."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    _, known = STRATEGIES[found["name"]]
    given = {key: float(value) for key, value in pairs(found["given"] or "").items()}
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise ValueError(f"arm '{text}': unknown argument '{unknown[0]}'; one of {', '.join(known)}")
    return FlowerArm(name=text, align=False, of_flower=found["name"], given={**known, **given})


READERS.append(read_flower_strategy)
