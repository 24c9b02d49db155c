"""What the documentation takes from the code: formulas as MathML, and pages that are
generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any


def math(source: str, *_: Any, **__: Any) -> str:
    """Return a block of LaTeX as MathML, which browsers draw without a script."""
    from latex2mathml.converter import convert

    made = convert(source, display="block")
    unknown = re.findall(r"\\[a-zA-Z]+", made)
    if unknown:
        raise ValueError(f"latex2mathml does not know {unknown[0]} in {source!r}")
    return f'<div class="math" style="overflow-x: auto">{made}</div>'


def commands() -> str:
    """Return the help of every command as Markdown."""
    import click
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from fedrot.simulations.cli.app import app

    command = get_command(app)
    text = get_docs_for_click(
        obj=command, ctx=click.Context(command, info_name="fedrot"), name="fedrot"
    )
    # What stands before the first command is its list again, cut short.
    text = text[text.index("\n## ") :]
    return re.sub(
        r"^(Examples?:)\n\n((?:fedrot .*\n+)+)", _as_code, text, flags=re.MULTILINE
    )


def _as_code(examples: re.Match[str]) -> str:
    lines = "\n".join(filter(None, examples[2].splitlines()))
    return f"**{examples[1]}**\n\n```bash\n{lines}\n```\n\n"


def rows() -> str:
    """Return what `explorer.js` draws, as tables, with the script itself."""
    from docs.explorer import tables

    style = '<link rel="stylesheet" href="../../assets/explorer.css">'
    return f'{tables()}\n\n{style}<script src="../../assets/explorer.js"></script>'


def settings() -> str:
    """Return the fields of an experiment as a table."""
    from fedrot.simulations.experiment import Experiment

    return _fields(Experiment, "setting")


def strategies() -> str:
    """Return the keys of a strategy as a table."""
    from fedrot.simulations.strategy import Strategy

    return _fields(Strategy, "key")


def _fields(model: Any, called: str) -> str:
    header, lines = (called, "default", "meaning"), []
    for name, field in model.model_fields.items():
        default = field.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        empty = field.is_required() or shown in (None, "", {})
        lines.append(
            (f"`{name}`", "" if empty else f"`{shown}`", field.description or "")
        )
    escape = str.maketrans({"&": "&amp;", "<": "&lt;", "|": "\\|"})
    rows = [
        header,
        ["---"] * 3,
        *([cell.translate(escape) for cell in line] for line in lines),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


#: What stands in a page as a comment ``generated: NAME`` alone on its line.
GENERATED: Mapping[str, Callable[[], str]] = {
    "commands": commands,
    "rows": rows,
    "settings": settings,
    "strategies": strategies,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated; raises ``KeyError`` for an unknown name."""
    return re.sub(
        r"^<!-- generated: (\w+) -->$",
        lambda found: GENERATED[found[1]](),
        markdown,
        flags=re.MULTILINE,
    )


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Complete a notebook: links to other sources become links to pages, pictures get
    their texts.

    A picture has the text of its cell's metadata ``alt``. Raises ``ValueError`` for a
    link to no page.
    """
    source = page.file.src_uri
    if not source.endswith(".ipynb"):
        return html

    def link(found: re.Match[str]) -> str:
        target = files.get_file_from_path(normpath(join(dirname(source), found[1])))
        if target is None:
            raise ValueError(f"{source} links to {found[1]}, which is no page")
        return f'href="{target.url_relative_to(page.file)}{found[2]}"'

    html = re.sub(r'href="([^":#]+\.(?:md|ipynb))(#[^"]*|)"', link, html)
    cells = json.loads(Path(page.file.abs_src_path).read_text(encoding="utf-8"))[
        "cells"
    ]
    texts = iter(
        [cell["metadata"]["alt"] for cell in cells if "alt" in cell["metadata"]]
    )
    missing = 'alt="No description has been provided for this image"'
    return re.sub(missing, lambda _: f'alt="{escape(next(texts))}"', html)
