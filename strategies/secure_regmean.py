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

import copy
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.common import FitIns, FitRes, Parameters, log, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from safetensors import SafetensorError
from torch import Tensor, nn

from fedrot.aggregation import Statistics
from fedrot.collect.gram import collect_gram
from fedrot.collect.random_inputs import random_inputs
from fedrot.collect.statistics import INPUT_AXIS, TRAINED, check_statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.client import Collector, check_order
from fedrot.strategies.flower_compat import SECURE_AGGREGATION, UNNAMED_MODEL, largest_unclipped
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.strategies.wire.records import model_records
from fedrot.tensors import Tensors, check_finite, check_update

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable, Mod

#: Keys of a request's configuration: the layers and their scales, as safetensors; alpha.
ASKED, ALPHA = "fedrot-regmean", "fedrot-regmean-alpha"

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
#: Keys of the scales, as in ``statistics_record``: a kind, and the weights that read one input. Key of
#: the gains.
_KIND, _NAMES, _GAINS = "/", "|", "gains"


@dataclass(frozen=True)
class _Group:
    """Weights that read one input of ``n`` units, and the scale of each unit, float64 ``[n]``.

    ``gains`` are the factors of their products, one for each weight.
    """

    kind: str
    names: tuple[str, ...]
    scale: Tensor
    gains: tuple[float, ...]

    def oriented(self, weight: Tensor) -> Tensor:
        """Return a weight as ``[out, n]``, or such a matrix in the weight's own layout."""
        return weight if INPUT_AXIS[self.kind] == 1 else weight.mT

    def gram(self, found: Statistics) -> Tensor:
        """Return a client's Gram matrix ``[n, n]``, float64."""
        by_name, size = found.get(self.kind, {}), [len(self.scale)] * 2
        for name in self.names:
            if name not in by_name:
                raise UpdateError(
                    f"The Gram matrix of '{name}' is missing, and the server asks for it: let the "
                    "function that regmean_mod is given return collect_gram(model, batches)."
                )
        gram = by_name[self.names[0]]
        if list(gram.shape) != size:
            raise UpdateError(
                f"The Gram matrix of '{self.names[0]}' has shape {list(gram.shape)}; under secure "
                f"aggregation it has to be full, {size}."
            )
        for name in self.names[1:]:
            if by_name[name] is not gram and not torch.equal(by_name[name], gram):
                raise UpdateError(
                    f"'{self.names[0]}' and '{name}' read one input at the server, and have different "
                    "Gram matrices here. Clients and server have to run the same model."
                )
        return gram.detach().cpu().double()


def regmean_mod(names: Iterable[str], statistics: Collector) -> Mod:
    """Return a mod that sends what ``SecureRegMean`` adds up, in place of the weights.

    Use it between the mods that mask and that align:
    ``ClientApp(client_fn, mods=[secaggplus_mod, regmean_mod(names, grams), align_mod(symmetry)])``.
    Requests of other strategies it passes on, and their replies stay as they are.

    Args:
        names: of the tensors that a client returns, in their order; ``model.state_dict()`` has them.
            Messages of Flower's legacy workflows hold no names.
        statistics: a function of the message, the context and the reply's tensors by name, aligned ones
            if ``align_mod`` comes after. It returns their full Gram matrices, from ``collect_gram``.

    Raises:
        UpdateError: by the mod: the reply is not a finite update of the received model, or a Gram matrix
            is missing, wrong or not full. The client leaves the round.
        FedrotError: by the mod: a mod that masks, clips or adds noise runs before it.
    """
    order = tuple(names)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != MessageType.TRAIN or _asked(message) is None:
            return call_next(message, context)
        check_order(call_next, "regmean_mod")
        groups, alpha = _read(message)
        received = _named(message.content.array_records[UNNAMED_MODEL], order)
        secure = SECURE_AGGREGATION in message.content
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        ((record, arrays),) = model_records(reply.content).items()
        update = _named(arrays, order)
        shapes = {name: tuple(tensor.shape) for name, tensor in received.items()}
        check_update(update, shapes)
        check_finite(update)
        found = statistics(message, context, update)
        _check_found(found, groups, shapes)
        largest = largest_unclipped(context, reply.content) if secure else math.inf
        products, grams = _sums(groups, alpha, update, received, found, largest)
        keys = dict(zip(order, arrays, strict=True))
        sent = {keys[name]: tensor for name, tensor in products.items()}
        more = {str(len(order) + place): tensor for place, tensor in enumerate(grams)}
        replaced = copy.copy(reply)
        replaced.content = RecordDict(dict(reply.content))
        replaced.content[record] = ArrayRecord({**arrays, **to_arrays({**sent, **more})})
        return replaced

    return mod


def _asked(message: Message) -> Any:
    return next((c[ASKED] for c in message.content.config_records.values() if ASKED in c), None)


def _read(message: Message) -> tuple[list[_Group], float]:
    """Return the layers that the server asks for, and alpha."""
    config: Any
    (config,) = (c for c in message.content.config_records.values() if ASKED in c)
    try:
        scales = safetensors.torch.load(config[ASKED])
        alpha = float(config[ALPHA])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FedrotError(
            f"What the server asks for in '{ASKED}' cannot be read, {type(error).__name__}: {error}. "
            "Clients and server need the same version of fedrot."
        ) from error
    return _groups(scales), alpha


def _groups(scales: Mapping[str, Tensor]) -> list[_Group]:
    """Return the groups of what the server sends: scales by kind and names, and all gains in order."""
    gains, found = iter(scales[_GAINS].tolist()), []
    for key in sorted(scales.keys() - {_GAINS}):
        kind, _, joined = key.partition(_KIND)
        names = tuple(joined.split(_NAMES))
        found.append(_Group(kind, names, scales[key].double(), tuple(islice(gains, len(names)))))
    return found


def _named(arrays: ArrayRecord, names: tuple[str, ...]) -> dict[str, Tensor]:
    if len(arrays) != len(names):
        raise UpdateError(
            f"There are {len(arrays)} tensors without names, but regmean_mod was given {len(names)} "
            "names. Give it model.state_dict(), and send all of its tensors in this order."
        )
    return from_arrays(ArrayRecord(dict(zip(names, arrays.values(), strict=True))))


def _check_found(
    found: Statistics, groups: Iterable[_Group], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check what is asked for; other statistics are left out."""
    if found.get(TRAINED):
        raise UpdateError("Rows that a client has not trained cannot be left out of masked sums.")
    for group in groups:
        for name in group.names:
            if name not in shapes:
                raise UpdateError(f"The server asks for '{name}', which is no tensor of this model.")
        check_statistics({group.kind: {group.names[0]: group.gram(found)}}, shapes)


def _sums(
    groups: Iterable[_Group],
    alpha: float,
    update: Tensors,
    received: Tensors,
    found: Statistics,
    largest: float = math.inf,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return ``c D G S`` by weight in its own layout, and upper triangles of ``S G S``; float64.

    Where an entry is above ``largest``, all of a layer are multiplied by the same number below 1.
    """
    products, grams = dict[str, Tensor](), list[Tensor]()
    for group in groups:
        gram = group.gram(found)
        shrunk = alpha * gram + (1 - alpha) * torch.diag(gram.diagonal())
        sums = []
        for name, gain in zip(group.names, group.gains, strict=True):
            apart = gain * group.oriented(update[name].double() - received[name].double())
            sums.append(group.oriented(apart @ shrunk * group.scale).contiguous())
        scaled = group.scale[:, None] * shrunk * group.scale
        upper = torch.triu_indices(*scaled.shape)
        sums.append(scaled[upper[0], upper[1]])
        reached = max(float(one.abs().max()) for one in sums)
        if reached > largest:
            message = (
                "The sums of '%s' reach %.3g, and secure aggregation clips at %.3g: this client counts "
                "less in this layer. Give SecureRegMean a larger headroom."
            )
            log(WARNING, message, group.names[0], reached, largest)
            sums = [one * (largest / reached) for one in sums]
        products.update(zip(group.names, sums, strict=False))
        grams.append(sums[-1])
    return products, grams


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
        **kwargs: of FedAvg.

    Example: ``SecureRegMean(model, min_fit_clients=3, min_available_clients=3, fraction_evaluate=0.0)``

    Raises:
        FedrotError: ``alpha`` or ``headroom`` is impossible, or no layer is left. In a round: the
            clients have sent something else, because they run without ``regmean_mod``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        alpha: float = 0.9,
        names: Collection[str] | None = None,
        batches: Iterable[Tensors] | None = None,
        headroom: float = 16.0,
        **kwargs: Any,
    ) -> None:
        if not 0 <= alpha <= 0.99 or not 0 < headroom < float("inf"):
            raise FedrotError(
                f"alpha is {alpha}, headroom {headroom}; alpha is 0 to 0.99, headroom positive."
            )
        tensors = model.state_dict()
        start = [tensor.detach().cpu().numpy() for tensor in tensors.values()]
        kwargs.setdefault("initial_parameters", ndarrays_to_parameters(start))
        super().__init__(**kwargs)
        self.alpha, self.headroom = alpha, headroom
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
            kind, _, names = key.partition(_KIND)
            for name in names.split(_NAMES):
                weight = self._received[name].double()
                oriented = weight if INPUT_AXIS[kind] == 1 else weight.mT
                change = max(float((oriented.square() @ squares).mean().sqrt()), _CHANGE)
                gains.append(1 / self._products.get(name, change / math.sqrt(self.headroom)))
        self._scales[_GAINS] = torch.tensor(gains)
        self._groups = _groups(self._scales)

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
        merged = self._solved([torch.from_numpy(a) for a in parameters_to_ndarrays(parameters)])
        return ndarrays_to_parameters([tensor.numpy() for tensor in merged.values()]), metrics

    def _solved(self, means: list[Tensor]) -> dict[str, Tensor]:
        """Return the new model in its order, from the mean arrays of the clients."""
        sizes = [len(group.scale) for group in self._groups]
        expected = [list(tensor.shape) for tensor in self._received.values()]
        expected += [[size * (size + 1) // 2] for size in sizes]
        if [list(tensor.shape) for tensor in means] != expected:
            raise FedrotError(
                f"The clients have sent {len(means)} arrays, and the sums of RegMean are "
                f"{len(expected)} of other shapes: let each client run "
                "regmean_mod(model.state_dict(), statistics), behind secaggplus_mod in its mods."
            )
        merged = dict(zip(self._order, means, strict=False))
        self.notes = {}
        keyed = zip(sorted(self._squares), self._groups, means[len(self._order) :], strict=True)
        for key, group, upper in keyed:
            total = _symmetric(upper, len(group.scale))
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
        return {name: tensor.contiguous() for name, tensor in merged.items()}


def _expected(
    model: nn.Module, batches: Iterable[Tensors] | None, names: Collection[str] | None
) -> dict[str, Tensor]:
    """Return by group the mean squares that the layers' inputs have on the server's batches."""
    rows = batches if batches is not None else random_inputs(_config(model), _ROWS)
    found = collect_gram(model, rows, max_batches=None, form="diagonal", names=names)
    if not found:
        raise FedrotError(f"None of the names are weights of linear layers: {names}.")
    shared: dict[tuple[str, int], list[str]] = {}
    for kind, by_name in found.items():
        for name, squares in by_name.items():
            shared.setdefault((kind, id(squares)), []).append(name)
    return {
        f"{kind}{_KIND}{_NAMES.join(members)}": found[kind][members[0]].double()
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
