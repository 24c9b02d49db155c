"""What alignment moves, and when."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from fedrot.errors import FedrotError
from fedrot.symmetry.groups import DEFAULT_PARTS, PARTS

#: Layers by their place.
_LAYERS = re.compile(r"all|(first|last):[0-9]+")


@dataclass(frozen=True)
class AlignmentOptions:
    """What to move, and when.

    Attributes:
        parts: any of ``residual`` (permutation of the residual stream), ``output`` (permutation,
            with signs under odd activations, of the task heads' hidden units), ``heads`` (head
            permutation), ``attention`` (per-head rotation), ``rescale`` (per-head scale), ``ffn``
            (neuron permutation). ``fedrot.WHOLE_MODEL`` is all of them but ``rescale``.
        layers: ``"all"``, ``"first:N"``, ``"last:N"`` or a sequence of layer indices.
        ridge: pull of the rotation towards "do not move", relative to the largest singular value of
            each head's cross matrix; 0 is plain Procrustes.
        within_heads: ``rotation``, or ``permutation`` for the best order of each head's units, which
            is all that Git Re-Basin and Verma & Elbayad allow.
        threshold: a move that removes less than this share of its group's squared distance is
            skipped and reported as skipped; 0 moves whatever helps.
        sweeps: at most so many passes over all parts where they depend on each other (with
            ``residual`` or ``output`` among them); passes stop when one removes less than
            ``tolerance`` of the squared distance.
        tolerance: see ``sweeps``.
        restarts: further starts of the residual stream, from random permutations; the best wins.
        canonical_biases: set attention biases that change nothing to 0 in anchor and update, and in
            what ``Alignment.apply`` returns (``fedrot.canonical_biases``): they say nothing about the
            function, but distances see them. Then aligning a moved model gives back its function, not
            its biases.
        activation_weight: share of activations against weights in a group's similarity, between 0
            and 1; it matters only where activations are given.
    """

    parts: tuple[str, ...] = DEFAULT_PARTS
    layers: str | Collection[int] = "all"
    ridge: float = 0.0
    within_heads: str = "rotation"
    threshold: float = 0.0
    sweeps: int = 20
    tolerance: float = 1e-4
    restarts: int = 0
    activation_weight: float = 0.5
    canonical_biases: bool = False

    def __post_init__(self) -> None:
        parts: object = self.parts
        if isinstance(parts, str):
            named = tuple(parts.split("+"))
            known = repr(named) if set(named) <= {*PARTS} else f"a tuple of some of {PARTS}"
            write = "fedrot.WHOLE_MODEL" if parts == "whole" else known
            raise FedrotError(f"parts is the string '{parts}'; write parts={write}.")
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise FedrotError(f"Unknown part '{unknown[0]}' in parts; choose from {PARTS}.")
        if not isinstance(self.layers, Collection):
            raise FedrotError(f"layers is {self.layers!r}; give a list of indices, [{self.layers!r}].")
        if isinstance(self.layers, str) and not _LAYERS.fullmatch(self.layers):
            raise FedrotError(
                f"layers is '{self.layers}'; use 'all', 'first:N', 'last:N' or a list of indices."
            )
        if not self.ridge >= 0:
            raise FedrotError(f"ridge is {self.ridge}; it must be 0 or positive.")
        if self.within_heads not in ("rotation", "permutation"):
            raise FedrotError(
                f"within_heads is '{self.within_heads}'; choose from 'rotation', 'permutation'."
            )
        if self.sweeps < 1 or self.restarts < 0:
            raise FedrotError(
                f"sweeps is {self.sweeps} and restarts {self.restarts}; at least 1 and 0 are needed."
            )
        if not self.tolerance >= 0:
            raise FedrotError(f"tolerance is {self.tolerance}; it must be 0 or positive.")
        if not 0 <= self.activation_weight <= 1:
            raise FedrotError(f"activation_weight is {self.activation_weight}; it must lie in [0, 1].")
        if not 0 <= self.threshold < 1:
            raise FedrotError(f"threshold is {self.threshold}; it must lie in [0, 1).")

    def layer_indices(self, count: int) -> tuple[int, ...]:
        """Return the chosen layers of a model with ``count`` layers."""
        if not isinstance(self.layers, str):
            outside = [layer for layer in self.layers if not 0 <= layer < count]
            if outside:
                raise FedrotError(f"Layer {outside[0]} is not in the model, which has {count}.")
            return tuple(self.layers)
        if self.layers == "all":
            return tuple(range(count))
        side, _, number = self.layers.partition(":")
        n = min(int(number), count)
        return tuple(range(n) if side == "first" else range(count - n, count))


def checked_options(options: AlignmentOptions | None) -> AlignmentOptions:
    """Return options, the defaults if None.

    Raises:
        FedrotError: they are something else.
    """
    if not isinstance(options, AlignmentOptions | None):
        raise FedrotError(
            f"options is a {type(options).__name__}; pass fedrot.AlignmentOptions, "
            "AlignmentOptions(parts=('attention',)), say."
        )
    return options or AlignmentOptions()
