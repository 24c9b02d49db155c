"""Tensors of a saved model by the names of its state dict, mapped from their files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.simulations.models.model_files import SAVE_AGAIN, Place, opened, stored_tensors


@dataclass(frozen=True)
class MappedTensors:
    """The tensors of a model on disk; names and shapes are known, values are read on demand.

    Attributes:
        shapes: of every tensor of the state dict.
        first: for every name of the state dict, the first of the names that share its tensor.
        places: where each tensor is stored, by first name.
        unknown: stored names that the state dict does not have.
    """

    shapes: Mapping[str, tuple[int, ...]]
    first: Mapping[str, str]
    places: Mapping[str, Place]
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, config_file: Path, model_class: Any, config: Any) -> MappedTensors:
        """Find the tensors of a class with a configuration in a folder or file.

        Raises:
            FedrotError: a tensor is missing or of another shape, tied tensors differ, or a file cannot
                be read; see ``stored_tensors``.
        """
        with torch.device("meta"):
            state = model_class(config).state_dict(keep_vars=True)
        names: dict[int, str] = {}
        first = {name: names.setdefault(id(tensor), name) for name, tensor in state.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        stored = stored_tensors(path)
        unknown = tuple(sorted(stored.keys() - first.keys()))
        found = cls(shapes, first, _places(path, stored, first, model_class.__name__), unknown)
        for name, tensor in found.read().items():
            if tuple(tensor.shape) != shapes[name]:
                raise FedrotError(
                    f"'{path}': the tensor '{name}' has shape {list(tensor.shape)}, but should have "
                    f"{list(shapes[name])} by '{config_file}'. Check that they belong together."
                )
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which ``save_pretrained`` stores the tensors: tied ones once."""
        return tuple(self.places)

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return tensors by name, those of the whole state dict by default.

        They are views of the mapped files. A file stays mapped as long as one of its tensors is kept,
        and the pages that were read stay in memory as long. Tied names share one tensor.
        """
        wanted = list(self.first if names is None else names)
        found: dict[str, Tensor] = {}
        with ExitStack() as stack:
            handles: dict[Path, Any] = {}
            for name in dict.fromkeys(self.first[name] for name in wanted):
                file, stored = self.places[name]
                if file not in handles:
                    handles[file] = stack.enter_context(opened(file))
                found[name] = handles[file].get_tensor(stored)
        return {name: found[self.first[name]] for name in wanted}


def _places(
    path: Path, stored: Mapping[str, Place], first: Mapping[str, str], model_class: str
) -> dict[str, Place]:
    """Return where each tensor is stored; any copy of tied tensors will do, if all are equal."""
    copies: dict[str, list[str]] = defaultdict(list)
    for name, one in first.items():
        copies[one] += [name] if name in stored else []
    missing = [name for name, names in copies.items() if not names]
    unknown = sorted(stored.keys() - first.keys())
    if missing and unknown:
        raise FedrotError(
            f"'{path}' stores '{unknown[0]}', which a {model_class} does not have, and lacks "
            f"'{missing[0]}' ({len(missing)} missing in all). Check that it and its configuration "
            "belong together. Some classes (ViT, DeiT) are stored by transformers under other names "
            "than they have in memory, which this command does not translate: load them with "
            "from_pretrained, merge with fedrot.align and save the result."
        )
    if missing:
        raise FedrotError(
            f"'{path}' has no tensor '{missing[0]}' ({len(missing)} missing in all), which a "
            f"{model_class} has. Check that it and its configuration belong together. {SAVE_AGAIN}"
        )
    for one, *others in copies.values():
        for other in others:
            (file, here), (beside, there) = stored[one], stored[other]
            with opened(file) as a, opened(beside) as b:
                same = torch.equal(a.get_tensor(here), b.get_tensor(there))
            if not same:
                raise FedrotError(
                    f"'{path}' holds different values in '{one}' and '{other}', which its configuration "
                    "ties. Set its 'tie_word_embeddings' to what the model was trained with."
                )
    return {one: stored[names[0]] for one, names in copies.items()}
