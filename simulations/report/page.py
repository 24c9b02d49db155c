"""HTML pages from the templates of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedrot._io import write_text
from fedrot.simulations.report import findings, plots, tables
from fedrot.simulations.report.tables import Table
from fedrot.simulations.summary import LOWER_IS_BETTER


class Section(NamedTuple):
    """A section of a plug-in at the end of a run's page."""

    title: str
    text: str
    tables: Sequence[Table] = ()


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Render a template into a file, which is replaced at once; return its path."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedrot.simulations.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": tables.number, "spoken": tables.spoken}
    environment.globals |= {"findings": findings, "plots": plots, "tables": tables}
    environment.globals["lower_is_better"] = LOWER_IS_BETTER
    write_text(path, environment.get_template(template).render(values))
    return path
