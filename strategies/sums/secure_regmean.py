"""RegMean under secure aggregation: what clients send in place of their weights, and who solves it.

``W = W_0 + (sum_i w_i D_i G_i) (sum_i w_i G_i)^-1``, with ``D_i = W_i - W_0`` the change from the
broadcast weight, needs two sums over clients and nothing of a single one. So a client replaces every
regressed weight by ``D_i G_i`` and appends ``G_i``. Flower averages these arrays, masked or not, like
all parameters, and the server solves for ``W``.

Secure aggregation rounds to fixed steps and clips. So inputs are scaled, unit ``j`` by ``s_j``, and
products by a gain ``c``. The server finds both from inputs of its own, or from the last round's sums,
and sends them to all clients. With ``S = diag(s)``, ``c D G S`` and ``S G S`` travel, and
``D = (c D G S) (S G S)^-1 S / c``.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable
from logging import INFO, WARNING
from typing import Any

import safetensors.torch
import torch
from flwr.common import FitIns, FitRes, Parameters, log, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from torch import Tensor, nn

from fedrot.collect.gram import collect_gram
from fedrot.collect.random_inputs import random_inputs
from fedrot.collect.statistics import INPUT_AXIS
from fedrot.errors import FedrotError
from fedrot.strategies.sums.client_sums import (
    ALPHA,
    ASKED,
    CLIPPING,
    GAINS,
    KIND,
    NAMES,
    groups_of,
    oriented,
)
from fedrot.strategies.sums.privacy import Privacy
from fedrot.tensors import Tensors

#: Random texts or images from which the server finds the scales.
_ROWS = 256
#: A unit's mean square counts as at least this share of its layer's mean.
_LEAST = 0.1
#: Mean squares below this share of what the server expects count as 0.
_UNSEEN = 1e-3
#: Changes of a layer's outputs are expected to be as large as its outputs, and at least this.
_CHANGE = 0.5
#: Products of a client are expected to be this many times the largest of the last round's mean.
_SLACK = 8.0


class SecureRegMean(FedAvg):
    """RegMean for Flower's secure aggregation: ``flwr.server.strategy.FedAvg`` that solves for weights.

    Use it in ``DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(...))``, with ``regmean_mod`` at every
    client: a client without it spoils the sums, and under secure aggregation nobody can tell. The server
    sees the sums of all clients' Gram matrices, and no single one. Without the workflow it works, too,
    and then the server sees the single ones.

    The result is that of ``fedrot.aggregation.RegMean`` up to the rounding of secure aggregation, with
    one difference. Units of a layer that have been near 0 at all clients keep the received weights, not
    the mean: the mean is not sent.

    Args:
        model: a ``torch`` model with the tensors that travel, in the order of its ``state_dict``. They
            are the initial parameters unless others are given.
        alpha: of ``RegMean``, from 0 to 0.99. Below 1 no equation is singular, so that rounding errors
            stay small.
        names: of the weights to regress, for example all but the task head's; None for all that
            ``collect_gram`` finds.
        batches: keyword arguments of the model's forward, from which the server estimates the mean
            squares of inputs for the first round; later rounds have those of the clients' sums. Only
            rounding depends on them. None draws random inputs from the model's configuration.
        headroom: secure aggregation does not clip up to ``headroom * clipping_range`` times the mean
            squares that the server expects. A client with larger ones counts less in that layer, and
            logs a warning. A larger headroom costs digits.
        privacy: bounds what a client adds to the sums, and adds noise to them, once: the models are then
            differentially private, in whole clients. All clients have one weight, and their metrics are
            left out. That a client failed is not hidden. None: neither bound nor noise.
        **kwargs: of FedAvg.

    Example: ``SecureRegMean(model, min_fit_clients=3, min_available_clients=3, fraction_evaluate=0.0)``

    Raises:
        FedrotError: ``alpha`` or ``headroom`` is impossible, a tensor is bfloat16, no layer is left, or
            with ``privacy`` clients would send metrics without noise. In a round: the clients have sent
            something else, because they run without ``regmean_mod``, or have unlike weights with
            ``privacy``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        alpha: float = 0.9,
        names: Collection[str] | None = None,
        batches: Iterable[Tensors] | None = None,
        headroom: float = 16.0,
        privacy: Privacy | None = None,
        **kwargs: Any,
    ) -> None:
        if not 0 <= alpha <= 0.99 or not 0 < headroom < float("inf"):
            raise FedrotError(
                f"alpha is {alpha}, headroom {headroom}; alpha is 0 to 0.99, headroom positive."
            )
        tensors = model.state_dict()
        if odd := [name for name, t in tensors.items() if t.dtype == torch.bfloat16]:
            raise FedrotError(
                f"'{odd[0]}' is bfloat16, which NumPy lacks, and so do Flower's older strategies. "
                "Convert the model with model.float(), here and at the clients."
            )
        start = [tensor.detach().cpu().numpy() for tensor in tensors.values()]
        kwargs.setdefault("initial_parameters", ndarrays_to_parameters(start))
        super().__init__(**kwargs)
        self.alpha, self.headroom, self.privacy = alpha, headroom, privacy
        if privacy is not None:
            _check_private(self)
            self._random = torch.Generator()
            self._random.manual_seed(secrets.randbits(63) if privacy.seed is None else privacy.seed)
        #: Remarks about the layers of the last round, by weight.
        self.notes: dict[str, str] = {}
        self._order = tuple(tensors)
        self._received: Tensors = tensors
        #: By group the expected mean squares of inputs, by weight the expected products.
        self._squares = _expected(model, batches, names)
        self._products: dict[str, float] = {}
        self._rescale()
        log(
            INFO,
            "RegMean under secure aggregation: %d layers; every client needs "
            "fedrot.strategies.regmean_mod(model.state_dict(), statistics) behind secaggplus_mod.",
            sum(len(group.names) for group in self._groups),
        )

    def _rescale(self) -> None:
        """Set the scales and gains: what is as expected becomes ``1 / headroom``, a product 1."""
        self._scales = dict[str, Tensor]()
        gains = []
        for key, squares in sorted(self._squares.items()):
            least = squares.clamp_min(_LEAST * float(squares.mean()))
            self._scales[key] = torch.where(least > 0, (self.headroom * least).rsqrt(), 1.0).float()
            kind, _, names = key.partition(KIND)
            for name in names.split(NAMES):
                weight = oriented(self._received[name].double(), kind)
                change = max(float((weight.square() @ squares).mean().sqrt()), _CHANGE)
                gains.append(1 / self._products.get(name, change / math.sqrt(self.headroom)))
        self._scales[GAINS] = torch.tensor(gains)
        self._groups = groups_of(self._scales)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Ask for the sums of every layer; scales come from the last round's sums, if there is one."""
        arrays = parameters_to_ndarrays(parameters)
        self._received = {
            name: torch.from_numpy(array.copy()) for name, array in zip(self._order, arrays, strict=True)
        }
        self._rescale()
        asked: dict[str, Any] = {ASKED: safetensors.torch.save(self._scales), ALPHA: self.alpha}
        if self.privacy is not None:
            asked[CLIPPING] = self.privacy.clipping_norm
        instructions = super().configure_fit(server_round, parameters, client_manager)
        return [(c, FitIns(ins.parameters, {**ins.config, **asked})) for c, ins in instructions]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """Average the sums as FedAvg does, and solve for the weights."""
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        if parameters is None:
            return None, metrics
        means = [torch.from_numpy(a) for a in parameters_to_ndarrays(parameters)]
        self._check(means)
        deviation = 0.0
        if self.privacy is not None:
            weights = sorted({result.num_examples for _, result in results})
            if len(weights) > 1:
                raise FedrotError(
                    f"Clients have the weights {weights[:5]}, and what one adds to the sums is bounded "
                    "for equal ones: let every client run regmean_mod of this version of fedrot."
                )
            deviation = self.privacy.noise_multiplier * self.privacy.clipping_norm / len(results)
            means = self._noisy(means, deviation)
        merged = self._solved(means, deviation)
        return ndarrays_to_parameters([tensor.numpy() for tensor in merged.values()]), metrics

    def _noisy(self, means: list[Tensor], deviation: float) -> list[Tensor]:
        """Return the means with Gaussian noise in every entry; tensors of integers are the received."""
        received = [*self._received.values()]
        found = []
        for place, mean in enumerate(means):
            of = received[place] if place < len(received) else None
            if of is not None and not of.is_floating_point():
                found.append(of)
                continue
            noise = torch.randn(mean.shape, dtype=torch.float64, generator=self._random)
            found.append(mean.double() + deviation * noise)
        return found

    def _check(self, means: list[Tensor]) -> None:
        """Raise ``FedrotError`` unless the means are those of what ``regmean_mod`` sends."""
        sizes = [len(group.scale) for group in self._groups]
        expected = [list(tensor.shape) for tensor in self._received.values()]
        expected += [[size * (size + 1) // 2] for size in sizes]
        if [list(tensor.shape) for tensor in means] != expected:
            raise FedrotError(
                f"The clients have sent {len(means)} arrays, and the sums of RegMean are "
                f"{len(expected)} of other shapes: let each client run "
                "regmean_mod(model.state_dict(), statistics), behind secaggplus_mod in its mods."
            )

    def _solved(self, means: list[Tensor], deviation: float = 0.0) -> dict[str, Tensor]:
        """Return the new model in its order, from the mean arrays of the clients.

        ``deviation`` is the noise's; the spectral norm of its part in a matrix of ``n`` units, about
        ``2 sqrt(n)`` times as much, is added to the diagonal.
        """
        merged = dict(zip(self._order, means, strict=False))
        self.notes = {}
        keyed = zip(sorted(self._squares), self._groups, means[len(self._order) :], strict=True)
        for key, group, upper in keyed:
            size = len(group.scale)
            total = _symmetric(upper, size) + 2 * deviation * math.sqrt(size) * torch.eye(size)
            self._squares[key] = total.diagonal().clamp_min(0) / group.scale**2
            inverse, unseen = _inverse(total, self.alpha, _UNSEEN / self.headroom)
            for name, gain in zip(group.names, group.gains, strict=True):
                received, product = self._received[name], merged[name].double() / gain
                if largest := float(product.abs().max()):
                    self._products[name] = _SLACK * largest
                apart = group.oriented(product) @ inverse * group.scale
                merged[name] = (received.double() + group.oriented(apart)).to(received.dtype)
                if unseen:
                    self.notes[name] = (
                        f"{unseen} of {len(group.scale)} units of its input were near 0 at every "
                        "client; there the weights are the received ones"
                    )
        if self.notes:
            name, note = next(iter(self.notes.items()))
            log(WARNING, "RegMean, '%s' (%d notes in all): %s", name, len(self.notes), note)
        return {
            name: tensor.to(self._received[name].dtype if self.privacy else tensor.dtype).contiguous()
            for name, tensor in merged.items()
        }


def _check_private(strategy: SecureRegMean) -> None:
    """Refuse what would tell the server or its models more than the noisy sums."""
    wrong = {
        "fraction_evaluate=0.0": strategy.fraction_evaluate > 0,
        "no fit_metrics_aggregation_fn": strategy.fit_metrics_aggregation_fn is not None,
    }
    if any(wrong.values()):
        instead = " and ".join(name for name, is_wrong in wrong.items() if is_wrong)
        raise FedrotError(
            "With privacy clients send noisy sums alone: their metrics would tell of single clients "
            f"without noise. Give {instead}, and evaluate at the server."
        )


def _expected(
    model: nn.Module, batches: Iterable[Tensors] | None, names: Collection[str] | None
) -> dict[str, Tensor]:
    """Return by group the mean squares that the layers' inputs have on the server's batches."""
    rows = batches if batches is not None else random_inputs(_config(model), _ROWS)
    found = collect_gram(model, rows, max_batches=None, form="diagonal", names=names)
    if not found:
        raise FedrotError(f"None of the names are weights of linear layers: {names}.")
    shared: dict[tuple[str, int], list[str]] = {}
    for kind in INPUT_AXIS:
        for name, squares in found.get(kind, {}).items():
            shared.setdefault((kind, id(squares)), []).append(name)
    return {
        f"{kind}{KIND}{NAMES.join(members)}": found[kind][members[0]].double()
        for (kind, _), members in shared.items()
    }


def _config(model: nn.Module) -> dict[str, Any]:
    described: Any = getattr(model, "config", None)
    if not callable(getattr(described, "to_dict", None)):
        raise FedrotError(
            f"A {type(model).__name__} has no transformers configuration to draw random inputs from; "
            "give SecureRegMean batches."
        )
    return dict(described.to_dict())


def _symmetric(upper: Tensor, size: int) -> Tensor:
    """Return the matrix ``[size, size]`` of an upper triangle, float64."""
    rows, columns = torch.triu_indices(size, size)
    full = torch.zeros(size, size, dtype=torch.float64)
    full[rows, columns] = upper.double()
    full[columns, rows] = upper.double()
    return full


def _inverse(total: Tensor, alpha: float, least: float) -> tuple[Tensor, int]:
    """Return the inverse of a summed matrix ``[n, n]``, 0 for unseen units, and how many these are.

    Units are seen whose diagonal entry is above ``least``.

    With its diagonal scaled to 1 the exact matrix has no eigenvalue below ``1 - alpha``: what is below
    is rounding, and is raised to it.
    """
    seen = total.diagonal() > least
    scale = torch.where(seen, total.diagonal().clamp_min(least).rsqrt(), 0.0)
    even = scale[:, None] * total * scale + torch.diag((~seen).double())
    factor, failed = torch.linalg.cholesky_ex(even)
    if bool(failed) or bool((factor.diagonal() ** 2 < (1 - alpha) / 2).any()):
        values, vectors = torch.linalg.eigh(even)
        found = vectors / values.clamp_min(1 - alpha) @ vectors.mT
    else:
        found = torch.cholesky_inverse(factor)
    return scale[:, None] * found * scale, int((~seen).sum())
