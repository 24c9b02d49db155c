"""Options that are generated from the fields of a settings model."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from fedrot.simulations import INSTALL
from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.commands import BAD_INPUT, FAILED, INTERRUPTED, command, command_line
from fedrot.simulations.cli.experiment_commands import MORE_SETTINGS
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation import grid_run, runner
from fedrot.simulations.jobs import Machine
from tests.simulations.commands import invoke


class Settings(BaseModel):
    kind: Literal["a", "b"] = Field("a", description="The kind.")
    data_dir: Path | None = Field(None, description="The folder.")
    name: str = Field("", description="The name.")
    limit: Annotated[int, Field(gt=0)] | None = Field(None, description="The limit.")
    rate: float = Field(0.5, description="The rate.")
    arms: tuple[str, ...] = Field(("x", "y"), description="The arms.")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0, 1, 2), description="The seeds.")
    hidden: int = 3


def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
    made, seen = typer.Typer(), {}

    @command(made, "fedrot x", fields=Settings, renamed={"arms": "--arm"}, leave_out=("hidden",))
    def only(settings: dict[str, Any], more: Annotated[int, typer.Option(help="More.")] = 1) -> None:
        """Do it."""
        seen.update(settings, more=more)

    result = CliRunner().invoke(made, arguments)
    return result.exit_code, seen, " ".join(result.output.split())


DEFAULTS = {
    "kind": "a",
    "data_dir": None,
    "name": None,
    "limit": None,
    "rate": 0.5,
    "arms": "x,y",
    "seeds": "3",
    "more": 1,
}


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("", {}),
        ("--kind c --name n", {"kind": "c", "name": "n"}),
        ("--data-dir some/where", {"data_dir": Path("some/where")}),
        ("--limit -1 --rate 2", {"limit": -1, "rate": 2.0}),
        ("--arm z --seeds 5 --more 7", {"arms": "z", "seeds": "5", "more": 7}),
    ],
)
def test_fields_are_options_with_their_types_and_defaults(line: str, changed: dict[str, Any]) -> None:
    assert run(*line.split())[:2] == (0, {**DEFAULTS, **changed})


@pytest.mark.parametrize("line", ["--limit x", "--arms z", "--hidden 1", "--settings y"])
def test_what_is_no_option_is_refused(line: str) -> None:
    code, seen, _ = run(*line.split())
    assert (code, seen) == (2, {})


def test_help_describes_the_fields() -> None:
    _, _, output = run("--help")
    for name, field in Settings.model_fields.items():
        assert (field.description or "--hidden") in output or name == "hidden"
    assert "hidden" not in output
    assert "[default: x,y]" in output


def test_every_setting_is_an_option() -> None:
    group: Any = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    options = {str(p.name): p for p in group.commands["simulate"].params}
    missing = {"setting", *MORE_SETTINGS}
    assert SimulationConfig.model_fields.keys() - options == missing
    for field, info in SimulationConfig.model_fields.items():
        assert info.description
        assert field in missing or options[field].help.replace("\\", "") == info.description  # type: ignore[attr-defined]


def test_a_tilde_is_the_home_folder_where_shells_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    code, seen, output = run("--data-dir=~/data", "--name=~/a.csv", "--arm=~b")
    assert code == 0, output
    assert (seen["data_dir"], seen["name"]) == (Path("/home/me/data"), "/home/me/a.csv")
    assert seen["arms"] == "~b"


def test_the_command_line_wins_over_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text(
        '[base]\ndata_dir = "elsewhere"\nlocal_epochs = 2\n[[setting]]\nmodel = "theirs"\n'
        '[[setting]]\nsetting = "b"\nmodel = "others"\n'
    )
    seen: list[Any] = []
    monkeypatch.setattr(grid_run, "simulate", lambda *given, **options: seen.append((given, options)))
    run = ("simulate", grid, "--out", tmp_path / "run")
    assert invoke(*run, "--workers", 3, "--ray", "there:1")[0] == 0
    own = ("--data-dir", tmp_path / "here", "--model", "mine", "--gpus", 0.5, "--dry-run")
    assert invoke(*run, *own)[0] == 0
    (grids, out, *_, machine), options = seen[0]
    assert [(config.model, config.data_dir) for config in grids] == [
        ("theirs", Path("elsewhere")),
        ("others", Path("elsewhere")),
    ]
    assert (out, machine, options) == (tmp_path / "run", Machine(3, "there:1"), {"dry_run": False})
    (grids, *_, machine), options = seen[1]
    assert [(config.model, config.data_dir) for config in grids] == [("mine", tmp_path / "here")] * 2
    assert [config.local_epochs for config in grids] == [2, 2]
    assert (machine, options) == (Machine(gpus=0.5), {"dry_run": True})


def test_two_settings_of_one_name_are_refused(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text('[[setting]]\nsetting = "a"\n[[setting]]\nsetting = "a"\nlr = 0.5\n')
    code, output = invoke("simulate", grid, "--out", tmp_path / "run")
    said = "Two settings have the same name among ['a', 'a']"
    assert (code, said in output) == (BAD_INPUT, True), output


def test_options_of_a_simulation_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(grid_run, "simulate", lambda *a, **k: seen.append((a, k)))
    out = tmp_path / "run"
    options = ("--seeds", "5-6", "--lr", 0.5, "--gpus", 0.5, "--start", "same,scrambled")
    options += ("--workers", 3)
    assert invoke("simulate", "--out", out, *options)[0] == 0
    ((config,), path, *_, machine), given = seen[0]
    assert (config.seeds, config.lr, config.starts) == ((5, 6), 0.5, ("same", "scrambled"))
    assert (path, machine, given) == (out, Machine(3, gpus=0.5), {"dry_run": False})
    # Without --arms those of the other settings are run.
    lora = ("--model", "some/model", "--lora", "r=2,targets=query", "--dry-run")
    assert invoke("simulate", "--out", out, *lora)[0] == 0
    ((config,), *_), given = seen[1]
    assert (config.arms, given["dry_run"]) == (("plain", "lora-exact"), True)
    assert len(seen) == 2


def test_errors_become_a_line_and_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "out")
    for error, code, said in (
        (RuntimeError("2 of 3 cells failed"), FAILED, "Error: 2 of 3 cells failed"),
        (ValueError("alpha is 0"), BAD_INPUT, "Error: alpha is 0"),
        (FileExistsError("it holds a run"), BAD_INPUT, "Error: it holds a run"),
        (
            PermissionError(errno.EACCES, "Permission denied", file),
            BAD_INPUT,
            f"Error: '{file}': Permission denied. Change its permissions, or choose another place.",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", file),
            BAD_INPUT,
            f"Error: '{file}': No space left on device. Free some space, or choose another place.",
        ),
        (
            OSError(errno.EIO, "Input/output error", file),
            BAD_INPUT,
            f"Error: '{file}': Input/output error.",
        ),
        (ModuleNotFoundError("give it"), BAD_INPUT, "Error: give it"),
        (
            ModuleNotFoundError("No module named 'ray'", name="ray"),
            BAD_INPUT,
            f"Error: This command needs ray. {INSTALL}",
        ),
        (KeyboardInterrupt(), INTERRUPTED, ""),
    ):

        def fail(*_: Any, error: BaseException = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(grid_run, "simulate", fail)
        found = invoke("simulate", "--out", tmp_path / "run")
        assert found == (code, said)


def test_the_command_is_noted_as_a_shell_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["simulate", "--out", "my runs/a", "--arms", "lora-mean(residual=fold)"]
    monkeypatch.setattr("sys.argv", ["/somewhere/fedrot", *line])
    assert shlex.split(command_line()) == ["fedrot", *line]


def test_the_report_of_a_run_is_also_written_as_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Path] = []
    monkeypatch.setattr(runner, "present", lambda folder, console: shown.append(folder))
    row = {"setting": "a", "arm": "plain", "start": "same", "seed": 0, "round": 1, "scope": "central"}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "metric": "loss", "value": 0.25}) + "\n")
    assert invoke("report", tmp_path) == (0, "")
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
    assert invoke("report", tmp_path, "--markdown", tmp_path / "results.md") == (0, "")
    assert shown == [tmp_path] * 2
    assert "| plain | 0.250 | - | - |" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize("entry", ["layers", "lr=1", "colour=red", "setting=x", "=2"])
def test_other_settings_are_named_and_each_is_given_once(entry: str, tmp_path: Path) -> None:
    code, output = invoke("simulate", "--out", tmp_path / "o", "--set", entry)
    assert (code, f"--set {entry}: give NAME=VALUE, each name once; one of" in output) == (2, True)
    code, output = invoke("simulate", "--out", tmp_path / "o", *["--set", "layers=2"] * 2)
    assert (code, "--set layers=2: give NAME=VALUE" in output) == (2, True)


def test_what_has_no_option_of_its_own_is_set_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(grid_run, "simulate", lambda configs, *_, **__: seen.extend(configs))
    given = [o for entry in ("layers=3", "weight-decay = 0.5", "holdout=0.25") for o in ("--set", entry)]
    code, output = invoke("simulate", "--out", tmp_path / "o", *given)
    assert code == 0, output
    assert [(c.layers, c.weight_decay, c.holdout, c.width) for c in seen] == [(3, 0.5, 0.25, 128)]
    code, output = invoke("simulate", "--out", tmp_path / "o", "--set", "layers=many")
    assert (code, "Error in layers:" in output) == (2, True)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (("--layers", "2"), "Did you mean '--set layers=VALUE'?"),
        (("--epochs", "2"), "--local-epochs"),
        (("--arms", "plain,alligned"), "did you mean 'aligned'?"),
        (("--arms", "plain+taskhead"), "did you mean 'plain+task-head'?"),
    ],
)
def test_a_likely_name_is_suggested(given: tuple[str, str], advice: str, tmp_path: Path) -> None:
    code, output = invoke("simulate", "--out", tmp_path / "o", *given)
    assert code == 2
    assert advice in output.replace("│ │ ", "")
