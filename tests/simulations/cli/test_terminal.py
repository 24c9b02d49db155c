"""What the commands print: help that fits a screen, examples that work, text that is never markup."""

from __future__ import annotations

import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fedrot.simulations.cli import app as entry
from fedrot.simulations.cli.app import app
from fedrot.simulations.settings import Experiment, read_experiments
from tests.models import fresh_model
from tests.simulations.commands import invoke

GROUP: Any = typer.main.get_command(app)
COMMANDS = GROUP.commands
ROOT = Path(__file__).parents[3]


def help_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a command's help on a usual terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    return CliRunner().invoke(app, [*name.split(), "--help"]).output.splitlines()


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_a_screen_and_describes_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_of(name, monkeypatch)
    assert len(lines) <= 36
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "\\" not in text  # Typer escapes brackets.
    for parameter in COMMANDS[name].params if name else ():
        if parameter.param_type_name == "option":
            assert parameter.help
            assert parameter.help in text
        else:
            # Once in the usage, once in the description.
            assert text.count(parameter.name.upper()) >= 2 or name == "report"
    assert name != "simulate" or "[[strategy]]" in text


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_ends_with_examples_that_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of an example exists and takes its value; nothing is run."""
    lines = [line.strip() for line in help_of(name, monkeypatch)]
    start = max(i for i, line in enumerate(lines) if line in ("Example:", "Examples:"))
    found = [line for line in lines[start + 1 :] if line]
    assert found
    for line in found:
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("fedrot", name or command)
        given = COMMANDS[command].make_context(command, arguments).params
        if command == "simulate":
            fields = {k: v for k, v in given.items() if k in Experiment.model_fields and v is not None}
            file = given["file"] and Path(given["file"])
            assert read_experiments(file, fields) if file else Experiment.from_flat(fields)


@pytest.mark.parametrize("name", ["[/x]", "[red]x"])
def test_brackets_in_a_name_are_no_markup(name: str, tmp_path: Path) -> None:
    code, output = invoke("check", name)
    assert (code, f"'{name}' cannot be loaded" in output) == (2, True), output
    folder = tmp_path / name
    fresh_model("bert-classifier").save_pretrained(folder)
    code, output = invoke("check", folder)
    assert code == 0, output
    code, output = invoke("report", folder)
    assert f"'{tmp_path}/{name}" in output


def project_version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_package_can_be_run_as_a_module_and_says_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry, "prepare", lambda: None)
    monkeypatch.setattr(sys, "argv", ["fedrot", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fedrot", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fedrot {project_version()}\n"
