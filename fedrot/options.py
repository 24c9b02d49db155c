"""``AlignmentOptions``: what alignment moves, and towards what."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fedrot.errors import FedrotError
from fedrot.symmetry.groups import DEFAULT_PARTS, PARTS, WHOLE_MODEL, Group, Symmetry

#: Groups that may act inside heads.
WITHIN_HEADS = ("rotation", "permutation")

_LAYERS = re.compile(r"all|(first|last):[0-9]+")


@dataclass(frozen=True)
class AlignmentOptions:
    """Options of ``align``, ``align_round`` and the strategies.

    Attributes:
        parts: ``"whole"`` (``fedrot.WHOLE_MODEL``, all parts), or any of ``residual``
            (permutation of the residual stream, or rotation, see ``canonical``),
            ``output`` (permutation of the task heads' hidden units, with signs under
            odd activations), ``heads`` (permutation of the attention heads),
            ``attention`` (rotation inside each head), ``ffn`` (permutation of the
            neurons).
        anchor: of a round, see ``align_round`` and ``fedrot.alignment.anchors``;
            ``align`` ignores it.
        layers: ``"all"``, ``"first:N"``, ``"last:N"`` or a sequence of layer indices.
        within_heads: ``rotation``, or ``permutation`` for the best order of each head's
            units, as in Git Re-Basin and Verma & Elbayad.
        chance: a group moves only if its element removes more than ``chance`` times the
            squared distance that chance removes (``fedrot.matching.chance``). With 0, a
            group moves if its element removes anything. With ``residual`` or
            ``output``, groups are coupled, and chance is ignored.
        activation_weight: share of activations against weights in a group's similarity,
            0 to 1; used only where activations are given.
        canonical: anchor and update are brought to canonical form before matching, and
            the result of ``Alignment.apply`` is canonical (see ``fedrot.canonical``);
            the function stays the same. The part ``residual`` is then a rotation of the
            whole stream, in pre-norm models. None means True if ``residual`` is among
            the parts and can be rotated in the model (``for_model``).
    """

    parts: Sequence[str] = DEFAULT_PARTS
    anchor: str = "running"
    layers: str | Collection[int] = "all"
    within_heads: str = "rotation"
    chance: float = 1.1
    activation_weight: float = 0.5
    canonical: bool | None = None

    def __post_init__(self) -> None:
        parts: object = self.parts
        whole = parts == "whole"
        if isinstance(parts, str) and not whole:
            named = tuple(parts.split("+"))
            known = f"a tuple of some of {tuple(PARTS)}"
            if set(named) <= {*PARTS}:
                known = repr(named)
            raise FedrotError(
                f"parts is the string '{parts}'; write parts={known}, or parts='whole'."
            )
        object.__setattr__(self, "parts", WHOLE_MODEL if whole else tuple(self.parts))
        for part in self.parts:
            if part not in PARTS:
                raise FedrotError(
                    f"Unknown part '{part}' in parts; choose from {tuple(PARTS)}."
                )
        if not isinstance(self.layers, Collection):
            raise FedrotError(
                f"layers is {self.layers!r}; give a list of indices, [{self.layers!r}]."
            )
        if isinstance(self.layers, str) and not _LAYERS.fullmatch(self.layers):
            raise FedrotError(
                f"layers is '{self.layers}'; use 'all', 'first:N', 'last:N' or a list "
                "of indices."
            )
        if self.within_heads not in WITHIN_HEADS:
            raise FedrotError(
                f"within_heads is {self.within_heads!r}; it must be one of "
                f"{WITHIN_HEADS}."
            )
        if not 0 <= self.chance < float("inf"):
            raise FedrotError(f"chance is {self.chance!r}; it must be 0 or positive.")
        if not 0 <= self.activation_weight <= 1:
            raise FedrotError(
                f"activation_weight is {self.activation_weight!r}; it must lie in "
                "[0, 1]."
            )

    @property
    def coupled(self) -> bool:
        """True if a chosen part shares tensors with others, so elements are coupled."""
        return "residual" in self.parts or "output" in self.parts

    def for_model(self, symmetry: Symmetry) -> AlignmentOptions:
        """Return the options with ``canonical`` decided for a model."""
        if self.canonical is not None:
            return self
        return replace(self, canonical="residual" in self.parts and symmetry.can_rotate)

    def movable(self, symmetry: Symmetry) -> AlignmentOptions:
        """Return the options without the parts that cannot be moved in a model.

        ``residual`` stays, so that ``align`` refuses it: whole models cannot be matched
        without it.
        """
        still = symmetry.refused.keys() - {"residual"}
        return replace(self, parts=[part for part in self.parts if part not in still])

    def as_it_is(self) -> AlignmentOptions:
        """Return the options with ``canonical=False``, unless it is True."""
        return replace(self, canonical=bool(self.canonical))

    @property
    def rotates(self) -> bool:
        """True if the residual stream is rotated, not permuted; after ``for_model``."""
        return bool(self.canonical) and "residual" in self.parts

    @property
    def may_be_canonical(self) -> bool:
        """False if these options bring no model to canonical form."""
        return "residual" in self.parts if self.canonical is None else self.canonical

    def groups(self, symmetry: Symmetry) -> tuple[Group, ...]:
        """Return a model's groups of the chosen parts and layers."""
        return symmetry.select(self.parts, self.layer_indices(symmetry.layers))

    def layer_indices(self, count: int) -> tuple[int, ...]:
        """Return the chosen layers of a model with ``count`` layers."""
        if not isinstance(self.layers, str):
            for layer in self.layers:
                if not 0 <= layer < count:
                    raise FedrotError(
                        f"Layer {layer} is not in the model, which has {count}."
                    )
            return tuple(self.layers)
        if self.layers == "all":
            return tuple(range(count))
        side, _, number = self.layers.partition(":")
        n = min(int(number), count)
        return tuple(range(n) if side == "first" else range(count - n, count))


def checked_options(
    options: AlignmentOptions | None, name: str = "options"
) -> AlignmentOptions:
    """Return options, the defaults if None; raise ``FedrotError`` for another type."""
    if not isinstance(options, AlignmentOptions | None):
        raise FedrotError(
            f"{name} is a {type(options).__name__}; pass fedrot.AlignmentOptions, for "
            "example AlignmentOptions(parts=('attention',))."
        )
    return options or AlignmentOptions()
