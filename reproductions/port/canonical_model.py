"""A saved model in canonical form: its norms are folded, so that its residual stream can be rotated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedrot.check import function_change
from fedrot.errors import FedrotError
from fedrot.simulations.models.model_files import refuse_filled
from fedrot.symmetry.canonical import canonical
from reproductions.port.rewriting import Separate, write


@dataclass(frozen=True)
class CanonicalReport:
    """What became of a model.

    Attributes:
        folded: the gains that are 1 now.
        untied: the tables that are tensors of their own now.
        change: of an output, relative to the largest entry.
    """

    folded: tuple[str, ...]
    untied: tuple[str, ...]
    change: float


def write_canonical(name: str, out: Path) -> CanonicalReport:
    """Bring a saved model to canonical form (``fedrot.canonical``); write it as a model of its class.

    Tied tables become separate ones where the gain of the last norm goes into one of them.

    Raises:
        FedrotError: the model cannot be loaded, or its residual stream cannot be rotated; the message
            has the reason.
        FileExistsError: there is something at ``out``.
    """
    refuse_filled(out)
    given = Separate.load(name)
    symmetry = given.symmetry
    if not symmetry.folds:
        reason = next(iter((symmetry.unfolded | symmetry.refused).values()), "it has none of its own")
        raise FedrotError(f"The norms of '{name}' cannot be folded: {reason}")
    model = given.holding(canonical(given.tensors, symmetry))
    change = function_change(given.model, model, given.saved.config)
    write(model, given.saved.path, out)
    untied = [n for names in given.tied if symmetry.readers & {*names} for n in names]
    return CanonicalReport(tuple(fold.gain for fold in symmetry.folds), tuple(untied), change)
