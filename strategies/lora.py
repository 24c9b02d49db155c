"""The strategies ``AlignedLoRA`` and ``FedRotLoRA``: averages of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp.strategy import FedAvg

from fedrot.aggregation import Aggregator
from fedrot.collect.statistics import Statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapters import AdapterUpdate, LoraSettings, pairs_of
from fedrot.lora.averaging import (
    AdapterAverage,
    AdapterOptions,
    checked_adapter_options,
)
from fedrot.strategies.base import ReplyStrategy
from fedrot.strategies.fitting.rounds import FitsTaskHead
from fedrot.strategies.reporting.verdict import Row
from fedrot.strategies.round.inbox import Schema
from fedrot.strategies.round.merge import OF_THE_MEAN
from fedrot.strategies.round.update import Builder
from fedrot.strategies.wire.arrays import from_arrays
from fedrot.tensors import Shaped, TensorDict, Tensors, check_update

#: Metrics of a round: relative distances of the new adapter, and of the mean of the
#: factors, to the mean of the products; and the relative error of the sum of products,
#: whose rank is bounded.
ERROR = "fedrot-adapter-error"
ERROR_OF_FACTORS = "fedrot-adapter-error-of-factors"
LOST = "fedrot-adapter-lost"


def adapter_record(config: object) -> ConfigRecord:
    """Return the settings of a client's adapter, for the server to compare.

    ``config`` is its ``LoraConfig``, or the content of ``adapter_config.json``.

    Example: ``content["fedrot-adapter"] =
    adapter_record(peft_model.peft_config["default"])``.
    """
    settings = LoraSettings.of(config)
    alphas = [f"{name}={alpha}" for name, alpha in settings.alpha_pattern.items()]
    return ConfigRecord(
        {
            "lora_alpha": settings.alpha,
            "use_rslora": settings.use_rslora,
            "alpha_pattern": alphas,
        }
    )


class AlignedLoRA(ReplyStrategy):
    """Mixin that averages LoRA adapters, and passes the average to a base strategy.

    ``class AdamLoRA(AlignedLoRA, FedAdam): pass``, then ``AdamLoRA(peft_config,
    eta=0.01)``. Supported base strategies: FedAvg, FedAvgM, FedAdagrad, FedAdam and
    FedYogi. They receive only the average.

    All clients need the same settings. With the method ``exact``, a client may have a
    smaller rank than the received adapter (``fedrot.lora.load_adapter`` reduces it).
    Each round logs the distances of the average, and of the mean of the factors, to the
    mean of the clients' products.

    Args:
        settings: the adapter's ``LoraConfig``, or the content of
            ``adapter_config.json``, for alpha.
        adapters: how adapters are averaged; None averages the factors.
        *args: of the base strategy.
        **kwargs: of the base strategy, and of ``ReplyStrategy``.

    Raises:
        FedrotError: the settings are not those of a LoRA adapter; the base strategy is
            not supported. In ``start``: ``initial_arrays`` is not an adapter.
    """

    uses_statistics = True

    def __init__(
        self,
        settings: object,
        adapters: AdapterOptions | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.settings = LoraSettings.of(settings)
        self.adapters = checked_adapter_options(adapters)
        super().__init__(*args, **kwargs)
        behind = self.wrapped_class
        if behind not in OF_THE_MEAN:
            raise FedrotError(
                f"{type(self).__name__} passes only the average on, but "
                f"{behind.__name__} needs every update. Supported base strategies: "
                f"{', '.join(strategy.__name__ for strategy in OF_THE_MEAN)}."
            )

    def summary(self) -> None:
        """Log how adapters are averaged, then the summary of the base strategy."""
        log(INFO, "\t├──> Adapters: %s", self.adapters)
        super().summary()

    def check_initial(self, arrays: ArrayRecord) -> None:
        """Check that the first model is an adapter; warn of base weights."""
        super().check_initial(arrays)
        try:
            pairs_of(arrays)
        except UpdateError as error:
            raise FedrotError(
                f"initial_arrays is not a LoRA adapter: {error}"
            ) from error
        # Biases that an adapter trains have such names, too.
        base = (
            name
            for name in arrays
            if ".base_layer." in name and not name.endswith(".bias")
        )
        if name := next(base, None):
            log(
                WARNING,
                "initial_arrays holds base weights ('%s'), which would be sent and "
                "averaged in every round. Send only the adapter: "
                "fedrot.lora.adapter_tensors(model).",
                name,
            )

    def schema(self, broadcast: Tensors) -> Schema:
        """Return what a reply must hold: an adapter of at most the broadcast ranks."""
        return AdapterSchema(
            broadcast,
            self.adapters.averaging.any_rank,
            settings=adapter_record(self.settings),
        )

    def aggregator(self, server_round: int) -> Builder:
        """Return the function that builds a round's average of adapters."""
        return lambda: AdapterMean(
            self.adapters.average(
                self.settings, from_arrays(self._broadcast), server_round
            )
        )


class FedRotLoRA(FitsTaskHead, AlignedLoRA, FedAvg):
    """FedAvg for LoRA adapters: clients send ``fedrot.lora.adapter_tensors(model)``.

    Every argument of ``FedAvg`` works by its name; see ``AlignedLoRA`` and
    ``FitsTaskHead`` for the other arguments. With ``fit_head=True`` the adapter has a
    task head among its ``modules_to_save``. Clients evaluate adapters at the broadcast
    ranks, also if their own are smaller.

    Example: ``FedRotLoRA(peft_config, AdapterOptions("exact"), fraction_train=0.5)``.
    """

    @property
    def half_way(self) -> bool:
        """Whether the adapter half way is a candidate.

        Factors of a product cannot be averaged.
        """
        return self.adapters.method == "mean"


@dataclass(frozen=True)
class AdapterSchema(Schema):
    """Adapters of the broadcast modules, of at most the broadcast ranks.

    Attributes:
        smaller: whether smaller ranks are allowed.
    """

    smaller: bool = True

    def check(self, tensors: Mapping[str, Shaped]) -> None:
        """Raise ``UpdateError`` unless names and shapes, except ranks, are right."""
        targets = _targets(self.like)
        sent_targets = _targets(tensors)
        if sent_targets and sent_targets != targets:
            raise UpdateError(
                f"The adapter's targets are {', '.join(sent_targets)}, the server's "
                f"{', '.join(targets)}. Build it with the server's LoraConfig."
            )
        shapes = self.shapes
        for pair in pairs_of(self.like):
            for name, axis in ((pair.a, 0), (pair.b, 1)):
                wanted = shapes[name]
                sent = tuple(tensors[name].shape) if name in tensors else ()
                # What is missing or has another number of axes is refused below.
                if len(sent) != len(wanted) or not sent[axis]:
                    continue
                rank = sent[axis]
                most = wanted[axis]
                needed = []
                if rank != most and not self.smaller:
                    needed.append("AdapterOptions('exact')")
                if rank > most:
                    needed.append("an initial adapter of the largest rank")
                if needed:
                    raise UpdateError(
                        f"The factor '{name}' has rank {rank}, the broadcast factor "
                        f"{most}. Clients of different ranks need "
                        f"{' and '.join(needed)}."
                    )
                shapes[name] = (*wanted[:axis], rank, *wanted[axis + 1 :])
        check_update(tensors, shapes)

    def about(self, tensors: Tensors) -> Row:
        """Return the ranks and targets of an adapter."""
        ranks = {len(tensors[pair.a]) for pair in pairs_of(tensors)}
        return {"rank": sorted(ranks), "targets": _targets(tensors)}


def _targets(tensors: Iterable[str]) -> list[str]:
    """Return the last parts of the names of the modules that an adapter changes."""
    return sorted(
        {name.split(".lora_")[0].split(".")[-1] for name in tensors if ".lora_" in name}
    )


class AdapterMean(Aggregator):
    """Averages adapters; ``sentence`` and ``measured`` report the last result."""

    def __init__(self, average: AdapterAverage) -> None:
        self._average = average

    def add(
        self, update: Tensors, weight: float, statistics: Statistics | None = None
    ) -> None:
        """Add one adapter; raises ``UpdateError`` as ``AdapterAverage.add``."""
        self._average.add(
            AdapterUpdate(update, weight, self._average.plan.settings, statistics or {})
        )

    def result(self) -> TensorDict:
        """Return the average, and store its report."""
        tensors, report = self._average.result()
        self.sentence = str(report)
        errors = {
            ERROR: report.mean_error,
            ERROR_OF_FACTORS: report.mean_error_of_factors,
            LOST: report.mean_lost or None,
        }
        self.measured = {
            name: error for name, error in errors.items() if error is not None
        }
        return tensors
