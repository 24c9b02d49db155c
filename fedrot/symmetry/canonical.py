"""``canonical``: redundant biases become 0, gains of norms go into the next weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedrot.errors import SymmetryError, UpdateError
from fedrot.symmetry.groups import RedundantBias, Symmetry, check_symmetry
from fedrot.symmetry.stream import Fold
from fedrot.tensors import (
    TensorDict,
    Tensors,
    along_axis,
    check_update,
    compute_dtype,
    full_float32,
)


@full_float32()
def canonical(tensors: Tensors, symmetry: Symmetry) -> TensorDict:
    """Return tensors of the same function in canonical form.

    * If the residual stream can be rotated (``symmetry.folds``), the gains of its norms
      become 1: each gain is folded into the weights that read the norm, and the norm's
      bias into their biases, if all of them have one. Under LayerNorm, the weights that
      write the stream are centred. A weight that reads a norm and was tied to an
      embedding becomes a separate tensor: the model must then have
      ``tie_word_embeddings=False``.
    * Redundant attention biases become 0. A key's bias adds the same number to every
      score of a softmax. A value's bias adds a constant to the block's output; this
      constant is moved to the bias of the output projection: ``b_O <- b_O + sum_h O_h
      b_V``. Other biases stay: a key's bias under rotary positions, and a value's bias
      if the output projection has no bias.

    The input is not changed. Unchanged tensors are returned as the same objects.

    Example: ``model.load_state_dict(fedrot.canonical(model.state_dict(), symmetry))``

    Sources: Ashkboos et al. 2024 (SliceGPT), section 3; Zhang et al. 2025, Theorem 4.1.

    Raises:
        UpdateError: the tensors differ from the symmetry's, or a norm has a bias at a
            gain of 0 that cannot be folded.
        SymmetryError: ``symmetry`` is not a ``Symmetry``.
    """
    check_symmetry(symmetry)
    check_update(tensors, symmetry.shapes)
    out = dict(tensors)
    with torch.no_grad():
        for fold in symmetry.folds:
            _fold(out, fold)
        for redundant in symmetry.redundant_biases:
            _drop(out, redundant)
        for name, axis in symmetry.centred:
            x = out[name].detach()
            wide = x.to(compute_dtype(x))
            out[name] = (wide - wide.mean(axis, keepdim=True)).to(x.dtype)
    return out


class CanonicalView(Mapping[str, Tensor]):
    """The tensors of ``canonical``, each computed when it is read, and not stored.

    For large models whose tensors are read once.
    """

    def __init__(self, tensors: Tensors, symmetry: Symmetry) -> None:
        check_update(tensors, symmetry.shapes)
        self._tensors = tensors
        self._symmetry = symmetry

    def __getitem__(self, name: str) -> Tensor:
        part = self._symmetry.around([name])
        connected = {other: self._tensors[other] for other in part.shapes}
        return canonical(connected, part)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def check_rotates(symmetry: Symmetry) -> None:
    """Raise ``SymmetryError`` if tied tensors prevent a rotation of the stream."""
    if symmetry.rotated and symmetry.untied:
        names = " and ".join(f"'{name}'" for name in symmetry.untied[0])
        raise SymmetryError(
            f"The tensors {names} are tied, so the residual stream cannot be rotated. "
            "Start from a model with tie_word_embeddings=False, or align with "
            "canonical=False."
        )


def check_folded(tensors: Tensors, symmetry: Symmetry) -> None:
    """Raise ``UpdateError`` if a gain of a stream that is rotated is not 1."""
    for fold in symmetry.folds if symmetry.rotates else ():
        if not _is_one(tensors[fold.gain]):
            raise UpdateError(
                f"The norm '{fold.gain}' has a gain other than 1, so the residual "
                "stream cannot be rotated. Fold the gains first: "
                "fedrot.canonical(tensors, symmetry)."
            )


def _is_one(gain: Tensor) -> bool:
    return bool((gain == 1).all())


def _fold(out: TensorDict, fold: Fold) -> None:
    """Fold a norm's gain into its readers' weights.

    Its bias is folded into their biases if all have one.
    """
    biased = fold.bias and out[fold.bias].any()
    old_gain = out[fold.gain].detach()
    if _is_one(old_gain) and not biased:
        return
    gain = old_gain.to(compute_dtype(old_gain))
    bias = out[fold.bias].detach().to(gain.dtype) if fold.bias else None
    for reader in fold.readers:
        weight = out[reader.weight].detach()
        # The copy is changed in place, so that a large table is not in memory twice.
        wide = weight.to(compute_dtype(weight), copy=True)
        if bias is not None and fold.holds_bias:
            old = out[reader.bias].detach()
            added = torch.tensordot(wide, bias.to(wide), dims=([reader.axis], [0]))
            out[reader.bias] = (old.to(added.dtype) + added).to(old.dtype)
        wide.mul_(along_axis(gain, reader.axis, wide))
        out[reader.weight] = wide.to(weight.dtype)
    if bias is not None and fold.holds_bias:
        out[fold.bias] = torch.zeros_like(out[fold.bias])
    elif bias is not None:
        if ((gain == 0) & (bias != 0)).any():
            raise UpdateError(
                f"The gain of the norm '{fold.gain}' cannot be folded: a unit has a "
                "bias and a gain of 0, and a layer that reads the norm has no bias. "
                "Align with canonical=False."
            )
        # The readers multiply by the gain, so the bias is divided by it.
        left = torch.where(gain == 0, 0, bias / gain)
        out[fold.bias] = left.to(out[fold.bias].dtype)
    out[fold.gain] = torch.ones_like(old_gain)


def _drop(out: TensorDict, redundant: RedundantBias) -> None:
    """Set a redundant bias to 0, and add its effect to the output projection's bias."""
    name = redundant.bias.tensor
    before = out[name]
    after = before.detach().clone()
    redundant.bias.slice.view(after, 0).zero_()
    out[name] = after
    if redundant.read is None:
        return
    old = out[redundant.taken_up]
    dtype = compute_dtype(old)
    units = redundant.read.rows(out[redundant.read.tensor], dtype)
    constant = per_query(before.detach().to(dtype), redundant, len(units))
    out[redundant.taken_up] = (old.to(dtype) + constant @ units).to(old.dtype)


def per_query(bias: Tensor, redundant: RedundantBias, size: int) -> Tensor:
    """Return what a value's bias adds to ``size`` inputs of the output projection."""
    entries = redundant.bias.slice.of(bias, 0)
    by_head = entries.unflatten(0, (redundant.heads, -1))
    return by_head.repeat_interleave(size // len(entries), 0).flatten()
