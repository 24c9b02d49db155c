"""Arms of published tables: ensembles, rivals' adapters, and adapters that are rotated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from flwr.serverapp.strategy import FedAdam, FedAvg, FedYogi
from torch import nn

import reproductions.soup  # noqa: F401
from fedrot.simulations.arm import (
    ADAPTER_OPTIONS,
    OF_ADAPTERS,
    READERS,
    TOGETHER,
    Arm,
    Together,
    pairs,
)
from fedrot.simulations.config import TASKS, SimulationConfig
from fedrot.simulations.federation.arm_strategies import (
    AdapterCell,
    ArmRun,
    CellStrategy,
    adapter_strategy,
)
from fedrot.simulations.federation.arms import (
    aggregation_of,
    evaluate_held_out,
    with_state,
)
from fedrot.simulations.models import LOADERS, tensors_of
from fedrot.simulations.report.findings.sentences import WORDS
from fedrot.simulations.tasks.task import Task
from fedrot.strategies import FedRot
from fedrot.strategies.round.update import Moved
from fedrot.tensors import Tensors
from reproductions.adapter_symmetry import ADAPTERS, adapter_symmetry
from reproductions.ensemble import Ensemble
from reproductions.lora_clients import load_first, load_folded
from reproductions.lora_rivals import RivalOptions
from reproductions.lora_strategies import RivalLoRA

#: Arms whose clients' models answer together, by the mean of their logits or of their probabilities.
ENSEMBLES = ("ensemble", "ensemble-probabilities")
#: Options of arms of adapters, with what reads their values; see ``RivalOptions``.
RIVAL_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "gauge": str,
    "strength": float,
    "by": str,
    "limit": int,
    "residual": str,
    "schedule": str,
}

#: Methods of ``AdapterOptions``, whose arms are fedrot's unless they have options of rivals.
OURS = ("mean", "exact", "regmean")

_OF_ADAPTERS = re.compile(rf"{OF_ADAPTERS}(?P<method>[a-z-]*)(\((?P<options>[^)]*)\))?")


# Updates that are evaluated together


def evaluate_ensemble(
    task: Task, arm: Arm, shell: nn.Module, states: Iterable[Tensors]
) -> dict[str, float]:
    """Return the metrics of the ensemble of the clients' models on the held-out split."""
    models = [with_state(shell, state) for state in states]
    return evaluate_held_out(task, Ensemble(models, arm.aggregation == "ensemble-probabilities"))


def _ensemble(task: Task, arm: Arm, shell: nn.Module, updates: Sequence[Moved]) -> dict[str, float]:
    return evaluate_ensemble(task, arm, shell, (update.tensors for update in updates))


def _no_ensemble(arm: Arm, config: SimulationConfig | None) -> str:
    if arm.align:
        return f"an ensemble needs no alignment; use '{arm.aggregation}'"
    if config is None or TASKS[config.task].classifies:
        return ""
    able = " or ".join(f"'{task}'" for task, traits in TASKS.items() if traits.classifies)
    return f"ensembles are for task {able}, not for '{config.task}'"


TOGETHER |= dict.fromkeys(ENSEMBLES, Together(_ensemble, refused=_no_ensemble))
WORDS["ensemble"] = "the clients' models answer together; there is no merged model"


# Adapters


class RivalCell(AdapterCell, RivalLoRA):
    """Mixin for a cell of a rival's adapters."""

    def __init__(self, cell: ArmRun, *args: Any, **kwargs: Any) -> None:
        super().__init__(cell, *args, **kwargs)
        self.loads = "fold" if self.adapters.folds else "first" if self.adapters.method == "pad" else ""


class RivalStrategy(RivalCell, FedAvg):
    """``FedAvg`` of a rival's adapters for one cell."""


class RivalAdam(RivalCell, FedAdam):
    """``FedAdam`` of a rival's adapters for one cell."""


class RivalYogi(RivalCell, FedYogi):
    """``FedYogi`` of a rival's adapters for one cell."""


class AdaptersStrategy(CellStrategy, FedRot):
    """``FedRot`` of adapters for one cell."""

    def __init__(self, cell: ArmRun, model: nn.Module, report: Path) -> None:
        arm = cell.arm
        super().__init__(
            cell,
            model,
            report,
            adapter_symmetry(tensors_of(model)),
            aggregation=aggregation_of(arm, cell.task, cell.seed, model),
            alignment=arm.options,
        )


#: The strategy of a rival's adapters by ``SimulationConfig.server``.
OF_RIVALS = {"mean": RivalStrategy, "adam": RivalAdam, "yogi": RivalYogi}


class RivalArm(Arm):
    """``lora-METHOD(OPTIONS)`` of ``RivalOptions``, ``lora-rotate(strength=0.4;by=alternate)``."""

    strategy: ClassVar = staticmethod(partial(adapter_strategy, OF_RIVALS))

    @property
    def rival(self) -> RivalOptions:
        """The options."""
        assert isinstance(self.adapters, RivalOptions)
        return self.adapters

    @property
    def any_server(self) -> bool:
        """Whether a server's optimiser can take the average: no residual for the base weights."""
        return not self.rival.folds


class AdaptersArm(Arm):
    """``adapters@ANCHOR*CHANCE``: ``FedRot`` rotates factors, where there is evidence for it."""

    strategy: ClassVar = AdaptersStrategy

    @property
    def of_adapters(self) -> bool:
        """Whether the arm is for adapters alone."""
        return True

    @property
    def any_server(self) -> bool:
        """Whether a server's optimiser can take the average."""
        return False


def read_adapters(text: str) -> Arm | None:
    """Return an arm of adapters that fedrot does not know, None for other names."""
    if re.fullmatch(rf"{ADAPTERS}([@~*:/].*)?", text):
        return AdaptersArm.of_grammar(text)
    found = _OF_ADAPTERS.fullmatch(text)
    if found is None:
        return None
    try:
        given = pairs(found["options"] or "")
        if given.keys() <= ADAPTER_OPTIONS.keys() and found["method"] in OURS:
            return None
        unknown = [key for key in given if key not in RIVAL_OPTIONS]
        if unknown:
            raise ValueError(f"unknown option '{unknown[0]}'; one of {', '.join(RIVAL_OPTIONS)}")
        options = {key: RIVAL_OPTIONS[key](value) for key, value in given.items()}
        adapters = RivalOptions(found["method"], **options)
    except ValueError as error:
        raise ValueError(f"arm '{text}': {error}") from error
    return RivalArm(name=text, align=False, adapters=adapters)


READERS.append(read_adapters)
LOADERS |= {"first": load_first, "fold": load_folded}
