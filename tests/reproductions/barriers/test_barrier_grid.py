"""The grid of barriers: what it trains, keeps, repeats and refuses, on tiny models."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrot.errors import FedrotError
from fedrot.simulations.barrier.barrier_lines import lines_of
from fedrot.simulations.barrier.barrier_methods import METHODS, MatchingMethod
from fedrot.simulations.barrier.barrier_report import summarise
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import task_of
from reproductions.barriers.grid import Cell, Grid, _file_of, _record, run_grid, shared_rows, trained
from tests.reproductions.commands import invoke
from tests.simulations.commands import contents

GRID = """
[base]
methods = ["vanilla", "whole", "whole+data"]
points = 5
rows = 64
train_limit = 300
test_limit = 60
layers = 1
width = 32
heads = 2
max_length = 32
local_epochs = 1

[[task]]
setting = "labels"
[task.pairs]
same = [[0, 1]]
thirds = [[0, 1]]

[[task]]
setting = "tokens"
task = "mlm"
[task.pairs]
disjoint = [[0, 1], [2, 3]]
"""


@pytest.fixture(scope="module")
def grid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grid") / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.fixture(scope="module")
def finished(grid_file: Path) -> Path:
    """The grid, run by two processes."""
    out = grid_file.parent / "run"
    code, output = invoke(grid_file, "--out", out, "--workers", 2)
    assert code == 0, output
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that the test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_the_rows_of_the_grid_are_complete(finished: Path) -> None:
    rows = read_rows(finished)
    pairs = [
        ("labels-same", "0-1"),
        ("labels-thirds", "0-1"),
        ("tokens-disjoint", "0-1"),
        ("tokens-disjoint", "2-3"),
    ]
    expected = {
        (cell, pair, method, position)
        for cell, pair in pairs
        for method in ("vanilla", "whole", "whole+data")
        for position in (0, 0.25, 0.5, 0.75, 1)
    }
    assert len(rows) == len(expected)
    assert {(r["cell"], r["pair"], r["method"], r["position"]) for r in rows} == expected
    for row in rows:
        metrics = (
            ("accuracy", "macro_f1", "ece", "calibrated_loss")
            if "labels" in row["cell"]
            else ("pseudo_perplexity", "accuracy")
        )
        names = ("cell", "pair", "method", "seconds", "before", "after", "position", *metrics, "loss")
        assert tuple(row) == names
        assert all(math.isfinite(row[name]) for name in names[3:])
        assert row["after"] == row["before"] if row["method"] == "vanilla" else row["seconds"] > 0


def test_matching_keeps_the_ends_and_comes_closer(finished: Path) -> None:
    lines = {(line.cell, line.pair, line.method): line for line in lines_of(read_rows(finished))}
    assert {method for _, _, method in lines} == {"vanilla", "whole", "whole+data"}
    for (cell, pair, method), line in lines.items():
        vanilla = lines[cell, pair, "vanilla"].barrier
        for end in (0.0, 1.0):
            assert line.barrier.at(end)["loss"] == pytest.approx(vanilla.at(end)["loss"], abs=1e-5)
        assert line.barrier.barrier >= 0
        if method == "whole":
            assert line.after < line.before


def test_the_run_says_what_was_trained_and_how(finished: Path) -> None:
    models = [json.loads(line) for line in (finished / "models.jsonl").read_text().splitlines()]
    rows = {(m["cell"], m["pair"], m["seed"]): m["rows"] for m in models}
    assert len(rows) == 8
    assert rows["labels-same", "0-1", 0] == 300
    assert rows["labels-thirds", "0-1", 1] == 200
    assert rows["tokens-disjoint", "2-3", 3] == 150
    assert all(math.isfinite(m["training_loss"]) and m["seconds"] > 0 for m in models)
    config = json.loads((finished / "config.json").read_text())
    assert config["cells"]["tokens-disjoint"]["pairs"] == [[0, 1], [2, 3]]
    assert config["cells"]["tokens-disjoint"]["config"]["width"] == 32
    assert "activation_weight=0.5" in config["methods"]["whole+data"][0]
    assert json.loads((finished / "versions.json").read_text())["torch"] == torch.__version__
    summary = (finished / "summary.md").read_text().splitlines()
    assert len(summary) == 2 + 9
    assert {path.name for path in (finished / "plots").iterdir()} == {
        "labels-same.png",
        "labels-thirds.png",
        "tokens-disjoint.png",
    }
    assert not [path for path in finished.rglob(".*") if path.is_file()]


def test_a_finished_run_is_not_repeated(run: Path, grid_file: Path) -> None:
    before = contents(run)
    code, output = invoke(grid_file, "--out", run, "--workers", 1)
    assert code == 0, output
    after = contents(run)
    assert before.keys() == after.keys()
    kept = [name for name in before if name.startswith(("models/", "lines/"))]
    assert [after[name] for name in kept] == [before[name] for name in kept]
    assert after["rows.jsonl"][1] == before["rows.jsonl"][1]
    assert len(json.loads(after["config.json"][1])["commands"]) == 2


def test_what_is_missing_is_done_again_with_the_same_result(run: Path, grid_file: Path) -> None:
    """One line and one model are gone, and an interrupted write left its temporary file."""
    line, model = run / "lines/labels-same.0-1.whole.jsonl", run / "models/labels-same.0-1.1.safetensors"
    before, kept = lines_of(read_rows(run)), (run / "models/labels-same.0-1.0.safetensors").stat()
    trained = model.read_bytes()
    line.unlink()
    model.unlink()
    (run / "lines/.labels-same.0-1.whole.jsonl.1").write_text('{"half')
    options = ["--out", run, "--workers", 1, "--only", "labels-same"]
    code, output = invoke(grid_file, *options)
    assert code == 0, output
    assert "1 of 1" in output
    assert (run / "models/labels-same.0-1.0.safetensors").stat().st_mtime_ns == kept.st_mtime_ns
    assert len(model.read_bytes()) == len(trained)
    after = lines_of(read_rows(run))
    assert [(ln.cell, ln.pair, ln.method, ln.after) for ln in after] == [
        (ln.cell, ln.pair, ln.method, ln.after) for ln in before
    ]
    assert [ln.barrier for ln in after] == [ln.barrier for ln in before]


def test_a_model_is_built_and_trained_from_its_own_seed_and_once(
    grid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], int]] = []

    def train(model: torch.nn.Module, task: Any, rows: np.ndarray, seed: int) -> float:
        seen.append((rows.tolist(), seed))
        return 0.5

    monkeypatch.setattr(training, "train", train)
    (cell, *_) = Grid.read(grid_file).cells
    task = task_of(cell.config.to_json())
    rows = {3: np.arange(20), 7: np.arange(10, 40)}
    for _ in range(2):
        for seed in (3, 7):
            model = trained(cell, (3, 7), seed, rows[seed], tmp_path)
            initial = build_model(cell.config, task.data, seed).state_dict()
            assert all(torch.equal(initial[name], t) for name, t in model.state_dict().items())
            assert not model.training
    assert seen == [(rows[3].tolist(), 3), (rows[7].tolist(), 7)]


def test_a_later_method_needs_no_training(run: Path, grid_file: Path) -> None:
    before = contents(run)
    options = ["--out", run, "--only", "labels", "--methods", "rotation", "--workers", 1]
    code, output = invoke(grid_file, *options)
    assert code == 0, output
    after = contents(run)
    done = [name for name in before if name.startswith(("models/", "lines/"))]
    assert {name.split("/")[0] for name in done} == {"models", "lines"}
    assert all(after[name] == before[name] for name in done)
    assert set(after) - set(before) == {
        "lines/labels-same.0-1.rotation.jsonl",
        "lines/labels-thirds.0-1.rotation.jsonl",
    }
    assert len(read_rows(run)) == (12 + 2) * 5
    assert "rotation" in (run / "summary.md").read_text()


def test_a_failing_pair_leaves_what_was_done(
    grid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(METHODS, "failing", MatchingMethod(refine=fail))
    options = ["--out", tmp_path / "run", "--only", "labels-same", "--workers", 1]
    code, output = invoke(grid_file, *options, "--methods", "vanilla,failing")
    assert code == 1
    assert "out of luck" in output
    assert {row["method"] for row in read_rows(tmp_path / "run")} == {"vanilla"}
    assert (tmp_path / "run/summary.md").exists()
    (failure,) = (tmp_path / "run/failures").iterdir()
    assert "in fail\n" in failure.read_text()
    monkeypatch.setitem(METHODS, "failing", MatchingMethod())
    code, output = invoke(grid_file, *options, "--methods", "vanilla,failing")
    assert code == 0, output
    assert not failure.parent.exists()


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        (("points = 5", "points = 7"), [], "with other settings"),
        (("points = 5", "points = 6"), [], "must be odd"),
        (("[[0, 1], [2, 3]]", "[[0, 0]]"), [], "two different seeds"),
        (("disjoint", "quarters"), [], "sharing"),
        (('"tokens"', '"labels"'), ["--only", "labels-quarters"], "unknown cell 'labels-quarters'"),
        (('"tokens"', '"labels"\nthirds = 1'), [], "thirds"),
        (("disjoint = [[0, 1], [2, 3]]", ""), [], "has no pairs"),
        (("", ""), ["--methods", "vanilla,magic"], "unknown method 'magic'"),
        (("", ""), ["--methods", " , "], "no method"),
        (("", ""), ["--workers", "0"], "workers"),
    ],
)
def test_an_impossible_grid_is_refused(
    change: tuple[str, str], options: list[str], expected: str, run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(GRID.replace(*change) if change[0] else GRID)
    before = contents(run)
    code, output = invoke(path, "--out", run, *options)
    assert code == 2, output
    assert expected in output.lower()
    assert contents(run) == before


def test_an_empty_grid_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text("[base]\npoints = 5\n")
    code, output = invoke(path, "--out", tmp_path / "run")
    assert code == 2
    assert "has no [[setting]]" in output
    with pytest.raises(FedrotError, match=r"at least one \[\[task\]\]"):
        Grid.read(path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("base = 3", "is no grid"),
        ("[task]\ndata = 'sst2'", "is no grid"),
        ("[base]\nmethods = 0\n[[task]]\npairs = {same = [[0, 1]]}", "Unknown method '0'"),
        ("[base]\nmethods = [[0]]\n[[task]]\npairs = {same = [[0, 1]]}", "Unknown method"),
        ("[[task]]\ndata = 'sst2'\npairs = 5", "has no pairs"),
    ],
)
def test_a_grid_of_something_else_than_tables_is_refused(
    text: str, problem: str, tmp_path: Path
) -> None:
    (path := tmp_path / "grid.toml").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=problem):
        Grid.read(path)


def test_the_experiment_is_a_grid_of_nine_cells() -> None:
    grid = Grid.read(Path("barriers"), Path("anywhere"))
    assert len(grid.cells) == 9
    assert sum(len(cell.pairs) for cell in grid.cells) == 22
    assert set(grid.methods) <= set(METHODS)
    assert all(cell.points == 21 and cell.config.test_limit == 500 for cell in grid.cells)


@pytest.mark.parametrize(
    ("sharing", "common", "each"), [("same", 300, 300), ("thirds", 100, 200), ("disjoint", 0, 150)]
)
def test_models_share_the_rows_they_should(sharing: Any, common: int, each: int) -> None:
    first, second = shared_rows(300, sharing, (4, 5))
    assert (len(first), len(second)) == (each, each)
    assert len(np.intersect1d(first, second)) == common
    assert len(np.union1d(first, second)) == 300
    again = shared_rows(300, sharing, (4, 5))
    assert all(map(np.array_equal, (first, second), again))
    assert sharing == "same" or not np.array_equal(first, shared_rows(300, sharing, (6, 7))[0])


def test_a_task_may_have_methods_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        '[base]\nmethods = ["vanilla", "stream"]\n'
        '[[task]]\nsetting = "gpt2"\ntask = "clm"\narchitecture = "gpt2"\n'
        "[task.pairs]\nsame = [[0, 1]]\n"
        '[[task]]\nsetting = "bert"\nmethods = ["vanilla", "whole"]\n'
        "[task.pairs]\nsame = [[0, 1]]\n"
    )
    grid = Grid.read(file)
    assert [cell.methods for cell in grid.cells] == [("vanilla", "stream"), ("vanilla", "whole")]
    assert grid.methods == ("vanilla", "stream", "whole")
    assert {cell.methods for cell in grid.measuring(["rotation"]).cells} == {("rotation",)}


def test_where_the_data_lies_does_not_count_as_another_setting() -> None:
    cells = [
        Cell(config=SimulationConfig(data_dir=where), sharing="same", pairs=((0, 1),))
        for where in (None, Path("elsewhere"))
    ]
    assert cells[0].settings() == cells[1].settings()


# Methods


def test_a_run_of_another_kind_is_not_touched(grid_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "simulated"
    folder.mkdir()
    files = {"rows.jsonl": '{"arm": "plain"}\n', "config.json": '{"command": "", "settings": []}'}
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(FileExistsError, match="holds a run of another kind"):
        run_grid(Grid.read(grid_file), folder, "command", print)
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_a_line_whose_distance_is_not_finite_is_one_line() -> None:
    rows = [
        {
            **{"cell": "c", "pair": "0-1", "method": "vanilla", "seconds": 1.0, "after": value},
            **{"before": value, "position": position, "loss": value},
        }
        for position, value in ((0.0, None), (0.5, float("nan")), (1.0, None))
    ]
    (line,) = lines_of(rows)
    assert math.isnan(line.before)
    assert len(line.barrier.rows) == 3
    (summary,) = summarise([line])
    assert summary.method == "vanilla"


def test_settings_that_differ_in_capitals_alone_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    task = '[[task]]\nsetting = "{}"\n[task.pairs]\nsame = [[0, 1]]\n'
    path.write_text(task.format("MLM") + task.format("mlm"))
    with pytest.raises(FedrotError, match="a setting of its own"):
        Grid.read(path)


@pytest.mark.parametrize("name", ["../../x", "/etc/x"])
def test_lines_of_a_copy_stay_in_its_folder(name: str, tmp_path: Path) -> None:
    assert _file_of(tmp_path, name, name, name).parent == tmp_path / "lines"


def test_a_folder_with_the_config_of_a_model_is_left_alone(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "bert"}')
    with pytest.raises(
        FileExistsError, match=r"has a config.json of another kind, for example of a model"
    ):
        _record(Grid.model_construct(cells=()), tmp_path, "one")
    assert config.read_text() == '{"model_type": "bert"}'
