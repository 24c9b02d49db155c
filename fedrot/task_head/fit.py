"""The last layer of a classifier, fitted in closed form to sums of clients.

The layer is a linear discriminant analysis (or ridge regression) of its own inputs over
the rows of all clients. Sources: Luo et al., "No Fear of Heterogeneity" (CCVR, NeurIPS
2021), who fit a task head to class means and covariances of clients; Legate et al.
(FedNCM, NeurIPS 2023) and Fanì et al. (Fed3R, ICML 2024), who also compute task heads
from sums over clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.task_head.covariance import ShrunkCovariance
from fedrot.task_head.sums import ClassSums
from fedrot.tensors import TensorDict, Tensors, spare_threads


def fitted_task_head(
    sums: ClassSums,
    shrinkage: float = 0.1,
    bias: bool = True,
    priors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weight ``[outputs, inputs]`` and bias ``[outputs]`` of one task head.

    See ``fitted_task_heads``.
    """
    weights, biases = fitted_task_heads(sums, [shrinkage], bias, priors)
    return weights[0], biases[0]


@spare_threads(1)
def fitted_task_heads(
    sums: ClassSums,
    shrinkages: Sequence[float],
    bias: bool = True,
    priors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights and biases of the task heads of several shrinkages.

    Linear discriminant analysis: with the classes' means ``m_c``, the mean ``m`` of all
    rows and the covariance ``S`` inside the classes, shrunk to ``S_a = (1 - a) S + a
    D``, the weights are ``S_a^-1 (m_c - m)`` and the biases ``-(m_c - m)^T S_a^-1 (m_c
    + m) / 2 + log(n_c / n)``. (``m`` adds the same number to all logits, and keeps
    weights small.) ``D`` is the diagonal of ``S``, with the floor that
    ``ClassSums.deviations`` says. Features in other units give the same logits; rotated
    features give others. Logits are often too large by a factor; see
    ``fedrot.task_head.losses``.

    A class without rows gets weights 0. Its bias is the mean of the other classes'
    biases, weighted by rows, minus ``log(2 n)``. Its logit is then their mean logit
    minus ``log(2 n)``, never the largest.

    Several labels: the logit of a label is the log odds of the discriminant between
    rows with and without it. A label that no row has, or every row, gets weights 0, and
    its log odds with half a row added to both. Regression: ``(1 - a) S_a^-1`` times the
    covariances with the outputs, which is ridge regression, and the intercept of the
    means; ``S`` is the covariance of all rows. Outputs may have any unit. Their mean
    may be a million times their deviation: beyond, float64 sums, and a bias in float32,
    round the deviation away.

    Args:
        sums: the sum over clients.
        shrinkages: values of ``a``, from 0 to 1.
        bias: whether the layer has a bias (the ``score`` of decoders has none). If
            False, the bias returned is 0, and the bias times ``u`` is added to the
            weights, where ``u`` is the ridge regression of 1 on the features: ``u^T h``
            is as near to 1 as the same shrinkage allows. Logits are near those with a
            bias if some direction of the features has a mean that is large beside its
            deviation.
        priors: ``counts`` whose shares take the place of ``n_c / n``; not used by a
            regression.

    Returns:
        float64 ``[shrinkages, outputs, inputs]`` and ``[shrinkages, outputs]``, from
        one eigendecomposition.

    Example: ``weights, biases = fitted_task_heads(total, (0.01, 0.1, 0.5))``

    Raises:
        FedrotError: a shrinkage is not from 0 to 1, or there is none.
        UpdateError: fewer than two classes have rows, no feature varies, or their
            covariance is singular and not shrunk.
    """
    if not shrinkages:
        raise FedrotError(
            "There is no shrinkage to fit a task head with. Give at least one."
        )
    deviations = sums.deviations()
    values, vectors = torch.linalg.eigh(
        sums.within() / torch.outer(deviations, deviations)
    )
    weights, biases = list[Tensor](), list[Tensor]()
    for shrinkage in shrinkages:
        if not 0 <= shrinkage <= 1:
            raise FedrotError(f"shrinkage is {shrinkage}; it must be from 0 to 1.")
        covariance = ShrunkCovariance(values, vectors, deviations, shrinkage)
        weight, offset = sums.kind.fit(sums.counts, sums.sums, covariance, priors)
        if not bias:
            shares = sums.counts[sums.kind.centres] / sums.rows
            weight = weight + torch.outer(
                offset, covariance.ridge_of_one(sums.means(), shares)
            )
            offset = torch.zeros_like(offset)
        weights.append(weight)
        biases.append(offset)
    return torch.stack(weights), torch.stack(biases)


def with_task_head(
    tensors: Tensors, task_head: str, weight: Tensor, bias: Tensor
) -> TensorDict:
    """Return a model's tensors with another last layer.

    The other tensors are the same objects.

    Args:
        tensors: a state dict; the layer's tensors keep their dtypes and devices.
        task_head: the layer's name, from ``task_head_of``.
        weight: from ``fitted_task_head``.
        bias: from ``fitted_task_head``.

    Example: ``with_task_head(model.state_dict(), "score", *fitted_task_head(total))``

    Raises:
        FedrotError: there is no such layer; or it has another shape, no bias although
            ``bias`` is not 0, or a dtype whose range is too small.
    """
    layer = {f"{task_head}.weight": weight}
    if f"{task_head}.bias" in tensors:
        layer[f"{task_head}.bias"] = bias
    elif bias.any():
        raise FedrotError(
            f"The layer '{task_head}' has no bias: fit it with fitted_task_head(sums, "
            "bias=False)."
        )
    changed = dict(tensors)
    for name, value in layer.items():
        before = tensors.get(name)
        if before is None or before.shape != value.shape:
            shape = "is missing" if before is None else f"has shape {[*before.shape]}"
            raise FedrotError(
                f"The tensor '{name}' {shape}, but the task head has "
                f"{list(value.shape)}. Fit the head to sums of the same layer of the "
                "same model."
            )
        changed[name] = value.detach().to(before)
        if not bool(torch.isfinite(changed[name]).all()):
            raise FedrotError(
                f"The tensor '{name}' is {before.dtype}, which cannot hold the "
                "task head's values. Take a wider dtype for the task head, or raise "
                "the shrinkage."
            )
    return changed
