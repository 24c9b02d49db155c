"""Several data sets as the domains of one task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrot.simulations.data.partition import key_names, partition_keys
from fedrot.simulations.data.read import DataError
from fedrot.simulations.data.texts import load_domains, load_texts
from tests.simulations.data.files import chosen, write

WORDS = ("sunny", "gloomy", "furious", "shy")


def corpus(path: Path, labels: tuple[str, ...], seed: int) -> None:
    """Write 60 rows whose words tell their labels; every label occurs in both splits."""
    which = np.random.default_rng(seed).permutation(np.arange(60) % len(labels))
    texts = [f"{labels[w]} day {i} of {path.stem}" for i, w in enumerate(which)]
    columns = {label: [bool(w == place) for w in which] for place, label in enumerate(labels)}
    write(path, text=texts, **columns, split=["train"] * 45 + ["test"] * 15)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus(tmp_path / "news.parquet", ("sunny", "gloomy"), 0)
    corpus(tmp_path / "talk.parquet", ("gloomy", "furious", "shy"), 1)
    corpus(tmp_path / "books.parquet", ("furious", "sunny"), 2)
    return tmp_path


def load(names: str, folder: Path, unseen: str = "", **fields: Any) -> Any:
    return load_domains(chosen(names, folder, unseen_data=unseen, **fields))


@pytest.mark.parametrize("names", ["news,talk", " news, talk ,"])
def test_labels_are_united_by_name_and_unknown_where_a_domain_has_none(names: str, folder: Path) -> None:
    data = load(names, folder, " books ,")
    assert (data.name, data.label_names) == ("news,talk", WORDS)
    assert data.domains == ("news", "talk")
    assert (len(data.train), len(data.test)) == (90, 45)
    for split in (data.train, data.test):
        for domain, text, labels in zip(
            split.columns["domain"], split.inputs, split.labels, strict=True
        ):
            known = {"news": (0, 1), "talk": (1, 2, 3), "books": (0, 2)}[str(domain)]
            assert set(np.flatnonzero(~np.isnan(labels))) == set(known)
            assert data.label_names[int(np.nanargmax(labels))] == text.split()[0]
    assert data.metrics == ("macro_f1", "unseen_macro_f1", "f1_news", "f1_talk", "f1_books")
    said = [load_texts(chosen(name, folder)).said for name in ("news", "talk", "books")]
    assert data.said == " ".join(said)


def test_one_data_set_is_a_domain_beside_unseen_ones_alone(folder: Path) -> None:
    assert load("news", folder, "books").metrics == (
        "macro_f1",
        "unseen_macro_f1",
        "f1_news",
        "f1_books",
    )
    for unseen in ("", " "):
        data = load("news", folder, unseen)
        assert (data.kind, data.domains) == ("single", ())


def test_unknown_labels_are_no_classes_of_a_partition() -> None:
    labels = np.array([[np.nan, 1, 0], [0, np.nan, 1], [np.nan, 0, 0]], dtype=np.float32)
    assert partition_keys(labels).tolist() == [1, 2, 3]
    assert key_names(labels, ("a", "b", "c")) == ("a", "b", "c", "none")


@pytest.mark.parametrize(
    ("names", "unseen", "message"),
    [
        ("news,news", "", "two data sets have the same name among news, news"),
        ("news,talk", "talk", "two data sets have the same name among news, talk, talk"),
        ("news,scores", "", "'scores' has scores, pairs"),
        ("news,pairs", "", "'pairs' has scores, pairs"),
        ("news,numbers.csv", "", "'numbers.csv' has .* numbers for classes"),
        ("news,sub/news.parquet", "", "two data sets have the same name"),
        ("news", "other", "'other' has none of the labels sunny, gloomy; it has furious, shy"),
    ],
)
def test_what_is_no_domain_is_named(names: str, unseen: str, message: str, folder: Path) -> None:
    write(folder / "scores.parquet", text=["a"] * 10, label=[i / 3 for i in range(10)])
    write(folder / "pairs.parquet", sentence1=["a"] * 10, sentence2=["b"] * 10, label=["x", "y"] * 5)
    write(folder / "numbers.csv", text=["a"] * 10, label=[0, -1] * 5)
    corpus(folder / "sub" / "news.parquet", ("sunny", "gloomy"), 4)
    corpus(folder / "other.parquet", ("furious", "shy"), 3)
    with pytest.raises(DataError, match=message):
        load(names, folder, unseen)


def test_domains_may_have_any_number_of_labels_and_their_own_limits(tmp_path: Path) -> None:
    split = ["train"] * 8 + ["test"] * 4
    glad, sad = [True, True, False] * 4, [True, False, False] * 4
    write(tmp_path / "many.parquet", text=[*map(str, range(12))], glad=glad, sad=sad, split=split)
    lines = [f"line {row}" for row in range(20)]
    write(tmp_path / "files" / "other.csv", text=lines, label=["sad", "1"] * 10)
    write(tmp_path / "files" / "unseen.csv", text=lines, label=["sad", "unheard"] * 10)
    names = ("many", "files/other.csv", "files/unseen.csv")
    data = load(",".join(names[:2]), tmp_path, names[2], train_limit=6, test_limit=3)
    assert data.label_names == ("glad", "sad", "1")
    assert data.train.columns["domain"] == ["many"] * 6 + ["files/other.csv"] * 6
    assert data.test.columns["domain"] == [name for name in names for _ in range(3)]
    for text, labels in zip(data.train.inputs[:6], data.train.labels, strict=False):
        assert labels[:2].tolist() == [glad[int(text)], sad[int(text)]]
        assert np.isnan(labels[2])
    assert data.metrics[2:] == ("f1_many", "f1_other", "f1_unseen")
    # Both files were divided, the table was not.
    assert [part in data.note for part in ("many", "other.csv", "unseen.csv")] == [False, True, True]
    # A label that no domain with training rows has is left out.
    assert set(np.flatnonzero(~np.isnan(data.test.labels[-3:]).all(axis=0))) == {1}
