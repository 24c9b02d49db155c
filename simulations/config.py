"""Configuration of a simulation, validated and serialisable."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedrot.simulations.data import BUNDLED, DIGITS

# These modules import torch, which takes too long where only help is shown.
if TYPE_CHECKING:
    from fedrot.simulations.adapter import Adapter
    from fedrot.simulations.arm import Arm

TaskName = Literal["classification", "mlm", "clm", "ner", "image"]
Architecture = Literal["", "bert", "distilbert", "gpt2", "llama", "vit"]
Start = Literal["same", "different", "scrambled", "pretrained"]
Server = Literal["mean", "adam", "yogi"]
Missing = Literal["error", "drop", "keep"]


@dataclass(frozen=True)
class TaskTraits:
    """Properties of a task.

    Attributes:
        architectures: architectures of models from scratch, the default first.
        data: the default data set; empty if the user has to name one.
        classifies: whether models have one output per row, which ensembles can average.
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

#: The largest number of seeds. A larger number is probably a seed.
MOST_SEEDS = 10_000


#: Settings that have an effect only on a small model from scratch, or only with start ``pretrained``.
OF_SMALL_MODEL = ("layers", "width", "heads", "dropout")
OF_PRETRAINING = ("pretrain_data", "pretrain_limit", "pretrain_epochs")


class SimulationConfig(BaseModel):
    """One comparison of arms and starts over the same data, partitions, seeds and batches.

    The fields are the options of ``fedrot simulate``, the keys of a grid's ``[[setting]]`` and, with
    dashes, the keys of the Flower app's run configuration.
    """

    # Help needs the fields alone: what validates them is built at first use.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    setting: str = Field("", description="Name in tables and rows; default: data, partition and task.")
    data: str = Field(
        "",
        description="Data set: a bundled one, a name in --data-dir, a file (.parquet, .csv, .tsv, "
        ".jsonl, .json or .txt), a folder of images, or a hub name. Several sets of classified texts, "
        "separated by commas, are domains of one task. Default: goemotions_ekman; digits for images.",
    )
    unseen_data: str = Field(
        "", description="Data sets of further domains, separated by commas; only test rows are used."
    )
    task: TaskName = Field(
        "classification",
        description="classification, mlm or clm (masked or causal language modelling of the texts), "
        "ner (named entities) or image (image classification).",
    )
    data_dir: Path | None = Field(
        None, description="Folder of Parquet files, also in its folders glue, emotion, ner and images."
    )
    text_column: str | None = Field(None, description="Column with text, words or image.")
    label_column: str | None = Field(None, description="Column with the label or the tags.")
    label_kind: Literal["", "single", "multi", "regression"] = Field(
        "",
        description="Labels of a classification: single (one class per row), multi (any number of "
        "classes per row, in boolean columns) or regression (scores). Default: regression for "
        "floating-point numbers, multi for boolean columns if any row has not exactly one True.",
    )
    missing: Missing = Field(
        "error",
        description="Rows without a text or a label (empty, NA, negative class): error, drop (leave "
        "them out), or keep (NA, None, negative numbers and the like are classes).",
    )
    train_limit: int | None = Field(None, gt=0, description="Maximum number of training rows.")
    test_limit: int | None = Field(None, gt=0, description="Maximum number of test rows.")

    model: str | None = Field(
        None,
        description="Pretrained model: folder, hub name, minilm (all-MiniLM-L6-v2, from the extra "
        "minilm), or smollm2 (SmolLM2-135M); default: a small model from scratch.",
    )
    architecture: Architecture = Field(
        "",
        description="Architecture of the small model: bert, distilbert, gpt2, llama or vit; default: "
        "gpt2 for clm, vit for image, else bert.",
    )
    layers: int = Field(2, gt=0, description="Layers of the small model.")
    width: int = Field(128, gt=0, description="Hidden size of the small model.")
    heads: int = Field(4, gt=0, description="Attention heads of the small model.")
    max_length: int = Field(64, gt=3, description="Maximum number of tokens per text.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of the small model.")

    lora: str = Field(
        "",
        description="LoRA adapter that clients train, such as r=8,targets=query+value. Other keys: "
        "alpha, dropout, rslora=1 and dora=1. With r=2+4+16 clients have these ranks in turn.",
    )
    server: Server = Field(
        "mean", description="The server's step with the average of adapters: mean, adam or yogi."
    )
    server_lr: float = Field(0.01, gt=0, description="Learning rate of --server adam or yogi.")

    clients: int = Field(4, gt=0, description="Number of clients.")
    partition: str = Field(
        "iid", description="iid, dirichlet:ALPHA, pathological:CLASSES, keyclass:SHARE or column:NAME."
    )
    holdout: float = Field(0.1, ge=0, lt=1, description="Share of a client's rows held out for tests.")
    fraction_train: float = Field(1.0, gt=0, le=1, description="Share of clients that train in a round.")

    starts: tuple[Start, ...] = Field(
        ("same",),
        description="How clients start, separated by commas: same, different (own initial models), "
        "scrambled (updates in random bases) or pretrained (on pretrain_data).",
    )
    pretrain_data: str = Field(
        "", description="Texts on which the small model is pretrained, for start pretrained."
    )
    pretrain_limit: int | None = Field(None, gt=0, description="Maximum number of pretraining rows.")
    pretrain_epochs: float = Field(1, gt=0, description="Epochs of pretraining.")
    arms: tuple[str, ...] = Field(
        ("plain", "aligned"),
        description="Ways to average, separated by commas: plain, aligned, or PARTS[@ANCHOR] such as "
        "attention+ffn@global. Each may end in a guard's :METRIC (aligned:loss), /AGGREGATION "
        "(aligned/regmean) and +task-head. joined trains one model on all clients' data. For adapters: "
        "lora-METHOD(OPTIONS) such as lora-exact(gauge=none).",
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 1, 2),
        description="Number of seeds (3 is 0, 1 and 2), a range such as 3-5, or a list: 1,4,9.",
    )
    rounds: int = Field(3, gt=0, description="Rounds of federated training.")
    local_epochs: float = Field(1, gt=0, description="Epochs per client and round.")
    first_epochs: float | None = Field(
        None, gt=0, description="Epochs per client in the first round; default: local_epochs."
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

    @field_validator("starts", "arms", "seeds")
    @classmethod
    def _some(cls, value: tuple[object, ...]) -> tuple[object, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError("needs at least one value, each once")
        return value

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Fill in the task's defaults, and name the setting after data, partition and task."""
        default: TaskName = cls.model_fields["task"].default
        task: Any = values.get("task", default) if isinstance(values, dict) else None
        if not isinstance(task, str) or task not in TASKS:
            return values
        traits = TASKS[task]
        own = "" if values.get("model") else traits.architectures[0]
        named = {
            **values,
            "data": values.get("data") or traits.data,
            "architecture": values.get("architecture") or own,
        }
        what = [named["data"], values.get("partition", cls.model_fields["partition"].default)]
        what += [task] if task != default else []
        what += [named["architecture"]] if named["architecture"] != own else []
        if isinstance(values.get("lora"), str) and values["lora"]:
            from fedrot.simulations.adapter import default_arms

            named.setdefault("arms", default_arms(values["lora"]))
        arms, clients = named.get("arms"), values.get("clients", cls.model_fields["clients"].default)
        texts = [str(arm) for arm in arms] if isinstance(arms, list | tuple) else []
        if isinstance(clients, int) and any("#" in text for text in texts):
            from fedrot.simulations.arm import expanded

            named["arms"] = expanded(texts, clients)
        return {**named, "setting": values.get("setting") or ", ".join(map(str, what))}

    @model_validator(mode="after")
    def _consistent(self) -> SimulationConfig:
        self._check_task()
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if "different" in self.starts and self.fraction_train < 1:
            raise ValueError(
                "start 'different' needs fraction_train 1: a client that joins in a later round starts "
                "from the broadcast model"
            )
        if "different" in self.starts and self.model is not None and not self.lora:
            raise ValueError(
                f"start 'different' initialises a model for each client, but all have '{self.model}'; "
                "use start 'same'"
            )
        if self.unseen_data and self.task != "classification":
            raise ValueError(f"unseen_data is for task 'classification', not for '{self.task}'")
        if "pretrained" in self.starts:
            self._check_pretraining()
        self._check_arms()
        return self

    def _check_arms(self) -> None:
        """Check the arms after all other settings: their modules import torch."""
        from fedrot.simulations.adapter import check_adapter
        from fedrot.simulations.arm import Arm

        check_adapter(self)
        arms = [Arm.parse(arm) for arm in self.arms]
        for arm in arms:
            if arm.clients and max(arm.clients) >= self.clients:
                raise ValueError(f"arm '{arm.name}': there are {self.clients} clients, counted from 0")
            if arm.evidence == "learned" and "," in self.data:
                raise ValueError(
                    f"arm '{arm.name}': evidence 'learned' needs one data set, not several domains"
                )
            arm.check(self)
        if not self.holdout and any(arm.chooses for arm in arms):
            raise ValueError(
                "guards, aggregations with a score and fitted task heads need held-out rows of the "
                "clients; holdout must not be 0"
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

    @property
    def pretraining(self) -> SimulationConfig:
        """The configuration that pretrains the language model for start ``pretrained``."""
        of_model = ("architecture", "layers", "width", "heads", "max_length", "dropout")
        of_training = ("data_dir", "batch_size", "lr", "weight_decay")
        kept = {name: getattr(self, name) for name in (*of_model, *of_training)}
        able = (task for task in LANGUAGE_TASKS if self.architecture in TASKS[task].architectures)
        return SimulationConfig.model_validate(
            {
                **kept,
                "task": next(able),
                "data": self.pretrain_data,
                "train_limit": self.pretrain_limit,
                "local_epochs": self.pretrain_epochs,
                "clients": 1,
                "holdout": 0.0,
            }
        )

    @classmethod
    def from_flat(cls, settings: Mapping[str, Any]) -> SimulationConfig:
        """Build from the values of a command line, a grid or Flower's run configuration.

        ``starts`` and ``arms`` may be texts with commas, ``seeds`` may be their number or a text. An
        empty string, and 0 for limits and ``first_epochs``, mean the default. Names may have dashes.
        Raises ``ValueError`` if a setting is unknown or wrong.
        """
        flat = {k.replace("-", "_"): v for k, v in settings.items() if v is not None and v != ""}
        for name in ("train_limit", "test_limit", "pretrain_limit", "first_epochs"):
            flat[name] = flat.get(name) or None
        for name in ("starts", "arms"):
            if isinstance(flat.get(name), str):
                parts = re.split(r",(?![^(]*\))", flat[name])  # Not inside of parentheses.
                flat[name] = tuple(p.strip() for p in parts if p.strip())
        return cls.model_validate(flat)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that clients train; None if they train the whole model."""
        from fedrot.simulations.adapter import Adapter

        return Adapter.parse(self.lora) if self.lora else None

    def epochs(self, server_round: int) -> float:
        """Return the epochs of a client in a round; rounds count from 1."""
        return self.first_epochs or self.local_epochs if server_round == 1 else self.local_epochs

    def cells(self) -> list[tuple[int, Start, Arm]]:
        """Return every (seed, start, arm), seed by seed."""
        from fedrot.simulations.arm import Arm

        arms = map(Arm.parse, self.arms)
        return list(itertools.product(self.seeds, self.starts, arms))

    @property
    def moves(self) -> bool:
        """Whether weights are moved, which needs a model of a supported family."""
        from fedrot.simulations.arm import Arm

        if self.lora:
            return False
        arms = map(Arm.parse, self.arms)
        return "scrambled" in self.starts or any(arm.align or arm.takes("symmetry") for arm in arms)

    def to_json(self) -> str:
        """Return the configuration as one line of JSON, the same for equal configurations."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    @property
    def training(self) -> str:
        """The fields that decide how clients train and are tested, as JSON; others are compared."""
        compared = {"setting", "arms", "starts", "seeds"}
        return json.dumps(self.model_dump(mode="json", exclude=compared), sort_keys=True)


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
