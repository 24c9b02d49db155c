"""The setting ``lora``: ranks, targets and scale of the clients' adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from fedrot.lora import AdapterOptions
from fedrot.lora.adapter_options import METHODS
from fedrot.simulations.arm import OF_ADAPTERS, Arm, pairs

if TYPE_CHECKING:
    from fedrot.simulations.config import SimulationConfig

#: PEFT's name for all linear layers except the task head.
ALL_LINEAR = "all-linear"
#: PEFT's task types; they decide which layers are trained besides the adapter, such as the task head.
PEFT_TASKS = {"classification": "SEQ_CLS", "ner": "TOKEN_CLS", "clm": "CAUSAL_LM"}


class Adapter(BaseModel):
    """The LoRA adapter of a configuration, written as ``r=8,targets=query+value``.

    Attributes:
        ranks: client ``i`` has rank ``ranks[i % len(ranks)]``; the global adapter has the largest.
        targets: PEFT's ``target_modules``, or ``all-linear``.
        alpha: ``lora_alpha`` of all clients; each scales its product by ``alpha`` over its own rank.
        dropout: dropout rate of the adapter's inputs.
        rslora: scale by ``alpha / sqrt(rank)`` in place of ``alpha / rank``.
        dora: train DoRA's magnitudes, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False

    @classmethod
    def parse(cls, text: str) -> Adapter:
        """Read ``KEY=VALUE`` pairs, separated by commas; raises ``ValueError``.

        ``r`` is one rank or several ranks, ``r=2+4+16``; ``targets`` are separated by ``+``, too.
        """
        found = pairs(text, ",")
        unknown = [key for key in found if key not in _READ]
        if unknown:
            raise ValueError(f"lora has no key '{unknown[0]}'; its keys are {', '.join(_READ)}")
        missing = [key for key in ("r", "targets") if not found.get(key)]
        if missing:
            raise ValueError(f"lora needs {missing[0]}; write lora as r=8,targets=query+value")
        given = {"ranks" if key == "r" else key: _READ[key](value) for key, value in found.items()}
        adapter = cls.model_validate(given)
        fits = 0 < adapter.alpha < float("inf") and 0 <= adapter.dropout < 1
        if min(adapter.ranks) < 1 or not fits:
            raise ValueError("lora: ranks are at least 1, alpha is above 0, dropout from 0 to below 1")
        if not all(adapter.targets):
            raise ValueError("lora: a target has no name; write targets=query+value")
        return adapter

    @property
    def rank(self) -> int:
        """The rank of the global adapter."""
        return max(self.ranks)

    def rank_of(self, client: int) -> int:
        """Return the rank of a client's adapter."""
        return self.ranks[client % len(self.ranks)]


def _ranks(value: str) -> tuple[int, ...]:
    numbers = value.split("+")
    if not all(map(str.isdecimal, numbers)):
        raise ValueError(f"lora: r is '{value}'; write r=8, or r=2+4+16 for ranks in turn")
    return tuple(map(int, numbers))


def _switch(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError(f"lora: '{value}' is neither 0 nor 1")
    return value == "1"


_READ: Mapping[str, Callable[[str], Any]] = {
    "r": _ranks,
    "targets": lambda value: tuple(value.split("+")),
    "alpha": float,
    "dropout": float,
    "rslora": _switch,
    "dora": _switch,
}


def default_arms(lora: str) -> tuple[str, ...]:
    """Return the arms that compare adapters by default: averages of factors and of products."""
    several = len(set(Adapter.parse(lora).ranks)) > 1
    return ("lora-exact", "lora-exact(gauge=previous)") if several else ("plain", "lora-exact")


def check_adapter(config: SimulationConfig) -> None:
    """Raise ``ValueError`` if ``lora`` and the other settings of a configuration do not go together."""
    arms = [Arm.parse(arm) for arm in config.arms]
    if not config.lora:
        of_adapters = [arm.name for arm in arms if arm.of_adapters]
        if of_adapters or config.server != "mean":
            what = f"arm '{of_adapters[0]}'" if of_adapters else f"server '{config.server}'"
            raise ValueError(f"{what} is for adapters; give lora, for example r=8,targets=query+value")
        return
    adapter = Adapter.parse(config.lora)
    needs = {
        "a pretrained model; give model": config.model is None,
        f"task {', '.join(PEFT_TASKS)}": config.task not in PEFT_TASKS,
        "one data set": "," in config.data,
        "start 'same'": config.starts != ("same",),
    }
    for what, lacking in needs.items():
        if lacking:
            raise ValueError(f"lora needs {what}")
    for arm in arms:
        known = arm.of_adapters or arm.joined or arm.name == "plain"
        if not known or arm.aggregation != "mean":
            raise ValueError(
                f"arm '{arm.name}' is not for adapters; write plain, joined, or "
                f"{OF_ADAPTERS}METHOD(OPTIONS) with a method of {', '.join(METHODS)}"
            )
        own = arm.adapters or AdapterOptions()
        if len(set(adapter.ranks)) > 1 and not arm.joined and not own.kind.any_rank:
            raise ValueError(
                f"arm '{arm.name}': factors of different ranks have no mean; methods for such ranks are "
                f"{', '.join(name for name, method in METHODS.items() if method.any_rank)}"
            )
        if adapter.dora and not own.kind.of_dora:
            raise ValueError(f"arm '{arm.name}': method '{own.method}' is not for adapters with dora=1")
        if config.server != "mean" and not arm.any_server:
            raise ValueError(f"arm '{arm.name}' does not go with server '{config.server}'; set 'mean'")
