"""Saved models with separate tables: loaded, and written so that ``from_pretrained`` loads them so."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrot._io import replacing
from fedrot.check import function_change
from fedrot.errors import FedrotError
from fedrot.simulations.models.model_files import BESIDE, refuse_filled
from fedrot.simulations.models.packaged import no_bar_for_files
from fedrot.simulations.models.saved_model import SavedModel, open_saved_model
from fedrot.symmetry import Symmetry, symmetry_of

#: Accepted change of an output of a written model, relative to the largest, by the dtype of its weights.
ACCEPTED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Separate:
    """A saved model in memory whose tied tables are tensors of their own.

    Attributes:
        symmetry: of the model with separate tables.
        tied: the names of tables that were one tensor.
    """

    saved: SavedModel
    model: nn.Module
    symmetry: Symmetry
    tied: tuple[tuple[str, ...], ...]

    @classmethod
    def load(cls, name: str | Path) -> Separate:
        """Load a model; raises ``FedrotError`` if it cannot be loaded or lacks a tensor."""
        saved = open_saved_model(name)
        model, missing, _ = saved.load(saved.model_class)
        if missing:
            raise FedrotError(
                f"'{name}' has no tensor '{missing[0]}' ({len(missing)} missing in all), which a "
                f"{type(model).__name__} has. Save the whole model with save_pretrained."
            )
        tied = symmetry_of(saved.config, model.state_dict()).tied
        separate = with_separate_tables(model)
        return cls(saved, separate, symmetry_of(saved.config, separate.state_dict()), tied)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(self.model.state_dict())

    def holding(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return a copy of the model with other tensors."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(tensors)
        return model


def with_separate_tables(model: nn.Module) -> nn.Module:
    """Return the model itself, in which every parameter has storage of its own now."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
            seen.add(id(parameter))
    return model


def write(model: nn.Module, beside: Path, out: Path) -> None:
    """Write a model with separate tables as a folder, whole or not at all, and load it once more.

    Args:
        beside: the folder whose tokenizer and generation configuration are copied.

    Raises:
        FileExistsError: there is something at ``out``.
        FedrotError: ``from_pretrained`` loads another function than was written.
    """
    refuse_filled(out)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    changes = []
    with replacing(out) as target:
        # T5 reads a false ``tie_word_embeddings`` as another scale of its outputs: there it stays true.
        for tie in (False, True):
            _save(model, target, tie)
            changes.append(_change_by_loading(model, target))
            if changes[-1] <= ACCEPTED[next(model.parameters()).dtype]:
                break
            shutil.rmtree(target)
        else:
            raise FedrotError(
                f"A {type(model).__name__} does not keep tables of its own: loaded from what was "
                f"written, its outputs differ by {min(changes):.1e} of their size. Nothing was written."
            )
        for file in (beside / name for name in BESIDE):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)


def _save(model: Any, target: Path, tie: bool) -> None:
    shell = copy.deepcopy(model)
    shell.config.tie_word_embeddings = tie
    shell.save_pretrained(target)


def _change_by_loading(model: Any, folder: Path) -> float:
    with no_bar_for_files(str(folder)):
        loaded = type(model).from_pretrained(folder, local_files_only=True)
    return function_change(model, loaded, model.config)
