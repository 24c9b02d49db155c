"""Help, the version and a mistake in an option appear before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from fedrot.simulations import INSTALL
from tests.simulations.cli.test_terminal import COMMANDS

HEAVY = {
    *("torch", "scipy", "transformers", "flwr", "datasets", "flwr_datasets", "matplotlib", "ray"),
    *("numpy", "pyarrow", "pandas", "safetensors", "huggingface_hub", "peft", "sklearn", "jinja2"),
}

#: Mistakes in the values of options, and in a setting.
MISTAKES = (
    *("--task wrong", "--rounds -1", "--rounds much", "--seeds 3-1", "--wrong 1"),
    *("--set wrong=1", "--set width=0", "--set start=wrong", "--model minilm --set width=8"),
    *("--set architecture=vit", "--task mlm --set label_kind=single", "a.toml"),
    *("--strategies wrong", "--set lora=r"),
)


def results_of(
    *lines: str, lacking: Iterable[str] = (), cwd: Path | None = None
) -> tuple[list[int], list[str], set[str]]:
    """Run commands in one new process, where the modules ``lacking`` cannot be imported.

    Return their exit codes and outputs, and the modules that were imported.
    """
    code = (
        "import json, sys\n"
        f"sys.modules.update(dict.fromkeys({[*lacking]!r}))\n"
        "from typer.testing import CliRunner\n"
        "from fedrot.__main__ import main\n"
        "from fedrot.simulations.cli.app import app\n"
        f"found = [CliRunner().invoke(app, line.split()) for line in {lines!r}]\n"
        "names = {name.partition('.')[0] for name, module in sys.modules.items() if module}\n"
        "print(json.dumps([[r.exit_code for r in found], [r.output for r in found], [*names]]))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    codes, outputs, modules = json.loads(result.stdout)
    return codes, [" ".join(output.split()) for output in outputs], set(modules)


HELPS = ("--help", "--version", *(f"{name} --help" for name in COMMANDS))


def test_help_and_unknown_options_import_nothing_heavy() -> None:
    wrong = ["--wrong", "wrong", *(f"{name} --wrong" for name in COMMANDS)]
    codes, outputs, modules = results_of(*HELPS, *wrong)
    assert codes == [0] * len(HELPS) + [2] * len(wrong), outputs
    assert modules & HEAVY == set()
    assert "fedrot" in modules


def test_mistakes_in_settings_import_nothing_heavy_but_numpy(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[[experiment]]\nwrong = 1\n")
    lines = [f"simulate --out run {mistake}" for mistake in MISTAKES]
    codes, outputs, modules = results_of(*lines, cwd=tmp_path)
    assert codes == [2] * len(lines), outputs
    assert modules & HEAVY <= {"numpy"}


def test_a_run_without_a_package_names_it() -> None:
    codes, outputs, _ = results_of(*HELPS, "simulate --out run", lacking=["transformers"])
    assert codes == [0] * len(HELPS) + [2], outputs
    assert outputs[-1] == f"Error: This command needs transformers. {INSTALL}"


def test_fedrot_itself_imports_nothing_until_a_name_is_used() -> None:
    code = (
        "import sys, fedrot; assert 'torch' not in sys.modules\n"
        "fedrot.align; print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "True"


def test_every_public_name_is_there() -> None:
    import fedrot

    assert all(getattr(fedrot, name) is not None for name in fedrot.__all__)
    assert {*fedrot.__all__, "__version__"} <= {*dir(fedrot)}
    with pytest.raises(AttributeError, match="wrong"):
        fedrot.wrong  # type: ignore[attr-defined]  # noqa: B018
