"""Options that have an effect only with certain values of other options, and their check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrot.errors import FedrotError
from fedrot.simulations.cli.commands import names
from fedrot.simulations.cli.model_commands import is_adapter
from fedrot.simulations.config import OF_PRETRAINING, OF_SMALL_MODEL, SimulationConfig

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Effect:
    """The condition under which parameters of a command have an effect.

    Attributes:
        where: the end of the sentence "... has an effect only".
        holds: the condition on the values of all parameters; true for values that the command refuses.
    """

    parameters: tuple[str, ...]
    where: str
    holds: Callable[[Values], bool]


def _of_adapters(values: Values) -> bool:
    return any(map(is_adapter, values["models"]))


#: Settings that may be given together with a grid.
_BESIDE_A_GRID = ("data_dir", "model", "setting")
_SETTINGS = tuple(name for name in SimulationConfig.model_fields if name not in _BESIDE_A_GRID)

EFFECTS: Mapping[str, tuple[Effect, ...]] = {
    "simulate": (
        Effect(
            ("quick",),
            "with a grid, fedrot simulate GRID",
            lambda v: v["grid"] is not None,
        ),
        Effect(
            (*_SETTINGS, "more"),
            "without a grid: the file of a grid has the settings",
            lambda v: v["grid"] is None,
        ),
        Effect(
            OF_SMALL_MODEL,
            "on a small model from scratch, not with --model",
            lambda v: v["model"] is None,
        ),
        Effect(("max_length",), "on texts, not with --task image", lambda v: v["task"] != "image"),
        Effect(("server_lr",), "beside --set server=adam or yogi", lambda v: v["server"] != "mean"),
        Effect(
            OF_PRETRAINING,
            "with --start pretrained",
            lambda v: "pretrained" in names(v["starts"]),
        ),
    ),
    # The command itself refuses a path that does not exist.
    "report": (
        Effect(
            ("markdown",),
            "for a run folder: a strategy's file has no results",
            lambda v: not Path(v["run_or_file"]).is_file(),
        ),
        Effect(
            ("out",),
            "for a strategy's file: the report of a run folder is in that folder",
            lambda v: not Path(v["run_or_file"]).is_dir(),
        ),
    ),
    "merge": (
        Effect(("parts",), "on models, not on LoRA adapters", lambda v: not _of_adapters(v)),
        Effect(("method", "rank"), "on LoRA adapters", _of_adapters),
    ),
}


def refuse_idle(command: str, values: Values, given: Mapping[str, str]) -> None:
    """Raise ``FedrotError`` if a parameter on the command line has no effect.

    ``values`` has the value of every parameter. ``given`` has the spelling of those on the command line.
    """
    for effect in EFFECTS.get(command, ()):
        idle = [given[name] for name in effect.parameters if name in given]
        if idle and not effect.holds(values):
            verb, it = ("has", "it") if len(idle) == 1 else ("have", "them")
            raise FedrotError(
                f"{' and '.join(idle)} {verb} an effect only {effect.where}. Leave {it} out."
            )
