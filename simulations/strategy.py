"""``Strategy``: one way to train and to average; strategies that have a name."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from fedrot.simulations.scenario import Settings, data_names

if TYPE_CHECKING:
    from fedrot.aggregation.registry import AggregationEntry
    from fedrot.simulations.scenario import Scenario


#: Arguments of a class, or fields of a table, by name.
Fields = dict[str, Any]

#: Fields that do not go with adapters.
_WITHOUT_ADAPTERS = {"alignment", "other_basis", "aggregation", "guard"}


class Strategy(BaseModel):
    """One strategy of a comparison.

    It has the arguments of ``FedRot`` by their names, and how clients are trained.
    The fields are the keys of a ``[[strategy]]`` table. A table with nothing but a name
    is ``FedRot(model.config)``; in an experiment with ``lora`` it is
    ``FedRotLoRA(peft_config)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str = Field(
        min_length=1, max_length=80, description="Its name in tables and rows."
    )
    kind: str = Field(
        "fedrot",
        description="fedrot, head_only (nobody trains), alone, local_finetuning, or a "
        "plug-in's.",
    )
    learning_rate: float | None = Field(
        None, gt=0, description="Of the clients; default: lr."
    )
    fit_at_end: bool = Field(
        False, description="Fit the task head once, after the last round."
    )
    alignment: bool | Fields = Field(True, description="Or fields of AlignmentOptions.")
    other_basis: bool | Fields = Field(
        False, description="true, or fields of OtherBasis."
    )
    aggregation: str | Fields = Field("", description="A name, or name and arguments.")
    fit_head: bool | str = Field(False, description="Fit the task head in every round.")
    guard: str = Field("", description="A metric on the clients' held-out rows.")
    server: Fields = Field({}, description="Fields of Server.")
    fraction_train: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Default: the experiment's.",
    )
    weighted_by_key: str = Field("num-examples", description="As in FedAvg.")
    adapters: Fields = Field(
        {}, description="Of LoRA adapters: fields of AdapterOptions."
    )
    batches: int = Field(0, ge=0, description="Most batches for statistics; 0: all.")
    clients: tuple[int, ...] = Field(
        (), description="The clients that take part; default: all."
    )
    options: Fields = Field({}, description="Of a plug-in's kind.")

    @property
    def fits(self) -> bool:
        """Whether a task head is fitted."""
        return self.kind == "head_only" or self.fit_at_end or bool(self.fit_head)

    @property
    def chooses(self) -> bool:
        """Whether held-out rows of the clients choose between models."""
        return bool(self.guard or self.fits or self.kind == "local_finetuning")

    @property
    def aggregation_arguments(self) -> Fields:
        """``aggregation`` as a table, with a ``name``."""
        aggregation = self.aggregation or "mean"
        if isinstance(aggregation, str):
            return {"name": aggregation}
        return dict(aggregation)

    @property
    def entry(self) -> AggregationEntry | None:
        """The registered aggregation, None if there is none of this name."""
        return _aggregations().get(self.aggregation_arguments.get("name"))

    def check(self, experiment: Scenario) -> None:
        """Raise ``ValueError`` if the strategy does not go with an experiment.

        Arguments of ``FedRot`` are checked by ``FedRot``, which is built before
        anything is run.
        """
        from fedrot.simulations.environment import load_plugins

        load_plugins()
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind '{self.kind}'; one of {', '.join(KINDS)}")
        if self.entry is None:
            raise ValueError(
                f"unknown aggregation {self.aggregation!r}; its name is one of "
                f"{', '.join(_aggregations())}"
            )
        if self.batches and not self.entry.needs:
            raise ValueError(
                f"aggregation '{self.entry.name}' needs no statistics; leave out "
                "batches"
            )
        idle = {"adapters"}
        purpose = "adapters; give lora"
        if experiment.lora:
            idle = _WITHOUT_ADAPTERS
            purpose = "an experiment without lora"
        for name in self.model_dump(include=idle, exclude_defaults=True):
            raise ValueError(f"'{name}' is for {purpose}")
        # Without a number they are the values of a column, which is read later.
        if experiment.clients and not {*self.clients} <= {*range(experiment.clients)}:
            raise ValueError(
                f"clients are {self.clients}; there are {experiment.clients}, from 0"
            )
        if self.chooses and not experiment.holdout:
            raise ValueError(
                "it needs held-out rows of the clients; holdout must not be 0"
            )
        KINDS[self.kind](self, experiment)

    def code(self, experiment: Scenario) -> str:
        """Return the line of a server app that runs the strategy, to copy.

        It is empty if there is none.
        """
        model = "peft_config" if experiment.lora else "model.config"
        if self.kind == "head_only":
            return f"fit_task_head(grid, arrays, {model})"
        if self.kind != "fedrot":
            return ""
        arguments = self._arguments(experiment)
        share = self.fraction_train or experiment.fraction_train
        shared = [f"fraction_train={share:g}"] if share < 1 else []
        unaligned = self.alignment is False
        function = "FedRot"
        first = [model]
        # Adapters are not aligned, and so they have no such argument.
        if experiment.lora:
            function = "FedRotLoRA"
        elif unaligned:
            first.append("alignment=None")
        if not arguments and (unaligned or experiment.lora):
            function = "FedAvg"
            first = []
        line = _call(function, {}, *first, *arguments, *shared)
        if self.fit_at_end:
            line += f"  # then fit_task_head(grid, result.arrays, {model})"
        return line

    def _arguments(self, experiment: Scenario) -> list[str]:
        """Return the arguments of ``FedRot`` that are not its defaults."""
        arguments = []
        if self.adapters:
            arguments.append(_call("AdapterOptions", self.adapters))
        if isinstance(self.alignment, Mapping):
            arguments.append(f"alignment={_call('AlignmentOptions', self.alignment)}")
        if self.other_basis and experiment.start != "same":
            basis = _call("OtherBasis", self.other_basis, "make_model")
            arguments.append(f"other_basis={basis}")
        options = self.aggregation_arguments
        name = options.pop("name")
        entry = self.entry
        if entry is not None and name != "mean":
            built = f'"{name}"'
            if options:
                built = f"lambda: {_call(entry.build.__name__, options)}"
            arguments.append(f"aggregation={built}")
        for field in ("fit_head", "guard"):
            if value := getattr(self, field):
                arguments.append(f"{field}={value!r}")
        if self.server:
            arguments.append(f"server={_call('Server', self.server)}")
        return arguments


def _aggregations() -> Mapping[Any, AggregationEntry]:
    """Return the registered aggregations by name."""
    from fedrot.aggregation import aggregations

    return {entry.name: entry for entry in aggregations({"symmetry"})}


def _call(name: str, options: object, *first: str) -> str:
    """Return a call as Python text; ``options`` are arguments if they are a mapping."""
    arguments = [*first]
    if isinstance(options, Mapping):
        for key, value in options.items():
            if key != "model":  # stands for ``make_model``
                arguments.append(f"{key}={value!r}")
    return f"{name}({', '.join(arguments)})"


def _of_adapters(strategy: Strategy, experiment: Scenario) -> None:
    """Refuse options of adapters that do not fit their ranks or kind."""
    from fedrot.lora import AdapterOptions

    if not experiment.lora:
        return
    options = AdapterOptions(**strategy.adapters)
    if len(set(experiment.ranks)) > 1 and not options.averaging.any_rank:
        raise ValueError(
            f"factors of different ranks have no mean (method '{options.method}'); "
            "take the strategy exact, adapters = {method = 'exact'}"
        )


def refuse_unread(strategy: Strategy, *read: str) -> None:
    """Refuse the fields that a kind does not read, beside ``name`` and ``kind``."""
    known = {"name", "kind", "learning_rate", "clients", *read}
    for name in strategy.model_dump(exclude=known, exclude_defaults=True):
        raise ValueError(f"kind '{strategy.kind}' does not read {name}; leave it out")


#: What refuses a strategy that does not go with an experiment, by kind. Plug-ins add
#: theirs; how a kind runs is in ``federation.cells.RUNS``.
KINDS: dict[str, Callable[[Strategy, Scenario], None]] = {
    "fedrot": _of_adapters,
    "head_only": lambda strategy, experiment: None,
    "alone": lambda strategy, experiment: refuse_unread(strategy),
    "local_finetuning": _of_adapters,
}

#: The strategies that ``--strategies`` knows: their fields, and a sentence ``says``.
NAMED: dict[str, Fields] = tomllib.loads(
    (resources.files("fedrot.simulations") / "strategies.toml").read_text("utf-8")
)


def named(name: str, of_adapters: object = False) -> Strategy:
    """Return a named strategy; raises ``ValueError``."""
    if name not in NAMED:
        raise ValueError(
            f"unknown strategy '{name}'; named ones are {', '.join(NAMED)}; write any "
            "other as a table [[strategy]] of a TOML file"
        )
    fields = {"name": name, **NAMED[name]}
    idle = ("says", "alignment", "other_basis") if of_adapters else ("says",)
    for key in idle:
        fields.pop(key, None)
    return Strategy(**fields)


def default_strategies(experiment: Settings, classifies: bool) -> list[str]:
    """Return the names of the strategies that answer the question "which average
    helps?".

    Args:
        experiment: the fields of an experiment.
        classifies: whether the task has a head that can be fitted.
    """
    lora = experiment["lora"]
    domains = data_names(str(experiment["data"]), experiment["data_dir"])
    heads = []
    if classifies and experiment["holdout"] and len(domains) < 2:
        heads = ["fedavg_head", "head_only", "fit_head"]
    names = ["fedavg", *heads, "aligned"]
    if lora and isinstance(lora, Mapping):
        names = ["fedavg", "exact", *heads[1:]]
        rank = lora.get("r")
        # Factors of different ranks have no mean.
        if isinstance(rank, list) and len(set(rank)) > 1:
            names = ["exact", *heads[1:2]]
    elif heads and experiment["start"] == "same":
        names.remove("aligned")
    return [*names, "alone"] if heads else names
