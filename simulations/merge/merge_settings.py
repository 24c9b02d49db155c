"""The options of ``fedrot merge``, for models and for LoRA adapters."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

#: The names of ``merge_inputs.METHODS``, which imports torch; and ``AlignmentOptions.chance``.
METHOD_NAMES, CHANCE = ("mean", "fisher", "ot", "regmean"), 1.1
#: The file by which the folder of a LoRA adapter is recognised.
ADAPTER_CONFIG = "adapter_config.json"


class MergeSettings(BaseModel):
    """How saved models are aligned and merged; ``merge`` checks the values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    anchor: str | None = Field(
        default=None, description="The model that the others are moved to; default: the first."
    )
    method: str = Field(
        default="mean",
        description=f"{', '.join(METHOD_NAMES)} (ot: pip install 'fedrot[ot]'). Of adapters: exact, the "
        "mean of products cut to the rank (default), or mean, of the factors.",
    )
    parts: str = Field(
        default="attention+ffn",
        description="What is aligned: whole, none, or parts such as attention+ffn.",
    )
    layers: str = Field(
        default="all", description="Aligned layers: all, first:N, last:N or indices such as 0,2."
    )
    chance: float = Field(
        default=CHANCE,
        description="A group moves only if that removes more than this factor of what chance removes; "
        "0: if it removes anything.",
    )
    token_order: bool = Field(
        default=False,
        description="Count tokens by their place in the vocabulary (whole): for tokenizers that number "
        "frequent ones first.",
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
        default=None,
        description="Data set, as for simulate: texts for fisher, regmean and activations (whole), and "
        "held-out rows to score the models on.",
    )
    data_dir: Path | None = Field(
        default=None, description="Folder with glue/, emotion/ ... as Parquet files."
    )
    text_column: str | None = Field(default=None, description="Column with the text.")
    label_column: str | None = Field(default=None, description="Column with the label.")
    rows: int | None = Field(
        default=None,
        description="Texts at most; default: 1024, 256 for fisher, which takes a backward pass for each "
        "text and label, and 500 to score on.",
    )
    max_length: int = Field(default=64, description="Tokens per text.")


class AdapterMergeSettings(BaseModel):
    """Options of ``fedrot merge`` for LoRA adapters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str = Field(
        default="exact",
        description="exact: the mean of products, cut to the rank; mean: of the factors.",
    )
    rank: int | None = Field(
        default=None,
        gt=0,
        description="Of the result; default: the adapters' rank, the largest if they differ.",
    )
    weights: str | None = Field(
        default=None, description="One number per adapter; default: equal weights."
    )


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a LoRA adapter, as PEFT saves it."""
    return (folder / ADAPTER_CONFIG).is_file()
