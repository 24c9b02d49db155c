"""Tables: files of every format, folders, the hub, and what is refused with what to do."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrot._io import DEEPEST, shallow
from fedrot.simulations.data import read
from fedrot.simulations.data.read import DataError, find, read_table
from fedrot.simulations.data.texts import load_tags, load_texts
from tests.simulations.data.files import TEXTS, bounded, chosen, write

ROWS = "".join(f"{i},x{i % 2}\n" for i in range(10))
FRAME = pd.DataFrame({"text": list("abcdefghij"), "label": ["x", "y"] * 5})


def parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, store_schema=False)
    return file.getvalue()


def feather() -> bytes:
    file = io.BytesIO()
    FRAME.to_feather(file)
    return file.getvalue()


#: A parser that recurses ends the process at so many brackets.
DEEP = "[" * 300_000
#: Name and content of a file, and what is said.
REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "semicolons": ("a.csv", "text;label\na;1\n", "separated by semicolons; separate them by commas"),
    "commas beside semicolons": ("a.csv", "text;label\na, b;1\n", "separated by semicolons"),
    "tabs": ("a.csv", "text\tlabel\na\t1\n", "separated by tabs; separate them by commas"),
    "commas": ("a.tsv", "text,label\na,1\n", "separated by commas; separate them by tabs"),
    "Excel's other line": ("a.csv", "sep=;\ntext;label\na;1\n", "separated by semicolons"),
    "UTF-16": ("a.csv", "text,label\na,1\n".encode("utf-16"), "in UTF-16: save it in UTF-8"),
    "UTF-16 without a mark": ("a.csv", "text,label\na,1\n".encode("utf-16-le"), "UTF-16"),
    "gzip": ("a.csv", gzip.compress(b"text,label\na,1\n"), "compressed by gzip: unpack it"),
    "gzip of JSON": ("a.jsonl", gzip.compress(b"{}"), "compressed by gzip: unpack it"),
    "gzip of Parquet": ("a.parquet", gzip.compress(parquet(text=["a"])), "compressed by gzip"),
    "an Excel workbook": ("a.csv", b"PK\3\4\x14\0", "an Excel workbook or a zip archive: export it"),
    "Feather": ("a.csv", feather(), "Feather.*: save it as Parquet"),
    "a web page": ("a.csv", "<!doctype html>\n<p>404", "a web page: download the file itself"),
    "a pointer": ("a.csv", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs"),
    "Latin-1": ("a.csv", b"text,label\na,b\ncaf\xe9,a\n", "(?i)column #0: Row #3: .*invalid utf8"),
    "JSON in Latin-1": ("a.jsonl", b'{"text": "caf\xe9", "label": 1}\n', "utf-8"),
    "text in Latin-1": ("a.txt", b"caf\xe9\n", "a.txt cannot be read as plain text .*utf-8"),
    "a long row": ("a.csv", "a,b\n1,2\n1,2,3\n", "CSV .*Row #3: Expected 2 columns, got 3.*; save it"),
    "a short row": ("a.csv", "text,label\na,1\nb\n", "Row #3: Expected 2 columns, got 1"),
    "an open quotation": ("a.tsv", 'text\tlabel\n"a\tx\nb"\ty\n', "quotation mark is not closed"),
    "an open quotation at the end": (
        "a.csv",
        "text,label\n" + ROWS + '"a,x\n' + ROWS,
        "quotation mark is not closed|got 1",
    ),
    "the last mark is missing": (
        "a.csv",
        "text,label\n" + ROWS + 'a,"x\n' + ROWS,
        "quotation mark is not closed",
    ),
    "empty": ("a.csv", "", "Empty CSV file"),
    "equal names but for spaces": (
        "a.csv",
        "text,label,label \na,1,2\n",
        "two columns have equal names",
    ),
    "a line too many": ("a.csv", "text,label\n", "a.csv has 0 rows, too few"),
    "numbers in a list": ("a.json", "[1, 2]", "items that are not objects"),
    "half an object": (
        "a.jsonl",
        '{"text": "a"}\n{half',
        "a.jsonl cannot be read as JSON lines.*line 2 column 2",
    ),
    "two types": ("a.jsonl", '{"text": "a"}\n{"text": 1}\n', "'text' has values of several types"),
    "a lone surrogate": ("a.jsonl", '{"text": "\\ud800"}\n', "'text' has values"),
    "no Parquet": ("a.parquet", "text", "a.parquet cannot be read as Parquet"),
    "half of Parquet": ("a.parquet", parquet(text=["a"])[:-9], "a.parquet cannot be read as Parquet"),
    **{
        f"a data frame by {orient}": ("a.json", FRAME.to_json(orient=orient), "orient='records'")
        for orient in ("columns", "index", "split", "table")
    },
    "brackets": ("a.jsonl", '{"a":' + DEEP, "a.jsonl .* nested more than 200"),
    "objects": ("a.json", "[" + '{"a":' * 300_000, "a.json .* nested more than 200"),
    "marks": ("a.jsonl", '"\\' * 300_000, "a.jsonl cannot be read as JSON lines"),
    "names": ("a.json", json.dumps([dict.fromkeys(map(str, range(50_000)), 1)]), "it has 50000 columns"),
    "sparse objects": (
        "a.jsonl",
        "".join(f'{{"c{i % 9999}":1}}\n' for i in range(50_000)),
        "499950000 cells",
    ),
    "columns": ("a.csv", ",".join(map(str, range(50_000))) + "\n", "it has 50000 columns"),
    "equal columns": ("a.csv", (",".join(f"c{i}" for i in range(9000)) + "\n") * 3, "c9 and 8990 more"),
    "cells": ("a.parquet", parquet(**{str(i): pa.nulls(1 << 22) for i in range(65)}), "272629760 cells"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_table_is_refused_with_the_cause(name: str, tmp_path: Path) -> None:
    file, content, message = REFUSED[name]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with bounded(), pytest.raises(DataError, match=f"(?s){message}") as caught:
        load_texts(chosen(tmp_path / file))
    assert str(tmp_path / file) in str(caught.value)
    assert len(str(caught.value)) < 700


#: Name and content of a file with ten rows of two classes.
READ: dict[str, tuple[str, str | bytes]] = {
    "plain": ("a.csv", "text,label\n" + ROWS),
    "upper case": ("A.CSV", "text,label\n" + ROWS),
    "spaces and a mark": ("a.csv", "\ufeff text , label \n" + ROWS),
    "lines of Windows": ("a.csv", ("text,label\n" + ROWS).replace("\n", "\r\n")),
    "Excel's line": ("a.csv", "\ufeffsep=,\r\ntext,label\r\n" + ROWS),
    "Excel's empty columns": ("a.csv", "text,label,,\n" + ROWS.replace("\n", ",,\n")),
    "the index of pandas": ("a.csv", FRAME.to_csv()),
    "a name as a pattern": ("a[1]*.csv", "text,label\n" + ROWS),
    "tabs": ("a.tsv", FRAME.to_csv(sep="\t", index=False)),
    "Parquet of another name": ("a.csv", parquet(text=list("abcdefghij"), label=["x", "y"] * 5)),
    "records": ("a.json", FRAME.to_json(orient="records")),
    "indented records": ("a.json", FRAME.to_json(orient="records", indent=2)),
    "a mark and spaces": ("a.jsonl", "\ufeff \n" + FRAME.to_json(orient="records")),
    "lines": ("a.jsonl", FRAME.to_json(orient="records", lines=True)),
    "lines of another name": ("a.json", FRAME.to_json(orient="records", lines=True)),
    "one large cell": (
        "a.json",
        json.dumps([{"text": "x" * (1 << 22), "label": "y"}, *FRAME.to_dict("records")[1:]]),
    ),
    "a column that is late": (
        "a.jsonl",
        FRAME.to_json(orient="records", lines=True)[:-3] + '","site":"here"}\n',
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_other_tools_save_is_read(name: str, tmp_path: Path) -> None:
    file, content = READ[name]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    data = load_texts(chosen(tmp_path / file))
    assert (len(data.train), len(data.test), len(data.label_names)) == (8, 2, 2)
    assert set(data.train.columns) <= {"site"}


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0\r"), max_size=9)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_cells_of_text_files_are_their_texts(rows: list[tuple[str, str]]) -> None:
    from tempfile import TemporaryDirectory

    columns = {"text": [first for first, _ in rows], "other": [second for _, second in rows]}
    with TemporaryDirectory() as folder:
        table = read_table(write(Path(folder, "a.csv"), **columns))
    assert table.to_pydict() == {
        name: [cell or None for cell in cells] for name, cells in columns.items()
    }


json_cells = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts


@given(st.lists(json_cells, min_size=1, max_size=5))
def test_cells_of_json_keep_their_types(cells: list[Any]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = write(Path(folder, "a.jsonl"), text=cells)
        kinds = {type(cell) for cell in cells} - {type(None)}
        try:
            found = read_table(path)["text"].to_pylist()
        except DataError:
            assert len(kinds) > 1
            return
    large = kinds == {int} and any(abs(cell) >= 2**63 for cell in cells if cell is not None)
    assert found == [str(cell) if large and cell is not None else cell for cell in cells]


def test_rows_may_be_longer_than_a_block_and_have_several_lines(tmp_path: Path) -> None:
    texts = [f"{i} " + 100_000 * 'a "line",\n' for i in range(6)]
    for suffix in (".csv", ".tsv", ".jsonl", ".json"):
        assert read_table(write(tmp_path / f"long{suffix}", text=texts))["text"].to_pylist() == texts


def test_types_of_parquet_are_kept(tmp_path: Path) -> None:
    texts = ["a", None, "b"] * 100
    columns = {
        "text": texts,
        "class": pa.array(texts).dictionary_encode(),
        "words": [["a", "b"], [], None] * 100,
        "delta": pa.array(texts, pa.large_string()),
        "image": [{"bytes": b"x", "path": None}] * 300,
    }
    how = {"column_encoding": {"delta": "DELTA_BYTE_ARRAY"}, "use_dictionary": ["text", "class"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", **how)
    assert read_table(tmp_path / "a.parquet").equals(pq.read_table(tmp_path / "a.parquet"))


def test_brackets_in_texts_are_no_levels() -> None:
    opened = b"[" * (DEEPEST + 1)
    for data in (opened[1:] + b"]" * DEEPEST, b'"' + opened + b'"', rb'"\"' + opened, b"[]" * 9999, b""):
        assert shallow(data) is data
    for data in (opened, b'"a"' + opened, rb'"\\"' + opened, rb'"\\\""' + opened, b'{"a":' * 201):
        with pytest.raises(ValueError, match="levels"):
            shallow(data)


def test_paragraphs_of_plain_text_are_rows(tmp_path: Path) -> None:
    speeches = [f"FIRST:\nSpeech {i}." for i in range(20)]
    (tmp_path / "play.txt").write_text("\n\n  \n".join(speeches) + "\n\n")
    data = load_texts(chosen(tmp_path / "play.txt", task="mlm"))
    assert sorted((*data.train.inputs, *data.test.inputs)) == sorted(speeches)
    assert (len(data.test), data.label_names, set(data.train.labels), data.said) == (
        4,
        ("all",),
        {0},
        "",
    )
    with pytest.raises(DataError, match="no label column 'label'"):
        load_texts(chosen(tmp_path / "play.txt"))


#: Files of a data folder, the name that is given, and the files that are read.
PLACES: dict[str, tuple[list[str], str, list[str]]] = {
    "a file": (["mine.csv", "mine.parquet"], "mine.csv", ["mine.csv"]),
    "a name": (["mine.parquet", "mine/train.parquet", "mine/test.parquet"], "mine", ["mine.parquet"]),
    "a folder of files": (["emotion/mine.csv"], "mine.csv", ["emotion/mine.csv"]),
    "a folder of splits": (
        ["mine/train.parquet", "mine/test.parquet", "mine/validation.parquet"],
        "mine",
        ["mine/train.parquet", "mine/validation.parquet"],
    ),
    "two splits for tests": (
        ["glue/mine/train.parquet", "glue/mine/test.parquet", "glue/mine/validation_matched.parquet"],
        "mine",
        ["glue/mine/train.parquet", "glue/mine/validation_matched.parquet"],
    ),
    "splits beside each other": (
        ["embedded/mine_train.parquet", "embedded/mine_test.parquet"],
        "mine",
        ["embedded/mine_train.parquet", "embedded/mine_test.parquet"],
    ),
    "splits as text": (["mine/train.csv", "mine/test.csv"], "mine", ["mine/train.csv", "mine/test.csv"]),
    "a part of a path": (
        ["glue/mine/train.jsonl", "glue/mine/test.jsonl"],
        "glue/mine",
        ["glue/mine/train.jsonl", "glue/mine/test.jsonl"],
    ),
    "before the bundled data": (
        ["goemotions_ekman.parquet"],
        "goemotions_ekman",
        ["goemotions_ekman.parquet"],
    ),
    "words with tags": (["ner/mine.parquet"], "mine", ["ner/mine.parquet"]),
}


@pytest.mark.parametrize("name", PLACES)
def test_where_data_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, given_name, expected = PLACES[name]
    for file in files:
        write(tmp_path / "data" / file, text=[file])
    found = find(given_name, tmp_path / "data")
    assert list(found.tables) == [str(tmp_path / "data" / file) for file in expected]
    assert [table["text"].to_pylist() for table in found.tables.values()] == [
        [file] for file in expected
    ]
    if "goemotions" not in given_name and "/" not in files[0].replace("mine/", ""):
        monkeypatch.chdir(tmp_path / "data")
        assert list(find(given_name, None).tables) == expected
        (tmp_path / "other").mkdir()
        assert list(find(given_name, tmp_path / "other").tables) == expected


def test_bundled_data_are_found_before_a_folder_of_their_name_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "goemotions_ekman").mkdir()
    data = load_texts(chosen("goemotions_ekman"))
    emotions = ("anger", "disgust", "fear", "joy", "sadness", "surprise", "neutral")
    assert (data.label_names, len(data.train), len(data.test)) == (emotions, 6000, 1000)
    assert np.bincount(data.train.labels).tolist() == [994, 495, 537, 993, 993, 993, 995]
    assert data.train.columns["label_name"][0] == emotions[data.train.labels[0]]
    licence = (Path(read.__file__).parent / "bundled" / "LICENSE-goemotions.txt").read_text()
    assert "Demszky" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ([], "nowhere.csv", "'nowhere.csv' is not available"),
        (
            ["mine.csv.gz"],
            "mine.csv.gz",
            r"mine.csv.gz has no known format.* .parquet, .csv, .tsv, .jsonl, .json, .txt",
        ),
        (
            ["mine/train.parquet"],
            "mine",
            "add one of validation.parquet, validation_matched.parquet, test",
        ),
        (["mine_train.parquet"], "mine", "add one of mine_validation.parquet"),
        (["mine/note.txt"], "mine", "mine has no images, nor train.parquet"),
        (
            [
                "both_train.parquet",
                "whole.parquet",
                "parts/train.parquet",
                "emotion/other.parquet",
                "away/test.parquet",
            ],
            "nope",
            "Available: away, both_train.parquet, digits, emotion, goemotions_ekman, other.parquet, "
            "parts, whole.parquet .*names of the hub are owner/name",
        ),
        (["there"], "/no/such/data", "'/no/such/data' is not available"),
    ],
)
def test_what_is_not_found_is_told_without_a_network(
    files: list[str], name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("the hub was asked"))
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(parquet(text=["a"]))
    with pytest.raises(DataError, match=message):
        find(name, tmp_path)
    with pytest.raises(DataError, match=r"data folder .* does not exist"):
        find(name, tmp_path / "missing")


def hub_rows(*texts: str, hidden: bool = False) -> datasets.Dataset:
    kinds = {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    columns = {"sentence": texts, "label": [-1 if hidden else row % 2 for row in range(len(texts))]}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


#: What a data set of ``datasets`` holds, and the numbers of rows, or a word of the error.
SPLITS: dict[str, tuple[Any, Any]] = {
    "three": ({"train": 4, "test": 2, "validation": 1}, (4, 1)),
    "two": ({"test": 2, "train": 4}, (4, 2)),
    "training rows alone": ({"train": 10}, (8, 2)),
    "no training rows": ({"first": 10, "test": 2}, "it needs a split 'train' and has first, test"),
    "no splits": (10, (8, 2)),
    "hidden labels": ({"train": 4, "test": -2}, r"test.* labels without a name .* -1, in 2 of 2 rows"),
}


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", SPLITS)
def test_data_sets_of_the_hub_and_saved_ones(
    name: str, saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, expected = SPLITS[name]
    rows = (
        {s: hub_rows(*TEXTS[: abs(n)], hidden=n < 0) for s, n in sizes.items()}
        if isinstance(sizes, dict)
        else hub_rows(*TEXTS[:10])
    )
    found = datasets.DatasetDict(rows) if isinstance(rows, dict) else rows
    asked: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or found)
    given_name = "owner/glue:cola"
    if saved:
        found.save_to_disk(tmp_path / "cola")
        given_name = str(tmp_path / "cola")
    if isinstance(expected, str):
        with pytest.raises(DataError, match=f"cola.*{expected}"):
            load_texts(chosen(given_name))
        return
    data = load_texts(chosen(given_name))
    assert ((len(data.train), len(data.test)), data.label_names) == (expected, ("bad", "good"))
    assert data.metrics[0] == "matthews"
    assert asked == ([] if saved else [("owner/glue", "cola")])
    assert {*data.train.inputs} <= set(TEXTS)


def test_a_damaged_saved_data_set_and_a_hub_that_fails_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_rows("a", "b").save_to_disk(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"x" * 99)
    with pytest.raises(DataError, match=r"saved' cannot be read as saved by 'datasets' \(Arrow"):
        load_texts(chosen(tmp_path / "saved"))

    def fail(*_: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        DataError, match=r"'owner/name' is not available.*hub failed \(ConnectionError: no route"
    ):
        load_texts(chosen("owner/name"))


def test_numbers_of_a_hub_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["O", "B-PER", "I-PER"]
    kinds = {
        "tokens": datasets.List(datasets.Value("string")),
        "ner_tags": datasets.List(datasets.ClassLabel(names=names)),
    }
    rows = {"tokens": [["Anna", "is"]], "ner_tags": [[1, 0]]}
    split = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_: datasets.DatasetDict(train=split, test=split)
    )
    data = load_tags(chosen("owner/entities"))
    assert (data.tags, data.train.second[0].tolist()) == (tuple(names), [1, 0])
