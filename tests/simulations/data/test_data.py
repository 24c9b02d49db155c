"""Data sets, their errors, metrics against independent oracles, and the shipped tokenizer."""

from __future__ import annotations

import copy
import csv
import json
import os
import socket
import urllib.request
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from fedrot.simulations.data import sources
from fedrot.simulations.data.encoding import bundled_tokenizer, encode_texts
from fedrot.simulations.data.labels import label_columns, labels_of
from fedrot.simulations.data.sources import DataError
from fedrot.simulations.data.texts import NER, TEXT, TextSplit, load_text_data
from fedrot.simulations.tasks.scores import evaluate_predictions
from tests.simulations.commands import invoke
from tests.simulations.data.wordpiece import SPECIAL_TOKENS, train_wordpiece

EMOTIONS = ("anger", "disgust", "fear", "joy", "sadness", "surprise", "neutral")


@pytest.fixture
def shared_data() -> Path:
    default = Path(__file__).parents[3].parent / "shared" / "data"
    folder = Path(os.environ.get("FEDROT_DATA", default))
    if not folder.is_dir():
        pytest.skip("shared/data is not present: set FEDROT_DATA to the folder with glue/ and emotion/")
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_offline", lambda: True)


def write(path: Path, **columns: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_the_bundled_data_are_the_default() -> None:
    data = load_text_data()
    assert (len(data.train), len(data.test)) == (6000, 1000)
    assert (data.kind, data.label_names, data.metrics[0]) == ("single", EMOTIONS, "accuracy")
    assert np.bincount(data.train.labels).tolist() == [994, 495, 537, 993, 993, 993, 995]
    assert data.train.labels.dtype == np.int64
    assert data.train.columns["label_name"][0] == EMOTIONS[data.train.labels[0]]
    assert max(map(len, data.train.texts)) <= 200


def test_the_bundled_data_carry_their_licence() -> None:
    text = (Path(sources.__file__).parent / "bundled" / "LICENSE-goemotions.txt").read_text()
    for needed in ("Demszky", "Apache License", "Changes made", "END OF TERMS AND CONDITIONS"):
        assert needed in text


@pytest.mark.parametrize(
    ("name", "kind", "metrics", "classes", "train", "test", "pairs"),
    [
        ("cola", "single", "matthews", 2, 8541, 1043, False),
        ("sst2", "single", "accuracy", 2, 66983, 872, False),
        ("mrpc", "single", "accuracy", 2, 3668, 408, True),
        ("rte", "single", "accuracy", 2, 2488, 277, True),
        ("stsb", "regression", "pearson", 1, 5709, 1500, True),
        ("qnli", "single", "accuracy", 2, 9998, 5463, True),
        ("qqp", "single", "accuracy", 2, 17447, 5000, True),
        ("mnli", "single", "accuracy", 3, 9999, 9815, True),
        ("dair_emotion", "single", "accuracy", 6, 15923, 2000, False),
        ("isear", "single", "accuracy", 7, 5975, 747, False),
        ("crowdflower", "single", "accuracy", 8, 31564, 3946, False),
        ("dailydialog", "single", "accuracy", 7, 81153, 7740, False),
        ("goemotions", "multi", "macro_f1", 7, 43112, 5427, False),
        ("affectivetext", "multi", "macro_f1", 6, 250, 1000, False),
        ("ssec", "multi", "macro_f1", 8, 2912, 1956, False),
        ("embedded/sst2", "single", "accuracy", 2, 4000, 872, False),
    ],
)
def test_every_shared_corpus_loads(
    shared_data: Path,
    name: str,
    kind: str,
    metrics: str,
    classes: int,
    train: int,
    test: int,
    pairs: bool,
) -> None:
    data = load_text_data(name, shared_data)
    assert (data.kind, data.metrics[0], len(data.label_names)) == (kind, metrics, classes)
    assert (len(data.train), len(data.test)) == (train, test)
    assert (data.train.pairs is not None) == pairs
    shape = (train, classes) if kind == "multi" else (train,)
    assert data.train.labels.shape == shape
    assert data.train.labels.dtype == (np.int64 if kind == "single" else np.float32)
    assert all(len(values) == train for values in data.train.columns.values())


def test_natural_columns_survive(shared_data: Path) -> None:
    assert set(load_text_data("stsb", shared_data).train.columns["genre"]) == {
        "main-captions",
        "main-news",
        "main-forum",
    }
    assert "country_code" in load_text_data("isear", shared_data).train.columns
    assert "f1" in load_text_data("mrpc", shared_data).metrics


def test_a_limit_takes_the_same_rows_every_time() -> None:
    first = load_text_data(train_limit=100, test_limit=50)
    again = load_text_data(train_limit=100, test_limit=50)
    more = load_text_data(train_limit=200)
    assert (len(first.train), len(first.test)) == (100, 50)
    assert first.train.texts == again.train.texts == more.train.texts[:100]
    assert len(np.unique(first.train.labels)) == 7
    assert len(load_text_data(train_limit=10**6).train) == 6000


def test_string_labels_and_named_columns(tmp_path: Path) -> None:
    for split, rows in (("train", 3), ("test", 2)):
        write(
            tmp_path / "mine" / f"{split}.parquet",
            body=["a", "b", "c"][:rows],
            other=["d", "e", "f"][:rows],
            mood=["sad", "glad", "sad"][:rows],
        )
    data = load_text_data("mine", tmp_path, text_column="body", label_column="mood")
    assert data.label_names == ("glad", "sad")
    assert data.train.labels.tolist() == [1, 0, 1]
    assert data.train.columns == {"other": ["d", "e", "f"]}
    pair = load_text_data("mine", tmp_path, text_column="body, other", label_column="mood")
    assert pair.train.pairs == ("d", "e", "f")


def test_the_last_part_of_a_name_is_the_task(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / "mine" / "cola" / f"{split}.parquet", text=["a", "b"], label=[0, 1])
    data = load_text_data("mine/cola", tmp_path)
    assert (data.metrics[0], data.label_names) == ("matthews", ("unacceptable", "acceptable"))


def test_boolean_columns_are_single_label_only_if_exactly_one_is_true(tmp_path: Path) -> None:
    split = ["train", "train", "test"]
    write(tmp_path / "one.parquet", text=list("abc"), x=[True, False, True], y=[False, True, False],
          split=split)  # fmt: skip
    write(tmp_path / "many.parquet", text=list("abc"), x=[True, False, True], y=[True, False, False],
          split=split)  # fmt: skip
    one, many = (load_text_data(name, tmp_path) for name in ("one", "many"))
    assert (one.kind, one.train.labels.tolist()) == ("single", [0, 1])
    assert (many.kind, many.train.labels.tolist()) == ("multi", [[1, 1], [0, 0]])


def test_an_unknown_name_lists_what_there_is(tmp_path: Path, offline: None) -> None:
    write(tmp_path / "mine.parquet", text=["a"], label=[0], split=["train"])
    with pytest.raises(DataError, match=r"'nope'.*no network.*goemotions_ekman, mine"):
        load_text_data("nope", tmp_path)


def test_a_failing_hub_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fail(*_: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(sources, "_offline", lambda: False)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match="offline, or no such data set: ConnectionError: no route"):
        load_text_data("owner/name")


def test_a_hub_data_set_keeps_its_class_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    split = datasets.Dataset.from_dict({"sentence": ["x", "y"], "label": [1, 0]}, features=features)
    asked = []

    def load(path: str, configuration: str | None) -> datasets.DatasetDict:
        asked.append((path, configuration))
        return datasets.DatasetDict(train=split, validation=split.select([0]))

    monkeypatch.setattr(sources, "_offline", lambda: False)
    monkeypatch.setattr(datasets, "load_dataset", load)
    data = load_text_data("owner/glue:cola")
    assert asked == [("owner/glue", "cola")]
    assert (data.label_names, data.metrics[0]) == (("bad", "good"), "matthews")
    assert (data.train.labels.tolist(), data.test.texts) == ([1, 0], ("x",))


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"text": ["a", "b"], "label": [0, 1]},
            {"text_column": "body"},
            "no text column 'body'; columns are text, label",
        ),
        ({"text": ["a", "b"], "label": [0, 1]}, {"label_column": "mood"}, "no label column 'mood'"),
        (
            {"body": ["a", "b"], "label": [0, 1]},
            {},
            "no text column 'text' or .* are body, label;",
        ),
        (
            {"text": ["a", "b"], "number": [0, 1]},
            {},
            "no label column 'label' .* are text, number;",
        ),
        ({"text": ["a", None], "label": [0, 1]}, {}, "1 missing values"),
        ({"text": ["a", "b"], "label": [0, None]}, {}, "missing values"),
        ({"text": ["a", "b"], "label": [0, -1]}, {}, "negative values"),
        ({"text": ["a", "b"], "label": [[0], [1]]}, {}, "give integers, strings or float scores"),
        ({"text": ["a", "b"], "label": [0, 1]}, {"train_limit": 0}, "must be at least 1"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, columns: dict[str, list[object]], options: dict[str, object], message: str
) -> None:
    for split in ("train", "validation"):
        write(tmp_path / "mine" / f"{split}.parquet", **columns)
    with pytest.raises(DataError, match=message):
        load_text_data("mine", tmp_path, **options)  # type: ignore[arg-type]


TEXTS = [f'it was "{word}", and\nthen {i}' for i in range(10) for word in ("good", "bad")]
MOODS = ["glad", "sad"] * 10


def save(path: Path, columns: dict[str, list[Any]]) -> Path:
    """Write a table with the standard library, Parquet apart."""
    rows = list(zip(*columns.values(), strict=True))
    if path.suffix == ".parquet":
        write(path, **columns)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(columns), *rows])
    else:
        lines = (json.dumps(dict(zip(columns, row, strict=True))) for row in rows)
        path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_a_single_file_is_divided_the_same_way_every_time(suffix: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"mine{suffix}", {"text": TEXTS, "label": MOODS, "site": list(range(20))})
    data = load_text_data(str(path))
    assert data.label_names == ("glad", "sad")
    # One row in five of each class.
    assert np.bincount(data.train.labels).tolist() == [8, 8]
    assert np.bincount(data.test.labels).tolist() == [2, 2]
    assert sorted((*data.train.texts, *data.test.texts)) == sorted(TEXTS)
    for text, site, label in zip(
        data.test.texts, data.test.columns["site"], data.test.labels, strict=True
    ):
        assert isinstance(site, int)
        assert (TEXTS[site], MOODS[site]) == (text, data.label_names[label])
    assert f"{path} has no splits: of 20 rows 4 are held out, one in 5" in data.note
    again, by_name = load_text_data(str(path)), load_text_data(path.name, tmp_path)
    assert again.test.texts == by_name.test.texts == data.test.texts
    assert data.test.texts != data.train.texts[:4]


def test_a_large_csv_file_has_texts_of_several_lines(tmp_path: Path) -> None:
    """Files are read in blocks of a megabyte, which may end within a text."""
    texts = ["a line\n" * 100 + str(i) for i in range(3000)]
    path = save(tmp_path / "large.csv", {"text": texts, "label": ["glad", "sad"] * 1500})
    data = load_text_data(str(path))
    assert sorted((*data.train.texts, *data.test.texts)) == sorted(texts)


def test_all_formats_are_divided_alike(tmp_path: Path) -> None:
    found = {
        load_text_data(str(save(tmp_path / f"mine{suffix}", {"text": TEXTS, "label": MOODS}))).test.texts
        for suffix in (".parquet", ".csv", ".jsonl")
    }
    assert len(found) == 1


def test_a_file_with_splits_of_its_own_keeps_them(tmp_path: Path) -> None:
    split = ["train"] * 15 + ["test"] * 5
    path = save(tmp_path / "mine.csv", {"text": TEXTS, "label": MOODS, "split": split})
    data = load_text_data(str(path))
    assert (data.train.texts, data.test.texts) == (tuple(TEXTS[:15]), tuple(TEXTS[15:]))
    assert data.note == ""
    assert load_text_data().note == ""


def test_of_a_file_with_both_splits_the_test_rows_are_held_out(tmp_path: Path) -> None:
    split = ["train", "validation", "test", "train"]
    write(tmp_path / "mine.parquet", text=list("abcd"), label=[0, 1, 1, 1], split=split)
    data = load_text_data("mine", tmp_path)
    assert (data.train.texts, data.test.texts) == (("a", "d"), ("c",))


def test_scores_and_columns_of_other_names_are_divided_too(tmp_path: Path) -> None:
    """A score is no class: of twenty different ones four are held out."""
    scores = [i / 7 for i in range(20)]
    data = load_text_data(str(save(tmp_path / "scores.csv", {"text": TEXTS, "label": scores})))
    assert (data.kind, len(data.train), len(data.test)) == ("regression", 16, 4)
    path = save(tmp_path / "other.csv", {"body": TEXTS, "mood": MOODS})
    data = load_text_data(str(path), text_column="body", label_column="mood")
    assert (data.label_names, len(data.train), len(data.test)) == (("glad", "sad"), 16, 4)


def test_paragraphs_of_plain_text_are_rows_for_language_modelling(tmp_path: Path) -> None:
    speeches = [f"FIRST:\nSpeech {i}." for i in range(20)]
    path = tmp_path / "play.txt"
    path.write_text("\n\n  \n".join(speeches) + "\n\n")
    data = load_text_data(str(path), labels_optional=True)
    assert sorted((*data.train.texts, *data.test.texts)) == sorted(speeches)
    assert (len(data.test), data.label_names, set(data.train.labels)) == (4, ("all",), {0})
    with pytest.raises(DataError, match="no label column 'label'"):
        load_text_data(str(path))
    code, output = invoke(
        "simulate", "--data", path, "--task", "clm", "--clients", 2, "--out", tmp_path / "o", "--dry-run"
    )
    assert code == 0, output


def test_labels_that_are_there_are_read_though_optional(tmp_path: Path) -> None:
    path = save(tmp_path / "mine.csv", {"text": TEXTS, "label": MOODS})
    data = load_text_data(str(path), labels_optional=True)
    assert (data.label_names, data.said) == (("glad", "sad"), "")
    assert load_text_data(str(path)).said == "Labels: 2 classes in the column 'label': glad, sad."


def test_the_chosen_labels_divide_a_file_and_others_do_not(tmp_path: Path) -> None:
    """Though another column is called ``label``: here the numbers of the rows, which are no classes."""
    rows = {"text": TEXTS, "label": list(range(20)), "mood": ["glad"] * 15 + ["sad"] * 5}
    path = str(save(tmp_path / "mine.csv", rows))
    data = load_text_data(path, label_column="mood")
    assert np.bincount(data.test.labels).tolist() == [3, 1]
    assert "one in 5 of each class" in data.note
    by_rows = sources.find(path, None).divided(["label"])
    assert by_rows.test.num_rows == 4
    assert "one in 5, drawn" in by_rows.note


@pytest.mark.parametrize(("column", "option"), [("target", None), ("mood", " mood")])
def test_labels_of_any_name_divide_a_file(column: str, option: str | None, tmp_path: Path) -> None:
    path = save(tmp_path / "mine.csv", {"text": TEXTS, column: ["glad"] * 15 + ["sad"] * 5})
    data = load_text_data(str(path), label_column=option)
    assert np.bincount(data.test.labels).tolist() == [3, 1]
    assert "one in 5 of each class" in data.note


def test_many_different_labels_divide_at_once(tmp_path: Path) -> None:
    table = pa.table({"label": [str(i // 10) for i in range(100_000)]})
    found = sources.Source("it", {"here": table}).divided(["label"])
    assert set(Counter(found.test["label"].to_pylist()).values()) == {2}


def test_rows_may_be_longer_than_a_block(tmp_path: Path) -> None:
    texts = [f"{i} " + 800_000 * "ab" for i in range(6)]
    for suffix in (".csv", ".jsonl"):
        path = save(tmp_path / f"long{suffix}", {"text": texts, "label": ["glad"] * 3 + ["sad"] * 3})
        source = sources.find(str(path), None).divided()
        assert sorted(t for s in (source.train, source.test) for t in s["text"].to_pylist()) == texts


def test_a_column_has_the_type_that_all_its_rows_have(tmp_path: Path) -> None:
    """The library ``datasets`` reads scores in the first file, and refuses the others."""
    gap = tmp_path / "gap.csv"
    gap.write_text("text,label\n" + "a,1\nb,\nc,0\n" * 10)
    data = load_text_data(str(gap), missing="drop")
    assert (data.kind, data.label_names) == ("single", ("0", "1"))
    late = tmp_path / "late.csv"
    late.write_text("text,label\n" + "a,1\n" * 20_000 + "a,x\n" * 10)
    assert load_text_data(str(late)).label_names == ("1", "x")
    rows = [{"text": f"{2000 * 'a'} {i}", "label": 1} for i in range(8000)]
    lines = [*map(json.dumps, rows), *(json.dumps({**row, "site": "x"}) for row in rows[:10])]
    (tmp_path / "late.jsonl").write_text("\n".join(lines))
    assert {*load_text_data(str(tmp_path / "late.jsonl")).train.columns["site"]} == {None, "x"}


def test_names_of_files_are_no_patterns(tmp_path: Path) -> None:
    path = save(tmp_path / "mine[1]*.csv", {"text": TEXTS, "label": MOODS})
    assert len(load_text_data(str(path)).train) == 16


@pytest.mark.parametrize("odd", ["train", "test"])
@pytest.mark.parametrize("row", [(0, 0), (1, 1)], ids=["none", "both"])
def test_rows_without_or_with_several_labels_make_a_task_of_several(
    odd: str, row: tuple[int, int]
) -> None:
    """In whichever split they are."""
    splits = {name: pa.table({"glad": [1, 0], "sad": [0, 1]}) for name in ("train", "test")}
    single = labels_of(sources.Source("it", splits), ("glad", "sad"))
    assert (single.kind, single.train.tolist(), single.test.tolist()) == ("single", [0, 1], [0, 1])
    splits[odd] = pa.table({"glad": [1, row[0]], "sad": [0, row[1]]})
    several = labels_of(sources.Source("it", splits), ("glad", "sad"))
    assert several.kind == "multi"
    assert getattr(several, odd).tolist() == [[1, 0], list(row)]


@pytest.mark.parametrize("odd", ["train", "test"])
def test_a_class_of_one_split_is_a_class(odd: str) -> None:
    splits = {name: pa.table({"label": [0, 1, 1]}) for name in ("train", "test")}
    splits[odd] = pa.table({"label": [0, 1, 2]})
    found = labels_of(sources.Source("it", splits), ("label",))
    assert found.names == ("0", "1", "2")
    assert (found.train.max(), found.test.max()) == ((2, 1) if odd == "train" else (1, 2))


def test_commands_say_how_a_file_was_divided(tmp_path: Path) -> None:
    path = save(tmp_path / "mine.csv", {"text": TEXTS, "label": MOODS})
    code, output = invoke(
        "simulate", "--data", path, "--clients", 2, "--out", tmp_path / "o", "--dry-run"
    )
    assert code == 0, output
    assert "has no splits: of 20 rows 4 are held out" in output


def test_bad_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "alone" / "train.parquet", text=["a"], label=[0])
    with pytest.raises(DataError, match="no held-out split"):
        load_text_data("alone", tmp_path)
    write(tmp_path / "whole.parquet", text=["a"], label=[0])
    with pytest.raises(DataError, match=r"whole.parquet has 1 rows, too few to hold .* more rows$"):
        load_text_data("whole", tmp_path)
    write(tmp_path / "half.parquet", text=["a"], label=[0], split=["train"])
    with pytest.raises(DataError, match="needs 'train' and one of"):
        load_text_data("half", tmp_path)
    write(tmp_path / "empty" / "train.parquet", text=pa.array([], pa.string()), label=pa.array([], "i8"))
    write(tmp_path / "empty" / "test.parquet", text=["a"], label=[0])
    with pytest.raises(DataError, match=r"empty \(train\) has no rows"):
        load_text_data("empty", tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        load_text_data("cola", tmp_path / "missing")
    with pytest.raises(DataError, match=r"there is no file \S+/nowhere.csv; check its path$"):
        load_text_data(str(tmp_path / "nowhere.csv"))


def test_cross_entropy_and_accuracy_by_hand() -> None:
    logits = np.array([[2.0, 0.0, -1.0], [0.0, 0.0, 0.0], [1.0, 3.0, 1.0]])
    labels = np.array([0, 1, 2])
    by_hand = [
        -np.log(row[label] / row.sum()) for row, label in zip(np.exp(logits), labels, strict=True)
    ]
    scores = evaluate_predictions("single", ("accuracy", "macro_f1"), logits, labels)
    assert scores["loss"] == pytest.approx(np.mean(by_hand), abs=1e-12)
    assert scores["accuracy"] == pytest.approx(1 / 3)
    # Predicted 0, 0, 1: F1 is 2/3 for class 0 and nothing for the others.
    assert scores["macro_f1"] == pytest.approx(2 / 9)


def test_calibration_agrees_with_a_loop_over_bins_and_with_one_over_temperatures() -> None:
    import torch
    from torch.nn import functional

    rng = np.random.default_rng(0)
    logits, labels = 3 * rng.normal(size=(200, 4)), rng.integers(4, size=200)
    found = evaluate_predictions("single", ("ece", "calibrated_loss"), logits, labels)
    probabilities = torch.softmax(torch.from_numpy(logits), 1).numpy()
    confidence, expected = probabilities.max(1), 0.0
    for first in range(15):
        own = (confidence >= first / 15) & (confidence < (first + 1) / 15)
        if own.any():
            hits = probabilities[own].argmax(1) == labels[own]
            expected += own.mean() * abs(hits.mean() - confidence[own].mean())
    assert found["ece"] == pytest.approx(expected, abs=1e-12)
    targets = torch.from_numpy(labels)
    losses = [
        float(functional.cross_entropy(torch.from_numpy(logits) / 2 ** (step / 8), targets))
        for step in range(-16, 33)
    ]
    assert found["calibrated_loss"] == pytest.approx(min(losses), rel=1e-12)
    assert found["calibrated_loss"] < found["loss"]


@pytest.mark.parametrize(("right", "expected"), [(4, 0.0), (2, 0.5), (0, 1.0)])
def test_predictions_of_full_confidence_are_off_by_their_errors(right: int, expected: float) -> None:
    labels = np.arange(4) % 2
    predicted = np.where(np.arange(4) < right, labels, 1 - labels)
    found = evaluate_predictions("single", ("ece",), 1e3 * np.eye(2)[predicted], labels)
    assert found["ece"] == expected


def test_losses_are_stable_and_agree_with_torch() -> None:
    import torch
    from torch.nn import functional

    rng = np.random.default_rng(0)
    logits, single = rng.normal(0, 300, (50, 4)), rng.integers(0, 4, 50)
    multi = rng.integers(0, 2, (50, 4)).astype(np.float32)
    ours = evaluate_predictions("single", (), logits, single)["loss"]
    theirs = functional.cross_entropy(torch.tensor(logits), torch.tensor(single))
    assert ours == pytest.approx(theirs.item(), rel=1e-12)
    ours = evaluate_predictions("multi", (), logits, multi)["loss"]
    theirs = functional.binary_cross_entropy_with_logits(
        torch.tensor(logits), torch.tensor(multi).double()
    )
    assert ours == pytest.approx(theirs.item(), rel=1e-12)


def test_multi_label_metrics_by_hand() -> None:
    logits = np.array([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    labels = np.array([[1, 0], [0, 1], [0, 1]], dtype=np.float32)
    scores = evaluate_predictions("multi", ("macro_f1", "micro_f1", "accuracy"), logits, labels)
    # True positives 1 and 1, false positives 1 and 0, false negatives 0 and 1: F1 is 2/3 each.
    assert scores["macro_f1"] == pytest.approx(2 / 3)
    assert scores["micro_f1"] == pytest.approx(2 / 3)
    assert scores["accuracy"] == pytest.approx(1 / 3)


def test_binary_metrics_by_hand() -> None:
    labels, predicted = np.array([1, 1, 1, 0, 0, 0]), np.array([1, 1, 0, 0, 0, 1])
    scores = evaluate_predictions("single", ("matthews", "f1"), np.eye(2)[predicted], labels)
    assert scores["matthews"] == pytest.approx((2 * 2 - 1 * 1) / np.sqrt(3 * 3 * 3 * 3))
    assert scores["f1"] == pytest.approx(2 / 3)


def test_regression_metrics_by_hand() -> None:
    labels, outputs = np.array([0.0, 1.0, 2.0, 5.0]), np.array([[0.0], [2.0], [1.0], [3.0]])
    scores = evaluate_predictions("regression", ("pearson", "spearman"), outputs, labels)
    assert scores["pearson"] == pytest.approx(np.corrcoef(outputs[:, 0], labels)[0, 1])
    assert scores["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert scores["loss"] == pytest.approx((0 + 1 + 1 + 4) / 4)
    constant = evaluate_predictions("regression", ("pearson", "spearman"), np.ones(4), labels)
    assert (constant["pearson"], constant["spearman"]) == (0.0, 0.0)


def test_predictions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        evaluate_predictions("multi", (), np.zeros((3, 2)), np.zeros((3, 4)))
    with pytest.raises(ValueError, match="do not fit"):
        evaluate_predictions("single", (), np.zeros((0, 2)), np.zeros(0, dtype=np.int64))
    with pytest.raises(ValueError, match="unknown metric 'bleu'"):
        evaluate_predictions("single", ("bleu",), np.zeros((3, 2)), np.zeros(3, dtype=np.int64))


def test_the_bundled_tokenizer_is_a_bert_tokenizer() -> None:
    tokenizer = bundled_tokenizer()
    assert tokenizer.get_vocab_size() == 6000
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    pair = tokenizer.encode("So HAPPY!", "thanks")
    assert pair.tokens == ["[CLS]", "so", "happy", "!", "[SEP]", "thanks", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 0, 0, 1, 1]
    texts = load_text_data().test.texts
    ids = [i for encoding in tokenizer.encode_batch(list(texts)) for i in encoding.ids]
    assert ids.count(1) / len(ids) < 0.001
    assert bundled_tokenizer() is tokenizer


def test_training_a_tokenizer_twice_gives_the_same_one() -> None:
    texts = load_text_data().train.texts
    first, second = (train_wordpiece(iter(texts), 1000) for _ in range(2))
    assert first.get_vocab_size() == 1000
    assert first.to_str() == second.to_str()
    with pytest.raises(ValueError, match="choose a larger vocabulary"):
        train_wordpiece(texts, 100)


def test_the_shipped_tokenizer_can_be_rebuilt(shared_data: Path) -> None:
    table = pq.read_table(shared_data / "emotion" / "goemotions.parquet", columns=["text", "split"])
    rows = zip(table["text"].to_pylist(), table["split"].to_pylist(), strict=True)
    rebuilt = train_wordpiece(text for text, split in rows if split == "train")
    assert rebuilt.to_str() == bundled_tokenizer().to_str()


def test_parquet_with_views_as_polars_writes_it_is_read(tmp_path: Path) -> None:
    if not hasattr(pa, "string_view"):
        pytest.skip("this pyarrow has no views")
    texts = pa.array([f"text {i}" for i in range(10)], pa.string_view())
    write(tmp_path / "views.parquet", text=texts, label=pa.array(["a", "b"] * 5, pa.string_view()))
    data = load_text_data(str(tmp_path / "views.parquet"))
    assert data.label_names == ("a", "b")
    assert {"text 0", "text 9"} <= {*data.train.texts, *data.test.texts}


@pytest.mark.parametrize(
    "values",
    [[["a", "word"]] * 10, [{"a": "text"}] * 10, [b"text"] * 10],
    ids=["list", "struct", "binary"],
)
def test_text_columns_hold_texts(values: list[object], tmp_path: Path) -> None:
    write(tmp_path / "odd.parquet", text=values, label=[0, 1] * 5)
    with pytest.raises(DataError, match=r"'text' holds .*; give one text per row"):
        load_text_data(str(tmp_path / "odd.parquet"))
    write(tmp_path / "splits" / "train.parquet", text=["a"] * 10, label=[0, 1] * 5)
    write(tmp_path / "splits" / "test.parquet", text=values, label=[0, 1] * 5)
    with pytest.raises(DataError, match=r"splits/test.parquet: .* 'text' holds .*; give one text"):
        load_text_data("splits", tmp_path)


def test_files_that_are_no_tables_are_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    for name in ("rows.yaml", "rows.csv.gz"):
        (tmp_path / name).write_text("[]")
        with pytest.raises(DataError, match=r"files end in .parquet, .csv, .tsv, .jsonl, .json, .txt"):
            load_text_data(str(tmp_path / name))
    (tmp_path / "rows.csv").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match=r"rows.csv' is a pointer of git-lfs"):
        load_text_data(str(tmp_path / "rows.csv"))
    (tmp_path / "ROWS.CSV").write_text("text,label\n" + "a,0\nb,1\n" * 10)
    assert len(load_text_data(str(tmp_path / "ROWS.CSV")).train) == 16


def test_f1_of_two_classes_is_that_of_class_1() -> None:
    outputs = np.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    found = evaluate_predictions("single", ("f1", "macro_f1"), outputs, np.array([1, 1, 1, 0]))
    # Two of three are found, and nothing else; of class 0 one of two that are predicted is right.
    assert found["f1"] == pytest.approx(0.8)
    assert found["macro_f1"] == pytest.approx((0.8 + 2 / 3) / 2)


def test_a_file_is_looked_for_in_the_data_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, label in (("here", "x"), ("data", "y")):
        (tmp_path / folder).mkdir()
        rows = "".join(f"a {i},{label}{i % 2}\n" for i in range(20))
        (tmp_path / folder / "mine.csv").write_text("text,label\n" + rows)
    monkeypatch.chdir(tmp_path / "here")
    assert load_text_data("mine.csv", tmp_path / "data").label_names == ("y0", "y1")
    assert load_text_data("mine.csv").label_names == ("x0", "x1")
    (tmp_path / "data" / "glue").mkdir()
    (tmp_path / "data" / "mine.csv").rename(tmp_path / "data" / "glue" / "mine.csv")
    assert load_text_data("mine.csv", tmp_path / "data").label_names == ("y0", "y1")
    with pytest.raises(DataError, match=r"there is no file other.csv, nor below \S+/data; check"):
        load_text_data("other.csv", tmp_path / "data")
    # A folder here with the name of bundled data is none of tables.
    (tmp_path / "here" / "goemotions_ekman").mkdir()
    assert load_text_data().label_names == EMOTIONS


def test_columns_have_usual_names_in_the_order_of_preference() -> None:
    texts = ("text", "sentence", "content", "review", "comment", "tweet", "utterance")
    labels = ("label", "labels", "target", "class")
    for number, name in enumerate(texts):
        table = pa.table({other: ["a"] for other in reversed(texts[number:])})
        assert sources.Source("it", {"here": table}).column(TEXT, None) == name
    for number, name in enumerate(labels):
        table = pa.table({other: ["a"] for other in reversed(labels[number:])})
        assert label_columns(sources.Source("it", {"here": table}), None) == (name,)
    # A column has to be in both tables.
    tables = {"here": pa.table({"text": ["a"], "review": ["b"]}), "there": pa.table({"review": ["c"]})}
    assert sources.Source("it", tables).column(TEXT, None) == "review"
    with pytest.raises(
        DataError, match=r"here and there: no text column 'text'; columns are review; .* --text-column"
    ):
        sources.Source("it", tables).column(TEXT, "text")


def test_a_single_boolean_column_is_no_label(tmp_path: Path) -> None:
    path = save(tmp_path / "one.parquet", {"text": TEXTS, "glad": [True, False] * 10})
    with pytest.raises(DataError, match=r"no label column 'label' .* columns are text, glad"):
        load_text_data(str(path))
    assert load_text_data(str(path), label_column="glad").label_names == ("False", "True")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sentence1", "sentence2"),
        ("question1", "question2"),
        ("premise", "hypothesis"),
        ("question", "sentence"),
    ],
)
def test_pairs_have_usual_names(first: str, second: str, tmp_path: Path) -> None:
    columns = {second: [text[::-1] for text in TEXTS], first: TEXTS, "label": MOODS}
    data = load_text_data(str(save(tmp_path / "pairs.csv", columns)))
    assert data.train.pairs == tuple(text[::-1] for text in data.train.texts)
    assert {*data.train.texts, *data.test.texts} == set(TEXTS)
    assert data.train.columns == {}


def test_texts_are_one_column_or_two(tmp_path: Path) -> None:
    path = save(tmp_path / "mine.csv", {"text": list(range(20)), "body": TEXTS, "label": MOODS})
    with pytest.raises(DataError, match="has 3 columns; give one or two"):
        load_text_data(str(path), text_column="text,body,text")
    # Numbers are read as texts.
    assert {*load_text_data(str(path)).test.texts} <= {str(number) for number in range(20)}


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_metrics_of_paraphrases(task: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"{task}.csv", {"text": TEXTS, "label": [0, 1] * 10})
    assert load_text_data(str(path)).metrics == ("accuracy", "macro_f1", "f1")


@pytest.mark.parametrize("folder", [".", "glue", "emotion", "embedded"])
def test_data_folders_are_searched_with_their_usual_folders(folder: str, tmp_path: Path) -> None:
    for name in ("mine_train", "mine_test", "mine_validation", "mine_validation_matched"):
        write(tmp_path / folder / f"{name}.parquet", text=[name], label=["a"])
    data = load_text_data("mine", tmp_path)
    assert (data.train.texts, data.test.texts) == (("mine_train",), ("mine_validation",))
    (tmp_path / folder / "mine_validation.parquet").unlink()
    assert load_text_data("mine", tmp_path).test.texts == ("mine_validation_matched",)
    (tmp_path / folder / "mine_validation_matched.parquet").unlink()
    assert load_text_data("mine", tmp_path).test.texts == ("mine_test",)
    (tmp_path / folder / "mine_test.parquet").unlink()
    with pytest.raises(DataError, match=r"add one of mine_validation.parquet, .*, mine_test.parquet"):
        load_text_data("mine", tmp_path)


def test_validation_rows_are_held_out_where_there_are_no_test_rows(tmp_path: Path) -> None:
    split = ["validation", "train", "train"]
    write(tmp_path / "mine.parquet", text=list("abc"), label=[0, 1, 0], split=split)
    data = load_text_data("mine", tmp_path)
    assert (data.train.texts, data.test.texts) == (("b", "c"), ("a",))


def test_a_data_folder_goes_before_the_bundled_data(tmp_path: Path) -> None:
    columns = {"text": TEXTS, "label": MOODS, "split": ["train", "test"] * 10}
    save(tmp_path / "goemotions_ekman.parquet", columns)
    assert load_text_data("goemotions_ekman", tmp_path).label_names == ("glad", "sad")
    assert load_text_data("goemotions_ekman", tmp_path.parent).label_names == EMOTIONS


def test_what_there_is_is_listed_by_the_names_to_give(tmp_path: Path, offline: None) -> None:
    for name in ("whole", "both_train", "parts/train", "emotion/other", "away/test"):
        write(tmp_path / f"{name}.parquet", text=["a"], label=[0])
    with pytest.raises(DataError, match="Available: both, goemotions_ekman, other, parts, whole "):
        load_text_data("nope", tmp_path)
    with pytest.raises(DataError, match="Available: nothing "):
        sources.find("nope", None, NER)


def test_held_out_rows_of_the_hub_are_those_of_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    splits = {
        name: datasets.Dataset.from_dict({"sentence": [name], "label": [1]})
        for name in ("test", "validation", "train")
    }
    monkeypatch.setattr(sources, "_offline", lambda: False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict(splits))
    data = load_text_data("owner/sst2")
    assert (data.train.texts, data.test.texts) == (("train",), ("validation",))
    # The task is the last part of the name.
    assert data.label_names == ("negative", "positive")
    del splits["validation"]
    assert load_text_data("owner/sst2").test.texts == ("test",)
    del splits["test"]
    with pytest.raises(DataError, match=r"'owner/sst2' is not available: .*a held-out split"):
        load_text_data("owner/sst2")


def test_the_hub_is_asked_where_its_address_is_known_or_there_may_be_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    hosts: list[str] = []

    def unknown(host: str, port: int) -> list[Any]:
        hosts.append(host)
        raise OSError("no such host")

    def asked() -> bool:
        with pytest.raises(DataError) as caught:
            load_text_data("owner/name")
        assert ("there is no network" in str(caught.value)) != (
            "from the hub failed" in str(caught.value)
        )
        return "from the hub failed" in str(caught.value)

    def fail(*_: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert not asked()
    assert hosts == ["hub.example"]
    with monkeypatch.context() as known:
        known.setattr(socket, "getaddrinfo", lambda *_: ["an address"])
        assert asked()
    with monkeypatch.context() as proxied:
        proxied.setattr(urllib.request, "getproxies", lambda: {"https": "proxy"})
        assert asked()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert asked()


def test_a_column_of_texts_alone_is_a_table(tmp_path: Path) -> None:
    texts = ["NA", "null", "None", *TEXTS]
    path = tmp_path / "mine.csv"
    path.write_text("text\n" + "".join(f"line {row}\n" for row in range(20)))
    assert len(load_text_data(str(path), labels_optional=True).train) == 16
    # Texts that stand for missing numbers are texts.
    data = load_text_data(str(save(path, {"text": texts})), labels_optional=True)
    assert sorted((*data.train.texts, *data.test.texts)) == sorted(texts)


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("listed", [False, True])
def test_objects_are_in_a_list_or_one_per_line(suffix: str, listed: bool, tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "label": mood}) for text, mood in zip(TEXTS, MOODS, strict=True)]
    path = tmp_path / f"mine{suffix}"
    path.write_text("\ufeff [" + ",\n".join(lines) + "]" if listed else "\n".join(lines), "utf-8")
    data = load_text_data(str(path))
    assert sorted((*data.train.texts, *data.test.texts)) == sorted(TEXTS)


def test_outputs_that_are_no_scores_are_refused_or_undefined() -> None:
    labels = np.array([0.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="regression needs one output per row, got 2"):
        evaluate_predictions("regression", ("pearson",), np.zeros((3, 2)), labels)
    for bad in (np.nan, np.inf):
        outputs = np.array([[0.0], [bad], [1.0]])
        found = evaluate_predictions("regression", ("pearson",), outputs, labels)
        assert list(found) == ["pearson", "loss"]
        assert np.isnan(list(found.values())).all()
    # A correlation needs two rows and labels that differ; that it has none is no warning.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = evaluate_predictions("regression", ("pearson", "spearman"), np.ones((1, 1)), labels[:1])
        same = evaluate_predictions("regression", ("pearson",), np.arange(3.0), np.ones(3))
    assert (one["pearson"], one["spearman"], same["pearson"]) == (0, 0, 0)
    # A label is predicted if its logit is above 0.
    found = evaluate_predictions("multi", ("accuracy",), np.array([[0.0, 1.0]]), np.array([[0, 1]]))
    assert found["accuracy"] == 1


def test_texts_are_cut_and_padded_to_the_longest_of_a_batch_alone() -> None:
    tokenizer = copy.deepcopy(bundled_tokenizer())
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(3)
    split = TextSplit(np.array([1, 0]), {"domain": [7, 8]}, ("so happy", "so " * 50), None)
    encoded = encode_texts(split, tokenizer, 8, pad_id=9)
    assert encoded.lengths(np.array([1, 0, 1])).tolist() == [8, 4, 8]
    assert (encoded.domains, len(encoded)) == (("7", "8"), 2)
    batch = encoded.batch(np.array([0, 1]))
    so, happy = map(tokenizer.token_to_id, ("so", "happy"))
    assert batch["input_ids"].tolist() == [[2, so, happy, 3, 9, 9, 9, 9], [2, *[so] * 6, 3]]
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 8]
    assert encoded.batch(np.array([0]))["input_ids"].shape == (1, 4)
    assert encoded.targets(np.array([1, 0])).tolist() == [0, 1]
    pairs = encode_texts(TextSplit(np.zeros(1), {}, ("so " * 9,), ("happy",)), tokenizer, 8, 9)
    assert pairs.batch(np.array([0]))["token_type_ids"].tolist() == [[0] * 6 + [1] * 2]
    # The tokenizers are as they were.
    assert len(tokenizer.encode("so").ids) == 32
    assert (bundled_tokenizer().truncation, bundled_tokenizer().padding) == (None, None)
