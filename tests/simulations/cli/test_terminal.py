"""What the commands print: help that fits a screen, examples that work, text that is
never markup.
"""

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import fedrot
from fedrot.simulations import INSTALL
from fedrot.simulations.cli.app import app
from fedrot.simulations.experiment import Experiment, read_experiments
from tests.models import fresh_model
from tests.simulations.commands import run

GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands


def help_of(name, monkeypatch):
    """The lines of a command's help on a usual terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    return CliRunner().invoke(app, [*name.split(), "--help"]).output.splitlines()


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_a_screen_and_describes_everything(name, monkeypatch):
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
def test_help_ends_with_examples_that_work(name, monkeypatch):
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
            fields = {
                k: v
                for k, v in given.items()
                if k in Experiment.model_fields and v is not None
            }
            file = given["file"] and Path(given["file"])
            assert (
                read_experiments(file, fields) if file else Experiment.from_flat(fields)
            )


@pytest.mark.parametrize("name", ["[/x]", "[red]x"])
def test_brackets_in_a_name_are_no_markup(name, tmp_path):
    run("check", name, code=2, says=f"'{name}' cannot be loaded")
    folder = tmp_path / name
    fresh_model("bert-classifier").save_pretrained(folder)
    run("check", folder)
    run("report", folder, code=2, says=f"'{tmp_path}/{name}")


HEAVY = {
    "torch",
    "scipy",
    "transformers",
    "flwr",
    "datasets",
    "flwr_datasets",
    "matplotlib",
    "ray",
    "numpy",
    "pyarrow",
    "pandas",
    "safetensors",
    "huggingface_hub",
    "peft",
    "sklearn",
    "jinja2",
}

#: Mistakes in the values of options, and in a setting.
MISTAKES = (
    "--task wrong",
    "--rounds -1",
    "--rounds much",
    "--seeds 3-1",
    "--wrong 1",
    "--set wrong=1",
    "--set width=0",
    "--set start=wrong",
    "--model minilm --set width=8",
    "--set architecture=vit",
    "--task mlm --set label_kind=single",
    "a.toml",
    "--strategies wrong",
    "--set lora=r",
)


def results_of(*lines, lacking=(), cwd=None):
    """Run commands in one new process, where the modules ``lacking`` cannot be
    imported.

    Return their exit codes and outputs, and the modules that were imported.
    """
    code = (
        f"import json, sys\nsys.modules.update(dict.fromkeys({[*lacking]!r}))\nfrom "
        "typer.testing import CliRunner\nfrom fedrot.__main__ import main\nfrom "
        "fedrot.simulations.cli.app import app\nfound = [CliRunner().invoke(app, "
        f"line.split()) for line in {lines!r}]\nnames = {{name.partition('.')[0] for "
        "name, module in sys.modules.items() if "
        "module}\nprint(json.dumps([[r.exit_code for r in found], [r.output for r in "
        "found], [*names]]))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=cwd
    )
    codes, outputs, modules = json.loads(result.stdout)
    return codes, [" ".join(output.split()) for output in outputs], set(modules)


HELPS = ("--help", "--version", *(f"{name} --help" for name in COMMANDS))


def test_help_and_unknown_options_import_nothing_heavy():
    wrong = ["--wrong", "wrong", *(f"{name} --wrong" for name in COMMANDS)]
    codes, outputs, modules = results_of(*HELPS, *wrong)
    assert codes == [0] * len(HELPS) + [2] * len(wrong), outputs
    assert modules & HEAVY == set()
    version = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())[
        "project"
    ]
    assert outputs[1] == f"fedrot {version['version']}"


def test_mistakes_in_settings_import_nothing_heavy_but_numpy(tmp_path):
    (tmp_path / "a.toml").write_text("[[experiment]]\nwrong = 1\n")
    lines = [f"simulate --out run {mistake}" for mistake in MISTAKES]
    codes, outputs, modules = results_of(*lines, cwd=tmp_path)
    assert codes == [2] * len(lines), outputs
    assert modules & HEAVY <= {"numpy"}


def test_a_run_without_a_package_names_it():
    codes, outputs, _ = results_of(
        *HELPS, "simulate --out run", lacking=["transformers"]
    )
    assert codes == [0] * len(HELPS) + [2], outputs
    assert outputs[-1] == f"Error: This command needs transformers. {INSTALL}"


def test_every_public_name_is_there():
    assert all(getattr(fedrot, name) is not None for name in fedrot.__all__)
    assert {*fedrot.__all__, "__version__"} <= {*dir(fedrot)}
    with pytest.raises(AttributeError, match="wrong"):
        fedrot.wrong  # type: ignore[attr-defined]  # noqa: B018
