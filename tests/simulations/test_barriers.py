"""Barriers of tiny models: the grid and what it repeats, two checkpoints, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedrot import random_equivalent, symmetry_of
from fedrot.diagnostics import Barrier, interpolate
from fedrot.errors import FedrotError
from fedrot.simulations import barriers
from fedrot.simulations.barrier_grid import Cell, Grid, shared_rows
from fedrot.simulations.barrier_report import markdown, summarise
from fedrot.simulations.barriers import METHODS, Line, Method, lines_of, match, measure, training_batches
from fedrot.simulations.cli import app
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.models import build_model, tokenizer_for
from fedrot.simulations.runfolder import read_rows
from fedrot.simulations.tasks import Task, task_of
from fedrot.symmetry import WHOLE_MODEL

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
SMALL: dict[str, Any] = {
    "train_limit": 128,
    "test_limit": 60,
    "layers": 1,
    "width": 32,
    "heads": 2,
    "max_length": 32,
}
ROOT = Path(__file__).parents[2]


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def grid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grid") / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.fixture(scope="module")
def finished(grid_file: Path) -> Path:
    """The grid, run by two processes."""
    out = grid_file.parent / "run"
    code, output = invoke("barriers", grid_file, "--out", out, "--workers", 2)
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
            ("accuracy", "macro_f1") if "labels" in row["cell"] else ("pseudo_perplexity", "accuracy")
        )
        names = ("cell", "pair", "method", "seconds", "before", "after", "position", *metrics, "loss")
        assert tuple(row) == names
        assert all(math.isfinite(row[name]) for name in names[3:])
        assert row["after"] == row["before"] if row["method"] == "vanilla" else row["seconds"] > 0


def test_matching_keeps_the_ends_and_comes_closer(finished: Path) -> None:
    lines = {(line.cell, line.pair, line.method): line for line in lines_of(read_rows(finished))}
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
    assert "activation_weight=0.5" in config["methods"]["whole+data"]
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
    code, output = invoke("barriers", grid_file, "--out", run, "--workers", 1)
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
    code, output = invoke("barriers", grid_file, *options)
    assert code == 0, output
    assert "1 of 1" in output
    assert (run / "models/labels-same.0-1.0.safetensors").stat().st_mtime_ns == kept.st_mtime_ns
    assert len(model.read_bytes()) == len(trained)
    after = lines_of(read_rows(run))
    assert [(ln.cell, ln.pair, ln.method, ln.after) for ln in after] == [
        (ln.cell, ln.pair, ln.method, ln.after) for ln in before
    ]
    assert [ln.barrier for ln in after] == [ln.barrier for ln in before]


def test_a_later_method_needs_no_training(run: Path, grid_file: Path) -> None:
    before = contents(run)
    options = ["--out", run, "--only", "labels", "--methods", "rotation", "--workers", 1]
    code, output = invoke("barriers", grid_file, *options)
    assert code == 0, output
    after = contents(run)
    assert all(after[name] == before[name] for name in before if name.startswith(("models/", "lines/")))
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

    monkeypatch.setitem(METHODS, "failing", Method(refine=fail))
    options = ["--out", tmp_path / "run", "--only", "labels-same", "--workers", 1]
    code, output = invoke("barriers", grid_file, *options, "--methods", "vanilla,failing")
    assert code == 1
    assert "out of luck" in output
    assert {row["method"] for row in read_rows(tmp_path / "run")} == {"vanilla"}
    assert (tmp_path / "run/summary.md").exists()


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
    code, output = invoke("barriers", path, "--out", run, *options)
    assert code == 2, output
    assert expected in output.lower()
    assert contents(run) == before


def test_an_empty_grid_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text("[base]\npoints = 5\n")
    code, output = invoke("barriers", path, "--out", tmp_path / "run")
    assert code == 2
    assert "at least one [[task]]" in output
    assert not (tmp_path / "run").exists()


def test_the_experiment_is_a_grid_of_nine_cells() -> None:
    grid = Grid.read(ROOT / "experiments" / "barriers.toml", Path("anywhere"))
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


def test_where_the_data_lies_does_not_count_as_another_setting() -> None:
    cells = [
        Cell(config=SimulationConfig(data_dir=where, **SMALL), sharing="same", pairs=((0, 1),))
        for where in (None, Path("elsewhere"))
    ]
    assert cells[0].settings() == cells[1].settings()


# Methods


@pytest.fixture(scope="module", params=["classification", "mlm"])
def task(request: pytest.FixtureRequest) -> Task:
    return task_of(SimulationConfig(task=request.param, **SMALL).to_json())


@pytest.fixture(scope="module")
def model(task: Task) -> torch.nn.Module:
    return build_model(task.config, task.data, seed=0)


def test_batches_for_methods_are_those_of_training(task: Task, model: torch.nn.Module) -> None:
    batches = training_batches(task, model, 100)
    assert sum(len(batch["input_ids"]) for batch in batches) == 100
    assert all("labels" in batch for batch in batches)
    masked = sum(int((batch["input_ids"] == 4).sum()) for batch in batches)
    assert (masked > 0) == (task.config.task == "mlm")
    again = training_batches(task, model, 100)
    assert all(torch.equal(x["input_ids"], y["input_ids"]) for x, y in zip(batches, again, strict=True))


def test_labels_are_not_shown_where_activations_are_collected(
    task: Task, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    original = barriers.collect_activations

    def spy(anchor: Any, client: Any, batches: Any, *args: Any, **kwargs: Any) -> Any:
        batches = list(batches)
        seen.extend(set(batch) for batch in batches)
        return original(anchor, client, batches, *args, **kwargs)

    monkeypatch.setattr(barriers, "collect_activations", spy)
    symmetry, batches = symmetry_of(model.config, model.state_dict()), training_batches(task, model, 64)
    for name in METHODS:
        match(METHODS[name], model, model, symmetry, batches)
    assert {"input_ids", "attention_mask", "token_type_ids"} in seen
    assert {"input_ids", "attention_mask"} in seen
    assert not any("labels" in names for names in seen)


def test_whole_model_methods_undo_a_random_equivalent(task: Task, model: torch.nn.Module) -> None:
    symmetry = symmetry_of(model.config, model.state_dict())
    client = copy.deepcopy(model)
    client.load_state_dict(random_equivalent(model.state_dict(), symmetry, seed=3, parts=WHOLE_MODEL))
    batches = training_batches(task, model, 64)
    for name in ("whole", "whole+probe", "whole+data"):
        line = measure(name, model, client, symmetry, task, batches, points=3)
        assert line.after < 1e-6 * line.before
        assert line.barrier.barrier == pytest.approx(0, abs=1e-5)
    vanilla = measure("vanilla", model, client, symmetry, task, batches, points=3)
    assert vanilla.barrier.at(0) == pytest.approx(vanilla.barrier.at(1), abs=1e-4, rel=1e-4)


def test_neither_model_is_changed(task: Task, model: torch.nn.Module) -> None:
    client = build_model(task.config, task.data, seed=1)
    before = [copy.deepcopy(m.state_dict()) for m in (model, client)]
    symmetry, batches = symmetry_of(model.config, model.state_dict()), training_batches(task, model, 64)
    for name in METHODS:
        measure(name, model, client, symmetry, task, batches, points=3)
    for m, state in zip((model, client), before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in m.state_dict().items())


def test_a_method_may_refine_the_client_and_repair_the_merged_models(
    task: Task, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = build_model(task.config, task.data, seed=1)
    symmetry, batches = symmetry_of(model.config, model.state_dict()), training_batches(task, model, 64)
    moved = match(METHODS["whole"], model, client, symmetry, batches).state
    seen: list[Any] = []

    def refine(anchor: Any, aligned: Any, *_: object) -> dict[str, torch.Tensor]:
        seen.append(aligned.state_dict())
        return {name: tensor.clone() for name, tensor in anchor.state_dict().items()}

    def repair(anchor: Any, aligned: Any, *_: object) -> Any:
        seen.append(aligned.state_dict())
        return lambda a, b, t: interpolate(a, b, 0.0)

    whole = METHODS["whole"]
    monkeypatch.setitem(METHODS, "refined", replace(whole, refine=refine))
    monkeypatch.setitem(METHODS, "repaired", replace(whole, repair=repair))
    for name in ("refined", "repaired"):
        line = measure(name, model, client, symmetry, task, batches, points=3)
        assert len({row["loss"] for row in line.barrier.rows}) == 1
        assert (line.after == 0) == (name == "refined")
    assert all(torch.equal(state[name], moved[name]) for state in seen for name in moved)


# Summaries


def line(cell: str, pair: str, method: str, *losses: float) -> Line:
    positions = tuple(np.linspace(0, 1, len(losses)).tolist())
    rows = tuple({"accuracy": 1 - loss, "loss": loss} for loss in losses)
    return Line(cell, pair, method, 2.0, 10.0, 5.0, Barrier(positions, rows))


def test_means_and_intervals_are_over_pairs() -> None:
    lines = [
        line("c", "0-1", "whole", 0.1, 0.2, 0.1),
        line("c", "2-3", "whole", 0.1, 0.4, 0.1),
        line("c", "0-1", "vanilla", 0.1, 0.5, 0.1),
        line("c", "2-3", "vanilla", 0.1, 0.7, 0.1),
    ]
    vanilla, whole = summarise(lines)
    assert (vanilla.method, whole.method, whole.pairs, whole.headline) == (
        "vanilla",
        "whole",
        2,
        "accuracy",
    )
    assert whole.barrier.mean == pytest.approx(0.2)
    # The mean of the ratios 0.1 / 0.4 and 0.3 / 0.6; t(0.975, 1) = 12.706, sd / sqrt(2) = 0.125.
    assert whole.share.mean == pytest.approx(0.375)
    assert whole.share.ci_high == pytest.approx(0.375 + 12.706 * 0.125, rel=1e-4)
    assert vanilla.share.mean == 1
    assert whole.middle.mean == pytest.approx(0.7)
    assert whole.ends.mean == pytest.approx(0.9)
    assert whole.distance.mean == 0.5
    assert "| c | accuracy | 2 | whole | 0.200 [-1.071, 1.471] |" in markdown([whole])


def test_a_share_needs_a_vanilla_barrier() -> None:
    (alone,) = summarise([line("c", "0-1", "whole", 0.1, 0.2, 0.1)])
    assert math.isnan(alone.share.mean)
    flat = [line("c", "0-1", "vanilla", 0.1, 0.1, 0.1), line("c", "0-1", "whole", 0.1, 0.2, 0.1)]
    assert all(math.isnan(summary.share.mean) for summary in summarise(flat))
    assert markdown([alone]).splitlines()[-1].count(" - ") == 1


def test_diverged_models_stay_in_rows_and_summary(tmp_path: Path) -> None:
    lines = [
        line("c", "0-1", "vanilla", 0.1, math.nan, 0.1),
        line("c", "0-1", "whole", 0.1, math.inf, 0.1),
    ]
    barriers.write_rows(tmp_path / "rows.jsonl", lines)
    assert "NaN" not in (tmp_path / "rows.jsonl").read_text()
    again = lines_of(read_rows(tmp_path))
    assert all(math.isnan(ln.barrier.at(0.5)["loss"]) for ln in again)
    assert "| c | accuracy | 1 | vanilla | - | - | - |" in markdown(summarise(again))


# Two checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("classification", "mlm"):
        config = SimulationConfig(task=name, **SMALL)
        task = task_of(config.to_json())
        for seed in (0, 1):
            build_model(config, task.data, seed).save_pretrained(folder / f"{name}{seed}")
        other = config.model_copy(update={"heads": 4})
        build_model(other, task.data, 0).save_pretrained(folder / f"{name}-heads")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_for(SimulationConfig()), pad_token="[PAD]", mask_token="[MASK]"
    )
    for seed in (0, 1):
        tokenizer.save_pretrained(folder / f"mlm{seed}")
    return folder


@pytest.mark.parametrize("name", ["classification", "mlm"])
def test_two_checkpoints(name: str, checkpoints: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    code, output = invoke(
        "barrier",
        checkpoints / f"{name}0",
        checkpoints / f"{name}1",
        *("--task", name, "--out", out, "--points", 5, "--rows", 64, "--test-limit", 60),
        *("--methods", "vanilla,whole,verma"),
    )
    assert code == 0, output
    assert all(word in output for word in ("vanilla", "whole", "verma", "share of", "seconds"))
    names = {"config.json", "versions.json", "rows.jsonl", "summary.md", "barrier.png"}
    assert {path.name for path in out.iterdir()} == names
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    rows = read_rows(out)
    assert len(rows) == 3 * 5
    assert json.loads((out / "config.json").read_text())["settings"]["test_limit"] == 60
    lines = {ln.method: ln for ln in lines_of(rows)}
    # The models are those of the harness, so their ends can be measured there.
    config = SimulationConfig(task=name, **{**SMALL, "train_limit": None})
    task = task_of(config.to_json())
    ends = [
        barriers.evaluator(task, (m := build_model(config, task.data, seed)))(m.state_dict())
        for seed in (0, 1)
    ]
    for method, ln in lines.items():
        assert ln.barrier.rows[0] == pytest.approx(ends[0], rel=1e-5)
        assert ln.barrier.rows[-1]["loss"] == pytest.approx(ends[1]["loss"], rel=1e-5)
        assert method == "vanilla" or ln.after < ln.before


def _spoil(folder: Path, kind: str) -> None:
    if kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "no weights":
        (folder / "model.safetensors").unlink()
    else:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        changes = {"family": {"model_type": "gpt2"}, "vocabulary": {"vocab_size": 7000}}
        path.write_text(json.dumps({**config, **changes[kind]}))


@pytest.mark.parametrize(
    ("a", "b", "spoilt", "options", "expected"),
    [
        ("classification0", "classification-heads", None, [], "different architectures: num_attention"),
        ("classification0", "nowhere", None, [], "is not a folder"),
        ("classification0", "classification1", "no config", [], "has no config.json"),
        ("classification0", "classification1", "no weights", [], "has no model.safetensors"),
        ("classification0", "classification1", "family", [], "gpt2"),
        ("classification0", "classification1", "vocabulary", [], "different vocabularies"),
        ("mlm0", "mlm1", None, [], "was not trained for task 'classification'"),
        ("classification0", "classification1", None, ["--task", "mlm"], "not trained for task 'mlm'"),
        ("classification0", "classification1", None, ["--data", "nothing"], "nothing"),
        ("classification0", "classification1", None, ["--methods", "magic"], "unknown method 'magic'"),
        ("classification0", "classification1", None, ["--points", "4"], "points is 4"),
        ("classification0", "classification1", None, ["--points", "1"], "points is 1"),
        ("classification0", "classification1", None, ["--rows", "0"], "rows is 0"),
        ("classification0", "classification1", None, ["--test-limit", "0"], "test_limit"),
    ],
)
def test_checkpoints_that_cannot_be_compared(
    a: str,
    b: str,
    spoilt: str | None,
    options: list[str],
    expected: str,
    checkpoints: Path,
    tmp_path: Path,
) -> None:
    other = checkpoints / b
    if spoilt:
        other = Path(shutil.copytree(other, tmp_path / "spoilt"))
        _spoil(other, spoilt)
    code, output = invoke("barrier", checkpoints / a, other, "--out", tmp_path / "out", *options)
    assert code == 2, output
    assert expected in output.lower()
    assert not (tmp_path / "out").exists()


def test_data_of_other_classes_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"text": ["one", "two"] * 4, "label": [0, 1] * 4, "split": ["train", "test"] * 4}
    pq.write_table(pa.table(columns), tmp_path / "two.parquet")
    options = ["--data", "two", "--data-dir", tmp_path, "--out", tmp_path / "out"]
    pair = [checkpoints / "classification0", checkpoints / "classification1"]
    code, output = invoke("barrier", *pair, *options)
    assert code == 2
    assert "has 7 outputs, but two has 2 classes" in output


def test_a_model_without_tokenizer_needs_the_bundled_vocabulary(
    checkpoints: Path, tmp_path: Path
) -> None:
    config = SimulationConfig(**SMALL)
    model: Any = build_model(config, task_of(config.to_json()).data, 0)
    model.resize_token_embeddings(50)
    model.save_pretrained(tmp_path / "a")
    code, output = invoke("barrier", tmp_path / "a", tmp_path / "a", "--out", tmp_path / "out")
    assert code == 2
    assert "has no tokenizer, and the bundled one has 6000 tokens where the model has 50" in output


def test_tokenizers_of_other_words_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(checkpoints / "mlm1", tmp_path / "b"))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"the"', '"zzzzz"'))
    code, output = invoke(
        "barrier", checkpoints / "mlm0", other, "--task", "mlm", "--out", tmp_path / "out"
    )
    assert code == 2
    assert "Different vocabularies" in output


def test_a_filled_folder_is_left_alone(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("1")
    pair = [checkpoints / "classification0", checkpoints / "classification1"]
    code, output = invoke("barrier", *pair, "--out", tmp_path)
    assert code == 2
    assert "Choose another --out" in output
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_nothing_is_written_when_a_method_fails(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise FedrotError("out of luck")

    monkeypatch.setitem(METHODS, "failing", Method(refine=fail))
    pair = [checkpoints / "classification0", checkpoints / "classification1"]
    options = ["--methods", "vanilla,failing", "--points", "3", "--test-limit", "60"]
    code, output = invoke("barrier", *pair, *options, "--out", tmp_path / "out")
    assert code == 2
    assert "out of luck" in output
    assert list(tmp_path.iterdir()) == []
