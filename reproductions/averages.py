"""Arms that merge as published or measured elsewhere: ``plain/NAME(ARGUMENTS)``, see ``AVERAGES``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from pydantic import Field
from torch import nn

from fedrot.aggregation import Aggregator
from fedrot.collect.statistics import STATISTIC_KINDS
from fedrot.simulations.arm import READERS, TASK_HEAD, Arm, pairs
from fedrot.simulations.federation.arm_strategies import ArmRun, ArmStrategy
from fedrot.strategies.wire.arrays import from_arrays
from reproductions.ace import Ace
from reproductions.changes import OfChanges, Scaled
from reproductions.damped_fisher import DampedFisher
from reproductions.kfac import KFac
from reproductions.output_grams import OUTPUT_GRAMS

#: The averages by name.
AVERAGES: Mapping[str, Callable[..., Any]] = {
    "scaled": Scaled,
    "ace": Ace,
    "kfac": KFac,
    "fisher-damped": DampedFisher,
}
_NAME = re.compile(
    rf"plain/(?P<average>{'|'.join(AVERAGES)})(\((?P<given>[^)]*)\))?({re.escape(TASK_HEAD)})?"
)


class AverageStrategy(ArmStrategy):
    """``FedRot`` for one cell of an average; averages of changes receive the broadcast model."""

    def __init__(self, cell: ArmRun, model: nn.Module, report: Path) -> None:
        super().__init__(cell, model, report)
        arm = cell.arm
        assert isinstance(arm, AverageArm)
        build = AVERAGES[arm.average]
        STATISTIC_KINDS.setdefault(OUTPUT_GRAMS.name, OUTPUT_GRAMS)
        self.aggregation, self._kinds = partial(build, **arm.given), build().needs

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._before_training = from_arrays(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregator(self, server_round: int) -> Callable[[], Aggregator] | None:
        """Return a function that builds the average."""

        def built() -> Aggregator:
            assert self.aggregation is not None
            average = self.aggregation()
            if isinstance(average, OfChanges):
                average.start = self._before_training
            return average

        return built


class AverageArm(Arm):
    """An arm such as ``plain/ace(ridge=0.1)+task-head``."""

    strategy: ClassVar[Any] = AverageStrategy

    average: str = ""
    given: Mapping[str, float] = Field(default_factory=dict)


def read_average(text: str) -> Arm | None:
    """Read an arm of ``AVERAGES``, None for other names; raises ``ValueError`` for wrong arguments."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    build = AVERAGES[found["average"]]
    try:
        given = {key: float(value) for key, value in pairs(found["given"] or "").items()}
        unknown = given.keys() - inspect.signature(build).parameters.keys()
        if unknown:
            raise ValueError(f"'{found['average']}' has no argument '{min(unknown)}'")
        build(**given)
    except ValueError as error:
        raise ValueError(f"arm '{text}': {error}") from error
    arm = Arm.of_grammar(f"plain{TASK_HEAD}" if text.endswith(TASK_HEAD) else "plain")
    return AverageArm.model_validate(
        {**dict(arm), "name": text, "average": found["average"], "given": given}
    )


READERS.append(read_average)
