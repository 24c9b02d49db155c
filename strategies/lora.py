"""The strategies ``AlignedLoRA`` and ``FedRotLoRA``: averages of LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from fedrot.aggregation import Aggregator
from fedrot.collect.statistics import TRAINED, Statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapter_options import AdapterOptions, checked_adapter_options
from fedrot.lora.adapters import LoraSettings, pairs_of
from fedrot.lora.averaging import AdapterAverage, AdapterUpdate
from fedrot.strategies.arguments import check_not_behind
from fedrot.strategies.base import ReplyStrategy
from fedrot.strategies.round.merge import OF_THE_MEAN
from fedrot.strategies.round.update import Schema
from fedrot.strategies.wire.arrays import from_arrays
from fedrot.tensors import Shaped, Tensors, check_update

#: Metrics of a round: how far the new adapter, and the mean of the factors, are from the mean product.
ERROR, ERROR_OF_FACTORS = "fedrot-adapter-error", "fedrot-adapter-error-of-factors"
#: And how much the sum of products has lost, because its rank is bounded.
LOST = "fedrot-adapter-lost"


class AlignedLoRA(ReplyStrategy):
    """Mixin that averages LoRA adapters, and passes the average to a strategy of Flower.

    ``class AdamLoRA(AlignedLoRA, FedAdam): pass``, then ``AdamLoRA(peft_config, eta=0.01)``. The base
    strategy receives the average alone; it can be FedAvg, FedAvgM, FedAdagrad, FedAdam or FedYogi.

    All clients need these settings; their ranks may differ, see below. Each round logs how far the
    average is from the mean of the clients' products, and how far the mean of the factors is. With the
    method ``exact`` a client may have a smaller rank than the adapter that it receives
    (``fedrot.lora.load_adapter`` reduces it).

    Args:
        settings: the adapter's ``LoraConfig``, or the content of ``adapter_config.json``: alpha is not
            in the tensors.
        adapters: how adapters are averaged; None averages the factors.
        *args: of the base strategy.
        **kwargs: of the base strategy, and of ``ReplyStrategy``.

    Raises:
        FedrotError: the settings are not those of a LoRA adapter; the base strategy is none of these.
            In the first round: the clients send no adapter.
    """

    uses_statistics = True

    not_in_checkpoints = ("settings", "adapters")

    def __init__(
        self,
        settings: LoraSettings | Mapping[str, Any] | object,
        adapters: AdapterOptions | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.settings = LoraSettings.of(settings)
        self.adapters = checked_adapter_options(adapters)
        super().__init__(*args, **kwargs)
        behind = self.wrapped_class
        if behind not in OF_THE_MEAN:
            able = ", ".join(strategy.__name__ for strategy in OF_THE_MEAN)
            raise FedrotError(
                f"{type(self).__name__} averages adapters itself, and {behind.__name__} looks at every "
                f"update. Behind it can stand {able}."
            )

    def summary(self) -> None:
        """Log how adapters are averaged, then the summary of the strategy behind."""
        log(INFO, "\t├──> Adapters: %s", self.adapters)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Check the first model before any client trains."""
        check_not_behind(self)
        if server_round == 1:
            _check_initial(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def schema(self, broadcast: Tensors) -> Schema:
        """Return the tensors that a reply may hold: an adapter of at most the broadcast ranks."""
        return AdapterSchema(broadcast, self.adapters.any_rank)

    def aggregator(self, server_round: int) -> Callable[[], Aggregator]:
        """Return the function that builds a round's average of adapters."""
        return lambda: AdapterMean(
            self.adapters.average(self.settings, from_arrays(self._broadcast), server_round)
        )


def _check_initial(arrays: ArrayRecord) -> None:
    """Refuse a first model that is no adapter, before any client trains; warn of base weights in it."""
    try:
        pairs_of(arrays)
    except UpdateError as error:
        raise FedrotError(f"initial_arrays is no LoRA adapter: {error}") from error
    base = [name for name in arrays if ".base_layer." in name]
    if base:
        log(
            WARNING,
            "initial_arrays holds base weights ('%s'), which would travel and be averaged in every "
            "round. Send the adapter alone: fedrot.lora.adapter_tensors(model).",
            base[0],
        )


class FedRotLoRA(AlignedLoRA, FedAvg):
    """FedAvg for LoRA adapters: clients send ``fedrot.lora.adapter_tensors(model)``.

    Every argument of ``FedAvg`` works as before, by its name; see ``AlignedLoRA`` for the others.

    Example: ``FedRotLoRA(peft_config, AdapterOptions("exact"), fraction_train=0.5)``.
    """


@dataclass(frozen=True)
class AdapterSchema(Schema):
    """Adapters of the broadcast modules, whose ranks are at most those of the broadcast factors.

    Attributes:
        smaller: whether smaller ranks are allowed.
    """

    smaller: bool = True

    def check(self, given: Mapping[str, Shaped]) -> None:
        """Raise ``UpdateError`` unless names and shapes, but for ranks, are those of the broadcast."""
        shapes = self.shapes
        for pair in pairs_of(self.like):
            for name, axis in ((pair.a, 0), (pair.b, 1)):
                wanted, own = shapes[name], tuple(given[name].shape) if name in given else ()
                if len(own) == len(wanted) and own[axis] != wanted[axis]:
                    self._check_rank(name, own[axis], wanted[axis])
                    # No adapter has rank 0: its shape is refused below.
                    shapes[name] = (*wanted[:axis], own[axis] or wanted[axis], *wanted[axis + 1 :])
        check_update(given, shapes)

    def _check_rank(self, name: str, own: int, most: int) -> None:
        if own > most or not self.smaller:
            needed = [] if self.smaller else ["AdapterOptions('exact')"]
            needed += ["an initial adapter of the largest rank"] if own > most else []
            raise UpdateError(
                f"The factor '{name}' has rank {own}, the broadcast one {most}. Clients of different "
                f"ranks need {' and '.join(needed)}."
            )


class AdapterMean:
    """An ``Aggregator`` of adapters, which says and measures what it found."""

    needs: tuple[str, ...] = ()
    notes: Mapping[str, str] = {}

    def __init__(self, average: AdapterAverage) -> None:
        self._average = average
        self.said, self.measured = "", dict[str, float]()

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Add one adapter; raises ``UpdateError`` as ``AdapterAverage.add``."""
        trained = {kind: of for kind, of in (statistics or {}).items() if kind == TRAINED}
        self._average.add(AdapterUpdate(update, weight, self._average.settings), trained)

    def result(self) -> dict[str, Tensor]:
        """Return the average, and keep its errors."""
        tensors, report = self._average.result()
        self.said = str(report)
        errors = {ERROR: report.mean_error, ERROR_OF_FACTORS: report.mean_error_of_factors}
        errors[LOST] = report.mean_lost or None
        self.measured = {name: error for name, error in errors.items() if error is not None}
        return tensors
