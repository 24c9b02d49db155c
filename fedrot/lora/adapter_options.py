"""``AdapterOptions`` and ``AdapterReport``: how adapters are averaged, and what that did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedrot.errors import FedrotError
from fedrot.lora.gauges import GAUGES, Factor
from fedrot.lora.methods import METHODS

#: Sums that lost a smaller share are exact enough.
SHOWN = 0.001
#: Which factors clients train.
SCHEDULES = ("both", "freeze-a", "alternate")
#: Factors that decide a rotation.
ROTATED_BY = ("both", "alternate")
#: What happens to the part that the factors cannot hold.
RESIDUALS = ("drop", "fold")


@dataclass(frozen=True)
class AdapterOptions:
    """Options for averages of adapters.

    Attributes:
        method: ``mean`` averages the factors (FedIT). ``pad`` does so for clients of different ranks:
            smaller factors are padded with zeros (as HetLoRA, which also weights clients by the size of
            their updates and prunes). ``rotate`` rotates each client's factors to those that it
            received, or to the mean so far, and averages them. ``exact`` averages the products, and
            keeps the best approximation of the result's rank (FlexLoRA, with ``gauge="none"``).
            ``stack`` adds the mean product to the base weights, and begins anew with a random ``A`` and
            ``B = 0`` (FLoRA); it needs ``residual="fold"``.
        gauge: of ``exact``, which pair of factors the product is given: ``keep-a``, ``none``,
            ``previous`` or ``mean``, see ``fedrot.lora.gauges``.
        strength: of ``rotate``: 1 applies the best rotation, 0 applies none.
        by: of ``rotate``: ``both`` computes the rotation from ``A`` and ``B``; ``alternate`` from ``A``
            in odd rounds and from ``B`` in even ones (FedRot-LoRA).
        limit: a sum of products with more than twice so many terms is cut to this rank. None: four times
            the largest rank, the result's if that is larger. ``fold`` ignores it, and keeps all.
        residual: the difference between the mean product and the product of the new factors. ``drop``
            discards it. ``fold`` adds it to the base weights (with ``mean``: FedEx-LoRA). Clients
            receive its sum over the rounds as a dense matrix for each module, see
            ``fedrot.lora.load_adapter``.
        schedule: of ``mean``, the factors that clients train: ``both``; ``B`` alone (``freeze-a``,
            FFA-LoRA); or ``B`` in odd and ``A`` in even rounds (``alternate``, RoLoRA). The mean is
            exact where one factor is the same at all clients.

    Raises:
        FedrotError: a value is unknown, or two of them do not go together.
    """

    method: str = "mean"
    gauge: str = "keep-a"
    strength: float = 1.0
    by: str = "both"
    limit: int | None = None
    residual: str = "drop"
    schedule: str = "both"

    def __post_init__(self) -> None:
        known = {"method": METHODS, "gauge": GAUGES, "by": ROTATED_BY, "residual": RESIDUALS}
        for name, values in {**known, "schedule": SCHEDULES}.items():
            if getattr(self, name) not in values:
                raise FedrotError(
                    f"Unknown {name} '{getattr(self, name)}' of adapters; one of {', '.join(values)}."
                )
        if not isinstance(self.strength, int | float) or not 0 <= self.strength <= 1:
            raise FedrotError(f"strength is {self.strength!r}; it is a number from 0 to 1.")
        if self.limit is not None and (not isinstance(self.limit, int) or self.limit < 1):
            raise FedrotError(f"limit is {self.limit!r}; it is a rank, 1 at least.")
        for name, method in (("gauge", "exact"), ("strength", "rotate"), ("by", "rotate")):
            if self.method != method and getattr(self, name) != getattr(type(self), name):
                raise FedrotError(
                    f"{name} is an option of method '{method}', and does nothing with '{self.method}'."
                )
        if self.schedule != "both" and self.method != "mean":
            raise FedrotError(
                f"schedule is '{self.schedule}', but method '{self.method}' changes both factors. Take "
                "method='mean': it is exact where one factor is frozen."
            )
        if self.schedule == "freeze-a" and self.folds:
            raise FedrotError("Where A is frozen the mean is exact: there is nothing to fold.")
        if self.method == "stack" and not self.folds:
            raise FedrotError(
                "Method 'stack' begins anew with a product of 0 in every round, and what clients have "
                "learned would be lost. Give residual='fold', which adds it to the base weights."
            )

    @property
    def folds(self) -> bool:
        """Whether clients receive a residual for their base weights."""
        return self.residual == "fold"

    def frozen(self, server_round: int) -> Factor | None:
        """Return the factor that clients do not train in a round; rounds count from 1."""
        if self.schedule == "both":
            return None
        return "A" if self.schedule == "freeze-a" or server_round % 2 else "B"

    def rotates_by(self, server_round: int) -> Factor | None:
        """Return the factor that alone decides the rotations of a round, None for both."""
        if self.by == "both":
            return None
        return "A" if server_round % 2 else "B"


def checked_adapter_options(options: AdapterOptions | None) -> AdapterOptions:
    """Return options, the defaults if None; raise ``FedrotError`` if they are something else."""
    if not isinstance(options, AdapterOptions | None):
        raise FedrotError(
            f"{options!r} is given in place of fedrot.lora.AdapterOptions, for example "
            "AdapterOptions('exact')."
        )
    return options or AdapterOptions()


@dataclass(frozen=True)
class AdapterReport:
    """What an average of adapters did; ``print(report)`` shows it in one sentence.

    Attributes:
        updates: number of adapters.
        error_of_factors: by module, ``|D - s B A| / |D|`` for the weighted mean ``D`` of the clients'
            products and the means of their factors; None where factors of different ranks have no mean.
        error: by module, the same for the factors of the result, with their residual if there is one.
        lost: by module, upper bound of the relative error in ``D`` itself, whose sum has a bounded rank
            (``AdapterOptions.limit``). Both errors contain an estimate of it, in which the parts that
            were left out are orthogonal to everything else.
        magnitudes: whether the adapters have DoRA's. Their weights are ``m (W + s B A) / |W + s B A|``
            with the base's ``W``, which no average of adapters knows: the errors are of products alone.
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
        """The mean of ``error_of_factors`` over the modules in which it is known, None if in none."""
        known = [error for error in self.error_of_factors.values() if error is not None]
        return sum(known) / len(known) if known else None

    def __str__(self) -> str:
        differ = sum(error is None for error in self.error_of_factors.values())
        naive = self.mean_error_of_factors
        given = "adapter" if self.updates == 1 else "adapters"
        error = f"{100 * self.mean_error:.1f} %"
        said = f"{self.updates} {given}: this average is {error} from the mean of their products"
        said += f", the mean of the factors {100 * naive:.1f} %" if naive is not None else ""
        said += f"; factors of {differ} modules have no mean, as ranks differ" if differ else ""
        if self.mean_lost > SHOWN:
            at_most = f"{100 * self.mean_lost:.1f} %"
            said += f"; estimates, as the sum of bounded rank leaves out {at_most} at most"
        if self.magnitudes:
            said += (
                "; this is about the products alone: DoRA's weights have magnitudes, too, whose mean "
                "was taken, and may be far from the mean of the adapters' weights"
            )
        return said
