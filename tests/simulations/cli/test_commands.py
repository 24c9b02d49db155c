"""Options, values of a file, errors in one line, and what is noted of a command."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from pydantic import BaseModel

from fedrot.simulations import INSTALL, simulate
from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.commands import BAD_INPUT, FAILED, INTERRUPTED, command_line
from fedrot.simulations.cli.experiment_commands import RAY
from fedrot.simulations.engine import Machine
from fedrot.simulations.settings import Experiment
from tests.simulations.commands import invoke

FILE = """
[base]
data_dir = "elsewhere"
local_epochs = 2
[[strategy]]
name = "ffn only"
alignment = { parts = ["ffn"] }
[[experiment]]
name = "a"
model = "theirs"
strategies = ["fedavg", "ffn only"]
[[experiment]]
name = "b"
"""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of the runs that commands would start."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(simulate, "simulate", lambda *given, **options: calls.append((given, options)))
    return calls


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(FILE)
    return path


def test_simulate_has_at_most_fifteen_options_and_each_is_a_setting_or_of_the_run() -> None:
    group: Any = typer.main.get_command(app)
    options = [p for p in group.commands["simulate"].params if isinstance(p, click.Option)]
    assert len(options) <= 15
    names = {str(option.name) for option in options}
    assert names - {*Experiment.model_fields} == {"out", "workers", "dry_run", "settings"}
    for option in options:
        if option.name in Experiment.model_fields:
            assert option.help == Experiment.model_fields[str(option.name)].description
    assert all(field.description for field in Experiment.model_fields.values())
    assert RAY not in Experiment.model_fields


def test_options_reach_the_run(seen: list[Any], tmp_path: Path) -> None:
    given = "--seeds 5,6 --strategies fedavg,aligned --workers 3 --set lr=0.5 --set ray=here:1"
    given += " --set start=scrambled --set weight-decay=0.25"
    assert invoke("simulate", "--out", tmp_path / "run", *given.split()) == (0, "")
    ((experiments, out, *_, machine), options) = seen[0]
    (found,) = experiments
    assert (found.seeds, found.lr, found.start, found.weight_decay) == ((5, 6), 0.5, "scrambled", 0.25)
    assert [strategy.name for strategy in found.strategies] == ["fedavg", "aligned"]
    assert (out, machine, options) == (tmp_path / "run", Machine(3, "here:1"), {"dry_run": False})
    # Without strategies, those that go with the other settings.
    lora = '{r = 2, target_modules = ["query"]}'
    options = ("--dry-run", "--model", "minilm", "--set", f"lora={lora}")
    assert invoke("simulate", "--out", tmp_path / "run", *options)[0] == 0
    ((experiments, *_), options) = seen[1]
    assert "exact" in [strategy.name for strategy in experiments[0].strategies]
    assert options == {"dry_run": True}


def test_options_replace_the_values_of_a_file(seen: list[Any], file: Path, tmp_path: Path) -> None:
    run = ("simulate", file, "--out", tmp_path / "run")
    assert invoke(*run, "--set", "ray=there:1") == (0, "")
    own = ("--data-dir", tmp_path, "--model", "mine", "--set", "lr=0.5")
    assert invoke(*run, *own) == (0, "")
    (first, _, _, _, machine), _ = seen[0]
    assert machine == Machine(ray="there:1")
    assert [(e.model, e.data_dir, e.rounds) for e in first] == [
        *(("theirs", Path("elsewhere"), 3), (None, Path("elsewhere"), 3))
    ]
    assert [strategy.name for strategy in first[1].strategies] == ["fedavg", "ffn only"]
    (second, *_), _ = seen[1]
    assert [(e.model, e.data_dir, e.rounds, e.lr) for e in second] == [("mine", tmp_path, 3, 0.5)] * 2
    assert [experiment.local_epochs for experiment in second] == [2, 2]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["layers"], "--set layers: give NAME=VALUE; names are name, data,"),
        (["=2"], "--set =2: give NAME=VALUE"),
        (["colour=red"], "--set colour=red: give NAME=VALUE"),
        (["layers=2", "layers=2"], "--set layers=2: 'layers' is given twice"),
        (["ray=a", "ray=b"], "--set ray=b: 'ray' is given twice"),
        (["rounds=2"], "--set rounds=2: 'rounds' is given twice"),
        (["layers=many"], "Error in layers:"),
    ],
)
def test_a_wrong_setting_is_named(
    entries: list[str], said: str, seen: list[Any], tmp_path: Path
) -> None:
    given = [part for entry in entries for part in ("--set", entry)]
    code, output = invoke("simulate", "--out", tmp_path / "o", "--rounds", 1, *given)
    assert (code, said in output) == (BAD_INPUT, True), output
    assert not seen


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FILE.replace('"b"', '"a"'), "needs its own name: a, a"),
        (FILE.replace('"ffn only"]', '"fnn"]'), "unknown strategy 'fnn'"),
        (FILE.replace("parts", "part"), ""),
        (FILE + "[other]\n", "but no 'other'"),
        ("[base]\n", "needs a table [[experiment]]"),
        ("a", "is no TOML"),
    ],
)
def test_a_wrong_file_is_refused(text: str, said: str, file: Path, tmp_path: Path) -> None:
    file.write_text(text)
    code, output = invoke("simulate", file, "--dry-run", "--out", tmp_path / "run")
    assert (code, said in output) == (BAD_INPUT, True), output
    assert not (tmp_path / "run").exists()


class Wanted(BaseModel):
    number: int


def invalid() -> Exception:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Wanted(number="x")  # type: ignore[arg-type]
    return caught.value


#: An exception, its exit code and what is said.
ERRORS: list[tuple[BaseException, int, str]] = [
    (RuntimeError("2 of 3 parts failed"), FAILED, "Error: 2 of 3 parts failed"),
    (ValueError("alpha is 0"), BAD_INPUT, "Error: alpha is 0"),
    (FileExistsError("it has a run"), BAD_INPUT, "Error: it has a run"),
    (OSError(errno.EIO, "Input/output error", "a"), BAD_INPUT, "Error: 'a': Input/output error."),
    (ModuleNotFoundError("give it"), BAD_INPUT, "Error: give it"),
    (ModuleNotFoundError("No", name="ray"), BAD_INPUT, f"Error: This command needs ray. {INSTALL}"),
    (invalid(), BAD_INPUT, "Error in number: Input should be a valid integer, unable to parse"),
    (KeyboardInterrupt(), INTERRUPTED, ""),
]


@pytest.mark.parametrize(("error", "code", "said"), ERRORS, ids=repr)
def test_errors_become_a_line_and_a_code(
    error: BaseException, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(simulate, "simulate", fail)
    found, output = invoke("simulate", "--out", tmp_path / "run")
    assert found == code
    assert output.startswith(said)
    assert bool(output) == bool(said)


def test_an_error_of_ours_is_no_expected_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module", name="fedrot.wrong")

    monkeypatch.setattr(simulate, "simulate", fail)
    assert invoke("simulate", "--out", tmp_path / "run") == (1, "")


def test_the_command_is_noted_as_a_shell_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["simulate", "--out", "my runs/a", "--set", "lora={r = 2}"]
    monkeypatch.setattr("sys.argv", ["/somewhere/fedrot", *line])
    assert shlex.split(command_line()) == ["fedrot", *line]


def test_a_flower_app_is_written_once(tmp_path: Path) -> None:
    assert invoke("flower-app", tmp_path / "deep" / "app") == (0, f"Flower app: {tmp_path}/deep/app")
    assert "server_app:app" in (tmp_path / "deep" / "app" / "pyproject.toml").read_text()
    code, said = invoke("flower-app", tmp_path / "deep" / "app")
    assert (code, said) == (2, f"Error: '{tmp_path}/deep/app' exists already. Choose a new folder.")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["app"]


def test_a_report_is_of_a_folder_or_a_file(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        json.dumps({"round": 1, "stage": "train", "metrics": {"fedrot-groups-moved": 1}}) + "\n"
    )
    page = tmp_path / "rows.html"
    assert invoke("report", rows) == (0, f"Report: {page}")
    assert page.is_file()
    for other in (tmp_path, tmp_path / "none"):
        code, output = invoke("report", other)
        assert (code, "is not a run folder" in output) == (BAD_INPUT, True), output
