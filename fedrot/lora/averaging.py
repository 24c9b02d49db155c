"""``average_adapters``: LoRA adapters of several clients become one."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedrot.aggregation.mean import Mean
from fedrot.collect.statistic_kinds import Statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapter_options import AdapterOptions, AdapterReport
from fedrot.lora.adapters import (
    LoraSettings,
    Pair,
    check_rank,
    factors,
    pairs_of,
    residual_name,
    shaped,
    wide_factors,
)
from fedrot.lora.gauges import Factors, Wanted, rotated
from fedrot.lora.methods import METHODS
from fedrot.lora.products import ProductSum, Terms
from fedrot.tensors import Tensors, check_finite, check_weight

#: Without a limit of its own, a sum of products keeps so many times the largest rank so far.
KEPT_RANKS = 4
#: A factor that differs by this share from the one that was sent has been trained.
FROZEN = 0.01
SMALLEST = 2.0**-24


@dataclass(frozen=True)
class AdapterUpdate:
    """A client's adapter.

    Attributes:
        tensors: as ``get_peft_model_state_dict`` returns them.
        weight: positive, such as the number of examples.
        settings: of this client's adapter.
    """

    tensors: Tensors
    weight: float
    settings: LoraSettings


class _Module:
    """The sums of one module over the clients, of products and factors that contain the scale."""

    def __init__(self) -> None:
        self.products, self.weight = ProductSum(), 0.0
        self.mean, self.as_sent = Mean(), Mean()
        self.ranks: set[int] = set()

    def add(self, sent: Factors, used: Factors, weight: float, padding: int = 0) -> None:
        """Add the factors of one client as it sent them, and as the mean of factors takes them."""
        a, b = used
        self.products.add(b, a, weight)
        self.ranks.add(len(a) + padding)
        self.weight += weight
        if len(self.ranks) == 1:
            if padding:
                a, b = pad(a, (0, 0, 0, padding)), pad(b, (0, padding))
            self.mean.add({"a": a, "b": b}, weight)
            if used is not sent:
                self.as_sent.add({"a": sent[0], "b": sent[1]}, weight)

    def factors(self, scale: float, as_sent: bool = False) -> Factors | None:
        """Return the means of the factors in units of a scale, None if ranks differ."""
        if len(self.ranks) > 1:
            return None
        mean = self.as_sent.current if as_sent and self.as_sent.weight else self.mean.current
        return mean["a"], mean["b"] / scale

    def wanted(self, terms: Terms, rank: int, scale: float, previous: Factors | None) -> Wanted:
        """Return the mean product in units of a scale, and the factors that a gauge may follow."""
        first = terms.first(rank)
        near = (
            f if f is not None and len(f[0]) == rank else None for f in (self.factors(scale), previous)
        )
        return Wanted(first.u, first.s / (self.weight * scale), first.vt, *near)

    def error(self, terms: Terms, found: Factors, scale: float) -> float:
        """Return ``|D - s B A| / |D|``; 0 if both are 0."""
        a, b = found
        return _share(terms.distance(self.weight * scale * b, a), terms.norm)

    def rest(self, terms: Terms, found: Factors, scale: float) -> Tensor:
        """Return the dense ``D - s B A``, ``[out, in]``."""
        a, b = found
        return (terms.u * (terms.s / self.weight)) @ terms.vt - scale * b @ a


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float(part > 0)


@dataclass
class AdapterAverage:
    """A sum of adapters, one at a time; ``average_adapters`` in steps.

    Attributes:
        settings: of the result.
        options: see ``AdapterOptions``.
        previous: the adapter that the clients received, with the result's settings, None if unknown. It
            may have residuals.
        server_round: decides which factor is frozen, or decides rotations, and what is drawn at random.
    """

    settings: LoraSettings
    options: AdapterOptions = field(default_factory=AdapterOptions)
    previous: Tensors | None = None
    server_round: int = 1

    def __post_init__(self) -> None:
        self._pairs: tuple[Pair, ...] = ()
        self._modules: dict[str, _Module] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._like: dict[str, Tensor] = {}
        self._others = Mean()
        self._beside: set[str] = set()
        self._updates = 0

    def add(self, update: AdapterUpdate, statistics: Statistics | None = None) -> None:
        """Add one adapter.

        Args:
            statistics: ``trained``, the rows of task heads that the client trained, see ``Mean``.

        Raises:
            UpdateError: it is none, holds NaN or Inf, or has other modules or sizes than the first.
                Nothing has been added then.
        """
        tensors, pairs = update.tensors, pairs_of(update.tensors)
        check_weight(update.weight)
        check_finite(tensors)
        others = self._other_tensors(tensors, pairs)
        read = {pair.module: factors(tensors, pair) for pair in pairs}
        self._check(pairs, read)
        for pair in pairs:  # Their errors have to come before anything is added.
            self._check_frozen(pair, *read[pair.module])
            self._padding(pair, read[pair.module][0])
        if self._updates and others.keys() != self._beside:
            odd = min(others.keys() ^ self._beside)
            raise UpdateError(f"The tensor '{odd}' is in some adapters, and missing in others.")
        self._others.check(others, update.weight, statistics)
        if self._updates == 0:
            self._pairs, self._beside = pairs, set(others)
            self._like = {n: tensors[n].new_empty(0) for pair in pairs for n in (pair.a, pair.b)}
            self._modules = {module: _Module() for module in read}
            self._shapes = {n: tensors[n].shape for pair in pairs for n in (pair.a, pair.b)}
        if others:
            self._others.fold(others, update.weight, statistics)
        for pair in pairs:
            sent = _scaled(pair, update)
            module = self._modules[pair.module]
            module.products.limit = self._limit(pair, *sent)
            module.add(sent, self._rotated(pair, sent), update.weight, self._padding(pair, sent[0]))
        self._updates += 1

    def result(self, rank: int | None = None) -> tuple[dict[str, Tensor], AdapterReport]:
        """Return the average in the dtypes of the first adapter, and what it did.

        Args:
            rank: of the result; None: in each module that of ``previous``, else the largest of the
                clients'. A mean of factors has the clients' rank.

        Raises:
            FedrotError: there are no adapters.
            UpdateError: factors of different ranks have no mean.
        """
        if not self._updates:
            raise FedrotError("There are no adapters to average.")
        if rank is not None:
            check_rank(rank)
        tensors: dict[str, Tensor] = self._others.result() if self._others.weight else {}
        naive: dict[str, float | None] = {}
        error, lost = dict[str, float](), dict[str, float]()
        for pair in self._pairs:
            module = self._modules[pair.module]
            received = self._received(pair)
            own = rank or (len(received[0]) if received else max(module.ranks))
            scale = self.settings.scale(pair.module, own)
            terms = module.products.terms()
            merged = self._merged(pair, module.wanted(terms, own, scale, received))
            for name, matrix in zip((pair.a, pair.b), merged, strict=True):
                tensors[name] = shaped(matrix, self._shapes[name]).to(self._like[name])
            found = wide_factors(tensors, pair)
            mean = module.factors(scale, as_sent=True)
            naive[pair.module] = None if mean is None else module.error(terms, mean, scale)
            error[pair.module] = module.error(terms, found, scale)
            lost[pair.module] = _share(module.products.lost, terms.norm)
            residual, before = residual_name(pair), (self.previous or {}).get(residual_name(pair))
            if self.options.folds:
                rest, error[pair.module] = module.rest(terms, found, scale), 0.0
                tensors[residual] = rest if before is None else rest + before.to(rest)
            elif before is not None:
                tensors[residual] = before
        return tensors, AdapterReport(self._updates, naive, error, lost)

    def _merged(self, pair: Pair, wanted: Wanted) -> Factors:
        """Return the new factors of a module."""
        seed = zlib.crc32(f"{pair.module} {self.server_round}".encode())
        found = METHODS[self.options.method](wanted, self.options.gauge, seed)
        if found is None:
            raise UpdateError(
                f"The clients' ranks of '{pair.module}' are {sorted(self._modules[pair.module].ranks)}: "
                "factors of different ranks have no mean, or not the one of the result. Take "
                "method='exact'."
            )
        frozen = self.options.frozen(self.server_round)
        if frozen is None or wanted.previous is None:
            return found
        a, b = wanted.previous
        return (a, found[1]) if frozen == "A" else (found[0], b)

    def _other_tensors(self, tensors: Tensors, pairs: tuple[Pair, ...]) -> dict[str, Tensor]:
        """Return what is no factor: task heads, biases, magnitudes."""
        paired = {name for pair in pairs for name in (pair.a, pair.b)}
        return {name: tensor for name, tensor in tensors.items() if name not in paired}

    def _check(self, pairs: tuple[Pair, ...], read: Mapping[str, Factors]) -> None:
        if not self._updates:
            return
        if {pair.module for pair in pairs} != self._modules.keys():
            odd = sorted({pair.module for pair in pairs} ^ self._modules.keys())[0]
            raise UpdateError(
                f"The module '{odd}' is adapted in some adapters and not in others. Clients need the "
                "same target_modules."
            )
        for pair in self._pairs:
            a, b = read[pair.module]
            wanted = self._shapes[pair.a][1:].numel(), self._shapes[pair.b][0]
            if (a.shape[1], len(b)) != wanted:
                raise UpdateError(
                    f"The factors of '{pair.module}' map {a.shape[1]} inputs to {len(b)} outputs, those "
                    f"of the first adapter {wanted[0]} to {wanted[1]}. Clients need the same base model."
                )

    def _check_frozen(self, pair: Pair, a: Tensor, b: Tensor) -> None:
        frozen, received = self.options.frozen(self.server_round), self._received(pair)
        if frozen is None or received is None or received[0].shape != a.shape:
            return
        name, own, sent = (pair.a, a, received[0]) if frozen == "A" else (pair.b, b, received[1])
        # Rounding on the wire is no training, that to float16's smallest numbers neither.
        allowed = FROZEN * torch.linalg.vector_norm(sent) + SMALLEST * sent.numel() ** 0.5
        if torch.linalg.vector_norm(own - sent) > allowed:
            raise UpdateError(
                f"The factor '{name}' is not the one that the client received, but {frozen} is frozen "
                "in this round. Call fedrot.lora.train_only(model, config) before the client trains."
            )

    def _rotated(self, pair: Pair, sent: Factors) -> Factors:
        """Return a client's factors, rotated to what it received or to the mean so far if asked for."""
        a, b = sent
        if self.options.method != "rotate":
            return sent
        module, received = self._modules[pair.module], self._received(pair)
        scale = self.settings.scale(pair.module, len(a))
        to = received or (module.factors(scale) if module.weight else None)
        if to is None or to[0].shape != a.shape:
            return sent
        near = (to[0].to(a), to[1].to(b))
        by = self.options.rotates_by(self.server_round)
        a, b = rotated((a, b / scale), near, self.options.strength, by)
        return a, scale * b

    def _limit(self, pair: Pair, a: Tensor, b: Tensor) -> int:
        """Return the rank that a module's sum keeps: with a residual as much as a product can have."""
        if self.options.folds:
            return min(len(b), a.shape[1])
        received, before = self._received(pair), self._modules[pair.module].products.limit or 0
        largest = max(len(a), len(received[0]) if received else 0)
        return self.options.limit or max(KEPT_RANKS * largest, before)

    def _padding(self, pair: Pair, a: Tensor) -> int:
        """Return by how much the rank of a client's factors is smaller than the result's."""
        if self.options.method != "pad":
            return 0
        received = self._received(pair)
        if received is None:
            raise UpdateError(
                "Method 'pad' pads factors to the rank of the adapter that the clients received. Give "
                "it as previous."
            )
        return max(len(received[0]) - len(a), 0)

    def _received(self, pair: Pair) -> Factors | None:
        if self.previous is None:
            return None
        if pair.a not in self.previous:
            raise UpdateError(f"The adapter that the clients received does not have '{pair.module}'.")
        return wide_factors(self.previous, pair)


def _scaled(pair: Pair, update: AdapterUpdate) -> Factors:
    """Return a client's factors in the dtype to compute in; ``B`` contains the scale."""
    a, b = wide_factors(update.tensors, pair)
    return a, b * update.settings.scale(pair.module, len(a))


def average_adapters(
    updates: Iterable[AdapterUpdate],
    settings: LoraSettings,
    options: AdapterOptions | None = None,
    previous: Tensors | None = None,
    rank: int | None = None,
    server_round: int = 1,
) -> tuple[dict[str, Tensor], AdapterReport]:
    """Average LoRA adapters, which are read one at a time.

    Tensors that are no factors (task heads, biases, DoRA's magnitudes) become their weighted mean.

    Example: ``average_adapters([AdapterUpdate(tensors, 10, settings), ...], settings)``.

    Args:
        updates: the clients' adapters; ranks and alphas may differ with ``method="exact"``.
        settings: of the result.
        options: see ``AdapterOptions``.
        previous: the adapter that the clients received, with ``settings``.
        rank: of the result; None: in each module that of ``previous``, else the largest of the clients'.
        server_round: for options that differ by round.

    Raises:
        FedrotError: there are no updates, or the rank is below 1.
        UpdateError: an update is no adapter, or does not fit the others.
    """
    average = AdapterAverage(settings, options or AdapterOptions(), previous, server_round)
    for update in updates:
        average.add(update)
    return average.result(rank)
