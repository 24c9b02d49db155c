"""``SiteRow``: what one site of a live run tells of models on its own rows."""

from __future__ import annotations

from math import nan
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

#: A number of a file of rows; null is NaN.
Number = Annotated[
    float, BeforeValidator(lambda value: nan if value is None else value)
]


class SiteRow(BaseModel):
    """A row of the stage ``site``, see ``docs/reference/metrics.md``.

    ``alone``, ``of_all`` (the global head) and ``of_site`` (its own) have metrics by
    name.
    """

    round: int
    client: int | str
    site: str
    rows: int
    chose: bool
    alone: dict[str, Number]
    of_all: dict[str, Number] = Field(alias="global")
    of_site: dict[str, Number] = Field(alias="own")
    gain: tuple[Number, Number, Number]
