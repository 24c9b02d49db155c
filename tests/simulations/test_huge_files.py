"""Nested files, and small files that claim much: refused by name, in seconds, without their memory."""

from __future__ import annotations

import json
import resource
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from fedrot._io import DEEPEST, refuse_nested
from fedrot.simulations.data.encoding import bundled_tokenizer, encode_tags, encode_texts
from fedrot.simulations.data.sources import read_table
from fedrot.simulations.data.texts import TagSplit, TextSplit
from tests.models import fresh_model
from tests.simulations.commands import invoke
from tests.simulations.saved_models.folders import configure, saved, tokenizer
from tests.simulations.test_hostile_files import safetensors

#: A parser that recurses ends the process at so many brackets.
NESTED = 300_000
MEGABYTE = "x" * (1 << 20)


@contextmanager
def bounded(seconds: float = 5, kilobytes: int = 1 << 20) -> Any:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, perf_counter()
    yield
    assert perf_counter() - start < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < kilobytes


def repeated(value: object, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(np.zeros(count, dtype=np.int32), pa.array([value]))


def one_list(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays([0, len(values)], values)


#: The name of a file, its content, and what is said.
TABLES: dict[str, tuple[str, Callable[[], str | pa.Array], str]] = {
    "a line": ("a.jsonl", lambda: '{"a":' + "[" * NESTED, "nested more than 200"),
    "objects": ("a.json", lambda: "[" + '{"a":' * NESTED, "nested more than 200"),
    "whole list": ("a.json", lambda: "[" * NESTED + "]" * NESTED, "nested more than 200"),
    "names": ("a.jsonl", lambda: "".join(f'{{"k{i}":1}}\n' for i in range(9999)), "99980001 cells"),
    "one object": ("a.json", lambda: json.dumps([{str(i): 1 for i in range(50_000)}]), "50000 columns"),
    "columns": ("a.csv", lambda: ",".join(map(str, range(50_001))) + "\n", "50000 columns"),
    "rows": ("a.parquet", lambda: repeated(0, 1 << 26), "67108864 cells"),
    "a list": ("a.parquet", lambda: one_list(pa.nulls(1 << 26, pa.int8())), "67108864 cells"),
    "texts": ("a.parquet", lambda: repeated(MEGABYTE, 20_000), "20971520000 bytes"),
    "texts in a list": ("a.parquet", lambda: one_list(repeated(MEGABYTE, 20_000)), "20971520000 bytes"),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_table_is_refused_before_it_is_read(case: str, tmp_path: Path) -> None:
    name, content, said = TABLES[case]
    made = content()
    if isinstance(made, str):
        (tmp_path / name).write_text(made)
    else:
        pq.write_table(pa.table({"text": made}), tmp_path / name, store_schema=False)
    with bounded():
        code, output = invoke(
            "simulate", "--data", tmp_path / name, "--dry-run", "--out", tmp_path / "o"
        )
    assert (code, said in output, name in output) == (2, True, True), output
    assert len(output) < 1000


def test_texts_that_share_their_beginnings_are_refused(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{MEGABYTE}{i}" for i in range(30)]})
    encoding = {"text": "DELTA_BYTE_ARRAY"}
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, column_encoding=encoding)
    with pytest.raises(ValueError, match=r"a\.parquet .*DELTA_BYTE_ARRAY"):
        read_table(tmp_path / "a.parquet")


def test_a_table_is_read_with_its_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": ["a", None, "b"] * 100,
            "large": pa.array(["a", None, "b"] * 100, pa.large_string()),
            "words": [["a", "b"], [], None] * 100,
            "image": [{"bytes": b"x", "path": None}] * 300,
            "class": pa.array(["a", None, "b"] * 100).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet").equals(pq.read_table(tmp_path / "a.parquet"))


def test_many_columns_are_counted_and_few_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text((",".join(f"c{i}" for i in range(9000)) + "\n") * 3)
    with bounded():
        code, output = invoke("simulate", "--data", tmp_path / "a.csv", "--dry-run", "--out", tmp_path)
    assert (code, "c8, c9 and 8990 more" in output, "c10" in output) == (2, True, False)


def test_a_long_text_is_cut_before_it_is_tokenised(tmp_path: Path) -> None:
    rows = "".join(f"some words,{i % 2}\n" for i in range(40))
    (tmp_path / "a.csv").write_text(f"text,label\n{rows}{'word ' * (5 << 20)},1\n")
    with bounded(10):
        code, output = invoke("simulate", "--data", tmp_path / "a.csv", "--dry-run", "--out", tmp_path)
    assert code == 0, output


def test_a_cut_text_has_the_same_first_tokens() -> None:
    texts = tuple(word * 1000 for word in ("some words ", "averylongword", " " * 9 + "x"))
    labels, words = np.zeros(3, dtype=np.int64), bundled_tokenizer()
    for pairs in (None, texts):
        found = encode_texts(TextSplit(labels, {}, texts, pairs), words, 5, 0)
        for row, ids in enumerate(found.ids):
            both = (texts[row],) if pairs is None else (texts[row], pairs[row])
            whole = bundled_tokenizer().encode(*both).ids
            assert pairs is not None or [*ids[:-1]] == whole[: len(ids) - 1]
            assert len(ids) == min(5, len(whole))
    split = TagSplit(labels[:1], {}, [(texts[0], "b")], [np.array([1, 2])])
    assert len(encode_tags(split, words, 5, 0).ids[0]) == 5


def test_brackets_in_texts_are_no_levels() -> None:
    opened = b"[" * (DEEPEST + 1)
    for data in (
        b"[" * DEEPEST + b"]" * DEEPEST,
        b'"' + opened + b'"',
        rb'["\"' + opened,
        b"[]" * 9999,
        b"",
    ):
        refuse_nested(data)
    for data in (opened, b'"a"' + opened, rb'"\\"' + opened, rb'"\\\""' + opened, b'{"a":' * 201):
        with pytest.raises(ValueError, match="levels"):
            refuse_nested(data)


def written(name: str, content: str | bytes, folder: Path) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def packed(folder: Path) -> None:
    """Weights in compressed entries: zeros that are a thousand times as large as the file."""
    torch.save({"x": torch.zeros(1 << 24)}, folder / "stored.bin")
    with (
        zipfile.ZipFile(folder / "stored.bin") as stored,
        zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for entry in stored.namelist():
            compressed.writestr(entry, stored.read(entry))
    for name in ("stored.bin", "model.safetensors"):
        (folder / name).unlink()


def listed(kind: str, folder: Path) -> None:
    names = dict.fromkeys(load_file(folder / "model.safetensors"), f"\ud800{kind}")
    (folder / "model.safetensors").unlink()
    written(
        f"{'model' if 's' in kind else 'pytorch_model'}{kind}.index.json",
        json.dumps({"weight_map": names}),
        folder,
    )


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "layers": (
        partial(configure, num_hidden_layers=10**6),
        "config.json' has 1000000 as num_hidden_layers",
    ),
    "labels": (
        partial(configure, num_labels=10**6, id2label=None),
        "config.json' has 1000000 as num_labels",
    ),
    "names": (partial(configure, id2label=dict.fromkeys(range(10**6), "")), "1000000 as id2label"),
    "positions": (partial(configure, max_position_embeddings=10**12), "config.json' has 1000000000000"),
    "inside": (partial(configure, text_config={"num_layers": 10**6}), "1000000 as num_layers"),
    "width": (partial(configure, hidden_size=40_000), "config.json describes"),
    "config": (partial(written, "config.json", '{"a":' * NESTED), "config.json' is damaged"),
    "list": (partial(written, "config.json", "[" * NESTED), "config.json' is damaged"),
    "index": (partial(written, "model.safetensors.index.json", "[" * NESTED), "index.json' is damaged"),
    "tokenizer": (partial(written, "tokenizer.json", "[" * NESTED), "tokenizer.json' is damaged"),
    "shards": (partial(listed, ".safetensors"), "model.safetensors.index.json lists"),
    "parts": (partial(listed, ".bin"), "pytorch_model.bin.index.json lists"),
    "zip": (packed, "pytorch_model.bin' is compressed"),
    "header": (partial(written, "model.safetensors", safetensors(b"[" * NESTED)), "model.safetensors'"),
    "tensors": (
        lambda folder: written(
            "model.safetensors", safetensors({f"t{i}": EMPTY for i in range(200_000)}), folder
        ),
        "model.safetensors' names tensors",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_is_refused_before_it_is_built(case: str, tmp_path: Path) -> None:
    spoil, said = MODELS[case]
    a, b = (saved(fresh_model("bert-classifier").float(), tmp_path / name) for name in "ab")
    tokenizer(b)
    spoil(b)
    for line in (
        ("merge", a, b, "--dry-run"),
        *([] if case == "tokenizer" else [("check", b)]),
        ("simulate", "--model", b, "--dry-run", "--out", tmp_path / "out"),
    ):
        with bounded():
            code, output = invoke(*line)
        assert (code, said in output, str(b) in output) == (2, True, True), (line, output)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * NESTED, "is no TOML"),
        ("a = " + "{a=" * NESTED, "is no TOML"),
        ("a." * 40_000 + "b = 1", "more than 1000 dots"),
        (
            "[matrix]\n" + "".join(f"{k} = [{'1,' * 99}]\n" for k in "abcde") + "[[setting]]",
            "combinations",
        ),
    ],
)
def test_a_grid_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(text)
    with bounded():
        code, output = invoke("simulate", tmp_path / "grid.toml", "--out", tmp_path / "out")
    assert (code, said in output) == (2, True), output[:500]
