"""The strategy ``FedRotLoRA``: FedAvg for LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from logging import INFO
from typing import Any

from flwr.common import log
from torch import Tensor

from fedrot.collect.statistic_kinds import TRAINED, Statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.lora.adapters import LoraSettings, pairs_of
from fedrot.lora.averaging import AdapterAverage, AdapterOptions, AdapterUpdate
from fedrot.strategies.fedrot import FedRot
from fedrot.strategies.round.merge import Merge
from fedrot.strategies.round.round_report import Round
from fedrot.strategies.round.update import Schema
from fedrot.strategies.round.waiting import Store
from fedrot.strategies.wire.arrays import from_arrays
from fedrot.tensors import Shaped, Tensors, check_update

#: Metrics of a round: how far the new adapter, and the mean of the factors, are from the mean product.
ERROR, ERROR_OF_FACTORS = "fedrot-adapter-error", "fedrot-adapter-error-of-factors"

#: Arguments of ``FedRot`` about the alignment of whole models.
_OF_ALIGNMENT = frozenset(("aggregation", "anchor", "options", "align", "other_basis", "guard"))


class FedRotLoRA(FedRot):
    """FedAvg for LoRA adapters: clients send ``get_peft_model_state_dict(model)``.

    Clients stay ordinary PEFT clients of one alpha. Each round logs how far the new adapter is from the
    mean of the clients' products, and how far the mean of the factors is. With ``method="exact"`` a
    client may have a smaller rank than the adapter that it receives, which it cuts by
    ``fedrot.lora.fitted``.

    Example: ``FedRotLoRA(peft_config, AdapterOptions("exact"), fraction_train=0.5)``.

    Args:
        settings: the adapter's ``LoraConfig``, or the content of ``adapter_config.json``: alpha is not
            in the tensors.
        adapters: how adapters become one; None averages the factors.
        **kwargs: of ``FedRot`` and ``FedAvg``, but for the aggregation and alignment.

    Raises:
        FedrotError: the settings are not those of a LoRA adapter. In the first round: the clients send
            no adapter.
    """

    not_in_checkpoints = (*FedRot.not_in_checkpoints, "settings", "adapters", "_this_round")

    def __init__(
        self,
        settings: LoraSettings | Mapping[str, Any] | object,
        adapters: AdapterOptions | None = None,
        **kwargs: Any,
    ) -> None:
        refused = sorted(_OF_ALIGNMENT & kwargs.keys())
        if refused:
            raise FedrotError(
                f"FedRotLoRA has no argument '{refused[0]}'. How adapters are averaged is said by "
                "AdapterOptions(method=..., gauge=...)."
            )
        self.settings = LoraSettings.of(settings)
        self.adapters = adapters or AdapterOptions()
        self._this_round = Round(0)
        super().__init__(**kwargs, aggregation=self._aggregator, align=False)

    def summary(self) -> None:
        """Log how adapters are averaged, then the summary of FedAvg."""
        gauge = f", gauge '{self.adapters.gauge}'" if self.adapters.method == "exact" else ""
        log(INFO, "\t├──> Adapters: %s%s", self.adapters.method, gauge)
        super(FedRot, self).summary()

    def schema(self, broadcast: Tensors) -> Schema:
        """Return the tensors that a reply may hold: an adapter of at most the broadcast ranks."""
        return AdapterSchema(broadcast, self.adapters.method == "exact")

    def merge(self, this_round: Round, store: Store) -> Merge:
        """Return what takes a round's adapters."""
        self._this_round = this_round
        return super().merge(this_round, store)

    def _aggregator(self) -> AdapterMean:
        previous = from_arrays(self._broadcast) if len(getattr(self, "_broadcast", ())) else None
        average = AdapterAverage(self.settings, self.adapters, previous)
        return AdapterMean(average, self._this_round)


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
            raise UpdateError(
                f"The factor '{name}' has rank {own}, the broadcast one {most}. Clients of different "
                "ranks need AdapterOptions('exact'), and an initial adapter of the largest rank."
            )


class AdapterMean:
    """An ``Aggregator`` of adapters, which tells the round what it found."""

    needs: tuple[str, ...] = ()
    notes: Mapping[str, str] = {}

    def __init__(self, average: AdapterAverage, this_round: Round) -> None:
        self._average, self._round = average, this_round

    def add(self, update: Tensors, weight: float, statistics: Statistics | None = None) -> None:
        """Add one adapter; raises ``UpdateError`` as ``AdapterAverage.add``."""
        trained = {kind: of for kind, of in (statistics or {}).items() if kind == TRAINED}
        self._average.add(AdapterUpdate(update, weight, self._average.settings), trained)

    def result(self) -> dict[str, Tensor]:
        """Return the average, and note its errors in the round."""
        tensors, report = self._average.result()
        self._round.said = str(report)
        errors = {ERROR: report.mean_error, ERROR_OF_FACTORS: report.mean_error_of_factors}
        self._round.measured = {name: error for name, error in errors.items() if error is not None}
        return tensors
