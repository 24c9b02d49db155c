"""The wheel as users get it, in an environment that holds the library's own dependencies only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("fedrot", "strategies", "simulations"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command = [*build, "--outdir", str(folder), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    return path


def needed(names: list[str]) -> dict[str, Distribution]:
    """The distributions that ``names`` need, transitively, without extras."""
    found: dict[str, Distribution] = {}
    while names:
        name = re.split(r"[^\w.-]", names.pop(), maxsplit=1)[0].lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except ModuleNotFoundError:
            continue  # for another platform
        names += [line for line in found[name].requires or [] if "extra ==" not in line]
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site folder with fedrot's wheel and links to nothing but what its metadata asks for."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (metadata,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    asked = [
        line.removeprefix("Requires-Dist: ")
        for line in text.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    names = {re.split(r"[<>=~!; ]", line)[0] for line in asked}
    assert names == {"torch", "numpy", "scipy", "safetensors"}
    for dist in needed(list(asked)).values():
        for top in {file.parts[0] for file in dist.files or []} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(dist.locate_file(top))))
    return site


def python(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    prelude = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    command = [sys.executable, "-I", "-S", "-c", prelude + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=site.parent, check=False)


def test_the_wheel_holds_every_module_types_data_and_licences(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fedrot"}
    for expected in (
        "fedrot/py.typed",
        "fedrot/strategies/aligned.py",
        "fedrot/simulations/cli/app.py",
        "fedrot/simulations/experiments/demo.toml",
        "fedrot/simulations/strategies.toml",
        "fedrot/simulations/flower_app/pyproject.toml",
        "fedrot/simulations/data/bundled/goemotions_ekman/train.parquet",
        "fedrot/simulations/data/bundled/goemotions_ekman/test.parquet",
        "fedrot/simulations/data/bundled/tokenizer.json",
        "fedrot/simulations/data/bundled/LICENSE-goemotions.txt",
        "fedrot/simulations/report/templates/page.html.j2",
    ):
        assert expected in names
    assert sum(name.endswith("licenses/LICENSE") for name in names) == 1
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "fedrot").rglob("*.py")}
    for folder in ("strategies", "simulations"):
        here |= {f"fedrot/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == here


def test_a_bundled_file_and_the_flower_app_come_with_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "from fedrot.simulations.cli.app import app\n"
        "for line in ('simulate demo --seeds 1 --out run --dry-run', 'flower-app app'):\n"
        "    app(line.split(), standalone_mode=False)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Dry run: nothing was run or written." in result.stdout
    assert "Flower app: app" in result.stdout
    assert not (tmp_path / "run").exists()
    app = (tmp_path / "app/pyproject.toml").read_text()
    assert "fedrot.simulations.federation.server_app:app" in app


def test_the_library_works_without_flower_transformers_and_datasets(bare: Path) -> None:
    result = python(
        bare,
        """
import importlib.util, torch, fedrot
for absent in ("flwr", "transformers", "datasets", "ray", "pydantic", "tokenizers", "pandas"):
    assert importlib.util.find_spec(absent) is None, absent
d, shapes = 8, {}
for i in range(2):
    p = f"encoder.layer.{i}."
    for m in ("self.query", "self.key", "self.value", "output.dense"):
        m = "attention." + m
        shapes[p + m + ".weight"], shapes[p + m + ".bias"] = (d, d), (d,)
    shapes[p + "intermediate.dense.weight"], shapes[p + "intermediate.dense.bias"] = (16, d), (16,)
    shapes[p + "output.dense.weight"], shapes[p + "output.dense.bias"] = (d, 16), (d,)
    for m in ("attention.output.LayerNorm", "output.LayerNorm"):
        shapes[p + m + ".weight"], shapes[p + m + ".bias"] = (d,), (d,)
config = {"model_type": "bert", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": d,
          "intermediate_size": 16}
symmetry = fedrot.symmetry_of(config, shapes)
anchor = {k: torch.randn(s, dtype=torch.float64) for k, s in shapes.items()}
moved = fedrot.random_equivalent(anchor, symmetry, seed=1)
back = fedrot.align(moved, anchor, symmetry).apply(moved)
assert max((back[k] - anchor[k]).abs().max().item() for k in anchor) < 1e-8
print("fine", fedrot.__file__)
""",
    )
    assert result.returncode == 0, result.stderr
    assert str(bare) in result.stdout


RUN = "import runpy; runpy.run_module('fedrot', run_name='__main__')"
SCRIPT = (
    "from importlib.metadata import entry_points as e; "
    "[script] = e(group='console_scripts', name='fedrot'); script.load()()"
)


@pytest.mark.parametrize(
    ("code", "named", "lines"),
    [
        ("import fedrot.strategies", "in a checkout, pip install '.[flower]'", None),
        ("from fedrot.simulations.cli.app import main", "constraints.txt '.[simulation]'", None),
        (RUN, "pip install -c constraints.txt '.[simulation]'", 1),
        (SCRIPT, "pip install -c constraints.txt '.[simulation]'", 1),
    ],
)
def test_the_missing_package_is_named_by_commands_in_one_line(
    bare: Path, code: str, named: str, lines: int | None
) -> None:
    result = python(bare, code)
    assert result.returncode != 0
    assert result.stderr.rstrip().endswith(named) or (lines is None and named in result.stderr)
    assert lines in (None, len(result.stderr.splitlines()))
