"""``PortSettings``: the options of ``python -m reproductions port``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PortSettings(BaseModel):
    """How a fine-tuning is carried over."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: str = Field(
        default="rotation",
        description="How the new base is matched to the old one: rotation (of the residual stream where "
        "the family has it, else a permutation), permutation, or none.",
    )
    scale: float = Field(default=1.0, description="The fine-tuning's difference counts so many times.")
