"""Settings of a merge, with the help texts of the command's options."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class MergeSettings(BaseModel):
    """How saved models are aligned and merged; ``merge`` checks the values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    anchor: str | None = Field(
        default=None, description="The model that the others are moved to; default: the first."
    )
    method: str = Field(
        default="mean", description="mean, fisher, regmean or ot (pip install 'fedrot[ot]')."
    )
    parts: str = Field(
        default="attention+ffn",
        description="What is aligned: whole, none, or parts such as attention+ffn.",
    )
    layers: str = Field(
        default="all", description="Aligned layers: all, first:N, last:N or indices such as 0,2."
    )
    weights: str | None = Field(
        default=None, description="One number per model, separated by commas; default: equal."
    )
    alpha: float = Field(default=0.9, description="RegMean's factor of off-diagonal entries.")
    dtype: str | None = Field(
        default=None, description="float32, float16 or bfloat16; default: the anchor's."
    )
    config: Path | None = Field(
        default=None, description="Of .safetensors files: config.json, or a folder with one."
    )
    data: str | None = Field(
        default=None, description="Texts for fisher, regmean and activations (whole): as for simulate."
    )
    data_dir: Path | None = Field(
        default=None, description="Folder with glue/, emotion/ ... as Parquet files."
    )
    text_column: str | None = Field(default=None, description="Column with the text.")
    label_column: str | None = Field(default=None, description="Column with the label.")
    rows: int | None = Field(
        default=None,
        description="Texts at most; default: 1024, and 256 for fisher, which takes a backward pass for "
        "each text and label.",
    )
    max_length: int = Field(default=64, description="Tokens per text.")
