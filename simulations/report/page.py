"""``Page``: self-contained HTML pages of registered sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from fedrot._io import write_text
from fedrot.simulations.report.tables import Table

Source = TypeVar("Source")
OfSource: TypeAlias = "Callable[[Source], Section | None]"


class Picture(NamedTuple):
    """A picture as a data URI (see ``plots.data_uri``), what it shows in words, and its caption."""

    uri: str
    alt: str
    caption: str


class Cell(NamedTuple):
    """A coloured cell: its text, the strength of its colour from 0 to 1, and what it is.

    It is ``found``, no more than ``chance`` (grey), or ``grew`` (another colour).
    """

    text: str
    strength: float = 0.0
    kind: str = "found"


class Grid(NamedTuple):
    """A table of coloured cells by line; ``below`` says what the columns are."""

    title: str
    below: str
    columns: Sequence[str]
    lines: Mapping[str, Sequence[Cell]]


@dataclass(frozen=True)
class Section:
    """A part of a page. Its fields are shown in this order; a folded section opens on a click.

    ``lead`` is a sentence in large type, ``code`` lines to copy, ``terms`` words and their meanings.
    ``beside`` puts pictures beside the text on a wide screen.
    """

    title: str = ""
    lead: str = ""
    code: str = ""
    text: str = ""
    sentences: Sequence[str] = ()
    terms: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[Picture] = ()
    grids: Sequence[Grid] = ()
    tables: Sequence[Table] = ()
    sections: Sequence[Section] = ()
    folded: bool = False
    warning: bool = False
    beside: bool = False


class Page(Generic[Source]):
    """A page with a list of sections, in the order in which they were registered.

    A section is a function::

        @PAGE.section
        def results(source):
            return Section("Results", tables=source.tables)  # None leaves the section out
    """

    def __init__(self) -> None:
        self.sections: dict[str, OfSource[Source]] = {}

    def section(self, function: OfSource[Source]) -> OfSource[Source]:
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
        sections = [section(source) for section in self.sections.values()]
        page = environment.get_template("page.html.j2")
        write_text(path, page.render(name=name, sections=[own for own in sections if own is not None]))
        return path
