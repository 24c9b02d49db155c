"""``Experiment``: the settings of one comparison, validated and serialisable; files of
experiments.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedrot.errors import FedrotError
from fedrot.simulations.data import BUNDLED, DIGITS
from fedrot.simulations.strategy import Strategy, default_strategies, named

TaskName = Literal["classification", "mlm", "clm", "ner", "image"]
Architecture = Literal["", "bert", "distilbert", "gpt2", "llama", "vit"]


@dataclass(frozen=True)
class TaskTraits:
    """Properties of a task.

    Attributes:
        architectures: architectures of models from scratch, the default first.
        auto_model: what the class of transformers that builds models is for:
            ``AutoModelFor...``.
        data: the default data set; empty if the user has to name one.
        peft: PEFT's task type, which decides what is trained beside an adapter; empty:
            no adapters.
        classifies: whether models have one output per row, and a task head that can be
            fitted.
    """

    architectures: tuple[Architecture, ...]
    auto_model: str
    data: str = BUNDLED
    peft: str = ""
    classifies: bool = False


TASKS: Mapping[str, TaskTraits] = {
    "classification": TaskTraits(
        ("bert", "distilbert", "gpt2", "llama"),
        "SequenceClassification",
        peft="SEQ_CLS",
        classifies=True,
    ),
    "mlm": TaskTraits(("bert", "distilbert"), "MaskedLM"),
    "clm": TaskTraits(("gpt2", "llama"), "CausalLM", peft="CAUSAL_LM"),
    "ner": TaskTraits(
        ("bert", "distilbert"), "TokenClassification", data="", peft="TOKEN_CLS"
    ),
    "image": TaskTraits(("vit",), "ImageClassification", data=DIGITS, classifies=True),
}

#: The largest number of seeds. A larger number is probably a seed.
MOST_SEEDS = 10_000
#: Settings that have an effect only on a small model from scratch.
OF_SMALL_MODEL = ("architecture", "layers", "width", "heads", "dropout")


class Experiment(BaseModel):
    """One comparison of strategies over the same data, partitions, seeds and batches.

    The fields are the options and ``--set`` names of ``fedrot simulate``, the keys of
    an ``[[experiment]]`` table and, with dashes, the keys of the Flower app's run
    configuration.
    """

    # Help needs the fields alone: what validates them is built at first use.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str = Field(
        "", description="In tables and rows; default: data, partition and task."
    )
    data: str = Field(
        "", description="File, folder, bundled or hub name; several: domains."
    )
    unseen_data: str = Field("", description="Data of further domains, for tests only.")
    task: TaskName = Field(
        "classification", description="classification, mlm, clm, ner or image."
    )
    data_dir: Path | None = Field(
        None, description="Folder in which names of data are looked up."
    )
    text_column: str | None = Field(
        None, description="Of the text (a,b: pairs), words or image."
    )
    label_column: str | None = Field(None, description="Of the label or the tags.")
    label_kind: Literal["", "single", "multi", "regression"] = Field(
        "", description="single, multi or regression; default: by the column's type."
    )
    train_limit: int | None = Field(None, gt=0, description="Most training rows.")
    test_limit: int | None = Field(None, gt=0, description="Most test rows.")

    model: str | None = Field(
        None, description="Folder, hub name, minilm; default: a small new one."
    )
    architecture: Architecture = Field(
        "", description="Of the small model; default: by task."
    )
    layers: int = Field(2, gt=0, description="Layers of the small model.")
    width: int = Field(128, gt=0, description="Hidden size of the small model.")
    heads: int = Field(4, gt=0, description="Attention heads of the small model.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of the small model.")
    max_length: int = Field(64, gt=3, description="Most tokens of a text.")
    lora: dict[str, Any] = Field(
        {},
        description=(
            "Of adapters: arguments of PEFT's LoraConfig. A list as r: ranks in turn."
        ),
    )

    clients: int = Field(4, gt=0, description="Number of clients.")
    partition: str = Field(
        "iid",
        description=(
            "iid, dirichlet:ALPHA, pathological:K, keyclass:SHARE, column:NAME."
        ),
    )
    holdout: float = Field(
        0.1, ge=0, lt=1, description="Share of a client's rows that it holds out."
    )
    fraction_train: float = Field(
        1.0, gt=0, le=1, description="Share of clients in a round."
    )
    start: Literal["same", "different", "scrambled"] = Field(
        "same", description="Clients' first models; scrambled: in other coordinates."
    )

    strategies: tuple[Strategy, ...] = Field(
        (), description="Names; others are [[strategy]] tables."
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 1, 2),
        max_length=MOST_SEEDS,
        description="Their number (3: 0, 1 and 2), or a list 1,4,9.",
    )
    rounds: int = Field(3, gt=0, description="Rounds of training.")
    local_epochs: float = Field(1, gt=0, description="Epochs of a client in a round.")
    first_epochs: float | None = Field(
        None, gt=0, description="In the first round, if others."
    )
    batch_size: int = Field(32, gt=0, description="Rows per step.")
    lr: float = Field(1e-3, gt=0, description="AdamW's learning rate.")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's weight decay.")

    @field_validator("seeds", mode="before")
    @classmethod
    def _counted(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return value
        numbers = [part.strip() for part in str(value).split(",")]
        if not all(map(str.isdecimal, numbers)) or numbers == ["0"]:
            raise ValueError(
                f"'{value}' is no choice of seeds; give their number, or a list 1,4,9"
            )
        if len(numbers) > 1:
            return numbers
        return range(int(numbers[0]))

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, values: Any) -> Any:
        """Fill in what depends on other fields: data, architecture, strategies and the
        name.
        """
        given = {
            **{name: field.default for name, field in cls.model_fields.items()},
            **values,
        }
        if given["task"] not in [*TASKS]:  # also a list is compared
            return values
        traits = TASKS[given["task"]]
        own = "" if given["model"] else traits.architectures[0]
        given["data"] = given["data"] or traits.data
        given["architecture"] = given["architecture"] or own
        unusual = {"task": "classification", "architecture": own}
        what = [str(given["data"]), str(given["partition"])]
        what += [
            str(given[key]) for key, usual in unusual.items() if given[key] != usual
        ]
        given["name"] = given["name"] or ", ".join(what)
        chosen = given["strategies"] or default_strategies(given, traits.classifies)
        if isinstance(chosen, list | tuple):
            given["strategies"] = [
                named(s, given["lora"]) if isinstance(s, str) else s for s in chosen
            ]
        return given

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
        traits, names = (
            TASKS[self.task],
            [strategy.name for strategy in self.strategies],
        )
        shares = [
            self.fraction_train,
            *(s.fraction_train or 1 for s in self.strategies),
        ]
        if not self.data:
            yield (
                f"there is no bundled data set for task '{self.task}'; name a file, a "
                "data set in data_dir, or one of the hub"
            )
        if self.label_kind and not traits.classifies:
            yield (
                "label_kind is for tasks 'classification' and 'image', not for "
                f"'{self.task}'"
            )
        if self.unseen_data and self.task != "classification":
            yield f"unseen_data is for task 'classification', not for '{self.task}'"
        usual = type(self).model_fields
        idle = [
            name
            for name in OF_SMALL_MODEL
            if getattr(self, name) != usual[name].default
        ]
        if self.model is not None and idle:
            yield (
                f"{idle[0]} is for small models from scratch, and '{self.model}' has "
                "its own"
            )
        if self.model is None and self.architecture not in traits.architectures:
            able = " or ".join(traits.architectures)
            yield (
                f"architecture '{self.architecture}' is not for '{self.task}'; choose "
                f"{able}"
            )
        if self.start == "different" and min(shares) < 1:
            yield (
                "start 'different' needs fraction_train 1: a client that joins in a "
                "later round starts from the broadcast model"
            )
        if self.start == "different" and self.model is not None:
            yield (
                f"start 'different' draws new models, but all have '{self.model}'; use "
                "start 'same'"
            )
        if self.lora:
            needs = {
                "a pretrained model; give model": self.model is None,
                f"task {', '.join(n for n in TASKS if TASKS[n].peft)}": not traits.peft,
                "one data set": "," in self.data,
                "start 'same'": self.start != "same",
                "r, a rank or a list of ranks": not all(
                    isinstance(r, int) and r > 0 for r in self.ranks
                ),
            }
            yield from (
                f"lora needs {what}" for what, lacking in needs.items() if lacking
            )
        if len(set(self.seeds)) < max(len(self.seeds), 1):
            yield "seeds needs at least one value, each once"
        if len(set(names)) < len(names):
            yield f"two strategies have the same name among {', '.join(names)}"

    @classmethod
    def from_flat(
        cls, settings: Mapping[str, Any], tables: Mapping[str, Any] = {}
    ) -> Experiment:
        """Build from the values of a command line, a file's table or Flower's run
        configuration.

        ``strategies`` may be a text with commas, and name some of the ``[[strategy]]``
        tables, which are given by name. ``lora`` may be the text of a TOML table. An
        empty string, and 0 for limits and ``first_epochs``, mean the default. Names may
        have dashes. Raises ``ValueError`` if a setting is unknown or wrong.
        """
        flat = {
            k.replace("-", "_"): v
            for k, v in settings.items()
            if v is not None and v != ""
        }
        for name in ("train_limit", "test_limit", "first_epochs"):
            flat[name] = flat.get(name) or None
        if isinstance(flat.get("strategies"), str):
            flat["strategies"] = [
                part.strip() for part in flat["strategies"].split(",") if part.strip()
            ]
        if isinstance(chosen := flat.get("strategies"), list):
            flat["strategies"] = [
                tables.get(s, s) if isinstance(s, str) else s for s in chosen
            ]
        if isinstance(flat.get("lora"), str):
            try:
                flat["lora"] = tomllib.loads(f"lora = {flat['lora']}")["lora"]
            except ValueError as error:
                example = '{r = 8, target_modules = ["query", "value"]}'
                raise ValueError(
                    f"lora is '{flat['lora']}'; write {example}"
                ) from error
        return cls.model_validate(flat)

    @property
    def ranks(self) -> tuple[Any, ...]:
        """The ranks of the clients' adapters, in turn, or None; the global adapter has
        the largest.
        """
        rank = self.lora.get("r")
        return tuple(rank) if isinstance(rank, list) and rank else (rank,)

    def epochs(self, server_round: int) -> float:
        """Return the epochs of a client in a round; rounds count from 1."""
        return (
            self.first_epochs or self.local_epochs
            if server_round == 1
            else self.local_epochs
        )

    def to_json(self) -> str:
        """Return the experiment as one line of JSON, the same for equal experiments."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    @property
    def training(self) -> str:
        """The fields that decide how clients train and are tested, as JSON; others are
        compared.
        """
        # Updates are moved into random coordinates after training.
        start = "same" if self.start == "scrambled" else self.start
        others = {"name": "", "strategies": (), "seeds": (), "start": start}
        return self.model_copy(update=others).to_json()


def read_experiments(path: Path, given: Mapping[str, Any]) -> list[Experiment]:
    """Return the experiments of a file, with the given values in place of its own.

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
    base, found, own = (
        described.pop(n, {}) for n in ("base", "experiment", "strategy")
    )
    tables = [base, *found, *own]
    if described or not found or not all(isinstance(table, dict) for table in tables):
        other = f", but no '{min(described)}'" if described else ""
        raise FedrotError(
            f"'{path}' needs a table [[experiment]] for each experiment; it may have "
            f"[base], with the values of all, and [[strategy]]{other}."
        )
    known = {str(table.get("name", "")): table for table in own}
    experiments = []
    for table in found:
        fields = {**base, **table, **given}
        fields.setdefault("strategies", ["fedavg", *known] if known else [])
        experiments.append(Experiment.from_flat(fields, known))
    names = [experiment.name for experiment in experiments]
    if len(set(names)) < len(names) or len(known) < len(own):
        said = ", ".join([*names, *known])
        raise FedrotError(
            f"'{path}': each [[experiment]] and [[strategy]] needs its own name: "
            f"{said}."
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
