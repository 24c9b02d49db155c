"""Settings of a barrier between two saved models, with the help texts of the command's options."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fedrot.simulations.barrier.barrier_methods import METHODS


class BarrierSettings(BaseModel):
    """What a barrier is measured with; ``compare_saved_models`` checks the values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str | None = Field(
        default=None, description="Data set, as for simulate; default: that of the task."
    )
    task: str = Field(default="classification", description="classification, mlm, clm, ner or image.")
    data_dir: Path | None = Field(
        default=None, description="Folder with glue/, emotion/ ... as Parquet files."
    )
    text_column: str | None = Field(default=None, description="Column with the text.")
    label_column: str | None = Field(default=None, description="Column with the label.")
    methods: str | None = Field(
        default=None,
        description=f"Ways to match, separated by commas: {', '.join(METHODS)}; default: all.",
    )
    points: int = Field(default=21, description="Positions on the line; odd, to include the middle.")
    rows: int = Field(default=2048, description="Training rows for the methods that look at data.")
    test_limit: int = Field(default=1000, description="Evaluate on at most so many held-out rows.")
    max_length: int = Field(default=64, description="Tokens per text.")
