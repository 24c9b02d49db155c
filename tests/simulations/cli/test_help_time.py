"""Help, the version and a wrong option appear before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fedrot.aggregation import aggregations
from fedrot.simulations.barrier import barrier_methods, barrier_settings
from fedrot.simulations.merge import merge_settings
from tests.simulations.cli.test_terminal import COMMANDS

HEAVY = {
    *("torch", "scipy", "transformers", "flwr", "datasets", "flwr_datasets", "matplotlib", "ray"),
    *("numpy", "pyarrow", "pandas", "safetensors", "huggingface_hub", "peft", "sklearn", "jinja2"),
}


def loaded(*lines: tuple[str, ...]) -> tuple[list[int], set[str]]:
    """Run the command with each of these arguments in a new process; return exit codes and modules."""
    code = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from fedrot.__main__ import main\n"
        "from fedrot.simulations.cli.app import app\n"
        f"codes = [CliRunner().invoke(app, line).exit_code for line in {lines!r}]\n"
        "print(json.dumps([codes, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    codes, modules = json.loads(result.stdout)
    return codes, set(modules)


def test_help_and_mistakes_import_nothing_heavy() -> None:
    helps = [("--help",), ("--version",), *((name, "--help") for name in COMMANDS)]
    mistakes = [("--wrong",), ("wrong",), *((name, "--wrong") for name in COMMANDS)]
    codes, modules = loaded(*helps, *mistakes)
    assert codes == [0] * len(helps) + [2] * len(mistakes)
    assert modules & HEAVY == set()
    assert "fedrot" in modules


def test_fedrot_itself_imports_nothing_until_a_name_is_used() -> None:
    code = (
        "import sys, fedrot; assert 'torch' not in sys.modules\n"
        "fedrot.align; print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "True"


def test_light_modules_name_what_the_heavy_ones_have() -> None:
    assert [*barrier_methods.METHODS] == [*barrier_settings.METHOD_NAMES]
    assert {entry.name for entry in aggregations({"symmetry"})} == {*merge_settings.METHOD_NAMES}


def test_every_public_name_is_there() -> None:
    import fedrot

    assert all(getattr(fedrot, name) is not None for name in fedrot.__all__)
    assert {*fedrot.__all__, "__version__"} <= {*dir(fedrot)}
    with pytest.raises(AttributeError, match="wrong"):
        fedrot.wrong  # type: ignore[attr-defined]  # noqa: B018
