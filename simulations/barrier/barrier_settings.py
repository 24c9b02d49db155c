"""``BarrierSettings``: the options of ``fedrot barrier``."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fedrot.simulations.config import TaskName

#: The names of ``barrier_methods.METHODS``, which imports torch.
METHOD_NAMES = ("vanilla", "rotation", "whole", "whole+data", "stream")


class BarrierSettings(BaseModel):
    """Data set, methods and sizes of a measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str | None = Field(
        default=None, description="Data set, as for simulate; default: the task's bundled one."
    )
    task: TaskName | None = Field(
        default=None,
        description="classification, mlm, clm, ner or image; default: the task of the models' class.",
    )
    data_dir: Path | None = Field(
        default=None, description="Folder of Parquet files, also in its folders glue, emotion, ..."
    )
    text_column: str | None = Field(default=None, description="Column with the text.")
    label_column: str | None = Field(default=None, description="Column with the label.")
    methods: str | None = Field(
        default=None,
        description=f"Ways to match, separated by commas: {', '.join(METHOD_NAMES)}; default: all "
        "for this model.",
    )
    points: int = Field(default=21, description="Positions on the line; odd, to include the middle.")
    test_limit: int = Field(default=1000, description="Maximum number of held-out rows.")
