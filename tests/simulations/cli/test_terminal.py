"""What the commands print: help that can be copied, versions, and text that is never markup."""

from __future__ import annotations

import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.experiment_commands import experiments_of
from fedrot.simulations.settings import Experiment
from tests.models import fresh_model
from tests.simulations.commands import invoke

GROUP = typer.main.get_command(app)
assert isinstance(GROUP, click.Group)
COMMANDS = GROUP.commands
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_describes_every_option(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(app, [name, "--help"]).output
    assert len(output.splitlines()) <= 37
    assert max(map(len, output.splitlines())) <= 80
    written = "".join(output.split())
    for parameter in COMMANDS[name].params:
        if not getattr(parameter, "hidden", False):
            said = str(getattr(parameter, "help", None) or "")
            assert said
            assert "".join(said.split()) in written


def test_a_simulation_has_at_most_fifteen_options() -> None:
    options = [p for p in COMMANDS["simulate"].params if isinstance(p, click.Option)]
    assert len(options) <= 15
    assert {str(p.name) for p in options} - {*Experiment.model_fields} == {
        *("out", "workers", "dry_run", "settings")
    }


@pytest.mark.parametrize("name", ["[/x]", "[red]x"])
def test_brackets_in_a_name_are_no_markup(name: str, tmp_path: Path) -> None:
    code, output = invoke("check", name)
    assert (code, f"'{name}' cannot be loaded" in output) == (2, True), output
    folder = tmp_path / name
    fresh_model("bert-classifier").save_pretrained(folder)
    code, output = invoke("check", folder)
    assert code == 0, output
    code, output = invoke("report", folder)
    assert f"'{tmp_path}/{name}/config.json' is not that of a run" in output


# Examples


def examples(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command lines that a help ends with at the usual width."""
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    lines = [line.strip() for line in result.output.rstrip().splitlines()]
    start = max(i for i, line in enumerate(lines) if line in ("Example:", "Examples:"))
    return [line for line in lines[start + 1 :] if line]


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
            given = {k: v for k, v in context.params.items() if k in Experiment.model_fields and v}
            file = context.params["file"]
            assert experiments_of(Path(file) if file else None, given, quick=False)


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
        ("fedrot simulate de", {"demo"}),
    ],
)
def test_the_shell_completes_commands_and_files(
    words: str, completed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"_FEDROT_COMPLETE": "complete_bash", "COMP_WORDS": words}
    asked["COMP_CWORD"] = str(len(words.split()) - 1)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, [], prog_name="fedrot", complete_var="_FEDROT_COMPLETE")
    assert set(result.stdout.split()) == completed
