"""Statistics in canonical form: Gram matrices and means of inputs of the canonical model.

``fedrot.canonical`` changes the inputs of two kinds of layers. A layer that reads a norm reads
``x = gain * z + bias``, and ``z`` after folding. The output projection of an attention block reads its
inputs without the constant that a value's bias adds to them. Both are ``z = (x - bias) / gain``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedrot.collect.statistics import GRAMS, INPUT_AXIS, MEANS, TRAINED, Statistics, semidefinite
from fedrot.errors import FedrotError, UpdateError
from fedrot.symmetry.canonical import CanonicalView, per_query
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import Tensors

#: Gains below this share of the largest gain are as good as 0: the Gram matrix has lost their inputs.
_NEAR_ZERO = 1e-6
#: Accepted rounding error of a unit's mean square after a norm; the mean over the norm's units is 1.
_LOST = 1e-3
#: Units of attention whose mean square is this many rounding errors of the matrix are constant.
_CONSTANT = 16
#: Mean squares below 0 by less than this share of those before are rounding errors of bfloat16.
_NEGATIVE = 2**-6

_CONTRADICTION = (
    "The mean and the Gram matrix contradict each other. Collect both from the same rows, with the same "
    "weights, and send float32 if bfloat16 has rounded them."
)


def follows_canonical_form(kind: str) -> bool:
    """Return whether statistics of a kind can be brought to canonical form with the weights.

    Diagonal Fisher information cannot: squares of gradients do not determine those of weights whose
    inputs are shifted.
    """
    return kind in (*INPUT_AXIS, *MEANS.values(), TRAINED)


def canonical_statistics(
    statistics: Statistics, tensors: Tensors, symmetry: Symmetry
) -> dict[str, dict[str, Tensor]]:
    """Return the statistics of ``fedrot.canonical(tensors, symmetry)``, given those of ``tensors``.

    Statistics of layers whose inputs stay the same are returned as the same objects, and layers that
    share a matrix share it afterwards.

    Args:
        statistics: by kind, then by tensor name. Gram matrices whose inputs are shifted need the mean of
            the inputs, which ``collect_gram`` returns.
        tensors: the tensors that the statistics are of.
        symmetry: from ``symmetry_of``.

    Raises:
        FedrotError: a kind cannot follow (``follows_canonical_form``).
        UpdateError: a mean is missing or contradicts its matrix, or a gain is too near 0.
    """
    out = {kind: dict(by_name) for kind, by_name in statistics.items()}
    if not (symmetry.folds or symmetry.redundant_biases):
        return out
    fixed = [kind for kind in statistics if not follows_canonical_form(kind)]
    if fixed:
        raise FedrotError(
            f"The statistics '{fixed[0]}' cannot be brought to canonical form. Apply fedrot.canonical "
            "to the model before the statistics are computed, or align with canonical=False."
        )
    changes = _changes(tensors, symmetry) if {*statistics} - {TRAINED} else {}
    for axis, kind in GRAMS.items():
        grams, means = statistics.get(kind, {}), statistics.get(MEANS[axis], {})
        shared: dict[tuple[int, int, int], tuple[Tensor | None, Tensor | None]] = {}
        for name in {**grams, **means}:
            change = changes.get((name, axis))
            if change is None:
                continue
            given = grams.get(name), means.get(name)
            key = (id(given[0]), id(given[1]), id(change))
            if key not in shared:
                shared[key] = change.of(name, *given)
            for by_kind, found in zip((kind, MEANS[axis]), shared[key], strict=True):
                if found is not None:
                    out[by_kind][name] = found
    return out


def canonical_gram(gram: Tensor, mean: Tensor, gain: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the Gram matrix of a layer's inputs after its norm's gain and bias are folded.

    Inputs ``x = gain * z + bias`` become ``z`` in ``fedrot.canonical``: with ``D = diag(gain)``,
    ``G_z = D^-1 (G_x - bias mean^T - mean bias^T + bias bias^T) D^-1``, computed in float64.

    Args:
        gram: ``G_x = X^T X / n``, uncentred, floating-point ``[in, in]``, from ``collect_gram``.
        mean: mean of the same inputs over the same tokens, ``[in]``.
        gain: of the norm, ``[in]``.
        bias: of the norm, ``[in]``. None if the norm has no bias, or if canonical tensors keep the bias
            in the norm (``Fold.holds_bias`` is false): the layer's inputs are then ``x / gain``.

    Returns ``G_z`` in the dtype of ``gram``.

    Example: ``canonical_gram(gram, mean, state["h.0.ln_1.weight"], state["h.0.ln_1.bias"])``

    Raises:
        UpdateError: shapes differ; a value is not finite; a gain is so near 0 that ``z`` is lost in the
            rounding of ``gram``; or the mean and the Gram matrix contradict each other.
    """
    _check_given(gram, mean=mean, gain=gain, bias=mean if bias is None else bias)
    found, scale = gram.detach().double(), gain.detach().double()
    lost = scale.abs() <= _NEAR_ZERO * scale.abs().max()
    if bias is not None:
        rounding = torch.finfo(gram.dtype).eps * found.diagonal()
        lost |= rounding > _LOST * scale.square()
        found = _shifted(found, mean, bias)
    if bool(lost.any()):
        unit = int(lost.nonzero()[0])
        raise UpdateError(
            f"The norm's gain of unit {unit} is {float(scale[unit]):g}, too near 0 for a Gram matrix in "
            f"{gram.dtype}: the unit's values are lost by rounding. Collect the matrix from the "
            "canonical model, or align with canonical=False."
        )
    found = found / (scale.unsqueeze(1) * scale)
    if bool((found.diagonal() < -_LOST).any()):
        raise UpdateError(_CONTRADICTION)
    return found.to(gram.dtype)


def _without_constant(gram: Tensor, mean: Tensor, constant: Tensor) -> Tensor:
    """Return a Gram matrix of inputs from which a constant was subtracted.

    Units that are constant within rounding become 0.
    """
    _check_given(gram, mean=mean, bias=constant)
    before = gram.detach().double()
    found = _shifted(before, mean, constant)
    left, squares = found.diagonal(), before.diagonal()
    if bool((left < -_NEGATIVE * squares).any()):
        raise UpdateError(_CONTRADICTION)
    varies = left > _CONSTANT * torch.finfo(gram.dtype).eps * squares
    kept = varies.to(found)
    return (found * kept.unsqueeze(1) * kept).to(gram.dtype)


@dataclass(frozen=True)
class _Change:
    """How a layer's inputs change: ``x = gain * z + bias`` become ``z``.

    Attributes:
        gain: of a norm, ``[in]``; None for the inputs of an output projection.
        bias: ``[in]``; None if it is 0 or stays in the norm.
        centred: whether every ``z`` has mean 0, as the outputs of a LayerNorm without gain and bias.
    """

    gain: Tensor | None
    bias: Tensor | None
    centred: bool = False

    def of(
        self, name: str, gram: Tensor | None, mean: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return a layer's Gram matrix and mean in canonical form; those that are not given are None."""
        if gram is not None:
            try:
                gram = self._of_gram(gram, mean)
            except UpdateError as error:
                what = f"The Gram matrix of '{name}' cannot be brought to canonical form"
                raise UpdateError(f"{what}. {error}") from error
        return gram, mean if mean is None else self._of_mean(name, mean)

    def _of_mean(self, name: str, mean: Tensor) -> Tensor:
        known = self.bias if self.gain is None else self.gain
        assert known is not None
        if mean.shape != known.shape:
            raise UpdateError(
                f"The mean of the inputs of '{name}' has shape {list(mean.shape)}, but the layer reads "
                f"{len(known)} inputs."
            )
        moved = mean.detach().double()
        moved = moved if self.bias is None else moved - self.bias.to(moved)
        moved = moved if self.gain is None else moved / self.gain.to(moved)
        return moved.to(mean.dtype)

    def _of_gram(self, gram: Tensor, mean: Tensor | None) -> Tensor:
        gain, bias = (v if v is None else v.to(gram.device) for v in (self.gain, self.bias))
        if bias is not None and mean is None:
            raise UpdateError(
                "A bias is taken out of the layer's inputs, which needs their mean: send the statistics "
                "'input_mean', which collect_gram returns, or align with canonical=False."
            )
        if gain is None:
            assert mean is not None
            assert bias is not None
            return semidefinite(_without_constant(gram, mean, bias), gram)
        found = canonical_gram(gram, gain if mean is None else mean, gain, bias)
        if self.centred:
            # Rounding must not look like a direction of the inputs.
            wide = found.double()
            wide = wide - wide.mean(0, keepdim=True)
            found = (wide - wide.mean(1, keepdim=True)).to(found.dtype)
        return semidefinite(found, gram)


def _changes(tensors: Tensors, symmetry: Symmetry) -> dict[tuple[str, int], _Change]:
    """Return the changes of layers' inputs in canonical form, by weight and its axis of inputs."""
    found: dict[tuple[str, int], _Change] = {}
    centred = {*symmetry.centred}
    for fold in symmetry.folds:
        gain = tensors[fold.gain].detach().double()
        bias = tensors[fold.bias].detach().double() if fold.bias and fold.holds_bias else None
        if bias is not None and not bool(bias.any()):
            bias = None
        if bias is not None or bool((gain != 1).any()):
            places = [(reader.weight, reader.axis) for reader in fold.readers]
            found |= dict.fromkeys(places, _Change(gain, bias, all(p in centred for p in places)))
    # A value's bias is dropped after the bias of the norm that the value reads was folded into it.
    folded = CanonicalView(tensors, replace(symmetry, redundant_biases=()))
    constants: dict[tuple[str, int], Tensor] = {}
    for redundant in symmetry.redundant_biases:
        read = redundant.read
        if read is None:
            continue
        own = torch.zeros(symmetry.shapes[read.tensor][read.axis], dtype=torch.float64)
        bias = folded[redundant.bias.tensor].detach().cpu().double()
        read.slice.write(own, 0, per_query(bias, redundant, read.size))
        place = read.tensor, read.axis
        constants[place] = constants.get(place, 0) + own
    return found | {place: _Change(None, own) for place, own in constants.items() if bool(own.any())}


def _check_given(gram: Tensor, **vectors: Tensor) -> None:
    """Raise ``UpdateError`` unless a Gram matrix and vectors ``[in]`` are finite and of one layer."""
    size = gram.shape[0] if gram.ndim else 0
    for name, value in {"gram": gram, **vectors}.items():
        shape = [size, size] if name == "gram" else [size]
        if list(value.shape) != shape or not bool(torch.isfinite(value).all()):
            raise UpdateError(
                f"The {name} of shape {list(value.shape)} must be finite and of shape {shape}. The "
                "Gram matrix, the mean and the norm must be those of one layer's inputs."
            )


def _shifted(gram: Tensor, mean: Tensor, bias: Tensor) -> Tensor:
    """Return the float64 Gram matrix of inputs minus a bias."""
    center, beta = (v.detach().double() for v in (mean, bias))
    crossed = beta.unsqueeze(1) * center
    return gram - crossed - crossed.mT + beta.unsqueeze(1) * beta
