"""The barrier between two saved models, and which ones cannot be compared."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file

from fedrot.errors import FedrotError
from fedrot.interpolation import Barrier
from fedrot.simulations.barrier.barrier_lines import BarrierLine, evaluator, lines_of, training_batches
from fedrot.simulations.barrier.barrier_methods import METHODS, MatchingMethod
from fedrot.simulations.barrier.barrier_report import summarise
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.encoding import tokenizer_for
from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks.task import task_of
from tests.simulations.commands import SMALL, invoke


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models")
    for name in ("classification", "mlm", "image"):
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


@pytest.mark.parametrize("name", ["classification", "mlm", "image"])
def test_two_saved_models(name: str, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    code, output = invoke(
        "barrier",
        models / f"{name}0",
        models / f"{name}1",
        *("--out", out, "--points", 5, "--test-limit", 60),
        *("--methods", "vanilla,whole,whole+data"),
    )
    assert code == 0, output
    assert all(word in output for word in ("vanilla", "whole", "whole+data", "share of"))
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
        evaluator(task, (m := build_model(config, task.data, seed)))(m.state_dict()) for seed in (0, 1)
    ]
    for method, ln in lines.items():
        assert ln.barrier.rows[0] == pytest.approx(ends[0], rel=1e-5)
        assert ln.barrier.rows[-1]["loss"] == pytest.approx(ends[1]["loss"], rel=1e-5)
        assert method == "vanilla" or ln.after < ln.before


def test_by_default_all_methods_are_measured_that_suit_the_models(models: Path, tmp_path: Path) -> None:
    pair = [models / "classification0", models / "classification1"]
    few = {name: METHODS[name] for name in ("vanilla", "whole", "stream")}
    with patch.dict(METHODS, few, clear=True):  # which restores the order, too
        options = ("--points", 3, "--test-limit", 20, "--out", tmp_path / "out")
        code, output = invoke("barrier", *pair, *options)
    assert code == 0, output
    # The residual stream of BERT cannot be rotated.
    assert [line.method for line in lines_of(read_rows(tmp_path / "out"))] == ["vanilla", "whole"]


def test_a_summary_has_the_middle_and_both_ends_of_a_line() -> None:
    rows = (
        {"accuracy": 0.5, "loss": 2.0},
        {"accuracy": 0.25, "loss": 3.0},
        {"accuracy": 0.75, "loss": 1.0},
    )
    barrier = Barrier((0.0, 0.5, 1.0), rows)
    (summary,) = summarise([BarrierLine("cell", "a to b", "vanilla", 1.0, 4.0, 4.0, barrier)])
    assert summary.middle.mean == 0.25
    assert [end.mean for end in summary.ends] == [0.5, 0.75]


def test_equal_models_have_no_share_of_a_barrier_or_of_a_distance() -> None:
    flat = Barrier((0.0, 0.5, 1.0), ({"loss": 2.0},) * 3)
    methods = ("vanilla", "whole")
    for summary in summarise([BarrierLine("cell", "a to a", m, 1.0, 0.0, 0.0, flat) for m in methods]):
        assert math.isnan(summary.share.mean)
        assert math.isnan(summary.distance.mean)


def test_methods_with_data_read_training_rows_of_the_whole_split() -> None:
    config = SimulationConfig(**{**SMALL, "train_limit": 30, "test_limit": 4})
    task = task_of(config.to_json())
    model = build_model(config, task.data, seed=0)
    assert (len(task.train), len(task.test)) == (30, 4)
    counts = {
        limit: sum(len(batch["input_ids"]) for batch in training_batches(task, model, limit))
        for limit in (12, 99)
    }
    assert counts == {12: 12, 99: 30}


@pytest.mark.parametrize("name", ["rotation", "whole", "whole+data", "stream"])
def test_published_methods_move_all_groups_also_those_that_chance_would_explain(name: str) -> None:
    options = METHODS[name].options
    assert options is not None
    assert (options.chance, options.canonical) == (0, name == "stream")


def _spoil(folder: Path, kind: str) -> None:
    if kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "no weights":
        (folder / "model.safetensors").unlink()
    else:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        changes = {"family": {"model_type": "ernie"}, "vocabulary": {"vocab_size": 7000}}
        path.write_text(json.dumps({**config, **changes[kind]}))


@pytest.mark.parametrize(
    ("a", "b", "spoilt", "options", "expected"),
    [
        ("classification0", "classification-heads", None, [], "different architectures: num_attention"),
        ("classification0", "nowhere", None, [], "is not a folder"),
        ("classification0", "classification1", "no config", [], "config.json' does not exist"),
        ("classification0", "classification1", "no weights", [], "has no model.safetensors"),
        ("classification0", "classification1", "family", [], "ernie"),
        ("classification0", "classification1", "vocabulary", [], "different vocabularies"),
        ("mlm0", "mlm1", None, ["--task", "classification"], "not trained for task 'classification'"),
        ("classification0", "classification1", None, ["--task", "mlm"], "not trained for task 'mlm'"),
        ("classification0", "classification1", None, ["--data", "nothing"], "nothing"),
        ("classification0", "classification1", None, ["--methods", "magic"], "unknown method 'magic'"),
        ("classification0", "classification1", None, ["--points", "4"], "points is 4"),
        ("classification0", "classification1", None, ["--points", "1"], "points is 1"),
        ("classification0", "classification1", None, ["--test-limit", "0"], "test-limit"),
    ],
)
def test_models_that_cannot_be_compared(
    a: str,
    b: str,
    spoilt: str | None,
    options: list[str],
    expected: str,
    models: Path,
    tmp_path: Path,
) -> None:
    other = models / b
    if spoilt:
        other = Path(shutil.copytree(other, tmp_path / "spoilt"))
        _spoil(other, spoilt)
    code, output = invoke("barrier", models / a, other, "--out", tmp_path / "out", *options)
    assert code == 2, output
    assert expected in output.lower()
    assert not (tmp_path / "out").exists()


def test_data_of_other_classes_is_refused(models: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"text": ["one", "two"] * 4, "label": [0, 1] * 4, "split": ["train", "test"] * 4}
    pq.write_table(pa.table(columns), tmp_path / "two.parquet")
    options = ["--data", "two", "--data-dir", tmp_path, "--out", tmp_path / "out"]
    pair = [models / "classification0", models / "classification1"]
    code, output = invoke("barrier", *pair, *options)
    assert code == 2
    assert "has 7 outputs, but two has 2 classes" in output


def test_a_model_without_tokenizer_needs_the_bundled_vocabulary(models: Path, tmp_path: Path) -> None:
    config = SimulationConfig(**SMALL)
    model: Any = build_model(config, task_of(config.to_json()).data, 0)
    model.resize_token_embeddings(50)
    model.save_pretrained(tmp_path / "a")
    code, output = invoke("barrier", tmp_path / "a", tmp_path / "a", "--out", tmp_path / "out")
    assert code == 2
    assert "has no tokenizer. The bundled one has 6000 tokens, the model has 50" in output


def test_tokenizers_of_other_words_are_refused(models: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(models / "mlm1", tmp_path / "b"))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"the"', '"zzzzz"'))
    code, output = invoke("barrier", models / "mlm0", other, "--task", "mlm", "--out", tmp_path / "out")
    assert code == 2
    assert "Different vocabularies" in output


def test_a_filled_folder_is_left_alone(models: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("1")
    pair = [models / "classification0", models / "classification1"]
    code, output = invoke("barrier", *pair, "--out", tmp_path)
    assert code == 2
    assert "Choose another --out" in output
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_nothing_is_written_when_a_method_fails(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise FedrotError("out of luck")

    monkeypatch.setitem(METHODS, "failing", MatchingMethod(refine=fail))
    pair = [models / "classification0", models / "classification1"]
    options = ["--methods", "vanilla,failing", "--points", "3", "--test-limit", "60"]
    code, output = invoke("barrier", *pair, *options, "--out", tmp_path / "out")
    assert code == 2
    assert "out of luck" in output
    assert list(tmp_path.iterdir()) == []


def test_labels_in_another_order_than_the_data_are_refused(models: Path, tmp_path: Path) -> None:
    names = ["neutral", "Disgust", "fear", "joy", "sadness", "surprise", "ANGER"]
    for seed in (0, 1):
        folder = Path(shutil.copytree(models / f"classification{seed}", tmp_path / f"{seed}"))
        settings = json.loads((folder / "config.json").read_text())
        settings |= {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
        (folder / "config.json").write_text(json.dumps(settings))
    pair = [tmp_path / "0", tmp_path / "1"]
    code, output = invoke("barrier", *pair, "--data", "goemotions_ekman", "--out", tmp_path / "out")
    assert code == 2
    assert "'neutral' is output 0 of the model, and label 6 of goemotions_ekman" in output
    code, output = invoke("merge", *pair, "--data", "goemotions_ekman", "--dry-run")
    assert code == 0
    assert "The models are not scored: 'neutral' is output 0 of the model, and label 6 of" in output


def test_models_without_a_finite_loss_are_drawn(models: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models / "mlm0", tmp_path / "a"))
    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    tensors["cls.predictions.bias"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    options = ["--methods", "vanilla", "--points", 3, "--test-limit", 8, "--out", tmp_path / "out"]
    code, output = invoke("barrier", folder, folder, *options)
    assert code == 0, output
    assert (tmp_path / "out" / "barrier.png").is_file()
