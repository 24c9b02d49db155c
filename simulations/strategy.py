"""``Strategy``: one way to train and to average, and the strategies that have a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from fedrot.aggregation.registry import AggregationEntry
    from fedrot.options import AlignmentOptions
    from fedrot.simulations.settings import Experiment

#: Arguments of ``FedRot`` that a strategy of a comparison cannot have, and why.
FIXED = {
    **dict.fromkeys(
        ("fraction_evaluate", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes"),
        "all clients of the run are there, and all are asked for their results",
    ),
    **dict.fromkeys(("arrayrecord_key", "configrecord_key"), "the harness names the records"),
    **dict.fromkeys(
        ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn", "reporting"), "the harness writes the rows"
    ),
    "checkpoints": "the run folder resumes a run",
    "model_config": "it is that of the run's model",
}
#: Fields of a strategy of adapters, and of a strategy of whole models.
OF_ADAPTERS, OF_MODELS = ("adapters", "optimizer"), ("alignment", "other_basis", "aggregation", "guard")


class Strategy(BaseModel):
    """One strategy of a comparison: the arguments of ``FedRot`` by their names, and how it is trained.

    The fields are the keys of a ``[[strategy]]`` table. A table with nothing but a name is
    ``FedRot(model.config)``; in an experiment with ``lora`` it is ``FedRotLoRA(peft_config)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str = Field(min_length=1, max_length=80, description="Its name in tables and rows.")
    kind: str = Field(
        "fedrot",
        description="fedrot; head_only (nobody trains, the task head is fitted); joined (one model is "
        "trained on the rows of all clients, an upper bound); or a kind of a plug-in.",
    )
    learning_rate: float | None = Field(None, gt=0, description="Of the clients; default: lr.")
    fit_at_end: bool = Field(False, description="Fit the task head once, after the last round.")
    alignment: bool | dict[str, Any] = Field(
        True, description="false: none. A table: fields of AlignmentOptions."
    )
    other_basis: bool | dict[str, Any] = Field(
        False, description="true: OtherBasis(make_model). A table: fields of OtherBasis."
    )
    aggregation: str | dict[str, Any] = Field(
        "", description="Such as regmean, or a table with its name and arguments."
    )
    fit_head: bool | str = Field(False, description="Fit the task head in every round.")
    guard: str = Field("", description="A metric on the clients' held-out rows.")
    server: dict[str, Any] = Field({}, description="Fields of Server.")
    fraction_train: float | None = Field(None, gt=0, le=1, description="Default: the experiment's.")
    weighted_by_key: str = Field("num-examples", description="As in FedAvg.")
    adapters: dict[str, Any] = Field({}, description="Of LoRA adapters: fields of AdapterOptions.")
    optimizer: Literal["", "adam", "yogi"] = Field("", description="Of LoRA adapters: at the server.")
    eta: float = Field(0.01, gt=0, description="The optimizer's learning rate.")
    batches: int = Field(
        0, ge=0, description="Most batches for an aggregation's statistics; 0: its own."
    )
    clients: tuple[int, ...] = Field((), description="The clients that take part; default: all.")
    options: dict[str, Any] = Field({}, description="Of a plug-in's kind.")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key in FIXED:
                raise ValueError(f"'{key}' is no key of a strategy here: {FIXED[key]}")
            if key not in cls.model_fields:
                raise ValueError(
                    f"'{key}' is no key of a strategy; keys are {', '.join(cls.model_fields)}"
                )
        return given

    @property
    def chooses(self) -> bool:
        """Whether held-out rows of the clients choose between models."""
        scored = self.entry is not None and "score" in self.entry.inputs
        return bool(self.guard or self.fits or scored)

    @property
    def fits(self) -> bool:
        """Whether a task head is fitted."""
        return self.kind == "head_only" or self.fit_at_end or bool(self.fit_head)

    @property
    def entry(self) -> AggregationEntry | None:
        """The registered aggregation; None for the mean."""
        from fedrot.aggregation import aggregations

        name = self.aggregation_arguments.get("name")
        return next((entry for entry in aggregations() if entry.name == name), None)

    @property
    def aggregation_arguments(self) -> dict[str, Any]:
        """``aggregation`` as a table; empty for the mean."""
        named = {"name": self.aggregation} if isinstance(self.aggregation, str) else self.aggregation
        return dict(named) if self.aggregation else {}

    @property
    def options_of_alignment(self) -> AlignmentOptions | None:
        """``alignment`` as options; None without alignment. Raises ``ValueError``."""
        from fedrot.options import AlignmentOptions

        given = self.alignment if isinstance(self.alignment, dict) else {}
        return AlignmentOptions(**given) if self.alignment is not False else None

    @property
    def aligns_at_clients(self) -> bool:
        """Whether clients align before they compute statistics, which cannot be rotated later."""
        entry = self.entry
        return self.alignment is not False and entry is not None and not entry.follows_rotations

    def check(self, experiment: Experiment) -> None:
        """Raise ``ValueError`` if a field is wrong, or the strategy does not go with an experiment."""
        from fedrot.simulations.plugins import load_plugins
        from fedrot.strategies import Guard, OtherBasis, Server

        load_plugins()
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind '{self.kind}'; one of {', '.join(KINDS)}")
        others = OF_MODELS if experiment.lora else OF_ADAPTERS
        idle = [n for n in others if getattr(self, n) != type(self).model_fields[n].default]
        if idle:
            what = "whole models, and the experiment has" if experiment.lora else "adapters; give"
            raise ValueError(f"'{idle[0]}' is for {what} lora")
        if max(self.clients, default=0) >= experiment.clients or min(self.clients, default=0) < 0:
            raise ValueError(f"clients are {self.clients}; there are {experiment.clients}, from 0")
        if self.chooses and not experiment.holdout:
            raise ValueError("it needs held-out rows of the clients; holdout must not be 0")
        _checked("alignment", lambda: self.options_of_alignment)
        _checked("server", lambda: Server(**self.server))
        if self.guard:
            Guard(self.guard)
        if isinstance(self.other_basis, dict):
            others = {name: value for name, value in self.other_basis.items() if name != "model"}
            _checked("other_basis", lambda: OtherBasis(**{**others, "model": dict}))
        self._check_aggregation()
        KINDS[self.kind](self, experiment)

    def _check_aggregation(self) -> None:
        from fedrot.aggregation import aggregations

        given = self.aggregation_arguments
        name = given.pop("name", None)
        if not self.aggregation:
            return
        entry = self.entry
        if entry is None or not {*entry.inputs} <= {"symmetry", "score"}:
            known = (e.name for e in aggregations({"symmetry", "score"}))
            raise ValueError(f"unknown aggregation '{name}'; one of {', '.join(known)}")
        if unknown := given.keys() - {*inspect.signature(entry.build).parameters}:
            raise ValueError(f"aggregation '{name}' has no argument '{min(unknown)}'")
        if given:
            _checked(f"aggregation '{name}'", lambda: entry.build(**given))
        if self.batches and not entry.needs:
            raise ValueError(f"aggregation '{name}' needs no statistics; leave out batches")

    def code(self, experiment: Experiment) -> str:
        """Return the line of a server app that runs the strategy, to copy."""
        model = "peft_config" if experiment.lora else "model.config"
        if self.kind == "head_only":
            return f"fit_task_head(grid, arrays, {model})"
        if self.kind != "fedrot":
            return ""
        share = self.fraction_train or experiment.fraction_train
        shared = [f"fraction_train={share:g}"] if share < 1 else []
        own = self._written_for_adapters() if experiment.lora else self._written(experiment.start)
        if own == ([] if experiment.lora else ["alignment=None"]):
            line = f"FedAvg({', '.join(shared)})"
        else:
            of_adapters = {"adam": "FedAdamLoRA", "yogi": "FedYogiLoRA"}.get(
                self.optimizer, "FedRotLoRA"
            )
            name = of_adapters if experiment.lora else "FedRot"
            line = f"{name}({', '.join([model, *own, *shared])})"
        end = f"; then fit_task_head(grid, result.arrays, {model})" if self.fit_at_end else ""
        return line + end

    def _written(self, start: str) -> list[str]:
        """Return the arguments of ``FedRot`` that are not its defaults."""
        said = [f"fit_head={self.fit_head!r}"] if self.fit_head else []
        if self.other_basis is not False and start in ("different", "scrambled"):
            given = self.other_basis if isinstance(self.other_basis, dict) else {}
            said.append(f"other_basis={_call('OtherBasis', given, 'make_model')}")
        entry, given = self.entry, self.aggregation_arguments
        name = given.pop("name", None)
        if entry is not None:
            built = _call(entry.build.__name__, given)
            said.append(f"aggregation=lambda: {built}" if given else f'aggregation="{name}"')
        said += [f'guard="{self.guard}"'] if self.guard else []
        said += [f"server={_call('Server', self.server)}"] if self.server else []
        if isinstance(self.alignment, dict):
            said.append(f"alignment={_call('AlignmentOptions', self.alignment)}")
        return [*said, "alignment=None"] if self.alignment is False else said

    def _written_for_adapters(self) -> list[str]:
        said = [_call("AdapterOptions", self.adapters)] if self.adapters else []
        said += [f"eta={self.eta:g}"] if self.optimizer else []
        return [*said, f"fit_head={self.fit_head!r}"] if self.fit_head else said


def _call(name: str, arguments: Mapping[str, Any], *first: str) -> str:
    """Return a call as Python text."""
    return (
        f"{name}({', '.join([*first, *(f'{k}={v!r}' for k, v in arguments.items() if k != 'model')])})"
    )


def _checked(what: str, build: Callable[[], object]) -> None:
    try:
        build()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}".replace("__init__() ", "")) from error


def _any_experiment(strategy: Strategy, experiment: Experiment) -> None:
    """Refuse nothing."""


def _of_adapters(strategy: Strategy, experiment: Experiment) -> None:
    """Refuse options of adapters that do not fit their ranks or kind."""
    from fedrot.lora import AdapterOptions

    adapter = experiment.adapter
    if adapter is None:
        return
    _checked("adapters", lambda: AdapterOptions(**strategy.adapters))
    options = AdapterOptions(**strategy.adapters)
    if len(set(adapter.ranks)) > 1 and not options.kind.any_rank:
        raise ValueError(
            f"factors of different ranks have no mean (method '{options.method}'); write "
            "adapters = {method = 'exact'}, the named strategy exact"
        )
    if adapter.dora and not options.kind.of_dora:
        raise ValueError(f"method '{options.method}' is not for adapters with dora=1")


#: What refuses a strategy that does not go with an experiment, by kind. Plug-ins add theirs; how a kind
#: runs is in ``federation.cells.RUNS``.
KINDS: dict[str, Callable[[Strategy, Experiment], None]] = {
    "fedrot": _of_adapters,
    "head_only": _any_experiment,
    "joined": _any_experiment,
}

#: The strategies that ``--strategies`` knows, with a sentence about each.
NAMED: Mapping[str, tuple[dict[str, Any], str]] = {
    "fedavg": ({"alignment": False}, "The clients' models are averaged as they are."),
    "fedavg_head": (
        {"alignment": False, "fit_at_end": True},
        "As fedavg; after the last round the task head is fitted to sums over the rows of all clients.",
    ),
    "head_only": (
        {"kind": "head_only"},
        "Nobody trains: the task head of the first model is fitted to sums over the rows of all clients.",
    ),
    "fit_head": (
        {"fit_head": True, "other_basis": True},
        "fedrot with a task head that is fitted before the first round and after each; no round is worse "
        "on rows that the clients hold out.",
    ),
    "aligned": (
        {"other_basis": True},
        "fedrot: each model is brought into common coordinates before it is averaged.",
    ),
    "guarded": (
        {"other_basis": True, "guard": "loss"},
        "As aligned; a round keeps the plain average unless the aligned one has the lower loss.",
    ),
    "regmean": (
        {"other_basis": True, "aggregation": "regmean"},
        "As aligned; linear layers by regression on the clients' inputs (RegMean).",
    ),
    "fisher": (
        {"alignment": False, "aggregation": "fisher"},
        "The average is weighted by the clients' Fisher information.",
    ),
    "exact": (
        {"adapters": {"method": "exact"}},
        "The products of the adapters' factors are averaged, not the factors.",
    ),
    "joined": ({"kind": "joined"}, "One model, trained on the rows of all clients: an upper bound."),
}


def named(name: str, experiment_has_lora: bool = False) -> Strategy:
    """Return a named strategy; raises ``ValueError``."""
    if name not in NAMED:
        near = get_close_matches(name, NAMED, 1)
        advice = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(
            f"unknown strategy '{name}'{advice} Named ones are {', '.join(NAMED)}; write any other as a "
            "table [[strategy]] of a TOML file"
        )
    fields, _ = NAMED[name]
    if experiment_has_lora:
        fields = {key: value for key, value in fields.items() if key not in ("alignment", "other_basis")}
    return Strategy(name=name, **fields)


def default_strategies(experiment: Mapping[str, Any], classifies: bool) -> tuple[str, ...]:
    """Return the names of the strategies that answer the question "which average helps?".

    Args:
        experiment: fields ``lora``, ``start``, ``holdout``, ``data`` and ``unseen_data``.
        classifies: whether the task has a head that can be fitted.
    """
    domains = "," in experiment["data"] or bool(experiment["unseen_data"])
    fits = classifies and bool(experiment["holdout"]) and not domains
    if experiment["lora"]:
        return ("fedavg", "exact", *(("head_only", "fit_head") if fits else ()))
    other = experiment["start"] in ("different", "scrambled")
    heads = ("fedavg_head", "head_only", "fit_head") if fits else ()
    return ("fedavg", *heads, *(("aligned",) if other or not fits else ()))
