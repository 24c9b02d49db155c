"""The grid of barriers: what it trains, keeps, repeats and refuses, on tiny models."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest

from fedrot.errors import FedrotError
from fedrot.simulations.run_folder import read_rows
from reproductions.barriers.grid import read_cells, run_grid, shared_rows
from reproductions.barriers.line import lines_of
from reproductions.barriers.methods import METHODS, MatchingMethod
from tests.reproductions import commands as laboratory
from tests.simulations.commands import contents

GRID = """
[base]
methods = ["vanilla", "whole", "whole+data"]
points = 3
rows = 64
train_limit = 300
test_limit = 60
depth = 1
width = 32
heads = 2
max_length = 32
local_epochs = 1

[[task]]
name = "labels"
[task.pairs]
same = [[0, 1]]
thirds = [[0, 1]]

[[task]]
name = "tokens"
task = "mlm"
[task.pairs]
disjoint = [[0, 1], [2, 3]]
"""


@pytest.fixture(scope="module")
def grid_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("grid") / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.fixture(scope="module")
def finished(grid_file):
    out = grid_file.parent / "run"
    laboratory.run(grid_file, "--out", out, "--workers", 1)
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run that the test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_the_rows_of_the_grid_are_complete(finished):
    rows = read_rows(finished / "rows.jsonl")
    pairs = ("labels-same 0-1", "labels-thirds 0-1")
    pairs += ("tokens-disjoint 0-1", "tokens-disjoint 2-3")
    methods = ("vanilla", "whole", "whole+data")
    assert [(f"{r['cell']} {r['pair']}", r["method"], r["position"]) for r in rows] == [
        *itertools.product(pairs, methods, (0, 0.5, 1))
    ]
    for row in rows:
        metrics = "accuracy macro_f1 ece calibrated_loss"
        if "tokens" in row["cell"]:
            metrics = "pseudo_perplexity accuracy"
        common = "cell pair method seconds before after position"
        assert " ".join(row) == f"{common} {metrics} loss"
        assert all(map(math.isfinite, [*row.values()][3:]))
        if row["method"] == "vanilla":
            assert row["after"] == row["before"]
        else:
            assert row["seconds"] > 0
    config = json.loads((finished / "config.json").read_text())
    assert config["cells"]["tokens-disjoint"]["experiment"]["width"] == 32
    assert json.loads((finished / "versions.json").read_text())["torch"]


def test_matching_keeps_the_ends_and_comes_closer(finished):
    for line in lines_of(read_rows(finished / "rows.jsonl")):
        ends = [line.metrics[end]["loss"] for end in (0, -1)]
        if line.method == "vanilla":
            plain = ends
        assert ends == pytest.approx(plain, abs=1e-5)
        assert line.barrier >= 0
        assert line.method != "whole" or line.after < line.before


def test_what_is_missing_is_done_again_with_the_same_result(run, grid_file):
    """One pair is gone, and an interrupted write left its temporary file."""
    before = read_rows(run / "rows.jsonl")
    files = contents(run)
    (run / "lines/labels-same.0-1.jsonl").unlink()
    (run / "lines/.labels-same.0-1.jsonl.1").write_text('{"half')
    output = laboratory.run(grid_file, "--out", run, "--workers", 1)
    assert output.count("barriers vanilla") == 1
    after = read_rows(run / "rows.jsonl")
    assert [{**row, "seconds": 0} for row in after] == [
        {**row, "seconds": 0} for row in before
    ]
    kept = "lines/tokens-disjoint.0-1.jsonl"
    assert contents(run)[kept] == files[kept]
    assert len(json.loads((run / "config.json").read_text())["commands"]) == 2


def test_a_failing_pair_leaves_what_was_done(grid_file, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(METHODS, "failing", MatchingMethod(refine=fail))
    path = tmp_path / "grid.toml"
    out = tmp_path / "run"
    path.write_text(GRID.replace('task = "mlm"', 'task = "mlm"\nmethods = ["failing"]'))
    output = laboratory.run(path, "--out", out, "--workers", 1, code=1)
    assert "FAILED" in output
    assert "out of luck" in output
    cells = {row["cell"] for row in read_rows(out / "rows.jsonl")}
    assert cells == {"labels-same", "labels-thirds"}
    failures = list((out / "failures").iterdir())
    assert len(failures) == 2
    assert "in fail\n" in failures[0].read_text()
    monkeypatch.setitem(METHODS, "failing", MatchingMethod())
    laboratory.run(path, "--out", out, "--workers", 1)
    assert not (out / "failures").exists()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("points = 3", "points = 7", "with other settings"),
        ("points = 3", "points = 6", "must be odd"),
        ("points = 3", "points = 1", "points"),
        ("[[0, 1], [2, 3]]", "[[0, 0]]", "two different seeds"),
        ("disjoint", "quarters", "sharing"),
        ('"tokens"', '"labels"\nthirds = 1', "thirds"),
        ("disjoint = [[0, 1], [2, 3]]", "", "has no pairs"),
        ('"vanilla", ', '"magic", ', "unknown method 'magic'"),
        ('["vanilla", "whole", "whole+data"]', "[]", "no method"),
        (GRID[GRID.index("[[task]]") :], "", "needs a table [[experiment]]"),
    ],
)
def test_an_impossible_grid_is_refused(before, after, expected, run, tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(GRID.replace(before, after))
    there = contents(run)
    output = laboratory.run(path, "--out", run, code=2)
    assert expected in output.lower()
    assert contents(run) == there


@pytest.mark.parametrize(
    ("sharing", "common", "each"),
    [("same", 300, 300), ("thirds", 100, 200), ("disjoint", 0, 150)],
)
def test_models_share_the_rows_they_should(sharing, common, each):
    both, again, others = (
        [rows.tolist() for rows in shared_rows(300, sharing, seeds)]
        for seeds in ((4, 5), (4, 5), (6, 7))
    )
    assert [*map(len, both)] == [each, each]
    first, second = map(set, both)
    assert (len(first & second), len(first | second)) == (common, 300)
    assert both == again
    assert sharing == "same" or both[0] != others[0]


def test_what_is_no_grid_or_lies_elsewhere(grid_file, tmp_path):
    line = (grid_file, "--out", tmp_path / "run")
    laboratory.run(*line, "--ray", "here", code=2, says="only on experiments")
    laboratory.run(*line, "--dry-run", code=2, says="only on experiments")
    (tmp_path / "config.json").write_text('{"commands": [], "experiments": []}')
    with pytest.raises(FileExistsError, match="another kind"):
        run_grid(read_cells(grid_file), tmp_path, "command", print)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    path = tmp_path / "grid.toml"
    path.write_text(GRID.replace('"tokens"', '"Labels"').replace("disjoint", "same"))
    with pytest.raises(FedrotError, match="of its own"):
        read_cells(path)
    # Where the data lie is no setting.
    here, there = (
        read_cells(grid_file, folder)[0].settings for folder in (None, tmp_path)
    )
    assert here == there
