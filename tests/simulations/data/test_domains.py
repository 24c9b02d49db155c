"""Several data sets as the domains of one task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrot.simulations.data.read import DataError
from fedrot.simulations.data.texts import load_domains, load_texts
from tests.simulations.data.files import chosen, write


def corpus(path: Path, *labels: str) -> None:
    """Write 60 rows whose words tell their labels; every label occurs in both splits."""
    which = np.random.default_rng(len(path.stem)).permutation(np.arange(60) % len(labels))
    texts = [f"{labels[w]} day {i} of {path.stem}" for i, w in enumerate(which)]
    columns = {label: [bool(w == place) for w in which] for place, label in enumerate(labels)}
    write(path, text=texts, **columns, split=["train"] * 45 + ["test"] * 15)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus(tmp_path / "news.parquet", "sunny", "gloomy")
    corpus(tmp_path / "talk.parquet", "gloomy", "furious", "shy")
    corpus(tmp_path / "books.parquet", "furious", "sunny")
    return tmp_path


def load(names: str, folder: Path, unseen: str = "", **fields: Any) -> Any:
    return load_domains(chosen(names, folder, unseen_data=unseen, **fields))


@pytest.mark.parametrize("names", ["news,talk", " news, talk ,"])
def test_labels_are_united_by_name_and_unknown_where_a_domain_has_none(names: str, folder: Path) -> None:
    data = load(names, folder, " books ,")
    assert (data.name, data.label_names) == ("news,talk", ("sunny", "gloomy", "furious", "shy"))
    assert (data.domains, len(data.train), len(data.test)) == (("news", "talk"), 90, 45)
    for split in (data.train, data.test):
        for row, domain in enumerate(split.columns["domain"]):
            known = {"news": [0, 1], "talk": [1, 2, 3], "books": [0, 2]}[str(domain)]
            assert np.flatnonzero(~np.isnan(split.labels[row])).tolist() == known
            told = split.inputs[row].split()
            assert (data.label_names[np.nanargmax(split.labels[row])], domain) == (told[0], told[-1])
    assert data.metrics == ("macro_f1", "unseen_macro_f1", "f1_news", "f1_talk", "f1_books")
    said = [load_texts(chosen(name, folder)).said for name in ("news", "talk", "books")]
    assert data.said == " ".join(said)


def test_one_data_set_is_a_domain_beside_unseen_ones_alone(folder: Path) -> None:
    assert load("news", folder, "books").metrics[1:] == ("unseen_macro_f1", "f1_news", "f1_books")
    data = load("news", folder, " ")
    assert (data.kind, data.domains) == ("single", ())


@pytest.mark.parametrize(
    ("names", "unseen", "message"),
    [
        ("news,news", "", "two data sets have the same name among news, news"),
        ("news,talk", "talk", "two data sets have the same name among news, talk, talk"),
        ("news,sub/news.parquet", "", "two data sets have the same name"),
        *(
            (f"news,{wrong}", "", f"'{wrong}' has scores, pairs")
            for wrong in ("scores", "pairs", "n.csv")
        ),
        ("news", "other", "'other' has .* or none of the labels sunny, gloomy; domains need"),
    ],
)
def test_what_is_no_domain_is_named(names: str, unseen: str, message: str, folder: Path) -> None:
    write(folder / "scores.parquet", text=["a"] * 10, label=[i / 3 for i in range(10)])
    write(folder / "pairs.parquet", sentence1=["a"] * 10, sentence2=["b"] * 10, label=["x", "y"] * 5)
    write(folder / "n.csv", text=["a"] * 10, label=[0, -1] * 5)
    corpus(folder / "sub" / "news.parquet", "sunny", "gloomy")
    corpus(folder / "other.parquet", "furious", "shy")
    with pytest.raises(DataError, match=message):
        load(names, folder, unseen)


def test_domains_may_have_any_number_of_labels_and_their_own_limits(tmp_path: Path) -> None:
    glad, sad = [True, True, False] * 4, [True, False, False] * 4
    columns = {"glad": glad, "sad": sad, "split": ["train"] * 8 + ["test"] * 4}
    write(tmp_path / "many.parquet", text=[*map(str, range(12))], **columns)
    lines = [f"line {row}" for row in range(20)]
    write(tmp_path / "files" / "other.csv", text=lines, label=["sad", "1"] * 10)
    write(tmp_path / "files" / "unseen.csv", text=lines, label=["sad", "unheard"] * 10)
    data = load("many,files/other.csv", tmp_path, "files/unseen.csv", train_limit=6, test_limit=3)
    assert data.label_names == ("glad", "sad", "1")
    assert data.train.columns["domain"] == ["many"] * 6 + ["files/other.csv"] * 6
    assert data.test.columns["domain"][::3] == ["many", "files/other.csv", "files/unseen.csv"]
    for text, labels in zip(data.train.inputs[:6], data.train.labels, strict=False):
        assert labels[:2].tolist() == [glad[int(text)], sad[int(text)]]
        assert np.isnan(labels[2])
    assert data.metrics[2:] == ("f1_many", "f1_other", "f1_unseen")
    # Both files were divided, the table was not. A label that only an unseen domain has is left out.
    divided = [f"{name} has no splits" in data.said for name in ("many", "other.csv", "unseen.csv")]
    assert divided == [False, True, True]
    assert set(np.flatnonzero(~np.isnan(data.test.labels[-3:]).all(axis=0))) == {1}
