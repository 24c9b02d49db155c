"""``average_adapters``: the average of several clients' LoRA adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.collect.statistics import TRAINED, Statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapter_options import METHODS, AdapterOptions, AdapterReport, checked_adapter_options
from fedrot.lora.adapters import (
    LoraSettings,
    Pair,
    check_rank,
    factors,
    pairs_of,
    shaped,
    wide_factors,
)
from fedrot.lora.gauges import GAUGES, Factors, Wanted, transposed
from fedrot.lora.module_sums import ModuleSums, in_threads, share
from fedrot.lora.products import Terms
from fedrot.tensors import Tensors, check_finite, check_weight, compute_dtype

#: A sum of products keeps this many times the largest rank so far, or the result's rank if it is larger.
#: The sum is cut to this rank when it has more than twice as many terms.
KEPT_RANKS = 4
#: Part of the names of DoRA's magnitudes.
_MAGNITUDE = ".lora_magnitude_vector"
#: Maximum norm of a factor, times its scale: products of larger factors could overflow.
LARGEST_FACTOR = 1e7


@dataclass(frozen=True)
class AdapterUpdate:
    """A client's adapter.

    Attributes:
        tensors: as ``get_peft_model_state_dict`` returns them.
        weight: positive, such as the number of examples.
        settings: of the client's adapter.
        statistics: those that the method ``needs``, and ``trained``, the rows of task heads that the
            client trained, see ``Mean``. Others are not used.
    """

    tensors: Tensors
    weight: float
    settings: LoraSettings
    statistics: Statistics = field(default_factory=dict)


@dataclass(frozen=True)
class AveragedModule:
    """One module's factors, the scale of its product, and the errors of the report."""

    tensors: dict[str, Tensor]
    scale: float
    error_of_factors: float | None
    error: float
    lost: float


@dataclass
class AdapterAverage:
    """An average to which adapters are added one at a time; made by ``AdapterOptions.average``.

    Each method is a class in ``METHODS``; this one is the mean of the factors.

    Attributes:
        settings: of the result.
        options: see ``AdapterOptions``.
        previous: the adapter that the clients received, with the result's settings; None if unknown.
        server_round: for methods that differ by round.
        rank: of the result. None means the rank of ``previous`` in each module, or the largest rank of
            the clients without ``previous``. A mean of factors has the clients' rank.
        any_rank: whether clients may have different ranks.
        used: the names of the options that the method uses.
        needs: the kinds of statistics that every update needs.
        of_dora: whether adapters may have DoRA's magnitudes.

    Raises:
        FedrotError: settings or options have another type, or the rank is below 1.
    """

    settings: LoraSettings
    options: AdapterOptions = field(default_factory=AdapterOptions)
    previous: Tensors | None = None
    server_round: int = 1
    rank: int | None = None
    any_rank: ClassVar[bool] = False
    used: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    of_dora: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.settings = LoraSettings.of(self.settings)
        self.options = checked_adapter_options(self.options)
        if self.rank is not None:
            check_rank(self.rank)
        self._pairs: tuple[Pair, ...] = ()
        self._modules: dict[str, ModuleSums] = defaultdict(ModuleSums)
        #: Scales of the first adapter; biases of ``B`` are averaged in these scales.
        self._scales: dict[str, float] = {}
        #: The tensors of the first adapter, without memory for their values.
        self._like: dict[str, Tensor] = {}
        self._others = Mean()
        self._updates = 0
        self._notes: dict[str, str] = {}

    @classmethod
    def check_kind(cls, names: Iterable[str], method: str) -> None:
        """Raise ``UpdateError`` if the method cannot average adapters with tensors of these names."""
        magnitudes = () if cls.of_dora else (name for name in names if _MAGNITUDE in name)
        if odd := next(iter(magnitudes), None):
            raise UpdateError(
                f"The adapter has DoRA's magnitudes ('{odd}'), and method '{method}' is for products of "
                "LoRA alone. Take method='exact', or adapters without use_dora."
            )

    def add(self, update: AdapterUpdate) -> None:
        """Add one adapter.

        Raises:
            FedrotError: ``update`` is not an ``AdapterUpdate``.
            UpdateError: the tensors are no adapter, or have NaN, Inf or huge factors, other modules or
                sizes than the first, or another rank although the initialisation changed the base
                weights; or statistics are missing or wrong. After an error, nothing has been added.
        """
        if not isinstance(update, AdapterUpdate):
            raise FedrotError(f"The update is a {type(update).__name__}; pass an AdapterUpdate.")
        tensors, pairs = update.tensors, pairs_of(update.tensors)
        settings = LoraSettings.of(update.settings)
        check_weight(update.weight)
        check_finite(tensors)
        self.check_kind(tensors, self.options.method)
        if odd := tensors.keys() ^ (self._like or tensors).keys():
            raise UpdateError(
                f"The tensor '{min(odd)}' is in some adapters and missing in others. All clients need "
                "the same target_modules, modules_to_save and bias in their LoraConfig."
            )
        paired = {name for pair in pairs for name in (pair.a, pair.b)}
        others = {name: tensor for name, tensor in tensors.items() if name not in paired}
        scales: dict[str, float] = {}
        for pair in pairs:  # Errors must come before anything is added.
            a, b = factors(tensors, pair)
            scale = scales[pair.module] = settings.scale(pair.module, len(a))
            self._check_pair(pair, settings, a, b)
            _check_size(pair, a, b, scale)
            _rescale(others, pair.bias, scale / self._scales.get(pair.module, scale))
        statistics = {kind: of for kind, of in update.statistics.items() if kind == TRAINED}
        self._others.check(others, update.weight, statistics)
        self._check_statistics(update, pairs)
        if not self._updates:
            self._pairs, self._scales = pairs, scales
            self._like = {name: t.new_empty(()).expand(t.shape) for name, t in tensors.items()}
        if others:
            self._others.fold(others, update.weight, statistics)

        def fold(pair: Pair) -> None:
            a, b = wide_factors(tensors, pair)
            sent = a, b * scales[pair.module]
            module = self._modules[pair.module]
            module.products.limit = self._limit(pair, *sent)
            self._add_to(module, pair, sent, update.weight)

        in_threads(fold, pairs, tensors[pairs[0].a].device)
        self._add_statistics(update, pairs, scales)
        self._updates += 1

    def result(self) -> tuple[dict[str, Tensor], AdapterReport]:
        """Return the average, in the dtypes of the first adapter, and its report.

        Raises:
            FedrotError: there are no adapters.
            UpdateError: factors of different ranks have no mean.
        """
        if not self._updates:
            raise FedrotError("There are no adapters to average.")
        tensors: dict[str, Tensor] = self._others.result() if self._others.weight else {}
        found = in_threads(self._averaged, self._pairs, self._like[self._pairs[0].a].device)
        for pair, module in zip(self._pairs, found, strict=True):
            tensors |= module.tensors
            _rescale(tensors, pair.bias, self._scales[pair.module] / module.scale)
        modules = dict(zip([pair.module for pair in self._pairs], found, strict=True))
        return tensors, AdapterReport(
            self._updates,
            error_of_factors={name: module.error_of_factors for name, module in modules.items()},
            error={name: module.error for name, module in modules.items()},
            lost={name: module.lost for name, module in modules.items()},
            magnitudes=any(_MAGNITUDE in name for name in self._like),
            notes=dict(self._notes),
        )

    def _averaged(self, pair: Pair) -> AveragedModule:
        module = self._modules[pair.module]
        own = self.rank or (len(self.previous[pair.a]) if self.previous else max(module.ranks))
        terms = module.products.terms(own)
        received = self._received(pair, terms.vt)
        scale = self.settings.scale(pair.module, own)
        product = self._product(pair, terms, own)
        merged = self._merged(pair, module.wanted(product, own, scale, received))
        tensors = {
            name: shaped(matrix, self._like[name].shape).to(self._like[name])
            for name, matrix in zip((pair.a, pair.b), merged, strict=True)
        }
        found = wide_factors(tensors, pair)
        mean = module.factors(scale)
        compared = [found] if mean is None else [found, mean]
        error, *of_factors = module.errors(terms, scale, *compared)
        lost = share(module.products.lost, terms.norm)
        return AveragedModule(tensors, scale, of_factors[0] if of_factors else None, error, lost)

    # What a method decides

    def chosen(self, pair: Pair, wanted: Wanted) -> Factors | None:
        """Return the new factors of a module, None if factors of different ranks have no mean."""
        return GAUGES[self.options.gauge](wanted) if "gauge" in self.used else wanted.mean

    def _check_statistics(self, update: AdapterUpdate, pairs: tuple[Pair, ...]) -> None:
        """Raise ``UpdateError`` if an update lacks statistics that the method needs."""

    def _add_statistics(
        self, update: AdapterUpdate, pairs: tuple[Pair, ...], scales: Mapping[str, float]
    ) -> None:
        """Add an update's statistics to the sums of its modules; ``scales`` are by module."""

    def _product(self, pair: Pair, terms: Terms, rank: int) -> Terms:
        """Return the sum of products that the factors of a module get, given that of the clients."""
        return terms

    def _add_to(self, module: ModuleSums, pair: Pair, sent: Factors, weight: float) -> None:
        """Add a client's factors, which contain the scale, to the sums of their module."""
        module.add(sent, weight)

    def _merged(self, pair: Pair, wanted: Wanted) -> Factors:
        """Return the new factors of a module."""
        found = self.chosen(pair, wanted.transposed if pair.of_embedding else wanted)
        if found is None:
            ranks = sorted(self._modules[pair.module].ranks)
            of = "factors of different ranks have no mean"
            what = of if len(ranks) > 1 else f"their mean cannot have rank {len(wanted.s)}"
            raise UpdateError(
                f"The clients' ranks of '{pair.module}' are {ranks}: {what}. Take method='exact'."
            )
        return transposed(found) if pair.of_embedding else found

    def _check_pair(self, pair: Pair, settings: LoraSettings, a: Tensor, b: Tensor) -> None:
        """Raise ``UpdateError`` if a module's size differs, or its rank with changed base weights."""
        wanted = self._like.get(pair.a, a).shape[1:].numel(), len(self._like.get(pair.b, b))
        if (a.shape[1], len(b)) != wanted:
            raise UpdateError(
                f"The factors of '{pair.module}' map {a.shape[1]} inputs to {len(b)} outputs, those "
                f"of the first adapter {wanted[0]} to {wanted[1]}. Use one base model."
            )
        if not settings.changed_base:
            return
        received, added = self._received(pair, a), self._modules.get(pair.module)
        rank = len(received[0]) if received else min(added.ranks) if added else len(a)
        if len(a) != rank:
            raise UpdateError(
                f"'{pair.module}' has rank {len(a)}, others {rank}. With init_lora_weights="
                f"'{settings.changed_base}' base weights depend on the rank: adapters of different "
                "ranks belong to different models. Use one rank, or another initialisation."
            )

    def _limit(self, pair: Pair, a: Tensor, b: Tensor) -> int:
        """Return the rank that a module's sum keeps."""
        received, before = self._received(pair, a), self._modules[pair.module].products.limit or 0
        largest = max(len(a), len(received[0]) if received else 0)
        return max(KEPT_RANKS * largest, before, self.rank or 0)

    def _received(self, pair: Pair, like: Tensor) -> Factors | None:
        """Return the factors that clients received, on the device and in the dtype for computations."""
        if self.previous is None:
            return None
        if pair.a not in self.previous:
            raise UpdateError(f"The adapter that the clients received does not contain '{pair.module}'.")
        a, b = factors(self.previous, pair)
        return a.to(like.device, compute_dtype(like)), b.to(like.device, compute_dtype(like))


class MeanOfProducts(AdapterAverage):
    """The mean of the products, as factors that a gauge chooses."""

    any_rank = True
    used: ClassVar[tuple[str, ...]] = ("gauge",)


METHODS |= {"mean": AdapterAverage, "exact": MeanOfProducts}


def _check_size(pair: Pair, a: Tensor, b: Tensor, scale: float) -> None:
    for name, factor, by in ((pair.a, a, 1.0), (pair.b, b, scale)):
        norm = by * float(torch.linalg.vector_norm(factor, dtype=torch.float64))
        if not norm <= LARGEST_FACTOR:
            raise UpdateError(
                f"The factor '{name}' has norm {norm:.3g} (with the adapter's scale), above "
                f"{LARGEST_FACTOR:g}: products of it would overflow. Check the client's training "
                "(learning rate, mixed precision) before sending it."
            )


def _rescale(tensors: dict[str, Tensor], name: str, scale: float) -> None:
    if name in tensors and scale != 1:
        tensors[name] = tensors[name] * scale


def average_adapters(
    updates: Iterable[AdapterUpdate],
    settings: LoraSettings,
    options: AdapterOptions | None = None,
    previous: Tensors | None = None,
    rank: int | None = None,
    server_round: int = 1,
) -> tuple[dict[str, Tensor], AdapterReport]:
    """Average LoRA adapters, which are read one at a time.

    Other tensors than factors (task heads, biases, DoRA's magnitudes) become their weighted mean.

    Example: ``average_adapters([AdapterUpdate(tensors, 10, settings), ...], settings)``.

    Args:
        updates: the clients' adapters. Alphas may differ; with ``exact`` and ``regmean``, ranks too.
        settings: of the result.
        options: see ``AdapterOptions``.
        previous: the adapter that the clients received, with ``settings``.
        rank: of the result; see ``AdapterAverage``.
        server_round: for options that differ by round.

    Raises:
        FedrotError: there are no updates, settings or options have another type, or the rank is below 1.
        UpdateError: an update is no adapter, or does not fit the others.
    """
    average = checked_adapter_options(options).average(settings, previous, server_round, rank)
    for update in updates:
        average.add(update)
    return average.result()
