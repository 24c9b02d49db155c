"""``AdapterOptions`` and ``AdapterReport``: how adapters are averaged, and the errors of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedrot.errors import FedrotError
from fedrot.lora.gauges import GAUGES
from fedrot.tensors import Tensors

if TYPE_CHECKING:
    from fedrot.lora.adapters import LoraSettings
    from fedrot.lora.averaging import AdapterAverage

#: A report mentions the share that a sum lost if it is larger than this.
SHOWN = 0.001
#: ``AdapterOptions.regmean_alpha`` unless another value is given.
REGMEAN_ALPHA = 0.9
#: The methods of averaging adapters, by name. Plug-ins add theirs.
METHODS: dict[str, type[AdapterAverage]] = {}
#: The options of methods, as their names are printed.
_OPTIONS = {"gauge": "gauge", "regmean_alpha": "alpha"}


@dataclass(frozen=True)
class AdapterOptions:
    """Options for averages of adapters.

    Attributes:
        method: ``mean`` averages the factors (FedIT). ``exact`` averages the products, and keeps the
            best approximation of the result's rank (FlexLoRA, with ``gauge="none"``). ``regmean`` keeps
            the product of this rank whose outputs are nearest to those of the clients' products on the
            clients' inputs; clients send Gram matrices.
        gauge: for ``exact`` and ``regmean``, the choice among the pairs of factors with the same
            product: ``keep-a``, ``none`` or ``previous``, see ``fedrot.lora.gauges``.
        regmean_alpha: for ``regmean``, the ``alpha`` of ``fedrot.aggregation.RegMean``, by which
            off-diagonal entries of Gram matrices are multiplied; no scale of an adapter.

    Raises:
        FedrotError: a value is unknown or out of range, or is given with a method that does not use it.
    """

    method: str = "mean"
    gauge: str = "keep-a"
    regmean_alpha: float = REGMEAN_ALPHA

    def __post_init__(self) -> None:
        known: dict[str, Mapping[str, object]] = {"method": METHODS, "gauge": GAUGES}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise FedrotError(
                    f"Unknown {name} '{getattr(self, name)}' of adapters; one of {', '.join(values)}."
                )
        for name in (name for name in _OPTIONS if name not in METHODS[self.method].used):
            if getattr(self, name) != getattr(type(self), name):
                able = " and ".join(f"'{key}'" for key, kind in METHODS.items() if name in kind.used)
                raise FedrotError(
                    f"{name} is an option of {able}, and has no effect with '{self.method}'; omit it."
                )
        alpha: object = self.regmean_alpha
        if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
            raise FedrotError(f"regmean_alpha is {alpha!r}; it must be a number from 0 to 1.")

    def __str__(self) -> str:
        given = (f"{_OPTIONS[name]} {getattr(self, name)!r}" for name in METHODS[self.method].used)
        return ", ".join([self.method, *given])

    def average(
        self,
        settings: LoraSettings,
        previous: Tensors | None = None,
        server_round: int = 1,
        rank: int | None = None,
    ) -> AdapterAverage:
        """Return an empty average by the method; see ``AdapterAverage``."""
        return self.kind(settings, self, previous, server_round, rank)

    @property
    def kind(self) -> type[AdapterAverage]:
        """The class of the average."""
        return METHODS[self.method]


def checked_adapter_options(options: AdapterOptions | None) -> AdapterOptions:
    """Return options, the defaults if None; raise ``FedrotError`` if they are something else."""
    if not isinstance(options, AdapterOptions | None):
        raise FedrotError(
            f"options is {options!r}; pass fedrot.lora.AdapterOptions, for example "
            "AdapterOptions('exact')."
        )
    return options or AdapterOptions()


@dataclass(frozen=True)
class AdapterReport:
    """The errors of an average of adapters; ``print(report)`` shows them in one sentence.

    Attributes:
        updates: number of adapters.
        error_of_factors: by module, ``|D - s B A| / |D|``, where ``D`` is the weighted mean of the
            clients' products, and ``A`` and ``B`` are the means of their factors. None if ranks differ.
        error: by module, the same for the factors of the result.
        lost: by module, upper bound of the relative error in ``D`` itself, a sum of bounded rank
            (``averaging.KEPT_RANKS``). Both errors include an estimate of it, in which the terms that
            were left out are orthogonal to all others.
        magnitudes: whether the adapters have DoRA's magnitudes ``m``. The weights are then
            ``m (W + s B A) / |W + s B A|`` with the base's ``W``, but the errors are of products only.
        notes: by module, what ``regmean`` did not solve, with the reason.
    """

    updates: int
    error_of_factors: Mapping[str, float | None]
    error: Mapping[str, float]
    lost: Mapping[str, float]
    magnitudes: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def mean_error(self) -> float:
        """The mean of ``error`` over the modules."""
        return sum(self.error.values()) / len(self.error)

    @property
    def mean_lost(self) -> float:
        """The mean of ``lost`` over the modules."""
        return sum(self.lost.values()) / len(self.lost)

    @property
    def mean_error_of_factors(self) -> float | None:
        """The mean of ``error_of_factors`` over the modules in which it is not None, None if all are."""
        known = [error for error in self.error_of_factors.values() if error is not None]
        return sum(known) / len(known) if known else None

    def __str__(self) -> str:
        differ = sum(error is None for error in self.error_of_factors.values())
        naive = self.mean_error_of_factors
        given = "adapter" if self.updates == 1 else "adapters"
        error = f"{100 * self.mean_error:.1f} %"
        said = f"{self.updates} {given}: this average is {error} from the mean of their products"
        said += f", the mean of the factors {100 * naive:.1f} %" if naive is not None else ""
        said += f"; factors of {differ} modules have no mean: their ranks differ" if differ else ""
        if self.mean_lost > SHOWN:
            at_most = f"{100 * self.mean_lost:.1f} %"
            said += f"; these are estimates: the sum of bounded rank leaves out at most {at_most}"
        if self.magnitudes:
            said += (
                "; these are errors of products only: DoRA's magnitudes were averaged separately, so "
                "the weights may be far from the mean of the adapters' weights"
            )
        return said
