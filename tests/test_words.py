"""The words of CONTRIBUTING.md: names of the product that use a word for another thing.

What a reader has to decide (whether ``shares`` are priors) is in no rule.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("fedrot", "strategies", "simulations")

#: What stores a value: a variable, a parameter, ``Class.field``, or ``x`` of
#: ``self.x = ...``.
VALUE = "value"
#: A function, a class or a module.
DEFINITION = "definition"


class Rule(NamedTuple):
    """A struck word.

    Attributes:
        name: regular expression of the whole name.
        what: the names that it holds for, ``VALUE`` or ``DEFINITION``.
        say: what the name should say.
        inside: beginnings of the paths that it holds for.
        allowed: beginnings of the paths where the word is right.
    """

    name: str
    what: str
    say: str
    inside: tuple[str, ...] = FOLDERS
    allowed: tuple[str, ...] = ()


#: Folders in which a head is an attention head.
ATTENTION = ("fedrot/symmetry", "fedrot/matching", "fedrot/alignment")
RULES = (
    # Columns of published rows are called ``found``, too.
    Rule(
        r"(?!(GroupReport|Shares)\.found)(\w+\.)?_?(found|own|given|said|one|theirs)",
        VALUE,
        "what it holds",
    ),
    Rule(
        r"(?i)(?!.*(task_?head|header|headline|head_only|site_head)).*head.*",
        DEFINITION,
        "task_head",
        allowed=ATTENTION,
    ),
    Rule(
        r"_?(Problem|PROBLEMS|problem_of)",
        DEFINITION,
        "OutputKind",
        allowed=("fedrot/matching",),
    ),
    Rule(r"(\w+\.)?_?[Bb]allots?", VALUE, "votes"),
    Rule(r"_?[Bb]allots?", DEFINITION, "Votes"),
    Rule(
        r"(\w+\.)?_?step",
        VALUE,
        "stage of a request, or share of a change",
        ("strategies/fitting", "strategies/client"),
    ),
    Rule(r"Group\.kind", VALUE, "action"),
    Rule(r"AdapterOptions\.kind", VALUE, "method"),
)


def names_in(tree):
    """Yield line, ``VALUE`` or ``DEFINITION``, and name of what a module names."""
    fields = {}
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                yield node.lineno, DEFINITION, name
                for statement in node.body:
                    if isinstance(statement, ast.AnnAssign):
                        fields[statement.target] = f"{name}."
            case ast.FunctionDef(name=name):
                yield node.lineno, DEFINITION, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, VALUE, fields.get(node, "") + name
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, VALUE, name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield node.lineno, VALUE, name


def struck_in(path, source):
    """Return what should be named otherwise in a module."""
    struck = []
    rules = [rule for rule in RULES if path.startswith(rule.inside)]
    rules = [rule for rule in rules if not path.startswith(rule.allowed)]
    names = names_in(ast.parse(source))
    for line, what, name in ((1, DEFINITION, Path(path).stem), *names):
        for rule in rules:
            if what == rule.what and re.fullmatch(rule.name, name):
                struck.append(f"{path}:{line}: {name}; say {rule.say}")
    return struck


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_have_the_projects_words(folder):
    struck = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        struck += struck_in(name, path.read_text(encoding="utf-8"))
    assert struck == []


@pytest.mark.parametrize(
    ("path", "source", "name"),
    [
        ("fedrot/a.py", "found = 1", "found"),
        ("fedrot/a.py", "_found: list[int] = []", "_found"),
        ("fedrot/a.py", "for own in range(3): pass", "own"),
        ("fedrot/a.py", "def f(*, given=None): pass", "given"),
        ("fedrot/a.py", "f = lambda one: 1", "one"),
        ("strategies/a.py", "(theirs := 1)", "theirs"),
        ("strategies/a.py", "try: pass\nexcept E as one: pass", "one"),
        ("simulations/a.py", "class A:\n    said: str = ''", "A.said"),
        ("simulations/a.py", "class A:\n    def f(self): self._one = 1", "_one"),
        ("fedrot/task_head/names.py", "def head_of(): pass", "head_of"),
        ("strategies/lora.py", "class FittedHead: pass", "FittedHead"),
        ("fedrot/head.py", "", "head"),
        ("fedrot/task_head/outputs.py", "class Problem: pass", "Problem"),
        ("fedrot/task_head/ballots.py", "", "ballots"),
        ("strategies/fitting/ask.py", "def ask(step): pass", "step"),
        ("fedrot/symmetry/groups.py", "class Group:\n    kind: str", "Group.kind"),
        ("fedrot/report.py", "class GroupReport:\n    found: float", ""),
        ("fedrot/matching/problem.py", "class Problem: pass", ""),
        ("fedrot/matching/heads.py", "def match_heads(): pass", ""),
        ("fedrot/task_head/fit.py", "def with_task_head(step): return found", ""),
    ],
)
def test_a_struck_word_is_seen(path, source, name):
    expected = [name] if name else []
    assert [s.split(": ")[1].split(";")[0] for s in struck_in(path, source)] == expected
