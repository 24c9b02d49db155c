"""One-way arrows: reproductions -> simulations -> strategies -> fedrot; ``import
fedrot`` is light.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "flwr",
    "flwr_datasets",
    "ray",
    "transformers",
    "datasets",
    "pandas",
    "sklearn",
    "matplotlib",
)
FORBIDDEN = {
    "fedrot": (*HEAVY, "fedrot.strategies", "fedrot.simulations", "reproductions"),
    "strategies": ("fedrot.simulations", "reproductions"),
    "simulations": ("reproductions",),
}
#: The import name of each top-level folder.
PACKAGES = {
    "fedrot": "fedrot",
    "strategies": "fedrot.strategies",
    "simulations": "fedrot.simulations",
}
#: Modules and folders of fedrot; each may import what stands before its row.
LAYERS = (
    ("errors",),
    ("_io",),
    ("tensors",),
    ("symmetry",),
    ("options", "report", "shares", "feature_bounds"),
    ("problems",),
    ("collect",),
    ("check", "matching"),
    ("alignment",),
    ("aggregation", "learning", "head"),
    ("temperature",),
    ("ballots",),
    ("anchors", "lora"),
    ("diagnosis",),
)


def imported(source: str, package: str) -> set[str]:
    """Return every module that the source imports, wherever in the file, as absolute
    names.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") == "import_module"
        ):
            names |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    return names


def violations(names: set[str], forbidden: tuple[str, ...]) -> set[str]:
    """Return the names that are, or lie below, a forbidden module."""
    return {n for n in names for f in forbidden if n == f or n.startswith(f"{f}.")}


def _imports(folder: str) -> dict[Path, set[str]]:
    """Return what every file of a folder imports."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        inside = path.relative_to(ROOT / folder)
        package = ".".join([PACKAGES[folder], *inside.parent.parts])
        found[inside] = imported(path.read_text(encoding="utf-8"), package)
    assert found
    return found


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_arrows_point_one_way(folder: str) -> None:
    wrong = {
        path: violations(names, FORBIDDEN[folder])
        for path, names in _imports(folder).items()
    }
    assert {path: names for path, names in wrong.items() if names} == {}


def test_arrows_inside_fedrot_point_one_way() -> None:
    rank = {name: place for place, names in enumerate(LAYERS) for name in names}
    wrong = set()
    for path, names in _imports("fedrot").items():
        unit = path.parts[0].removesuffix(".py")
        if unit in ("__init__", "__main__", "strategies", "simulations"):
            continue
        parts = (name.split(".") for name in names)
        units = {name[1] for name in parts if name[0] == "fedrot" and len(name) > 1} & {
            *rank
        }
        wrong |= {
            (unit, other) for other in units - {unit} if rank[other] >= rank[unit]
        }
    assert wrong == set()


def test_importing_fedrot_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, json, fedrot; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = json.loads(result.stdout)
    assert "fedrot" in loaded
    assert (
        violations(set(loaded), (*HEAVY, "fedrot.strategies", "fedrot.simulations"))
        == set()
    )
