"""One-way arrows: reproductions -> simulations -> strategies -> fedrot; ``import
fedrot`` is light.
"""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
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
#: Rooms of each folder, modules beside rooms among them; each may import what stands
#: before its row.
ROOMS = {
    "fedrot": (
        ("errors",),
        ("tensors",),
        ("_io", "changes"),
        ("symmetry",),
        ("options", "report", "distances"),
        ("collect",),
        ("check", "matching", "task_head"),
        ("aggregation",),
        ("alignment", "lora"),
    ),
    "strategies": (
        ("wire", "stored_model"),
        ("arguments", "pooled_classifier"),
        ("resume",),
        ("settings",),
        ("reporting",),
        ("client",),
        ("round",),
        ("base",),
        ("aligned", "fitting"),
        ("fedrot", "lora"),
    ),
}


def imported(source, package):
    """Return every module that the source imports, wherever in the file, as absolute
    names.
    """
    names = set()
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


def violations(names, forbidden):
    """Return the names that are, or lie below, a forbidden module."""
    return {n for n in names for f in forbidden if n == f or n.startswith(f"{f}.")}


def _imports(folder):
    """Return what every file of a folder imports."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        inside = path.relative_to(ROOT / folder)
        package = ".".join([PACKAGES[folder], *inside.parent.parts])
        found[inside] = imported(path.read_text(encoding="utf-8"), package)
    assert found
    return found


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_arrows_point_one_way(folder):
    wrong = {
        path: violations(names, FORBIDDEN[folder])
        for path, names in _imports(folder).items()
    }
    assert {path: names for path, names in wrong.items() if names} == {}


def arrows(folder):
    """Return the modules of a folder, each with those of the folder that it imports.

    Imports inside functions and for types count; a package's face (``__init__``) does
    not.
    """
    files = {
        ".".join([PACKAGES[folder], *path.with_suffix("").parts]): names
        for path, names in _imports(folder).items()
        if path.stem not in ("__init__", "__main__")
    }
    return {
        module: (names & files.keys()) - {module} for module, names in files.items()
    }


@pytest.mark.parametrize("folder", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(folder):
    TopologicalSorter(arrows(folder)).prepare()


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_one_way(folder):
    rank = {name: place for place, names in enumerate(ROOMS[folder]) for name in names}
    depth = len(PACKAGES[folder].split("."))
    found = {
        (module.split(".")[depth], other.split(".")[depth])
        for module, others in arrows(folder).items()
        for other in others
    }
    assert {room for pair in found for room in pair} <= rank.keys()
    assert {(a, b) for a, b in found if a != b and rank[b] >= rank[a]} == set()


def test_importing_fedrot_loads_nothing_heavy(tmp_path):
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
