"""``Experiment``: the settings of one comparison, validated; files of experiments."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from fedrot.errors import FedrotError
from fedrot.simulations.scenario import Scenario, Settings, data_names, names_in
from fedrot.simulations.strategy import Strategy, default_strategies, named
from fedrot.simulations.tasks.classification import Classification
from fedrot.simulations.tasks.language import (
    CausalLanguageModelling,
    MaskedLanguageModelling,
)
from fedrot.simulations.tasks.tagging import TokenClassification
from fedrot.simulations.tasks.task_registry import TASKS, named_tasks
from fedrot.simulations.tasks.vision import ImageClassification

#: An entry here makes a class a task.
TASKS |= {
    task.name: task
    for task in (
        Classification,
        MaskedLanguageModelling,
        CausalLanguageModelling,
        TokenClassification,
        ImageClassification,
    )
}

#: Number of clients, unless a column has them.
CLIENTS = 4
#: The largest number of seeds. A larger number is probably a seed.
MOST_SEEDS = 10_000
#: Settings that some tasks have, and the trait of these tasks.
_NEEDS = {"label_kind": "classifies", "lora": "peft"}
#: Settings that have an effect only on a small model from scratch.
OF_SMALL_MODEL = {"architecture", "depth", "width", "heads", "dropout"}


class Experiment(Scenario):
    """One comparison of strategies over the same data, partitions, seeds and batches.

    The fields are the options and ``--set`` names of ``fedrot simulate``, the keys of
    an ``[[experiment]]`` table and, with dashes, the keys of the Flower app's run
    configuration.
    """

    strategies: tuple[Strategy, ...] = Field(
        (), description="Names; others are [[strategy]] tables."
    )
    seeds: tuple[NonNegativeInt, ...] = Field(
        (0, 1, 2),
        max_length=MOST_SEEDS,
        description="Their number (3: 0, 1 and 2), or a list 1,4,9 or 11,.",
    )
    rounds: PositiveInt = Field(3, description="Rounds of training.")
    local_epochs: PositiveFloat = Field(1, description="Epochs of a client in a round.")
    first_epochs: float | None = Field(
        None, gt=0, description="In the first round, if others."
    )
    batch_size: PositiveInt = Field(32, description="Rows per step.")
    lr: PositiveFloat = Field(1e-3, description="AdamW's learning rate.")
    weight_decay: NonNegativeFloat = Field(0.01, description="AdamW's weight decay.")

    @field_validator("seeds", mode="before")
    @classmethod
    def _counted(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return value
        text = str(value)
        numbers = [part.strip() for part in text.removesuffix(",").split(",")]
        if not all(map(str.isdecimal, numbers)) or text == "0":
            raise ValueError(
                f"'{value}' is no choice of seeds; give their number, a list 1,4,9, or "
                "one seed with a comma: 11,"
            )
        return numbers if "," in text else range(int(text))

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_of_text(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) or value in ("last", "all"):
            return value
        try:
            return [int(part) for part in str(value).split(",")]
        except ValueError:
            raise ValueError(
                f"'{value}' is no choice of layers; give last, all, or numbers 4,5,6"
            ) from None

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, values: Any) -> Any:
        """Fill in data, architecture, strategies and name, if they are not given."""
        usual = {name: field.default for name, field in cls.model_fields.items()}
        fields = {**usual, **values}
        # A list has no hash, but can be compared.
        if fields["task"] not in [*TASKS]:
            *others, last = map(repr, TASKS)
            raise ValueError(f"task: Input should be {', '.join(others)} or {last}")
        task = TASKS[fields["task"]]
        usual["architecture"] = "" if fields["model"] else task.architectures[0]
        fields["data"] = fields["data"] or task.usual_data
        fields["architecture"] = fields["architecture"] or usual["architecture"]
        if not str(fields["partition"]).strip().startswith("column:"):
            fields["clients"] = fields["clients"] or CLIENTS
        parts = [fields["data"], fields["partition"]]
        for name in ("task", "architecture"):
            if fields[name] != usual[name]:
                parts.append(fields[name])
        fields["name"] = fields["name"] or ", ".join(map(str, parts))
        chosen = fields["strategies"] or default_strategies(fields, task.classifies)
        if isinstance(chosen, list | tuple):
            fields["strategies"] = [
                named(strategy, fields["lora"])
                if isinstance(strategy, str)
                else strategy
                for strategy in chosen
            ]
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        for problem in self._problems():
            raise ValueError(problem)
        for strategy in self.strategies:
            try:
                strategy.check(self)
            except (TypeError, ValueError) as error:
                raise ValueError(f"strategy '{strategy.name}': {error}") from error
        return self

    def _problems(self) -> Iterator[str]:
        """Yield what is wrong, and what to do."""
        task = TASKS[self.task]
        if not self.data:
            yield (
                f"there is no bundled data set for task '{self.task}'; name a file, a "
                "data set in data_dir, or one of the hub"
            )
        for field, trait in _NEEDS.items():
            if getattr(self, field) and not getattr(task, trait):
                able = ", ".join(named_tasks(trait))
                yield f"{field} is for task {able}, not for '{self.task}'"
        idle = self.model_dump(include=OF_SMALL_MODEL, exclude_defaults=True)
        if self.model is None:
            if self.architecture not in task.architectures:
                yield (
                    f"architecture '{self.architecture}' is not for '{self.task}'; "
                    f"choose {' or '.join(task.architectures)}"
                )
        elif idle:
            yield (
                f"{min(idle)} is for small models from scratch, and '{self.model}' has "
                "its own"
            )
        if self.layers != "last" and not (self.model and task.reads_pooling):
            yield (
                "layers is for the classification of texts by a pretrained model; "
                "depth is the number of layers of a small one"
            )
        if self.start == "different":
            shares = [strategy.fraction_train or 1 for strategy in self.strategies]
            if min(self.fraction_train, *shares) < 1:
                yield (
                    "start 'different' needs fraction_train 1: a client that joins in "
                    "a later round starts from the broadcast model"
                )
            if self.model is not None:
                yield (
                    f"start 'different' draws new models, but all have '{self.model}'; "
                    "use start 'same'"
                )
        if self.lora:
            yield from self._lacking_for_lora()
        if len(set(self.seeds)) < max(len(self.seeds), 1):
            yield "seeds needs at least one value, each once"
        names = [strategy.name for strategy in self.strategies]
        if len(set(names)) < len(names):
            yield f"two strategies have the same name among {', '.join(names)}"

    def _lacking_for_lora(self) -> Iterator[str]:
        if self.model is None:
            yield "lora needs a pretrained model; give model"
        if len(data_names(self.data, self.data_dir)) > 1:
            yield "lora needs one data set"
        if self.start != "same":
            yield "lora needs start 'same'"
        if not all(isinstance(rank, int) and rank > 0 for rank in self.ranks):
            yield "lora needs r, a rank or a list of ranks"

    @classmethod
    def from_flat(
        cls,
        settings: Settings,
        tables: Mapping[str, Any] = {},
    ) -> Experiment:
        """Build from values of a command line, a file or Flower's configuration.

        ``strategies`` may be a text with commas, and name some of the ``[[strategy]]``
        tables, which are given by name. ``lora`` may be the text of a TOML table. An
        empty string, and 0 for limits and ``first_epochs``, mean the default. Names may
        have dashes. Raises ``ValueError`` if a setting is unknown or wrong.
        """
        flat = {
            name.replace("-", "_"): value
            for name, value in settings.items()
            if value not in (None, "")
        }
        for name in ("train_limit", "test_limit", "first_epochs"):
            flat[name] = flat.get(name) or None
        strategies = flat.get("strategies")
        if isinstance(strategies, str):
            strategies = names_in(strategies, tables.__contains__)
        if isinstance(strategies, list):
            flat["strategies"] = [
                tables.get(entry, entry) if isinstance(entry, str) else entry
                for entry in strategies
            ]
        lora = flat.get("lora")
        if isinstance(lora, str):
            try:
                flat["lora"] = tomllib.loads(f"lora = {lora}")["lora"]
            except ValueError as error:
                example = '{r = 8, target_modules = ["query", "value"]}'
                raise ValueError(f"lora is '{lora}'; write {example}") from error
        return cls.model_validate(flat)

    def epochs(self, server_round: int) -> float:
        """Return the epochs of a client in a round; rounds count from 1."""
        if server_round == 1 and self.first_epochs:
            return self.first_epochs
        return self.local_epochs

    def to_json(self) -> str:
        """Return the experiment as one line of JSON, the same for equal experiments."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    @property
    def training(self) -> str:
        """The fields that decide how clients train and are tested, as JSON.

        Others are compared.
        """
        # Updates are moved into random coordinates after training.
        start = "same" if self.start == "scrambled" else self.start
        others = {"name": "", "strategies": (), "seeds": (), "start": start}
        return self.model_copy(update=others).to_json()


def read_experiments(path: Path, options: Settings) -> list[Experiment]:
    """Return the experiments of a file, with the values of options in place of its own.

    ``[base]`` has the values that all ``[[experiment]]`` tables share. ``strategies``
    may name tables ``[[strategy]]``; without this key, an experiment has ``fedavg`` and
    all such tables, if there are any.

    Args:
        path: path of a TOML file, or the name of a bundled file, such as ``demo``.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is no such bundled file, no valid TOML, or a wrong table or
            value.
    """
    try:
        described = tomllib.loads(_text(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FedrotError(f"'{path}' is no TOML: {error}") from error
    base = described.pop("base", {})
    comparisons = described.pop("experiment", {})
    strategies = described.pop("strategy", {})
    tables = [base, *comparisons, *strategies]
    if (
        described
        or not comparisons
        or not all(isinstance(table, dict) for table in tables)
    ):
        other = f", but no '{min(described)}'" if described else ""
        raise FedrotError(
            f"'{path}' needs a table [[experiment]] for each experiment; it may have "
            f"[base], with the values of all, and [[strategy]]{other}."
        )
    known = {str(table.get("name", "")): table for table in strategies}
    experiments = []
    for table in comparisons:
        fields = {**base, **table, **options}
        fields.setdefault("strategies", ["fedavg", *known] if known else [])
        experiments.append(Experiment.from_flat(fields, known))
    names = [experiment.name for experiment in experiments]
    if len(set(names)) < len(names) or len(known) < len(strategies):
        raise FedrotError(
            f"'{path}': each [[experiment]] and [[strategy]] needs its own name: "
            f"{', '.join([*names, *known])}."
        )
    return experiments


def _text(path: Path) -> str:
    if path.is_file() or path.suffix or path.parent.name:
        return path.read_text("utf-8")
    folder = resources.files("fedrot.simulations") / "experiments"
    bundled = {Path(file.name).stem: file for file in folder.iterdir()}
    if str(path) not in bundled:
        raise FedrotError(
            f"There is no bundled file '{path}'. Give the path of a TOML file, or one "
            f"of {', '.join(sorted(bundled))}."
        )
    return bundled[str(path)].read_text("utf-8")
