"""Tables: files of every format, folders, the hub, and what is refused with what to
do.
"""

import gzip
import io
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrot._io import DEEPEST, shallow
from fedrot.simulations.data.read import DataError, find, read_table
from fedrot.simulations.data.texts import load_domains, load_tags, load_texts
from tests.simulations.data.files import TEXTS, bounded, chosen, write

ROWS = "".join(f"{i},x{i % 2}\n" for i in range(10))
FRAME = pd.DataFrame({"text": list("abcdefghij"), "label": ["x", "y"] * 5})
LINES = FRAME.to_json(orient="records", lines=True)
HEAD = "text,label\n"


def parquet(**columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def written(folder, name, content):
    (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    return folder / name


ZIPPED = (
    "no text in UTF-8: a gzip or zip file, a workbook, Arrow, UTF-16?.*; save or "
    "export it as Parquet"
)
OPEN = "quotation mark is not closed|unexpected end of data|',' expected"
#: A parser that recurses ends the process at so many brackets.
DEEP = "[" * 300_000
#: Name and content of a file, and what is said.
REFUSED = {
    "UTF-16": ("a.csv", "text,label\na,1\n".encode("utf-16"), ZIPPED),
    "gzip": ("a.csv", gzip.compress(b"text,label\na,1\n"), ZIPPED),
    "gzip of Parquet": (
        "a.parquet",
        gzip.compress(parquet(text=["a"])),
        "magic bytes.*not compressed",
    ),
    "a pointer": (
        "a.csv",
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "git lfs pull",
    ),
    "Latin-1": ("a.csv", b"text,label\na,b\ncaf\xe9,a\n", "utf-8"),
    "a short row": (
        "a.csv",
        "text,label\na,1\nb\n",
        "row 3 has 1 cells, and the first 2",
    ),
    "an open quotation": ("a.tsv", 'text\tlabel\n"a\tx\nb"\ty\n', OPEN),
    "the last mark is missing": ("a.csv", HEAD + ROWS + 'a,"x\n' + ROWS, OPEN),
    "a mark inside of a cell": (
        "a.csv",
        HEAD + 'x,1\n"he said "hi" to me",1\n',
        "row 3, .*',' expected.* written twice",
    ),
    "empty": ("a.csv", "", "is empty: it has no columns"),
    "equal names": (
        "a.csv",
        "text,label,label \na,1,2\n",
        "2 columns of the name 'label'; rename",
    ),
    "numbers in a list": ("a.json", "[1, 2]", "needs an object for each row"),
    **{
        f"{first} beside {second}": (
            "a.json",
            json.dumps([{"text": value} for value in (None, first, first, second)]),
            f"'text' has .*: {first!r} in row 2 and {re.escape(repr(second))} in row 4",
        )
        for first, second in (
            ("0", 0),
            (0, "0"),
            (True, 1),
            (1, True),
            (0.5, False),
            ("a", ["a"]),
        )
    },
    "a large number beside text": (
        "a.jsonl",
        f'{{"text": 1e3}}\n{{"text": {10**30}}}\n',
        "too large",
    ),
    "half of Parquet": ("a.parquet", parquet(text=["a"])[:-9], "cannot be read"),
    "a frame by columns": (
        "a.json",
        FRAME.to_json(orient="columns"),
        "orient='records'",
    ),
    "a frame by split": ("a.json", FRAME.to_json(orient="split"), "orient='records'"),
    "brackets": ("a.jsonl", '{"a":' + DEEP, "nested more than 200"),
    "marks": ("a.jsonl", '"\\' * 300_000, "cannot be read"),
    "many columns": (
        "a.csv",
        ",".join(map(str, range(50_000))) + "\n",
        "9 and 49990 more",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_table_is_refused_with_the_cause(name, tmp_path):
    file, content, message = REFUSED[name]
    path = written(tmp_path, file, content)
    with bounded(), pytest.raises(DataError, match=f"(?s){message}") as caught:
        load_texts(chosen(path))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 700


#: Name and content of a file with ten rows of two classes.
READ = {
    "upper case": ("A.CSV", HEAD + ROWS),
    "spaces and a mark": ("a.csv", "\ufeff text , label \n" + ROWS),
    "empty lines": ("a.csv", (HEAD + ROWS).replace("\n", "\n\n")),
    "Excel's line": ("a.csv", "\ufeffsep=,\r\ntext,label\r\n" + ROWS),
    "Excel's other line": ("a.csv", "SEP=;\r\ntext;label\r\n" + ROWS.replace(",", ";")),
    "Excel's empty columns": ("a.csv", "text,label,,\n" + ROWS.replace("\n", ",,\n")),
    **{
        f"{mark!r} in {suffix}": (f"a{suffix}", FRAME.to_csv(sep=mark, index=False))
        for mark in ",;|\t"
        for suffix in (".csv", ".tsv")
    },
    "semicolons beside commas": ("a.csv", "text;label\n" + ROWS.replace(",", ", b;")),
    "Parquet of another name": (
        "a.csv",
        parquet(text=list("abcdefghij"), label=["x", "y"] * 5),
    ),
    "records": ("a.json", FRAME.to_json(orient="records")),
    "a mark and spaces": ("a.jsonl", "\ufeff \n" + FRAME.to_json(orient="records")),
    "lines of another name": ("a.json", LINES),
    "a column that is late": ("a.jsonl", LINES[:-3] + '","site":"here"}\n'),
}


@pytest.mark.parametrize("name", READ)
def test_what_other_tools_save_is_read(name, tmp_path):
    data = load_texts(chosen(written(tmp_path, *READ[name])))
    assert (len(data.train), len(data.test), len(data.label_names)) == (8, 2, 2)
    assert set(data.train.columns) == ({"site"} if "late" in name else set())


texts = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0\r"), max_size=9
)
json_cells = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_cells_of_text_files_are_their_texts(rows):
    columns = {
        "text": [first for first, _ in rows],
        "other": [second for _, second in rows],
    }
    with TemporaryDirectory() as folder:
        table = read_table(write(Path(folder, "a.csv"), **columns))
    assert table.to_pydict() == {
        name: [cell or None for cell in cells] for name, cells in columns.items()
    }


@given(st.lists(json_cells, min_size=1, max_size=5))
def test_cells_of_json_keep_their_types(cells):
    kinds = {type(cell) for cell in cells} - {type(None)}
    large = any(type(cell) is int and not -(2**63) <= cell < 2**63 for cell in cells)
    with TemporaryDirectory() as folder:
        try:
            found = read_table(write(Path(folder, "a.jsonl"), text=cells))
        except DataError:
            assert len(kinds) > 1 or large
        else:
            assert found.to_pydict() == {"text": cells}


def test_rows_may_be_longer_than_a_block_and_have_several_lines(tmp_path):
    texts = [f"{i} " + 100_000 * 'a "line",\n' for i in range(6)]
    for suffix in (".csv", ".tsv", ".jsonl", ".json"):
        table = read_table(write(tmp_path / f"long{suffix}", text=texts))
        assert table.to_pydict() == {"text": texts}


def test_brackets_in_texts_are_no_levels():
    opened = b"[" * (DEEPEST + 1)
    for data in (
        opened[1:] + b"]" * DEEPEST,
        b'"' + opened + b'"',
        rb'"\"' + opened,
        b"[]" * 9999,
        b"",
    ):
        assert shallow(data) is data
    for data in (
        opened,
        b'"a"' + opened,
        rb'"\\"' + opened,
        rb'"\\\""' + opened,
        b'{"a":' * 201,
    ):
        with pytest.raises(ValueError, match="levels"):
            shallow(data)


def test_paragraphs_of_plain_text_are_rows(tmp_path):
    speeches = [f"FIRST:\nSpeech {i}." for i in range(20)]
    path = written(tmp_path, "play.txt", "\n\n  \n".join(speeches) + "\n\n")
    data = load_texts(chosen(path, task="mlm"))
    assert sorted((*data.train.inputs, *data.test.inputs)) == sorted(speeches)
    assert (len(data.test), data.label_names) == (4, ("all",))
    assert set(data.train.labels) == {0}
    with pytest.raises(DataError, match="no label column 'label'"):
        load_texts(chosen(path))


#: Files of a data folder, the name that is given, and the files that are read.
PLACES = [
    ("mine.csv mine.parquet", "mine.csv", "mine.csv"),
    ("mine.parquet mine/train.parquet mine/test.parquet", "mine", "mine.parquet"),
    ("any/mine.parquet glue/mine.parquet", "mine", "any/mine.parquet"),
    (
        "mine/train.csv mine/test.csv mine/validation.csv",
        "mine",
        "mine/train.csv mine/validation.csv",
    ),
    (
        "g/m/train.tsv g/m/validation_matched.tsv",
        "m",
        "g/m/train.tsv g/m/validation_matched.tsv",
    ),
    ("mine/train.csv mine/val.csv", "mine", "mine/train.csv mine/val.csv"),
    ("mine/train.csv mine/dev.csv", "mine", "mine/train.csv mine/dev.csv"),
    ("goemotions_ekman.parquet", "goemotions_ekman", "goemotions_ekman.parquet"),
]


@pytest.mark.parametrize(("files", "name", "expected"), PLACES)
def test_where_data_are_found(files, name, expected, tmp_path, monkeypatch):
    for file in files.split():
        write(tmp_path / "data" / file, text=[file])
    found = find(name, tmp_path / "data")
    wanted = expected.split()
    assert [(path, table.to_pydict()) for path, table in found.tables.items()] == [
        (str(tmp_path / "data" / file), {"text": [file]}) for file in wanted
    ]
    if files.startswith("mine"):
        monkeypatch.chdir(tmp_path / "data")
        (tmp_path / "other").mkdir()
        for folder in (None, tmp_path / "other"):
            assert list(find(name, folder).tables) == wanted


def test_bundled_data_are_found_before_a_folder_of_their_name_here(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "goemotions_ekman").mkdir()
    data = load_texts(chosen("goemotions_ekman"))
    emotions = ("anger", "disgust", "fear", "joy", "sadness", "surprise", "neutral")
    assert (data.label_names, len(data.train), len(data.test)) == (emotions, 6000, 1000)
    counts = np.bincount(data.train.labels).tolist()
    assert counts == [994, 495, 537, 993, 993, 993, 995]
    assert data.train.columns["label_name"][0] == emotions[data.train.labels[0]]


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ("", "nowhere.csv", "'nowhere.csv' is not available"),
        (
            "mine.csv.gz",
            "mine.csv.gz",
            "no known format.* .parquet, .csv, .tsv, .jsonl, .json, .txt",
        ),
        (
            "mine/train.parquet",
            "mine",
            "add one of validation.parquet, .*, test.parquet",
        ),
        ("mine/note.txt", "mine", "mine has no images, nor train.parquet"),
        (
            "a.parquet b/c.parquet",
            "nope",
            "Available: a.parquet, b, c.parquet, digits, goemotions",
        ),
    ],
)
def test_what_is_not_found_is_told_without_a_network(
    files, name, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_: pytest.fail("the hub was asked")
    )
    for file in files.split():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        written(tmp_path, file, parquet(text=["a"]))
    with pytest.raises(DataError, match=message):
        find(name, tmp_path)
    with pytest.raises(DataError, match=r"not exist"):
        find(name, tmp_path / "missing")


@pytest.mark.parametrize(
    "name",
    [
        *("my/rows,old.csv", "rows/mine.csv.gz", "rows/mine.xlsx", "rows/a.png:x"),
        *("rows/a.SAV", "rows/a.h5", "rows/a.7z", "rows/a.db-2024"),
        "owner/rows,old.csv",
        *("./mine", "../mine", "/mine", "~/mine", "mine/", "rows\\mine", "here/mine"),
        *("my/rows,below", "sub/mine"),
    ],
)
def test_what_may_be_a_path_does_not_leave_the_machine(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_: pytest.fail("the hub was asked")
    )
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "data/sub", "my", "my/rows,below"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(DataError):
        load_domains(chosen(name, tmp_path / "data"))


def hub_rows(*texts, hidden=False):
    kinds = {
        "sentence": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["good", "bad"]),
    }
    columns = {
        "sentence": texts,
        "label": [-1 if hidden else row % 2 for row in range(len(texts))],
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


#: Rows of the splits of a data set of ``datasets`` (hidden labels: negative); what is
#: read, or said.
SPLITS = {
    "three": ({"train": 4, "test": 2, "validation": 1}, (4, 1)),
    "training rows alone": ({"train": 10}, (8, 2)),
    "no training rows": ({"first": 10, "test": 2}, "split 'train'"),
    "no splits": ({"": 10}, (8, 2)),
    "hidden labels": (
        {"train": 4, "test": -2},
        r"test.* labels without a name .* -1, in 2 of 2 rows",
    ),
}


@pytest.mark.parametrize(
    ("name", "saved"),
    [*((name, False) for name in SPLITS), ("three", True), ("no splits", True)],
)
def test_data_sets_of_the_hub_and_saved_ones(name, saved, tmp_path, monkeypatch):
    sizes, expected = SPLITS[name]
    rows = {s: hub_rows(*TEXTS[: abs(n)], hidden=n < 0) for s, n in sizes.items()}
    found = rows.get("") or datasets.DatasetDict(rows)
    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *names: asked.append(names) or found
    )
    given_name = str(tmp_path / "cola") if saved else "owner/glue-1.5b:cola.v2"
    if saved:
        found.save_to_disk(given_name)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=f"cola.*{expected}"):
            load_texts(chosen(given_name))
        return
    data = load_texts(chosen(given_name))
    assert (len(data.train), len(data.test)) == expected
    assert data.label_names == ("good", "bad")
    assert asked == ([] if saved else [("owner/glue-1.5b", "cola.v2")])
    assert {*data.train.inputs} <= set(TEXTS)


def test_a_damaged_saved_data_set_and_a_hub_that_fails_are_named(tmp_path, monkeypatch):
    hub_rows("a", "b").save_to_disk(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"x" * 99)
    with pytest.raises(
        DataError, match=r"saved' cannot be read as saved by 'datasets' \(Arrow"
    ):
        load_texts(chosen(tmp_path / "saved"))

    def fail(*_):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        DataError, match=r"'owner/name' is not available.*hub failed .*: no route"
    ):
        load_texts(chosen("owner/name"))


@pytest.mark.parametrize(
    ("folder", "file", "name", "outside"),
    [
        ("saved", "dataset_dict.json", "test", "../other/test"),
        ("saved", "test/state.json", "data-", "../../other/test/data-"),
        ("saved/test", "state.json", "data-", "../../other/test/data-"),
    ],
)
def test_saved_data_sets_name_no_file_outside(folder, file, name, outside, tmp_path):
    rows = hub_rows(*TEXTS)
    for copy in ("saved", "other"):
        datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / copy)
    listing = tmp_path / folder / file
    listing.write_text(listing.read_text().replace(name, outside))
    with pytest.raises(DataError, match=f"names '{outside}.* outside"):
        find(folder, tmp_path)


def test_numbers_of_a_hub_have_names(monkeypatch):
    tags = datasets.List(datasets.ClassLabel(names=["O", "B-PER", "I-PER"]))
    kinds = {"tokens": datasets.List(datasets.Value("string")), "ner_tags": tags}
    rows = {"tokens": [["Anna", "is"]], "ner_tags": [[1, 0]]}
    split = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_: {"train": split, "test": split}
    )
    data = load_tags(chosen("owner/entities"))
    assert data.tags == ("O", "B-PER", "I-PER")
    assert data.train.second[0].tolist() == [1, 0]
    for wrong in (-100, -1):
        rows = {"tokens": [["Anna", "is"]], "ner_tags": [[1, wrong]]}
        split = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
        with pytest.raises(DataError, match=f"row 1 has .* {wrong}; each word needs"):
            load_tags(chosen("owner/entities"))
