"""Grids of experiments: what [base], [matrix] and [quick] make of their entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrot.errors import FedrotError
from fedrot.simulations import grids
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.grids import bundled_grids, read_grid
from tests.simulations.commands import SMALL, invoke

GRID = """
[base]
clients = 2
seeds = [0, 1, 2]

[matrix]
local_epochs = [0.25, 1]
partition = ["iid", "dirichlet:0.3"]

[quick]
seeds = [0]
only = ["small"]
matrix = {local_epochs = [1], partition = ["iid"]}

[[setting]]
setting = "small"
width = 32

[[setting]]
setting = "large"
clients = 3
"""


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


def test_a_matrix_stands_for_all_combinations(grid: Path) -> None:
    found = read_grid(grid, "setting")
    assert [entry["setting"] for entry in found] == [
        f"{name}, local epochs {epochs}, partition {partition}"
        for name in ("small", "large")
        for epochs in (0.25, 1)
        for partition in ("iid", "dirichlet:0.3")
    ]
    assert found[1] == {
        "setting": "small, local epochs 0.25, partition dirichlet:0.3",
        "clients": 2,
        "seeds": [0, 1, 2],
        "width": 32,
        "local_epochs": 0.25,
        "partition": "dirichlet:0.3",
    }
    assert {entry["clients"] for entry in found[4:]} == {3}


def test_the_quick_variant_replaces_values_and_keeps_some_settings(grid: Path) -> None:
    found = read_grid(grid, "setting", quick=True)
    assert found == [
        {
            "setting": "small, local epochs 1, partition iid",
            "clients": 2,
            "seeds": [0],
            "width": 32,
            "local_epochs": 1,
            "partition": "iid",
        }
    ]


def test_a_setting_may_have_a_matrix_of_its_own(grid: Path) -> None:
    grid.write_text(f"{GRID}matrix = {{rounds = [1, 2]}}\n")
    names = [entry["setting"] for entry in read_grid(grid, "setting")]
    assert names[4:] == ["large, rounds 1", "large, rounds 2"]


def test_a_grid_without_a_quick_variant_is_refused(grid: Path) -> None:
    start, end = GRID.index("[quick]"), GRID.index("[[setting]]")
    grid.write_text(GRID[:start] + GRID[end:])
    assert len(read_grid(grid, "setting")) == 8
    with pytest.raises(FedrotError, match=r"no small variant; write one as the table \[quick\]"):
        read_grid(grid, "setting", quick=True)


def test_a_value_wins_over_the_lists_of_the_matrix(grid: Path) -> None:
    grid.write_text(f"{GRID}local_epochs = 9\n")
    large = read_grid(grid, "setting")[4:]
    assert [(entry["local_epochs"], entry["partition"]) for entry in large] == [
        (9, "iid"),
        (9, "dirichlet:0.3"),
    ]
    assert large[0]["setting"] == "large, partition iid"
    grid.write_text(GRID.replace("seeds = [0]\n", "partition = 'keyclass:1'\n"))
    (quick,) = read_grid(grid, "setting", quick=True)
    assert quick["partition"] == "keyclass:1"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('only = ["small"]', 'only = ["tiny"]', r"keeps only \['tiny'\]; .* among 'small', 'large'"),
        ('only = ["small"]', "only = 3", r"keeps only \[3\]"),
        ('only = ["small"]', "only = []", r"keeps only \[\]"),
        ("[base]", "[bse]", "unknown table 'bse'; tables are base, matrix, quick, setting"),
    ],
)
def test_what_a_grid_names_has_to_exist(before: str, after: str, message: str, grid: Path) -> None:
    grid.write_text(GRID.replace(before, after))
    with pytest.raises(FedrotError, match=message):
        read_grid(grid, "setting", quick=True)


@pytest.mark.parametrize(
    "matrix",
    [
        *("matrix = 3", "[matrix]\nclients = []", "[matrix]\nclients = 3", "[quick]\nmatrix = [3]"),
        "[base]\nmatrix = {clients = [2]}",
    ],
)
def test_a_matrix_is_a_list_for_each_key(matrix: str, grid: Path) -> None:
    grid.write_text(f"{matrix}\n[[setting]]\nclients = 2\n")
    with pytest.raises(ValueError, match=r"\[matrix\] has a list of values for each key"):
        read_grid(grid, "setting")


@pytest.mark.parametrize(
    "text",
    [
        *("[setting]", "setting = 3", "setting = [3]", "[setting]\nclients = 2"),
        *("base = 3\n[[setting]]", "quick = 3\n[[setting]]"),
        "[[setting]]\nmatrix = {clients = 2}",
    ],
)
def test_tables_of_other_kinds_are_no_grid(text: str, grid: Path) -> None:
    grid.write_text(text)
    with pytest.raises(
        ValueError, match=r"is no grid; write a table \[base\] and a table \[\[setting\]\]"
    ):
        read_grid(grid, "setting")


def test_entries_without_a_name_and_changes_of_the_small_variant(grid: Path) -> None:
    grid.write_text("[quick]\nclients = 4\nonly = ''\n[[setting]]\nclients = 3\nlr = 0.5\n")
    assert read_grid(grid, "setting") == [{"clients": 3, "lr": 0.5}]
    assert read_grid(grid, "setting", quick=True) == [{"clients": 4, "lr": 0.5}]
    grid.write_text("[matrix]\nlocal_epochs = [1, 2]\n[[setting]]\n")
    assert [entry["setting"] for entry in read_grid(grid, "setting")] == [
        "local epochs 1",
        "local epochs 2",
    ]
    grid.write_text("[[setting]]\nsetting = 'one'\n[[task]]\nname = 'other'\n")
    assert read_grid(grid, "setting") == [{"setting": "one"}]
    assert read_grid(grid, "task") == [{"name": "other"}]
    grid.write_text(GRID.replace('only = ["small"]', 'only = "small"'))
    assert len(read_grid(grid, "setting", quick=True)) == 1
    # Entries stay in the order of the grid.
    grid.write_text(GRID.replace('only = ["small"]', 'only = ["large", "small"]'))
    found = [entry["setting"].split(",")[0] for entry in read_grid(grid, "setting", quick=True)]
    assert found == ["small", "large"]


def test_a_bundled_grid_is_found_by_its_name_and_a_file_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled, own = tmp_path / "bundled", tmp_path / "own"
    for folder in (bundled, own):
        folder.mkdir()
    for name, entries in (("b", "setting"), ("a", "setting"), ("c", "task")):
        (bundled / f"{name}.toml").write_text(f"[base]\nlr = 1\n[[{entries}]]\nsetting = '{name}'\n")
    (own / "plain").write_text("[[setting]]\nsetting = 'own'\n")
    monkeypatch.setattr(grids, "FOLDERS", [bundled])
    monkeypatch.chdir(own)
    assert [*bundled_grids("setting")] == ["a", "b"]
    assert read_grid(Path("a"), "setting") == [{"lr": 1, "setting": "a"}]
    assert read_grid(Path("plain"), "setting") == [{"setting": "own"}]
    for missing in ("none.toml", "some/where"):
        with pytest.raises(FileNotFoundError):
            read_grid(Path(missing), "setting")
    with pytest.raises(FedrotError, match=r"no bundled grid 'c'\. Give .* or one of a, b\.$"):
        read_grid(Path("c"), "setting")


@pytest.mark.parametrize("name", bundled_grids("setting"))
def test_every_bundled_grid_of_settings_has_a_quick_variant(name: str) -> None:
    check_quick(name)


def check_quick(name: str) -> None:
    """Check that the small variant of a bundled grid keeps settings of the whole one, and is small."""
    whole, quick = (
        [SimulationConfig.from_flat(entry) for entry in read_grid(Path(name), "setting", quick=small)]
        for small in (False, True)
    )
    assert {config.setting for config in quick} <= {config.setting for config in whole}
    assert sum(map(_rows_trained, quick)) <= 200_000


def _rows_trained(config: SimulationConfig) -> float:
    """Rows in training steps of all cells; 200,000 rows are minutes for models of two small layers."""
    assert config.train_limit is not None, "a limit makes it small"
    epochs = sum(map(config.epochs, range(1, config.rounds + 1)))
    return config.train_limit * epochs * len(config.cells())


def test_the_command_line_wins_over_a_grid(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    small = "\n".join(f"{name} = {value}" for name, value in SMALL.items())
    grid.write_text(f'[base]\nmodel = "nowhere"\n{small}\n[[setting]]\nsetting = "one"\n')
    code, said = invoke("simulate", grid, "--out", tmp_path / "run", "--dry-run")
    assert (code, "nowhere" in said) == (2, True), said
    code, said = invoke("simulate", grid, "--out", tmp_path / "run", "--dry-run", "--model", "elsewhere")
    assert (code, "elsewhere" in said) == (2, True), said
