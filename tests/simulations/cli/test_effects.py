"""An option that would change nothing beside the others is refused before anything is read."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.effects import EFFECTS
from fedrot.simulations.cli.experiment_commands import MORE_SETTINGS
from fedrot.simulations.config import SimulationConfig
from tests.simulations.commands import invoke

#: Command lines with an idle option, and what is said of it. Nothing named here exists.
IDLE = {
    "merge a b --dry-run --rank 2 --method mean": (
        "--method and --rank have an effect only on LoRA adapters. Leave them out."
    ),
    "merge {adapter} b --dry-run --parts ffn": "--parts has an effect only on models, not on LoRA",
    "simulate --out o --model m --set layers=2": "--set layers has an effect only on a small model",
    "simulate --out o --model m --set width=8": "--set width has an effect only on a small model",
    "simulate --out o --model m --set heads=2": "--set heads has an effect only on a small model",
    "simulate --out o --model m --set dropout=0": "--set dropout has an effect only on a small model",
    "simulate --out o --task image --max-length 9": "--max-length has an effect only on texts",
    "simulate --out o --set server-lr=1": "--set server_lr has an effect only beside --set server=adam",
    "report {file} --markdown m": "--markdown has an effect only for a run folder",
    "report . --out o": "--out has an effect only for a strategy's file",
}


def _alone(command: str, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield an option of a command with a value, for each of some parameters, and the option."""
    group: Any = typer.main.get_command(app)
    for option in (p for p in group.commands[command].params if p.name in names):
        yield f"{option.opts[-1]}{'' if option.is_flag else ' 1'}", option.opts[-1]


#: What a grid's file says.
IDLE |= {
    f"simulate demo --out o {given}": f"{option} has an effect only without a grid"
    for given, option in _alone("simulate", SimulationConfig.model_fields.keys() - {"data_dir", "model"})
}
IDLE |= {
    f"simulate --out o {option}": f"{option[:-2]} has an effect only with --start pretrained"
    for option in (f"--set pretrain_{name}=1" for name in ("data", "limit", "epochs"))
}
IDLE |= {
    "simulate demo --out o --set layers=2": "--set has an effect only without a grid",
    "simulate --out o --quick": "--quick has an effect only with a grid",
}

#: The same options where they do something: the complaint is about something else.
AT_WORK = (
    "merge ./a ./b --dry-run --parts residual+ffn",
    "simulate --out o --partition dirichlet:0 --set layers=1 --set width=8 --set heads=2"
    " --set dropout=0 --max-length 9",
    "simulate --out o --partition dirichlet:0 --set server=yogi --set server_lr=1",
    "simulate --out o --partition dirichlet:0 --workers 2 --ray there:1",
    "simulate --out o --lora r=1,targets=q --set server=adam --set server_lr=1",
    "report nowhere --markdown m",
    "report nowhere --out o",
    "check nowhere/nothing/at/all --parts ffn",
)


@pytest.mark.parametrize("line", IDLE)
def test_an_option_without_an_effect_is_refused(
    line: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = tmp_path_factory.mktemp("adapter")
    (adapter / "adapter_config.json").write_text("{}")
    code, output = invoke(*shlex.split(line.format(file=__file__, adapter=adapter)))
    assert (code, IDLE[line] in output) == (2, True), output
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("line", AT_WORK)
def test_an_option_with_an_effect_is_not_complained_of(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = invoke(*shlex.split(line))
    assert code == 2
    assert "an effect" not in output


def test_every_condition_is_about_options_of_its_command_that_are_tried_here() -> None:
    group: Any = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    for command, effects in EFFECTS.items():
        parameters = {str(p.name): p.opts[-1] for p in group.commands[command].params}
        tried = [line.split() for line in IDLE if line.startswith(f"{command} ")]
        of_grids = set(MORE_SETTINGS) if command == "simulate" else set[str]()
        for name in {name for effect in effects for name in effect.parameters} - of_grids:
            option = parameters[name]
            assert name == "model" or any(option in line for line in tried)
