"""``Scenario``: the settings of an experiment that do not depend on its strategies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

#: Options and other values by name.
Settings = Mapping[str, Any]
#: What the labels of a row are: one class, several labels, or a score.
Kind = Literal["single", "multi", "regression"]


def names_in(text: str, is_name: Callable[[str], bool] = lambda _: False) -> list[str]:
    """Return the names in a text, which commas separate.

    Names that ``is_name`` knows may have commas; the longest is taken.
    """
    names = []
    parts = text.split(",")
    while parts:
        size = len(parts)
        while size > 1 and not is_name(",".join(parts[:size]).strip()):
            size -= 1
        names.append(",".join(parts[:size]).strip())
        del parts[:size]
    return [*filter(None, names)]


def data_names(text: str, data_dir: object) -> list[str]:
    """Return the names of data sets in a text; a path that exists may have commas."""
    folders = [Path()]
    if data_dir:
        folder = Path(str(data_dir))
        folders += [folder, *folder.glob("*/")]
    return names_in(
        text,
        lambda name: any(os.path.exists(folder / name) for folder in folders),
    )


class Scenario(BaseModel):
    """Data, task, models and clients, on which an ``Experiment`` compares strategies.

    Readers of data, models, tasks and strategies need no more than this. ``Experiment``
    adds strategies, seeds and training, and checks all values.
    """

    # Help needs the fields alone: what validates them is built at first use.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str = Field(
        "", description="In tables and rows; default: data, partition and task."
    )
    data: str = Field(
        "", description="File, folder, bundled or hub name; several: domains."
    )
    task: str = Field(
        "classification", description="classification, mlm, clm, ner or image."
    )
    data_dir: Path | None = Field(
        None, description="Folder in which names of data are looked up."
    )
    text_column: str | None = Field(
        None, description="Of the text (a,b: pairs), words or image."
    )
    label_column: str | None = Field(None, description="Of the label or the tags.")
    label_kind: Literal["", Kind] = Field(
        "", description="single, multi or regression; default: by the column's type."
    )
    train_limit: int | None = Field(None, gt=0, description="Most training rows.")
    test_limit: int | None = Field(None, gt=0, description="Most test rows.")

    model: str | None = Field(
        None, description="Folder, hub name, minilm; default: a small new one."
    )
    architecture: str = Field("", description="Of the small model; default: by task.")
    layers: Literal["last", "all"] | tuple[int, ...] = Field(
        "last",
        description="Layers that the task head of an encoder reads: last, all, 4,5,6.",
    )
    depth: PositiveInt = Field(2, description="Number of layers of the small model.")
    width: PositiveInt = Field(128, description="Hidden size of the small model.")
    heads: PositiveInt = Field(4, description="Attention heads of the small model.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of the small model.")
    max_length: int = Field(64, gt=3, description="Most tokens of a text.")
    lora: dict[str, Any] = Field(
        {},
        description=(
            "Of adapters: arguments of PEFT's LoraConfig. A list as r: ranks in turn."
        ),
    )

    clients: NonNegativeInt = Field(
        0, description="Their number; default: 4, or the values of column:NAME."
    )
    partition: str = Field(
        "iid",
        description=("iid, dirichlet:ALPHA, pathological:K, column:NAME."),
    )
    holdout: float = Field(
        0.1, ge=0, lt=1, description="Share of a client's rows that it holds out."
    )
    min_class_rows: PositiveInt = Field(
        5,
        description="Classes of fewer rows leave a client's sums and losses; 1: none.",
    )
    fraction_train: float = Field(
        1.0, gt=0, le=1, description="Share of clients in a round."
    )
    start: Literal["same", "different", "scrambled"] = Field(
        "same", description="Clients' first models; scrambled: in other coordinates."
    )

    @property
    def ranks(self) -> tuple[Any, ...]:
        """The ranks of the clients' adapters, in turn, or None.

        The global adapter has the largest.
        """
        rank = self.lora.get("r")
        return tuple(rank) if isinstance(rank, list) and rank else (rank,)
