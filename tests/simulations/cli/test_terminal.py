"""What the commands print: help that can be copied, versions, and text that is never markup."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import click
import pytest
import typer
from typer.testing import CliRunner

from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.commands import Command
from fedrot.simulations.cli.commands import examples as examples_of
from fedrot.simulations.cli.experiment_commands import MORE_SETTINGS, PANELS
from fedrot.simulations.grids import read_grid
from fedrot.simulations.settings import Experiment
from tests.models import fresh_model
from tests.simulations.commands import invoke

GROUP = typer.main.get_command(app)
assert isinstance(GROUP, click.Group)
COMMANDS = GROUP.commands
ROOT = Path(__file__).parents[3]


def printed(*arguments: object) -> str:
    """Output without the frames of tables and without spaces, which depend on the width."""
    code, output = invoke(*arguments)
    assert code == 0, output
    return re.sub(r"[\s│]", "", output)


def declared(name: str) -> list[str]:
    """The help texts of a command's parameters as they are written in the source."""
    (callback,) = (
        command.callback
        for command in app.registered_commands
        if command.callback and command.callback.__name__ == name.replace("-", "_")
    )
    hints = get_type_hints(callback, include_extras=True)
    return [info.help for hint in hints.values() for info in get_args(hint)[1:]]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_printed_as_it_is_written(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    output = printed(name, "--help")
    texts = declared(name)
    assert len(texts) == len(COMMANDS[name].params) > 0
    for text in texts:
        assert "".join(text.split()) in output


def test_help_shows_the_brackets_of_tables() -> None:
    assert "[base]and[[setting]]tables" in printed("simulate", "--help")


def test_brackets_in_a_commands_own_help_and_examples_are_text() -> None:
    made = typer.Typer()

    @made.command(cls=Command, epilog=examples_of("fedrot x [ot]"))
    def only() -> None:
        """Install fedrot[ot]."""

    output = CliRunner().invoke(made, ["--help"]).output
    assert "Install fedrot[ot]." in output
    assert "fedrot x [ot]" in output


@pytest.mark.parametrize("name", ["[/x]", "[red]x"])
def test_brackets_in_a_name_are_no_markup(name: str, tmp_path: Path) -> None:
    code, output = invoke("check", name)
    assert (code, f"'{name}' cannot be loaded" in output) == (2, True), output
    folder = tmp_path / name
    fresh_model("bert-classifier").save_pretrained(folder)
    code, output = invoke("check", folder)
    assert code == 0, output
    code, output = invoke("report", folder)
    assert f"'{tmp_path}/{name}' is not a run folder" in output


# Examples


def examples(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command lines that a help ends with at the usual width."""
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    lines = [line.strip() for line in result.output.rstrip().splitlines()]
    start = max(i for i, line in enumerate(lines) if line in ("Example:", "Examples:"))
    return lines[start + 1 :]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_ends_with_examples_that_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of an example exists and takes its value; nothing is run."""
    found = examples(name, monkeypatch)
    assert found
    for line in found:
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("fedrot", name or command)
        context = COMMANDS[command].make_context(command, arguments)
        if command == "simulate":
            settings = {k: v for k, v in context.params.items() if k in Experiment.model_fields}
            Experiment.from_flat(settings)
        if context.params.get("grid"):  # a bundled one
            assert read_grid(Path(context.params["grid"]), "setting")


def test_every_setting_is_in_one_panel_of_the_help_or_among_the_others() -> None:
    listed = [*MORE_SETTINGS, *(name for names in PANELS.values() for name in names)]
    assert sorted(listed) == sorted(Experiment.model_fields.keys() - {"setting"})
    printed = invoke("simulate", "--help")[1]
    assert f"One of {', '.join(MORE_SETTINGS)}." in printed.replace(" │ │ ", " ")
    assert [panel for panel in PANELS if f"─ {panel} ─" in printed] == [*PANELS]


# Versions


def project_version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_version_is_the_projects() -> None:
    assert invoke("--version") == (0, f"fedrot {project_version()}")


def test_the_package_can_be_run_as_a_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedrot", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fedrot", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fedrot {project_version()}\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("fedrot simu", {"simulate"}),
        ("fedrot simulate stre", {"stream-rounds"}),
    ],
)
def test_the_shell_completes_commands_and_grids(
    words: str, completed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"_FEDROT_COMPLETE": "complete_bash", "COMP_WORDS": words}
    asked["COMP_CWORD"] = str(len(words.split()) - 1)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, [], prog_name="fedrot", complete_var="_FEDROT_COMPLETE")
    assert set(result.stdout.split()) == completed
