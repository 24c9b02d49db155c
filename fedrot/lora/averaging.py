"""``average_adapters``: the average of several clients' LoRA adapters;
``AdapterOptions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.collect.statistics import TRAINED
from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapter_report import AdapterReport
from fedrot.lora.adapters import (
    AdapterUpdate,
    LoraSettings,
    Pair,
    check_rank,
    factors,
    pairs_of,
    wide_factors,
)
from fedrot.lora.gauges import GAUGES
from fedrot.lora.methods import METHODS, Method
from fedrot.lora.module_sums import AveragedModule, ModuleSums, Plan, in_threads
from fedrot.tensors import Tensors, check_finite, check_weight

#: The options of methods.
_OPTIONS = ("gauge",)
#: Part of the names of DoRA's magnitudes.
_MAGNITUDE = ".lora_magnitude_vector"


@dataclass(frozen=True)
class AdapterOptions:
    """Options for averages of adapters.

    Attributes:
        method: ``mean`` averages the factors (FedIT). ``exact`` averages the products,
            and keeps the best approximation of the result's rank (FlexLoRA, with
            ``gauge="none"``).
        gauge: for ``exact``, the choice among the pairs of factors with the same
            product: ``keep-a``, ``none`` or ``previous``, see ``fedrot.lora.gauges``.

    Raises:
        FedrotError: a value is unknown or out of range, or is given with a method that
            does not use it.
    """

    method: str = "mean"
    gauge: str = "keep-a"

    def __post_init__(self) -> None:
        known: dict[str, Mapping[str, object]] = {"method": METHODS, "gauge": GAUGES}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise FedrotError(
                    f"Unknown {name} '{getattr(self, name)}' of adapters; one of "
                    f"{', '.join(values)}."
                )
        for name in (
            name for name in _OPTIONS if name not in METHODS[self.method].used
        ):
            if getattr(self, name) != getattr(type(self), name):
                able = " and ".join(
                    f"'{key}'" for key, kind in METHODS.items() if name in kind.used
                )
                raise FedrotError(
                    f"{name} is an option of {able}, and has no effect with "
                    f"'{self.method}'; omit it."
                )

    def __str__(self) -> str:
        given = (
            f"{name} {getattr(self, name)!r}" for name in METHODS[self.method].used
        )
        return ", ".join([self.method, *given])

    def average(
        self,
        settings: LoraSettings,
        previous: Tensors | None = None,
        server_round: int = 1,
        rank: int | None = None,
    ) -> AdapterAverage:
        """Return an empty average by the method; arguments are those of
        ``average_adapters``.
        """
        of = LoraSettings.of(settings)
        if rank is not None:
            check_rank(rank)
        return AdapterAverage(self, Plan(of, self.gauge, previous, server_round, rank))

    @property
    def averaging(self) -> Method:
        """The entry of the method in the registry."""
        return METHODS[self.method]


def checked_adapter_options(options: AdapterOptions | None) -> AdapterOptions:
    """Return options, the defaults if None; raise ``FedrotError`` if they are something
    else.
    """
    if not isinstance(options, AdapterOptions | None):
        raise FedrotError(
            f"options is {options!r}; pass fedrot.lora.AdapterOptions, for example "
            "AdapterOptions('exact')."
        )
    return options or AdapterOptions()


def average_adapters(
    updates: Iterable[AdapterUpdate],
    settings: LoraSettings,
    options: AdapterOptions | None = None,
    previous: Tensors | None = None,
    rank: int | None = None,
    server_round: int = 1,
) -> tuple[dict[str, Tensor], AdapterReport]:
    """Average LoRA adapters, which are read one at a time.

    Other tensors than factors (task heads, biases, DoRA's magnitudes) become their
    weighted mean.

    Example: ``average_adapters([AdapterUpdate(tensors, 10, settings), ...],
    settings)``.

    Args:
        updates: the clients' adapters. Alphas may differ; with ``exact``, ranks too.
        settings: of the result.
        options: see ``AdapterOptions``.
        previous: the adapter that the clients received, with ``settings``.
        rank: of the result. None means the rank of ``previous`` in each module, or the
            largest rank of the clients without ``previous``. A mean of factors has the
            clients' rank.
        server_round: for methods that differ by round.

    Raises:
        FedrotError: there are no updates, settings or options have another type, or the
            rank is below 1.
        UpdateError: an update is no adapter, or does not fit the others.
    """
    average = checked_adapter_options(options).average(
        settings, previous, server_round, rank
    )
    for update in updates:
        average.add(update)
    return average.result()


class AdapterAverage:
    """An average to which adapters are added one at a time; made by
    ``AdapterOptions.average``.

    ``plan`` is that of the result.
    """

    def __init__(self, options: AdapterOptions, plan: Plan) -> None:
        self.options, self.method, self.plan = options, options.averaging, plan
        self._modules: dict[str, ModuleSums] = {}
        #: Pairs and scales of the first adapter; biases of ``B`` are averaged in these
        #: scales.
        self._pairs: tuple[Pair, ...] = ()
        self._scales: dict[str, float] = {}
        #: The tensors of the first adapter, without memory for their values.
        self._like: dict[str, Tensor] = {}
        self._others = Mean()
        self._updates = 0

    def add(self, update: AdapterUpdate) -> None:
        """Add one adapter.

        Raises:
            FedrotError: ``update`` is not an ``AdapterUpdate``.
            UpdateError: the tensors are no adapter, or have NaN, Inf or huge factors,
                other modules or sizes than the first, or another rank although the
                initialisation changed the base weights; or statistics are missing or
                wrong. After an error, nothing has been added.
        """
        if not isinstance(update, AdapterUpdate):
            raise FedrotError(
                f"The update is a {type(update).__name__}; pass an AdapterUpdate."
            )
        tensors, pairs = update.tensors, pairs_of(update.tensors)
        settings = LoraSettings.of(update.settings)
        check_weight(update.weight)
        check_finite(tensors)
        if odd := tensors.keys() ^ (self._like or tensors).keys():
            raise UpdateError(
                f"The tensor '{min(odd)}' is in some adapters and missing in others. "
                "All clients need the same target_modules, modules_to_save and bias in "
                "their LoraConfig."
            )
        paired = {name for pair in pairs for name in (pair.a, pair.b)}
        others = {
            name: tensor for name, tensor in tensors.items() if name not in paired
        }
        modules = self._modules or {
            pair.module: self.method.sums(pair, self.plan) for pair in pairs
        }
        scales: dict[str, float] = {}
        for pair in pairs:  # Errors must come before anything is added.
            a, b = factors(tensors, pair)
            scale = scales[pair.module] = settings.scale(pair.module, len(a))
            self._check_sizes(pair, a, b)
            modules[pair.module].check(a, b, settings)
            _rescale(others, pair.bias, scale / self._scales.get(pair.module, scale))
        statistics = {
            kind: of for kind, of in update.statistics.items() if kind == TRAINED
        }
        self._others.check(others, update.weight, statistics)
        if not self._updates:
            self._pairs, self._scales, self._modules = pairs, scales, modules
            self._like = {
                name: t.new_empty(()).expand(t.shape) for name, t in tensors.items()
            }
        if others:
            self._others.fold(others, update.weight, statistics)

        def fold(pair: Pair) -> None:
            a, b = wide_factors(tensors, pair)
            modules[pair.module].add((a, b * scales[pair.module]), update.weight)

        in_threads(fold, pairs, tensors[pairs[0].a].device)
        self._updates += 1

    def result(self) -> tuple[dict[str, Tensor], AdapterReport]:
        """Return the average, in the dtypes of the first adapter, and its report.

        Raises:
            FedrotError: there are no adapters.
            UpdateError: factors of different ranks have no mean.
        """
        if not self._updates:
            raise FedrotError("There are no adapters to average.")

        def averaged(pair: Pair) -> AveragedModule:
            return self._modules[pair.module].averaged(self.method.merge, self._like)

        tensors: dict[str, Tensor] = (
            self._others.result() if self._others.weight else {}
        )
        found = in_threads(averaged, self._pairs, self._like[self._pairs[0].a].device)
        for pair, module in zip(self._pairs, found, strict=True):
            tensors |= module.tensors
            _rescale(tensors, pair.bias, self._scales[pair.module] / module.scale)
        modules = dict(zip([pair.module for pair in self._pairs], found, strict=True))
        return tensors, AdapterReport(
            self._updates,
            error_of_factors={
                name: module.error_of_factors for name, module in modules.items()
            },
            error={name: module.error for name, module in modules.items()},
            lost={name: module.lost for name, module in modules.items()},
            magnitudes=any(_MAGNITUDE in name for name in self._like),
        )

    def _check_sizes(self, pair: Pair, a: Tensor, b: Tensor) -> None:
        wanted = (
            self._like.get(pair.a, a).shape[1:].numel(),
            len(self._like.get(pair.b, b)),
        )
        if (a.shape[1], len(b)) != wanted:
            raise UpdateError(
                f"The factors of '{pair.module}' map {a.shape[1]} inputs to {len(b)} "
                f"outputs, those of the first adapter {wanted[0]} to {wanted[1]}. Use "
                "one base model."
            )


def _rescale(tensors: dict[str, Tensor], name: str, scale: float) -> None:
    if name in tensors and scale != 1:
        tensors[name] = tensors[name] * scale
