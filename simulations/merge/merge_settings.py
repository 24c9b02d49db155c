"""The options of ``fedrot merge``, for models and for LoRA adapters."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

#: The names of ``merge_inputs.METHODS``, whose module imports torch.
METHOD_NAMES = ("mean", "fisher", "ot", "regmean")
#: The file that a folder of a LoRA adapter has.
ADAPTER_CONFIG = "adapter_config.json"


class MergeSettings(BaseModel):
    """Options for the alignment and the merge of saved models; ``merge`` checks the values."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    method: str = Field(
        default="mean",
        description=f"{', '.join(METHOD_NAMES)} (ot: pip install 'fedrot[ot]'). For adapters: exact "
        "(the mean of products, truncated to the rank; default) or mean (of the factors).",
    )
    parts: str = Field(
        default="attention+ffn",
        description="Parts to align: whole, none, or parts such as attention+ffn.",
    )
    weights: str | None = Field(
        default=None, description="One number per model, separated by commas; default: equal."
    )
    data: str | None = Field(
        default=None,
        description="Data set, as for simulate: texts for fisher, regmean and activations (whole), and "
        "held-out rows for scores of the models.",
    )
    data_dir: Path | None = Field(
        default=None, description="Folder of Parquet files, also in its folders glue, emotion, ..."
    )
    text_column: str | None = Field(default=None, description="Column with the text.")
    label_column: str | None = Field(default=None, description="Column with the label.")


class AdapterMergeSettings(BaseModel):
    """Options of ``fedrot merge`` for LoRA adapters.

    Attributes:
        method: ``exact`` (mean of the products, truncated to the rank) or ``mean`` (of the factors).
        rank: rank of the result; None: the largest rank of the adapters.
        weights: one number per adapter, separated by commas; None: equal weights.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    method: str = "exact"
    rank: int | None = Field(default=None, gt=0)
    weights: str | None = None


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a LoRA adapter saved by PEFT."""
    return (folder / ADAPTER_CONFIG).is_file()
