"""``average_adapters``: LoRA adapters of several clients become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedrot.aggregation.mean import Mean
from fedrot.collect.statistic_kinds import Statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapters import LoraSettings, Pair, factors, pairs_of, shaped
from fedrot.lora.gauges import GAUGES, Factors, Wanted, rotated
from fedrot.lora.products import ProductSum, Terms
from fedrot.tensors import Tensors, check_finite, check_weight, compute_dtype

#: Without a limit of its own, a sum of products keeps so many times the rank of the first adapter.
KEPT_RANKS = 4


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


@dataclass(frozen=True)
class AdapterOptions:
    """How adapters become one.

    Attributes:
        method: ``mean`` averages the factors (FedIT). ``rotate`` rotates each client's factors to those
            that it received, or to the mean so far, and averages them. ``exact`` averages the products
            and keeps the best approximation of the result's rank.
        gauge: of ``exact``, which factors the product is given: ``keep-a``, ``mean``, ``previous`` or
            ``none``, see ``fedrot.lora.gauges``.
        strength: of ``rotate``, 0 to 1: the part of the way to the best rotation.
        limit: the rank that a sum of products keeps; None: four times that of the first adapter.
    """

    method: str = "mean"
    gauge: str = "keep-a"
    strength: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (("method", self.method, METHODS), ("gauge", self.gauge, GAUGES)):
            if value not in known:
                raise FedrotError(f"Unknown {name} '{value}' of adapters; one of {', '.join(known)}.")
        if not 0 <= self.strength <= 1:
            raise FedrotError(f"strength is {self.strength}; it is 0 to 1.")
        if self.limit is not None and self.limit < 1:
            raise FedrotError(f"limit is {self.limit}; a sum keeps at least rank 1.")


@dataclass(frozen=True)
class AdapterReport:
    """What an average of adapters did; ``print(report)`` shows it in one sentence.

    Attributes:
        updates: number of adapters.
        error_of_factors: by module, ``|D - s B A| / |D|`` for the weighted mean ``D`` of the clients'
            products and the means of their factors; None where ranks differ.
        error: by module, the same for the factors of the result.
        lost: by module, upper bound of the share of ``|D|`` that the bounded rank left out of ``D``.
    """

    updates: int
    error_of_factors: Mapping[str, float | None]
    error: Mapping[str, float]
    lost: Mapping[str, float]

    @property
    def mean_error(self) -> float:
        """The mean of ``error`` over the modules."""
        return sum(self.error.values()) / len(self.error)

    @property
    def mean_error_of_factors(self) -> float | None:
        """The mean of ``error_of_factors`` over the modules in which it is known, None if in none."""
        known = [error for error in self.error_of_factors.values() if error is not None]
        return sum(known) / len(known) if known else None

    def __str__(self) -> str:
        differ = sum(error is None for error in self.error_of_factors.values())
        naive = self.mean_error_of_factors
        whose = "client's adapter" if self.updates == 1 else "clients' adapters"
        said = f"{self.updates} {whose}: this average differs from that of the products by "
        said += f"{100 * self.mean_error:.1f} %"
        said += f", the mean of the factors by {100 * naive:.1f} %" if naive is not None else ""
        return said + (f"; factors of {differ} modules have no mean, as ranks differ" if differ else "")


class _Module:
    """The sums of one module over the clients, of products and factors that contain the scale."""

    def __init__(self, limit: int) -> None:
        self.products, self.mean, self.weight = ProductSum(limit), Mean(), 0.0
        self.ranks: set[int] = set()

    def add(self, a: Tensor, b: Tensor, weight: float) -> None:
        """Add the factors of one client."""
        self.products.add(b, a, weight)
        self.ranks.add(len(a))
        self.weight += weight
        if len(self.ranks) == 1:
            self.mean.add({"a": a, "b": b}, weight)

    def factors(self, scale: float) -> Factors | None:
        """Return the means of the factors in units of a scale, None if ranks differ."""
        if len(self.ranks) > 1:
            return None
        return self.mean.current["a"], self.mean.current["b"] / scale

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


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float(part > 0)


Merge = Callable[[_Module, Wanted, str, Pair], Factors]


def _factors(module: _Module, wanted: Wanted, gauge: str, pair: Pair) -> Factors:
    if wanted.mean is None:
        raise UpdateError(
            f"The clients' ranks of '{pair.module}' are {sorted(module.ranks)}: factors of different "
            "ranks have no mean, or not the one of the result. Take method='exact'."
        )
    return wanted.mean


def _exact(module: _Module, wanted: Wanted, gauge: str, pair: Pair) -> Factors:
    return GAUGES[gauge](wanted)


#: The methods by name.
METHODS: Mapping[str, Merge] = {"mean": _factors, "rotate": _factors, "exact": _exact}


@dataclass
class AdapterAverage:
    """A sum of adapters, one at a time; ``average_adapters`` in steps.

    Attributes:
        settings: of the result.
        options: see ``AdapterOptions``.
        previous: the adapter that the clients received, with the result's settings, None if unknown.
    """

    settings: LoraSettings
    options: AdapterOptions = field(default_factory=AdapterOptions)
    previous: Tensors | None = None

    def __post_init__(self) -> None:
        self._pairs: tuple[Pair, ...] = ()
        self._modules: dict[str, _Module] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._like: dict[str, Tensor] = {}
        self._others = Mean()
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
        read = {pair.module: _read(tensors, pair, update.settings) for pair in pairs}
        self._check(pairs, read)
        self._others.check(others, update.weight, statistics)
        if self._updates == 0:
            self._pairs = pairs
            self._like = {n: tensors[n].new_empty(0) for pair in pairs for n in (pair.a, pair.b)}
            ranks = {module: len(a) for module, (a, _) in read.items()}
            self._modules = {m: _Module(self.options.limit or KEPT_RANKS * r) for m, r in ranks.items()}
            self._shapes = {n: tensors[n].shape for pair in pairs for n in (pair.a, pair.b)}
        if others:
            self._others.fold(others, update.weight, statistics)
        for pair in pairs:
            a, b = self._rotated(pair, *read[pair.module])
            self._modules[pair.module].add(a, b, update.weight)
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
        tensors: dict[str, Tensor] = self._others.result() if self._others.weight else {}
        naive: dict[str, float | None] = {}
        error, lost = dict[str, float](), dict[str, float]()
        for pair in self._pairs:
            module = self._modules[pair.module]
            received = self._received(pair)
            own = rank or (len(received[0]) if received else max(module.ranks))
            scale = self.settings.scale(pair.module, own)
            terms = module.products.terms()
            wanted = module.wanted(terms, own, scale, received)
            a, b = METHODS[self.options.method](module, wanted, self.options.gauge, pair)
            mean = module.factors(scale)
            naive[pair.module] = None if mean is None else module.error(terms, mean, scale)
            error[pair.module] = module.error(terms, (a, b), scale)
            lost[pair.module] = _share(module.products.lost, terms.norm)
            for name, matrix in ((pair.a, a), (pair.b, b)):
                tensors[name] = shaped(matrix, self._shapes[name]).to(self._like[name])
        return tensors, AdapterReport(self._updates, naive, error, lost)

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

    def _rotated(self, pair: Pair, a: Tensor, b: Tensor) -> Factors:
        """Return a client's factors, rotated to what it received or to the mean so far if asked for."""
        if self.options.method != "rotate":
            return a, b
        module, received = self._modules[pair.module], self._received(pair)
        scale = self.settings.scale(pair.module, len(a))
        to = received or (module.factors(scale) if module.weight else None)
        if to is None or to[0].shape != a.shape:
            return a, b
        near = (to[0].to(a), to[1].to(b))
        a, b = rotated((a, b / scale), near, self.options.strength)
        return a, scale * b

    def _received(self, pair: Pair) -> Factors | None:
        if self.previous is None:
            return None
        a, b = factors(self.previous, pair)
        return a.to(compute_dtype(a)), b.to(compute_dtype(b))


def _read(tensors: Tensors, pair: Pair, settings: LoraSettings) -> Factors:
    """Return a client's factors in the dtype to compute in; ``B`` contains the scale."""
    a, b = factors(tensors, pair)
    return a.to(compute_dtype(a)), b.to(compute_dtype(b)) * settings.scale(pair.module, len(a))


def average_adapters(
    updates: Iterable[AdapterUpdate],
    settings: LoraSettings,
    options: AdapterOptions | None = None,
    previous: Tensors | None = None,
    rank: int | None = None,
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

    Raises:
        FedrotError: there are no updates.
        UpdateError: an update is no adapter, or does not fit the others.
    """
    average = AdapterAverage(settings, options or AdapterOptions(), previous)
    for update in updates:
        average.add(update)
    return average.result(rank)
