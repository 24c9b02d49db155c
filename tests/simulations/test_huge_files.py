"""Nested files, and small files that claim much: refused by name, in seconds, without their memory."""

from __future__ import annotations

import json
import resource
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from fedrot._io import DEEPEST, refuse_nested
from fedrot.simulations.data.encoding import bundled_tokenizer, encode_texts
from fedrot.simulations.data.sources import read_table
from fedrot.simulations.data.texts import TextSplit
from tests.models import fresh_model
from tests.simulations.commands import invoke
from tests.simulations.saved_models.folders import WEIGHTS, configure, saved, tokenizer
from tests.simulations.test_hostile_files import safetensors

#: A parser that recurses ends the process at so many brackets.
DEEP = "[" * 300_000
MEGABYTE = "x" * (1 << 20)


@contextmanager
def bounded() -> Iterator[None]:
    """At most five seconds of work and a GiB."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, process_time()
    yield
    assert process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


def dry_run(data: Path) -> tuple[int, str]:
    with bounded():
        return invoke("simulate", "--data", data, "--dry-run", "--out", data.parent / "out")


def repeated(value: object, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(np.zeros(count, dtype=np.int32), pa.array([value]))


def one_list(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays([0, len(values)], values)


#: The name of a file, its content, and what is said.
TABLES: list[tuple[str, Callable[[], str | pa.Array], str]] = [
    ("a.jsonl", lambda: '{"a":' + DEEP, "nested more than 200"),
    ("a.json", lambda: "[" + '{"a":' * 300_000, "nested more than 200"),
    ("a.json", lambda: DEEP + "]" * 300_000, "nested more than 200"),
    ("a.jsonl", lambda: '"\\' * 300_000, "cannot be read as JSON lines"),
    ("a.jsonl", lambda: "".join(f'{{"k{i}":1}}\n' for i in range(9999)), "99980001 cells"),
    ("a.json", lambda: json.dumps([{str(i): 1 for i in range(50_000)}]), "50000 columns"),
    ("a.csv", lambda: ",".join(map(str, range(50_000))) + "\n", "50000 columns"),
    ("a.csv", lambda: (",".join(f"c{i}" for i in range(9000)) + "\n") * 3, "c9 and 8990 more"),
    ("a.parquet", lambda: repeated(0, 1 << 26), "67108864 cells"),
    ("a.parquet", lambda: one_list(pa.nulls(1 << 26, pa.int8())), "67108864 cells"),
    ("a.parquet", lambda: repeated(MEGABYTE, 20_000), "20971520000 bytes"),
    ("a.parquet", lambda: one_list(repeated(MEGABYTE, 20_000)), "20971520000 bytes"),
    ("delta.parquet", lambda: pa.array([f"{MEGABYTE}{i}" for i in range(30)]), "DELTA_BYTE_ARRAY"),
]


@pytest.mark.parametrize(("name", "content", "said"), TABLES)
def test_a_table_is_refused(name: str, content: Callable[[], object], said: str, tmp_path: Path) -> None:
    made = content()
    if isinstance(made, str):
        (tmp_path / name).write_text(made)
    else:
        delta = "delta" in name
        how = {"use_dictionary": not delta, "column_encoding": {"text": said} if delta else None}
        pq.write_table(pa.table({"text": made}), tmp_path / name, store_schema=False, **how)
    code, output = dry_run(tmp_path / name)
    assert (code, said in output, name in output, len(output) < 1000) == (2, True, True, True), output


def test_a_table_is_read_with_its_types(tmp_path: Path) -> None:
    columns = {
        "text": ["a", None, "b"] * 100,
        "large": pa.array(["a", None, "b"] * 100, pa.large_string()),
        "words": [["a", "b"], [], None] * 100,
        "image": [{"bytes": b"x", "path": None}] * 300,
        "class": pa.array(["a", None, "b"] * 100).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet").equals(pq.read_table(tmp_path / "a.parquet"))


def test_long_texts_are_cut_before_they_are_tokenised(tmp_path: Path) -> None:
    rows, long = "".join(f"some words,some words,{i % 2}\n" for i in range(40)), "word " * (5 << 20)
    for header, last in (
        ("text,other,label", f"{long},b"),
        ("sentence1,sentence2,label", f"{long},{long}"),
    ):
        (tmp_path / "a.csv").write_text(f"{header}\n{rows}{last},1\n")
        code, output = dry_run(tmp_path / "a.csv")
        assert code == 0, output


def test_a_cut_text_has_the_same_first_tokens() -> None:
    texts = tuple(word * 1000 for word in ("some words ", "averylongword", " " * 9 + "x"))
    found = encode_texts(TextSplit(np.zeros(3), {}, texts, None), bundled_tokenizer(), 5, 0).ids
    whole = [bundled_tokenizer().encode(text).ids for text in texts]
    assert [[*ids[:-1]] for ids in found] == [ids[: min(5, len(ids)) - 1] for ids in whole]


def test_brackets_in_texts_are_no_levels() -> None:
    opened = b"[" * (DEEPEST + 1)
    for data in (opened[1:] + b"]" * DEEPEST, b'"' + opened + b'"', rb'"\"' + opened, b"[]" * 9999, b""):
        refuse_nested(data)
    for data in (opened, b'"a"' + opened, rb'"\\"' + opened, rb'"\\\""' + opened, b'{"a":' * 201):
        with pytest.raises(ValueError, match="levels"):
            refuse_nested(data)


def written(name: str, content: str | bytes, folder: Path) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def packed(folder: Path) -> None:
    """Weights in compressed entries: zeros that are a thousand times as large as the file."""
    torch.save({"x": torch.zeros(1 << 24)}, folder / "stored")
    stored = zipfile.ZipFile(folder / "stored")
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as compressed:
        for entry in stored.namelist():
            compressed.writestr(entry, stored.read(entry))
    (folder / WEIGHTS).unlink()


def listed(index: str, folder: Path) -> None:
    """An index with half of a character in the name of a file."""
    names = dict.fromkeys(load_file(folder / WEIGHTS), "\ud800.bin")
    (folder / WEIGHTS).unlink()
    written(index, json.dumps({"weight_map": names}), folder)


def tensor(shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


def weights(*content: object) -> Callable[[Path], None]:
    return lambda folder: written(WEIGHTS, safetensors(*content), folder)


MILLION = 10**6
MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "layers": (partial(configure, num_hidden_layers=MILLION), "config.json' has 1000000 as num_hidden"),
    "labels": (partial(configure, num_labels=MILLION, id2label=None), "has 1000000 as num_labels"),
    "names": (partial(configure, id2label=dict.fromkeys(range(MILLION), "")), "1000000 as id2label"),
    "positions": (partial(configure, max_position_embeddings=10**12), "has 1000000000000 as max_pos"),
    "inside": (partial(configure, text_config={"num_layers": MILLION}), "1000000 as num_layers"),
    "width": (partial(configure, hidden_size=40_000), "config.json describes"),
    "configuration": (partial(written, "config.json", DEEP), "config.json' is damaged"),
    "index": (partial(written, f"{WEIGHTS}.index.json", DEEP), "index.json' is damaged"),
    "shards": (partial(listed, f"{WEIGHTS}.index.json"), f"{WEIGHTS}.index.json lists"),
    "parts": (partial(listed, "pytorch_model.bin.index.json"), "pytorch_model.bin.index.json lists"),
    "zip": (packed, "pytorch_model.bin' is compressed"),
    "nested header": (weights(DEEP.encode()), f"{WEIGHTS}' cannot be loaded"),
    "names of tensors": (
        weights({f"t{i}": tensor([0], 0, 0) for i in range(200_000)}),
        "bytes of names",
    ),
    "header of 8 GB": (weights(b"{}", b"", 8 << 30), WEIGHTS),
    "tensor of 8 GB": (weights({"a": tensor([1 << 31], 0, 8 << 30)}), WEIGHTS),
    "overlap": (weights({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, bytes(12)), WEIGHTS),
    "no JSON": (weights(b"no JSON"), WEIGHTS),
    "empty": (partial(written, WEIGHTS, b""), WEIGHTS),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_is_refused_before_it_is_built(case: str, tmp_path: Path) -> None:
    spoil, said = MODELS[case]
    a, b = (saved(fresh_model("bert-classifier").float(), tmp_path / name) for name in "ab")
    tokenizer(b)
    spoil(b)
    merge, out = ("merge", a, b, "--dry-run"), tmp_path / "out"
    for line in (merge, ("check", b), ("simulate", "--model", b, "--dry-run", "--out", out)):
        with bounded():
            code, output = invoke(*line)
        assert (code, str(b) in output) == (2, True), output
        # simulate compares the labels of the data before weights are read.
        assert said in output or "simulate" in line, output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"a = {DEEP}", "is no TOML"),
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
