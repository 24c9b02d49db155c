"""Options that are generated from the fields of a settings model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from fedrot.simulations.barrier.barrier_settings import BarrierSettings
from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.commands import command
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.merge.merge_settings import MergeSettings


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
    "seeds": 3,
    "more": 1,
}


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("", {}),
        ("--kind c --name n", {"kind": "c", "name": "n"}),
        ("--data-dir some/where", {"data_dir": Path("some/where")}),
        ("--limit -1 --rate 2", {"limit": -1, "rate": 2.0}),
        ("--arm z --seeds 5 --more 7", {"arms": "z", "seeds": 5, "more": 7}),
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


@pytest.mark.parametrize(
    ("name", "model", "missing"),
    [
        ("simulate", SimulationConfig, {"setting"}),
        ("barrier", BarrierSettings, set()),
        ("merge", MergeSettings, set()),
    ],
)
def test_every_setting_is_an_option(name: str, model: type[BaseModel], missing: set[str]) -> None:
    group: Any = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    options = {str(p.name): p for p in group.commands[name].params}
    assert set(model.model_fields) - set(options) == missing
    for field, info in model.model_fields.items():
        assert info.description
        assert field in missing or options[field].help.replace("\\", "") == info.description  # type: ignore[attr-defined]


def test_a_tilde_is_the_home_folder_where_shells_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    code, seen, output = run("--data-dir=~/data", "--name=~/a.csv", "--arm=~b")
    assert code == 0, output
    assert (seen["data_dir"], seen["name"]) == (Path("/home/me/data"), "/home/me/a.csv")
    assert seen["arms"] == "~b"
