"""``average_adapters``: the average of several clients' LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable
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
    plain_name,
    plain_names,
    rescale,
    wide_factors,
)
from fedrot.lora.gauges import GAUGES
from fedrot.lora.methods import METHODS, Method
from fedrot.lora.module_sums import AveragedModule, ModuleSums, Plan, in_threads
from fedrot.tensors import TensorDict, Tensors, check_finite, check_weight

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
        known = {"method": tuple(METHODS), "gauge": tuple(GAUGES)}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise FedrotError(
                    f"Unknown {name} '{getattr(self, name)}' of adapters; one of "
                    f"{', '.join(values)}."
                )
        if "gauge" not in self.averaging.used and self.gauge != type(self).gauge:
            able = [repr(name) for name, of in METHODS.items() if "gauge" in of.used]
            raise FedrotError(
                f"gauge is an option of {' and '.join(able)}, and has no effect with "
                f"'{self.method}'; omit it."
            )

    def __str__(self) -> str:
        options = [f"{name} {getattr(self, name)!r}" for name in self.averaging.used]
        return ", ".join([self.method, *options])

    def average(
        self,
        settings: LoraSettings,
        previous: Tensors | None = None,
        server_round: int = 1,
        rank: int | None = None,
    ) -> AdapterAverage:
        """Return an empty average; arguments are those of ``average_adapters``."""
        settings = LoraSettings.of(settings)
        if rank is not None:
            check_rank(rank)
        return AdapterAverage(
            self, Plan(settings, self.gauge, previous, server_round, rank)
        )

    @property
    def averaging(self) -> Method:
        """The entry of the method in the registry."""
        return METHODS[self.method]


def checked_adapter_options(options: AdapterOptions | None) -> AdapterOptions:
    """Return options, the defaults if None; refuse another type."""
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
) -> tuple[TensorDict, AdapterReport]:
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
    """An average to which adapters are added one at a time.

    ``AdapterOptions.average`` makes it; ``plan`` is that of the result.
    """

    def __init__(self, options: AdapterOptions, plan: Plan) -> None:
        self.options = options
        self.method = options.averaging
        self.plan = plan
        self._modules: dict[Pair, ModuleSums] = {}
        #: Scales of the first adapter; biases of ``B`` are averaged in these scales.
        self._scales: dict[Pair, float] = {}
        #: The tensors of the first adapter, without memory for their values.
        self._like: TensorDict = {}
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
        tensors = update.tensors
        if self._like and tensors.keys() != self._like.keys():
            # A state dict's names have wrappers and the adapter's name in them.
            names = {plain_name(name): name for name in self._like}
            plain = plain_names(tensors).items()
            tensors = {names.get(name, name): tensor for name, tensor in plain}
        pairs = pairs_of(tensors)
        settings = LoraSettings.of(update.settings)
        check_weight(update.weight)
        check_finite(tensors)
        odd = tensors.keys() ^ (self._like or tensors).keys()
        if odd:
            raise UpdateError(
                f"The tensor '{min(odd)}' is in some adapters and missing in others. "
                "All clients need the same target_modules, modules_to_save and bias in "
                "their LoraConfig, and files need to be those of save_pretrained."
            )
        others = dict(tensors)
        modules = self._modules or {
            pair: self.method.sums(pair, self.plan) for pair in pairs
        }
        scales: dict[Pair, float] = {}
        # Errors must come before anything is added.
        for pair in pairs:
            a, b = factors(tensors, pair)
            scale = settings.scale(pair.module, len(a))
            scales[pair] = scale
            self._check_sizes(pair, a, b)
            modules[pair].check(a, b, settings)
            del others[pair.a], others[pair.b]
            rescale(others, pair.bias, scale / self._scales.get(pair, scale))
        statistics = {TRAINED: update.statistics.get(TRAINED, {})}
        self._others.check(others, update.weight, statistics)
        if not self._updates:
            self._scales = scales
            self._modules = modules
            self._like = {
                name: t.new_empty(()).expand(t.shape) for name, t in tensors.items()
            }
        self._others.fold(others, update.weight, statistics)

        def fold(pair: Pair) -> None:
            a, b = wide_factors(tensors, pair)
            modules[pair].add((a, b * scales[pair]), update.weight)

        in_threads(fold, pairs, tensors[pairs[0].a].device)
        self._updates += 1

    def result(self) -> tuple[TensorDict, AdapterReport]:
        """Return the average, in the dtypes of the first adapter, and its report.

        Raises:
            FedrotError: there are no adapters.
            UpdateError: factors of different ranks have no mean.
        """
        if not self._updates:
            raise FedrotError("There are no adapters to average.")

        def averaged(pair: Pair) -> AveragedModule:
            return self._modules[pair].averaged(self.method.merge, self._like)

        tensors = self._others.result() if self._others.current else {}
        pairs = tuple(self._modules)
        averages = in_threads(averaged, pairs, self._like[pairs[0].a].device)
        modules: dict[str, AveragedModule] = {}
        for pair, module in zip(pairs, averages, strict=True):
            tensors |= module.tensors
            rescale(tensors, pair.bias, self._scales[pair] / module.scale)
            modules[pair.module] = module
        error = {name: module.error for name, module in modules.items()}
        lost = {name: module.lost for name, module in modules.items()}
        of_factors = {name: module.error_of_factors for name, module in modules.items()}
        magnitudes = any(_MAGNITUDE in name for name in self._like)
        return tensors, AdapterReport(
            self._updates, of_factors, error, lost, magnitudes
        )

    def _check_sizes(self, pair: Pair, a: Tensor, b: Tensor) -> None:
        inputs = a.shape[1]
        outputs = len(b)
        first_inputs = self._like.get(pair.a, a).shape[1:].numel()
        first_outputs = len(self._like.get(pair.b, b))
        if inputs != first_inputs or outputs != first_outputs:
            raise UpdateError(
                f"The factors of '{pair.module}' map {inputs} inputs to {outputs} "
                f"outputs, those of the first adapter {first_inputs} to "
                f"{first_outputs}. Use one base model."
            )
