"""Check of a saved model: random elements of its symmetry are applied, and its outputs compared."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedrot.check import TOLERANCE, output_change, suspects
from fedrot.errors import FedrotError
from fedrot.simulations.check.check_report import CheckReport, GroupFound, KindChecked
from fedrot.simulations.models.model_files import CONFIG, SUFFIX
from fedrot.simulations.models.saved_model import open_saved_model
from fedrot.symmetry import NO_LAYER, PARTS, Group, symmetry_of


def check_model(name: str, parts: tuple[str, ...] | None = None, seed: int = 0) -> CheckReport:
    """Load a model, move it by random elements of every group, and compare its outputs.

    Args:
        name: a folder of a saved model, or a name on the hub.
        parts: what is moved; all parts that can be moved if None.
        seed: of elements, inputs and noise; see ``fedrot.check_function``.

    Raises:
        FedrotError: the model cannot be loaded, a part cannot be moved, or the model does not run on
            random inputs.
    """
    start = time.perf_counter()
    model, notes = _loaded(name)
    config: Any = model.config
    symmetry = symmetry_of(config, model.state_dict())
    movable = {group.part for group in symmetry.groups}
    chosen = tuple(part for part in PARTS if part in movable) if parts is None else parts
    groups = symmetry.select(chosen)
    if not groups:
        raise FedrotError(f"'{name}' has no groups of the parts {', '.join(chosen) or '(none)'}.")
    change = output_change(model, config, symmetry, chosen, seed)
    kinds = tuple(
        _checked(key, sum(_key(group) == key for group in groups), change(partial(_is, key=key)))
        for key in dict.fromkeys(map(_key, groups))
    )
    together = change(lambda group: True)
    holds = together <= TOLERANCE and all(kind.holds for kind in kinds)
    broken = dict.fromkeys(kind.part for kind in kinds if not kind.holds)
    return CheckReport(
        model=name,
        model_type=config.model_type,
        family=symmetry.family,
        architecture=type(model).__name__,
        seed=seed,
        parts=chosen,
        refused=symmetry.refused,
        groups=tuple(map(_found, groups)),
        kinds=kinds,
        change=_finite(together),
        tolerance=TOLERANCE,
        holds=holds,
        suspects="" if holds else suspects(symmetry, change, tuple(broken)),
        notes=notes,
        seconds=time.perf_counter() - start,
    )


def _loaded(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Load a model as the class that its configuration names; return notes on its tensors, too."""
    if Path(name).is_file():
        advice = f" '{SUFFIX}' files lie beside their {CONFIG}." if name.endswith(SUFFIX) else ""
        raise FedrotError(f"'{name}' is a file. Give the folder of a saved model.{advice}")
    saved = open_saved_model(name, pickles=True)
    model, missing, unknown = saved.load(saved.model_class)
    class_name = type(model).__name__
    if 2 * len(missing) > len(model.state_dict()):
        raise FedrotError(
            f"'{name}' lacks {len(missing)} tensors of a {class_name}, the first '{missing[0]}': most "
            "of the model would be random. Save it, without wrappers, with save_pretrained."
        )
    notes = [f"Not stored, so random: {', '.join(missing)}"] if missing else []
    notes += [f"Stored beside a {class_name}, and left out: {', '.join(unknown)}"] if unknown else []
    return model, tuple(notes)


def _key(group: Group) -> tuple[str, str]:
    return group.part, type(group.kind).__name__


def _is(group: Group, key: tuple[str, str]) -> bool:
    return _key(group) == key


def _found(group: Group) -> GroupFound:
    layer = None if group.layer == NO_LAYER else group.layer
    tensors = len({slot.tensor for slot in group.slots})
    return GroupFound(group.name, layer, *_key(group), group.kind.units, tensors)


def _checked(key: tuple[str, str], groups: int, change: float) -> KindChecked:
    return KindChecked(*key, groups, _finite(change), change <= TOLERANCE)


def _finite(change: float) -> float | None:
    return change if math.isfinite(change) else None
