"""Self-contained HTML pages made of registered sections."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from fedrot._io import write_text
from fedrot.simulations.report.tables import format_difference, format_score

Source = TypeVar("Source")
Values: TypeAlias = Mapping[str, Any]


class HtmlPage(Generic[Source]):
    """A page with a list of sections, in the order in which they were registered.

    A section is a function with a template of its name::

        @PAGE.section
        def results(source):  # templates/results.html.j2
            return {"lines": source.lines}  # None leaves the section out
    """

    def __init__(self) -> None:
        self.sections: dict[str, Callable[[Source], Values | None]] = {}
        #: The packages with a folder ``templates``. Plug-ins that register sections add theirs.
        self.packages = ["fedrot.simulations.report"]

    def section(self, function: Callable[[Source], Values | None]) -> Callable[[Source], Values | None]:
        """Register a section."""
        self.sections[function.__name__] = function
        return function

    def write(self, path: Path, name: str, source: Source) -> Path:
        """Render the sections of ``source`` into a file, which is replaced whole; returns its path."""
        import jinja2
        from markupsafe import Markup

        environment = jinja2.Environment(
            loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in self.packages]),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        environment.filters.update(score=format_score, difference=format_difference)
        found = {name: function(source) for name, function in self.sections.items()}
        sections = [
            Markup(environment.get_template(f"{section}.html.j2").render(values))
            for section, values in found.items()
            if values is not None
        ]
        page = environment.get_template("page.html.j2").render(name=name, sections=sections)
        write_text(path, page)
        return path


def data_uri(path: Path) -> str:
    """Return a PNG file as the address of an embedded picture."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
