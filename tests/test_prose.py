"""The prose that users read: the project's words, no filler, and no long page."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(
        path
        for folder in ("docs", "examples")
        for path in (ROOT / folder).rglob("*.md")
    ),
    *sorted((ROOT / "docs").rglob("*.ipynb")),
]
ROOM = 1500
#: Maximum number of words of a page with another limit than ``ROOM``.
ROOMS = {
    "README.md": 930,
    "docs/symptoms.md": 2000,
    "docs/methods.md": 2000,
    "docs/how-to/different-labels.md": 1880,
}
#: What is not written, and what is written in its place.
INSTEAD = {
    r"stretch(es)?": "slice",
    r"(is|are|was|were) set aside": "dropped, with a reason",
    r"has no part in": "dropped, with a reason",
    r"foreign": "different initialisation, other basis",
    r"gauges?": "redundant bias",
    r"in order to": "to",
    r"utili[sz]e[sd]?|leverage[sd]?": "use",
    r"seamless(ly)?|effortless(ly)?|blazing(ly)?": "a number",
    r"simply|obviously|of course|easily": "nothing",
    r"state[- ]of[- ]the[- ]art": "what was measured",
    r"please note that|note that": "nothing",
}

#: A module, a function or a class that a page names, and a file.
CODE = re.compile(r"(?:`|^::: )(fedrot(?:\.[a-zA-Z_]\w*)+)", flags=re.MULTILINE)
FILE = re.compile(r"`((?:\w+/)+\w+\.py)`")


def unwanted_in(text):
    """Return what should be written otherwise, outside of code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`|<!--.*?-->", "", text, flags=re.DOTALL)
    return [
        f"'{match[0]}': write {instead}"
        for pattern, instead in INSTEAD.items()
        for match in re.finditer(rf"\b(?:{pattern})\b", prose, flags=re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_the_projects_words(page):
    text = page.read_text(encoding="utf-8")
    assert unwanted_in(text) == []
    if page.suffix == ".md" and not {"archive", "summary.md"} & {*page.parts}:
        assert len(text.split()) <= ROOMS.get(str(page.relative_to(ROOT)), ROOM)


def test_the_check_finds_words_outside_of_code():
    reasons = unwanted_in(
        "Two replies are set aside, simply. `foreign`\n```\na gauge\n```\nA stretch."
    )
    assert [reason.split("'")[1] for reason in reasons] == [
        "stretch",
        "are set aside",
        "simply",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    """Results name what they were measured with."""
    if "results" in page.parts:
        return
    text = page.read_text(encoding="utf-8")
    for name in CODE.findall(text):
        pkgutil.resolve_name(name)
    for name in FILE.findall(text):
        places = (ROOT / name, ROOT / "strategies" / name, page.parent / name)
        assert "NAME" in name or any(place.exists() for place in places), name


def test_what_is_called_stable_is_public():
    page = (ROOT / "docs" / "reference" / "stable.md").read_text(encoding="utf-8")
    names = [name.rpartition(".") for name in CODE.findall(page)]
    assert {"FedRot", "LabelledRows"} <= {name for _, _, name in names}
    for module, _, name in names:
        assert name in pkgutil.resolve_name(module).__all__
    commands = re.findall(r"`fedrot ([\w-]+)`", page)
    overview = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert sorted(commands) == sorted(re.findall(r"\| `fedrot ([\w-]+)`", overview))
