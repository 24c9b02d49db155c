"""``Experiment``: the settings of one comparison, validated and serialisable."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedrot.simulations.data import BUNDLED, DIGITS
from fedrot.simulations.strategy import Strategy, default_strategies, named

TaskName = Literal["classification", "mlm", "clm", "ner", "image"]
Architecture = Literal["", "bert", "distilbert", "gpt2", "llama", "vit"]
Start = Literal["same", "different", "scrambled", "pretrained"]


@dataclass(frozen=True)
class TaskTraits:
    """Properties of a task.

    Attributes:
        architectures: architectures of models from scratch, the default first.
        data: the default data set; empty if the user has to name one.
        classifies: whether models have one output per row, and a task head that can be fitted.
    """

    architectures: tuple[Architecture, ...]
    data: str = BUNDLED
    classifies: bool = False


TASKS: Mapping[str, TaskTraits] = {
    "classification": TaskTraits(("bert", "distilbert", "gpt2", "llama"), classifies=True),
    "mlm": TaskTraits(("bert", "distilbert")),
    "clm": TaskTraits(("gpt2", "llama")),
    "ner": TaskTraits(("bert", "distilbert"), data=""),
    "image": TaskTraits(("vit",), data=DIGITS, classifies=True),
}

#: Tasks without labels, on which small models are pretrained.
LANGUAGE_TASKS: tuple[TaskName, ...] = ("mlm", "clm")
#: PEFT's task types; they decide which layers are trained besides the adapter, such as the task head.
PEFT_TASKS = {"classification": "SEQ_CLS", "ner": "TOKEN_CLS", "clm": "CAUSAL_LM"}

#: The largest number of seeds. A larger number is probably a seed.
MOST_SEEDS = 10_000

#: Settings that have an effect only on a small model from scratch, or only with start ``pretrained``.
OF_SMALL_MODEL = ("layers", "width", "heads", "dropout")
OF_PRETRAINING = ("pretrain_data", "pretrain_epochs")


class Experiment(BaseModel):
    """One comparison of strategies over the same data, partitions, seeds and batches.

    The fields are the options and ``--set`` names of ``fedrot simulate``, the keys of an
    ``[[experiment]]`` table and, with dashes, the keys of the Flower app's run configuration.
    """

    # Help needs the fields alone: what validates them is built at first use.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str = Field("", description="Name in tables and rows; default: data, partition and task.")
    data: str = Field(
        "",
        description="Data: a file, a folder, a bundled or hub name. Several, separated by commas, are "
        "domains of one task.",
    )
    unseen_data: str = Field("", description="Data of further domains, for tests only.")
    task: TaskName = Field(
        "classification",
        description="classification, mlm, clm (language models), ner or image.",
    )
    data_dir: Path | None = Field(None, description="Folder in which names of data are looked up.")
    text_column: str | None = Field(None, description="Column of text (two: a,b), words or image.")
    label_column: str | None = Field(None, description="Column of the label or the tags.")
    label_kind: Literal["", "single", "multi", "regression"] = Field(
        "", description="Labels: single, multi or regression; default: by the column's type."
    )
    train_limit: int | None = Field(None, gt=0, description="Most training rows.")
    test_limit: int | None = Field(None, gt=0, description="Most test rows.")

    model: str | None = Field(
        None, description="Folder, hub name, minilm or smollm2; default: a small model from scratch."
    )
    architecture: Architecture = Field(
        "", description="Of the small model: bert, distilbert, gpt2, llama or vit; default: by task."
    )
    layers: int = Field(2, gt=0, description="Layers of the small model.")
    width: int = Field(128, gt=0, description="Hidden size of the small model.")
    heads: int = Field(4, gt=0, description="Attention heads of the small model.")
    max_length: int = Field(64, gt=3, description="Most tokens of a text.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of the small model.")
    lora: str = Field(
        "",
        description="LoRA adapter that clients train, such as r=8,targets=query+value. Other keys: "
        "alpha, dropout, rslora=1 and dora=1. With r=2+4+16 clients have these ranks in turn.",
    )

    clients: int = Field(4, gt=0, description="Number of clients.")
    partition: str = Field(
        "iid", description="iid, dirichlet:ALPHA, pathological:K, keyclass:SHARE or column:NAME."
    )
    holdout: float = Field(0.1, ge=0, lt=1, description="Share of a client's rows that it holds out.")
    fraction_train: float = Field(1.0, gt=0, le=1, description="Share of clients that train in a round.")
    start: Start = Field(
        "same",
        description="same, different (own initial models), scrambled (updates in random coordinates) or "
        "pretrained (on pretrain_data).",
    )
    pretrain_data: str = Field("", description="Texts on which the small model is pretrained.")
    pretrain_epochs: float = Field(1, gt=0, description="Epochs of pretraining.")

    strategies: tuple[Strategy, ...] = Field(
        (), description="Names, separated by commas; others are [[strategy]] tables of a file."
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 1, 2), description="Their number (3: 0, 1 and 2), a range 3-5, or a list 1,4,9."
    )
    rounds: int = Field(3, gt=0, description="Rounds of training.")
    local_epochs: float = Field(1, gt=0, description="Epochs of a client in a round.")
    first_epochs: float | None = Field(
        None, gt=0, description="Epochs in the first round; default: local_epochs."
    )
    batch_size: int = Field(32, gt=0, description="Rows per step.")
    lr: float = Field(1e-3, gt=0, description="AdamW's learning rate.")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's weight decay.")

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, value: str) -> str:
        from fedrot.simulations.data.partition import parse_partition

        parse_partition(value)
        return value

    @field_validator("seeds", mode="before")
    @classmethod
    def _counted(cls, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else _seeds_of(str(value))

    @field_validator("seeds")
    @classmethod
    def _some(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError("needs at least one value, each once")
        return value

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, values: Any) -> Any:
        """Fill in what depends on other fields: data, architecture, strategies and the name."""
        if not isinstance(values, dict):
            return values
        given = {**{name: field.default for name, field in cls.model_fields.items()}, **values}
        task = given["task"]
        if not isinstance(task, str) or task not in TASKS:
            return values
        traits = TASKS[task]
        own = "" if given["model"] else traits.architectures[0]
        given["data"] = given["data"] or traits.data
        given["architecture"] = given["architecture"] or own
        what = [given["data"], given["partition"]]
        what += [task] if task != cls.model_fields["task"].default else []
        what += [given["architecture"]] if given["architecture"] != own else []
        chosen = given["strategies"]
        if not chosen:
            chosen = default_strategies(given, traits.classifies)
            if (
                given["lora"] and len(set(Adapter.parse(given["lora"]).ranks)) > 1
            ):  # there is no mean of them
                chosen = ("exact", "head_only") if "head_only" in chosen else ("exact",)
        if isinstance(chosen, list | tuple):
            given["strategies"] = tuple(
                named(s, given["lora"]) if isinstance(s, str) else s for s in chosen
            )
        given["name"] = given["name"] or ", ".join(map(str, what))
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        self._check_task()
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.start == "different":
            self._check_different()
        if self.unseen_data and self.task != "classification":
            raise ValueError(f"unseen_data is for task 'classification', not for '{self.task}'")
        if self.start == "pretrained":
            self._check_pretraining()
        self._check_adapter()
        names = [strategy.name for strategy in self.strategies]
        if len(set(names)) < len(names):
            raise ValueError(f"two strategies have the same name among {', '.join(names)}")
        for strategy in self.strategies:
            try:
                strategy.check(self)
            except ValueError as error:
                raise ValueError(f"strategy '{strategy.name}': {error}") from error
        return self

    def _check_different(self) -> None:
        if min(self.fraction_train, *(s.fraction_train or 1 for s in self.strategies)) < 1:
            raise ValueError(
                "start 'different' needs fraction_train 1: a client that joins in a later round starts "
                "from the broadcast model"
            )
        if self.model is not None and not self.lora:
            raise ValueError(
                f"start 'different' initialises a model for each client, but all have '{self.model}'; "
                "use start 'same'"
            )

    def _check_task(self) -> None:
        traits = TASKS[self.task]
        if not self.data:
            raise ValueError(
                f"there is no bundled data set for task '{self.task}'; name a data set and its folder "
                "(--data NAME --data-dir DIR finds DIR/NAME.parquet and DIR/ner/NAME.parquet, with the "
                "columns tokens, ner_tags and split), or a data set of the hub"
            )
        if self.label_kind and not traits.classifies:
            raise ValueError(
                f"label_kind is for tasks 'classification' and 'image', not for '{self.task}'"
            )
        if self.model is not None and self.architecture:
            raise ValueError(
                f"architecture '{self.architecture}' is for models from scratch; model "
                f"'{self.model}' has its own, so give one of the two"
            )
        if self.model is None and self.architecture not in traits.architectures:
            raise ValueError(
                f"architecture '{self.architecture}' is not for task '{self.task}'; choose "
                f"{' or '.join(traits.architectures)}"
            )
        if self.architecture == "llama" and self.width // self.heads % 2:
            raise ValueError(
                f"heads of llama need an even width, for rotary positions; width {self.width} and "
                f"{self.heads} heads give {self.width // self.heads}"
            )

    def _check_pretraining(self) -> None:
        if not self.pretrain_data:
            raise ValueError("start 'pretrained' needs texts to pretrain on; give pretrain_data")
        if self.model is not None:
            raise ValueError(
                f"start 'pretrained' trains a small model first, but model '{self.model}' is pretrained "
                "already; choose start 'same'"
            )
        if not any(self.architecture in TASKS[task].architectures for task in LANGUAGE_TASKS):
            raise ValueError(
                f"start 'pretrained' is for models of texts, not for architecture '{self.architecture}'"
            )

    def _check_adapter(self) -> None:
        if not self.lora:
            return
        Adapter.parse(self.lora)
        needs = {
            "a pretrained model; give model": self.model is None,
            f"task {', '.join(PEFT_TASKS)}": self.task not in PEFT_TASKS,
            "one data set": "," in self.data,
            "start 'same'": self.start != "same",
        }
        for what, lacking in needs.items():
            if lacking:
                raise ValueError(f"lora needs {what}")

    @property
    def pretraining(self) -> Experiment:
        """The experiment that pretrains the language model for start ``pretrained``."""
        of_model = ("architecture", "layers", "width", "heads", "max_length", "dropout")
        kept = (*of_model, "data_dir", "batch_size", "lr", "weight_decay", "train_limit", "test_limit")
        able = (task for task in LANGUAGE_TASKS if self.architecture in TASKS[task].architectures)
        return Experiment.model_validate(
            {
                **{name: getattr(self, name) for name in kept},
                "task": next(able),
                "data": self.pretrain_data,
                "local_epochs": self.pretrain_epochs,
                "clients": 1,
                "holdout": 0.0,
            }
        )

    @classmethod
    def from_flat(cls, settings: Mapping[str, Any]) -> Experiment:
        """Build from the values of a command line, a file's table or Flower's run configuration.

        ``strategies`` may be a text with commas, ``seeds`` may be their number or a text. An empty
        string, and 0 for limits and ``first_epochs``, mean the default. Names may have dashes. Raises
        ``ValueError`` if a setting is unknown or wrong.
        """
        flat = {k.replace("-", "_"): v for k, v in settings.items() if v is not None and v != ""}
        for name in ("train_limit", "test_limit", "first_epochs"):
            flat[name] = flat.get(name) or None
        if isinstance(flat.get("strategies"), str):
            flat["strategies"] = [part.strip() for part in flat["strategies"].split(",") if part.strip()]
        return cls.model_validate(flat)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that clients train; None if they train the whole model."""
        return Adapter.parse(self.lora) if self.lora else None

    def epochs(self, server_round: int) -> float:
        """Return the epochs of a client in a round; rounds count from 1."""
        return self.first_epochs or self.local_epochs if server_round == 1 else self.local_epochs

    @property
    def moves(self) -> bool:
        """Whether weights are moved, which needs a model of a supported family."""
        if self.lora:
            return False
        return self.start == "scrambled" or any(
            strategy.kind == "fedrot" and strategy.alignment is not False for strategy in self.strategies
        )

    def to_json(self) -> str:
        """Return the experiment as one line of JSON, the same for equal experiments."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    @property
    def training(self) -> str:
        """The fields that decide how clients train and are tested, as JSON; others are compared."""
        # Updates are moved into random coordinates after training.
        start = "same" if self.start == "scrambled" else self.start
        others = {"name": "", "strategies": (), "seeds": (), "start": start}
        return self.model_copy(update=others).to_json()


class Adapter(BaseModel):
    """The LoRA adapter of an experiment, written as ``r=8,targets=query+value``.

    Attributes:
        ranks: client ``i`` has rank ``ranks[i % len(ranks)]``; the global adapter has the largest.
        targets: PEFT's ``target_modules``, or ``all-linear``.
        alpha: ``lora_alpha`` of all clients; each scales its product by ``alpha`` over its own rank.
        dropout: dropout rate of the adapter's inputs.
        rslora: scale by ``alpha / sqrt(rank)`` in place of ``alpha / rank``.
        dora: train DoRA's magnitudes, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: tuple[Annotated[int, Field(ge=1)], ...]
    targets: tuple[Annotated[str, Field(min_length=1)], ...]
    alpha: float = Field(16.0, gt=0, allow_inf_nan=False)
    dropout: float = Field(0.0, ge=0, lt=1)
    rslora: bool = False
    dora: bool = False

    @classmethod
    def parse(cls, text: str) -> Adapter:
        """Read ``KEY=VALUE`` pairs, separated by commas; raises ``ValueError``.

        ``r`` is one rank or several ranks, ``r=2+4+16``; ``targets`` are separated by ``+``, too.
        """
        found = dict[str, Any]()
        for part in filter(None, text.split(",")):
            key, equals, value = map(str.strip, part.partition("="))
            if not equals or key in found:
                raise ValueError(f"lora: '{part}' is not KEY=VALUE, or its key is given twice")
            found[key] = value
        unknown = [key for key in found if key not in _READ]
        if unknown:
            raise ValueError(f"lora has no key '{unknown[0]}'; its keys are {', '.join(_READ)}")
        missing = [key for key in ("r", "targets") if not found.get(key)]
        if missing:
            raise ValueError(f"lora needs {missing[0]}; write lora as r=8,targets=query+value")
        try:
            return cls.model_validate(
                {{"r": "ranks"}.get(key, key): _READ[key](value) for key, value in found.items()}
            )
        except ValueError as error:
            raise ValueError(
                "lora: ranks are whole numbers from 1, alpha is above 0, dropout from 0 to below 1, rslora "
                f"and dora are 0 or 1, targets have names; it is '{text}'"
            ) from error

    @property
    def rank(self) -> int:
        """The rank of the global adapter."""
        return max(self.ranks)

    def rank_of(self, client: int) -> int:
        """Return the rank of a client's adapter."""
        return self.ranks[client % len(self.ranks)]


_READ: Mapping[str, Callable[[str], Any]] = {
    "r": lambda value: tuple(map(int, value.split("+"))),
    "targets": lambda value: tuple(value.split("+")),
    "alpha": float,
    "dropout": float,
    "rslora": {"0": False, "1": True}.get,
    "dora": {"0": False, "1": True}.get,
}


def _seeds_of(text: str) -> tuple[int, ...]:
    """Return the seeds of a text with their number, a range or a list; raises ``ValueError``."""
    found = re.fullmatch("([0-9]+)(-[0-9]+)?|[0-9]+(,[0-9]+)+", text.replace(" ", ""))
    if found is not None and found[3]:
        return tuple(map(int, found[0].split(",")))
    first, stop = 0, 0
    if found is not None:
        first, stop = (int(found[1]), 1 - int(found[2])) if found[2] else (0, int(found[1]))
    if stop <= first:
        raise ValueError(
            f"'{text}' is no choice of seeds; give their number (3 is 0, 1 and 2), a range such as 3-5, "
            "or a list such as 1,4,9"
        )
    if stop - first > MOST_SEEDS:
        raise ValueError(f"'{text}' is {stop - first} seeds; at most {MOST_SEEDS} are allowed")
    return tuple(range(first, stop))
