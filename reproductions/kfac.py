"""``kfac``: least squares in Kronecker factors of the clients' Fisher information."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from fedrot.aggregation import Mean
from fedrot.collect.statistics import GRAMS, Statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.tensors import Tensors
from reproductions.changes import body_layers
from reproductions.output_grams import OUTPUTS

#: Relative residual at which conjugate gradients end, and the largest number of steps.
TOLERANCE, STEPS = 1e-6, 300


class KFac:
    """``min_W sum_i w_i tr(B_i (W - W_i) A_i (W - W_i)^T) + ridge s |W - mean|^2``, layer by layer.

    ``A_i`` is the Gram matrix of inputs, its entries off the diagonal times 0.9 as in RegMean; ``B_i``
    that of gradients at the outputs, divided by its mean diagonal and shrunk to the identity. With
    ``shrinkage=1`` this is RegMean. ``s`` is the mean diagonal of the quadratic form. Pooler and task
    head are averaged. The solver is conjugate gradients in float64, preconditioned by the Kronecker
    product of the mean factors. All factors are held until ``result``.

    Args:
        ridge: positive.
        shrinkage: of ``B_i``, 0 to 1.
    """

    needs: tuple[str, ...] = (GRAMS[1], OUTPUTS)

    def __init__(self, ridge: float = 0.01, shrinkage: float = 0.5) -> None:
        if not ridge > 0 or not 0 <= shrinkage <= 1:
            raise FedrotError(f"ridge is {ridge}, shrinkage {shrinkage}; positive, and from 0 to 1.")
        self.ridge, self.shrinkage = ridge, shrinkage
        #: The layers whose solver was stopped.
        self.notes: Mapping[str, str] = {}
        self._mean = Mean()
        self._layers: dict[str, list[tuple[Any, Any, Any]]] = {}

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Add one update; raises ``UpdateError`` as ``Mean.add``, or if a layer lacks a factor."""
        self._mean.check(update, weight, statistics)
        inputs, outputs = ((statistics or {}).get(kind, {}) for kind in self.needs)
        names = body_layers(update)
        lacking = [name for name in names if name not in inputs or name not in outputs]
        if lacking:
            raise UpdateError(f"The update has no Kronecker factors of '{lacking[0]}'.")
        self._mean.fold(update, weight, statistics)
        for name in names:
            w, a, b = (t.detach().double().numpy() for t in (update[name], inputs[name], outputs[name]))
            a = weight * (0.9 * a + 0.1 * np.diag(a.diagonal()))
            b = (1 - self.shrinkage) * b / max(b.diagonal().mean(), 1e-300)
            self._layers.setdefault(name, []).append((w, a, b + self.shrinkage * np.eye(len(b))))

    def result(self) -> dict[str, Tensor]:
        """Return the merged tensors; raises ``UpdateError`` if nothing was added."""
        merged, notes = self._mean.result(), dict[str, str]()
        for name, layer in self._layers.items():
            found, stopped = self._solved(layer, merged[name].double().numpy())
            if stopped:
                notes[name] = f"conjugate gradients stopped after {STEPS} steps"
            merged[name] = torch.from_numpy(found).to(merged[name].dtype)
        self.notes = notes
        return merged

    def _solved(self, layer: list[tuple[Any, Any, Any]], mean: Any) -> tuple[Any, bool]:
        """Return the solution of one layer, and whether the solver was stopped."""
        damping = self.ridge * sum(a.diagonal().mean() * b.diagonal().mean() for _, a, b in layer)
        if not damping > 0:
            return mean, False
        of_a, vectors_a = np.linalg.eigh(sum(a for _, a, _ in layer))
        of_b, vectors_b = np.linalg.eigh(sum(b for _, _, b in layer) / len(layer))
        products = np.outer(of_b.clip(0), of_a.clip(0)) + damping

        def applied(flat: Any) -> Any:
            x = flat.reshape(mean.shape)
            return (damping * x + sum(b @ x @ a for _, a, b in layer)).ravel()

        def preconditioned(flat: Any) -> Any:
            x = vectors_b.T @ flat.reshape(mean.shape) @ vectors_a
            return (vectors_b @ (x / products) @ vectors_a.T).ravel()

        target = sum(b @ (w - mean) @ a for w, a, b in layer).ravel()
        size = (mean.size, mean.size)
        quadratic, inverse = (LinearOperator(size, f, dtype=float) for f in (applied, preconditioned))
        moved, steps = cg(quadratic, target, rtol=TOLERANCE, maxiter=STEPS, M=inverse)
        return mean + moved.reshape(mean.shape), steps > 0
