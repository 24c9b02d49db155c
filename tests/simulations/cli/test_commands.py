"""Options, values of a file, errors in one line, and what is noted of a command."""

import errno
import json
import shlex

import click
import pytest
import typer

from fedrot.simulations import INSTALL, simulate
from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.commands import BAD_INPUT, FAILED, INTERRUPTED, command_line
from fedrot.simulations.cli.experiment_commands import RAY
from fedrot.simulations.engine import Machine
from fedrot.simulations.experiment import Experiment
from tests.simulations.commands import invoke, run


@pytest.fixture
def seen(
    monkeypatch,
):
    """Arguments of the runs that commands would start."""
    calls = []
    monkeypatch.setattr(
        simulate, "simulate", lambda *given, **options: calls.append((given, options))
    )
    return calls


def test_simulate_has_at_most_sixteen_options_and_each_is_a_setting_or_of_the_run():
    group = typer.main.get_command(app)
    options = [
        p for p in group.commands["simulate"].params if isinstance(p, click.Option)
    ]
    assert len(options) <= 16
    names = {str(option.name) for option in options}
    assert names - {*Experiment.model_fields} == {
        "out",
        "workers",
        "save",
        "dry_run",
        "settings",
    }
    for option in options:
        if option.name in Experiment.model_fields:
            assert option.help == Experiment.model_fields[str(option.name)].description
    assert all(field.description for field in Experiment.model_fields.values())
    assert RAY not in Experiment.model_fields


def test_options_reach_the_run(seen, tmp_path):
    given = (
        "--seeds 5,6 --strategies fedavg,aligned --workers 3 --set lr=0.5 --set "
        "ray=here:1"
    )
    given += " --set start=scrambled --set weight-decay=0.25"
    assert invoke("simulate", "--out", tmp_path / "run", *given.split()) == (0, "")
    ((experiments, out, *_, machine), options) = seen[0]
    (found,) = experiments
    assert (found.seeds, found.lr, found.start, found.weight_decay) == (
        (5, 6),
        0.5,
        "scrambled",
        0.25,
    )
    assert [strategy.name for strategy in found.strategies] == ["fedavg", "aligned"]
    assert (out, machine, options) == (
        tmp_path / "run",
        Machine(3, "here:1"),
        {"save": None, "dry_run": False},
    )
    # Options replace the values of a file.
    file = tmp_path / "one.toml"
    file.write_text("[[experiment]]\nmodel = 'theirs'\nlocal_epochs = 2")
    given = (
        f"{file} --dry-run --model minilm --data-dir {tmp_path} --out {tmp_path}/run"
    )
    lora = 'lora={r = 2, target_modules = ["query"]}'
    run("simulate", *given.split(), "--set", lora)
    (((found,), *_), options) = seen[1]
    assert (found.model, found.data_dir, found.local_epochs) == ("minilm", tmp_path, 2)
    assert found.lora == {"r": 2, "target_modules": ["query"]}
    assert options == {"save": None, "dry_run": True}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["depth"], "--set depth: give NAME=VALUE; names are name, data,"),
        (["colour=red"], "--set colour=red: give NAME=VALUE"),
        (["depth=2", "depth=2"], "--set depth=2: 'depth' is given twice"),
        (["rounds=2"], "--set rounds=2: 'rounds' is given twice"),
        (["depth=many"], "Error in depth:"),
        (["layers=2,x", "model=m"], "Error in layers: '2,x'"),
        (["layers=all"], "Error in the settings: layers"),
        (["layers=2"], "depth is the number of layers"),
        (["depth=3", "model=m"], "Error in the settings: depth is for small models"),
    ],
)
def test_a_wrong_setting_is_named(entries, said, seen, tmp_path):
    given = [part for entry in entries for part in ("--set", entry)]
    run("simulate", "--out", tmp_path / "o", "--rounds", 1, *given, code=2, says=said)
    assert not seen


#: An exception, its exit code and what is said.
ERRORS = [
    (RuntimeError("2 of 3 parts failed"), FAILED, "Error: 2 of 3 parts failed"),
    (ValueError("alpha is 0"), BAD_INPUT, "Error: alpha is 0"),
    (FileExistsError("it has a run"), BAD_INPUT, "Error: it has a run"),
    (
        OSError(errno.EIO, "Input/output error", "a"),
        BAD_INPUT,
        "Error: 'a': Input/output error.",
    ),
    (ModuleNotFoundError("give it"), BAD_INPUT, "Error: give it"),
    (
        ModuleNotFoundError("No", name="ray"),
        BAD_INPUT,
        f"Error: This command needs ray. {INSTALL}",
    ),
    (KeyboardInterrupt(), INTERRUPTED, ""),
    # An error of our own is no expected one: it is raised.
    (ModuleNotFoundError("No module", name="fedrot.wrong"), 1, ""),
]


@pytest.mark.parametrize(("error", "code", "said"), ERRORS, ids=repr)
def test_errors_become_a_line_and_a_code(
    error,
    code,
    said,
    tmp_path,
    monkeypatch,
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(simulate, "simulate", fail)
    found, output = invoke("simulate", "--out", tmp_path / "run")
    assert found == code
    assert output.startswith(said)
    assert bool(output) == bool(said)


def test_the_command_is_noted_as_a_shell_takes_it(
    monkeypatch,
):
    line = ["simulate", "--out", "my runs/a", "--set", "lora={r = 2}"]
    monkeypatch.setattr("sys.argv", ["/somewhere/fedrot", *line])
    assert shlex.split(command_line()) == ["fedrot", *line]


def test_a_flower_app_is_written_once(tmp_path):
    assert invoke("flower-app", tmp_path / "deep" / "app") == (
        0,
        f"Flower app: {tmp_path}/deep/app",
    )
    assert (
        "server_app:app" in (tmp_path / "deep" / "app" / "pyproject.toml").read_text()
    )
    code, said = invoke("flower-app", tmp_path / "deep" / "app")
    assert (code, said) == (
        2,
        f"Error: '{tmp_path}/deep/app' exists already. Choose a new folder.",
    )
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["app"]


def test_a_report_is_of_a_folder_or_a_file(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps(
            {"round": 1, "stage": "train", "metrics": {"fedrot-groups-moved": 1}}
        )
        + "\n"
    )
    page = tmp_path / "rows.html"
    assert invoke("report", rows) == (0, f"Report: {page}")
    assert page.is_file()
    for other in (tmp_path, tmp_path / "none"):
        run("report", other, code=2, says="is not a run folder")
