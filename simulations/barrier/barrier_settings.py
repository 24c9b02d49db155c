"""``BarrierSettings``: the options of ``fedrot barrier``."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fedrot.simulations.config import TaskName

#: The names of ``barrier_methods.METHODS``, which imports torch.
METHOD_NAMES = ("vanilla", "rotation", "whole", "whole+data", "stream")


class BarrierSettings(BaseModel):
    """Data set, methods and sizes; the descriptions are the help texts of the command's options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str | None = Field(
        default=None, description="Data set, as for simulate; default: that of the task."
    )
    task: TaskName | None = Field(
        default=None,
        description="classification, mlm, clm, ner or image; default: that of the models' class.",
    )
    data_dir: Path | None = Field(
        default=None, description="Folder with glue/, emotion/ ... as Parquet files."
    )
    text_column: str | None = Field(default=None, description="Column with the text.")
    label_column: str | None = Field(default=None, description="Column with the label.")
    methods: str | None = Field(
        default=None,
        description=f"Ways to match, separated by commas: {', '.join(METHOD_NAMES)}; default: all "
        "that suit the model.",
    )
    points: int = Field(default=21, description="Positions on the line; odd, to include the middle.")
    rows: int = Field(default=2048, description="Training rows for the methods that look at data.")
    test_limit: int = Field(default=1000, description="Evaluate on at most so many held-out rows.")
    max_length: int = Field(default=64, description="Tokens per text.")
