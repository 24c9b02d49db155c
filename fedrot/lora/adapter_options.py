"""``AdapterOptions`` and ``AdapterReport``: how adapters are averaged, and the errors of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedrot.errors import FedrotError
from fedrot.lora.gauges import GAUGES
from fedrot.tensors import Tensors

if TYPE_CHECKING:
    from fedrot.lora.adapters import LoraSettings
    from fedrot.lora.averaging import AdapterAverage

#: A report mentions the share that a sum lost if it is larger than this.
SHOWN = 0.001
#: The methods of averaging adapters, by name. Plug-ins add theirs.
METHODS: dict[str, type[AdapterAverage]] = {}


@dataclass(frozen=True)
class AdapterOptions:
    """Options for averages of adapters.

    Attributes:
        method: ``mean`` averages the factors (FedIT). ``exact`` averages the products, and keeps the
            best approximation of the result's rank (FlexLoRA, with ``gauge="none"``).
        gauge: for ``exact``, the choice among the pairs of factors with the same product: ``keep-a``,
            ``none`` or ``previous``, see ``fedrot.lora.gauges``.

    Raises:
        FedrotError: a value is unknown, or a gauge is given with another method.
    """

    method: str = "mean"
    gauge: str = "keep-a"

    def __post_init__(self) -> None:
        known: dict[str, Mapping[str, object]] = {"method": METHODS, "gauge": GAUGES}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise FedrotError(
                    f"Unknown {name} '{getattr(self, name)}' of adapters; one of {', '.join(values)}."
                )
        if self.method != "exact" and self.gauge != type(self).gauge:
            raise FedrotError(
                f"gauge is an option of method 'exact' and has no effect with '{self.method}'; omit it."
            )

    def __str__(self) -> str:
        return f"{self.method}, gauge '{self.gauge}'" if self.method == "exact" else self.method

    @property
    def any_rank(self) -> bool:
        """Whether clients may have different ranks."""
        return self.kind.any_rank

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
    """

    updates: int
    error_of_factors: Mapping[str, float | None]
    error: Mapping[str, float]
    lost: Mapping[str, float]
    magnitudes: bool = False

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
