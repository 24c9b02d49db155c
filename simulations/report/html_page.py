"""``HtmlPage``: self-contained HTML pages of registered sections."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedrot._io import write_text
from fedrot.simulations.report.tables import Table, pieces

Source = TypeVar("Source")


@dataclass(frozen=True)
class Section:
    """A part of a page. Its fields are shown in this order; a folded section opens on a click.

    Attributes:
        terms: words and their meanings.
        pictures: addresses of pictures (see ``data_uri``) by caption, which is also the ``alt`` text.
    """

    title: str
    text: str = ""
    sentences: Sequence[str] = ()
    terms: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    pictures: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    sections: Sequence[Section] = ()
    folded: bool = False
    warning: bool = False


class HtmlPage(Generic[Source]):
    """A page with a list of sections, in the order in which they were registered.

    A section is a function::

        @PAGE.section
        def results(source):
            return Section("Results", tables=source.tables)  # None leaves the section out
    """

    def __init__(self) -> None:
        self.sections: dict[str, Callable[[Source], Section | None]] = {}

    def section(
        self, function: Callable[[Source], Section | None]
    ) -> Callable[[Source], Section | None]:
        """Register a section."""
        self.sections[function.__name__] = function
        return function

    def write(self, path: Path, name: str, source: Source) -> Path:
        """Render the sections of ``source`` into a file, which is replaced at once; return its path."""
        import jinja2

        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("fedrot.simulations.report"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        environment.filters["broken"] = broken
        sections = filter(None, (section(source) for section in self.sections.values()))
        page = environment.get_template("page.html.j2").render(name=name, sections=list(sections))
        write_text(path, page)
        return path


def list_of(title: str, sentences: Iterable[str], text: str = "") -> Section | None:
    """Return a section of sentences; None if there are none."""
    found = list(sentences)
    return Section(title, text, found) if found else None


def broken(text: str) -> str:
    """Return a text as HTML with ``<wbr>`` at the places where long words may be broken."""
    from markupsafe import Markup

    mark = Markup("<wbr>")
    return Markup(" ").join(mark.join(pieces(word)) for word in text.split())


def data_uri(path: Path) -> str:
    """Return a PNG file as a data URI."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
