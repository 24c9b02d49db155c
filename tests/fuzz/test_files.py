"""Whatever a file holds or claims, it is read or refused in words, in seconds and without its memory."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import strategies as st

from fedrot.errors import FedrotError
from fedrot.simulations.data.sources import read_table
from fedrot.simulations.saved_models.load import load
from tests.fuzz.cases import EDGES, fuzzed, mutated
from tests.models import fresh_model
from tests.simulations.test_hostile_files import safetensors
from tests.simulations.test_huge_files import bounded, repeated

MARKS = ("[", "]", '{"a":', "}", '"', "\\", '"\\', "1", ",", "\n", '{"a":"b"}\n', '[{"a":1}]')
COUNTS = st.sampled_from((1, 1, 1, 2, 190, 300_000))


@functools.cache
def parquet() -> bytes:
    file, texts = io.BytesIO(), ["a" * 9, "b"] * 20
    pq.write_table(pa.table({"text": texts, "words": [texts] * 40, "label": repeated(7, 40)}), file)
    return file.getvalue()


@functools.cache
def model() -> tuple[dict[str, Any], bytes, bytes]:
    """Return the configuration and the weights of a model, as safetensors and as a zip file."""
    with TemporaryDirectory() as folder:
        found = fresh_model("bert-classifier").float()
        found.save_pretrained(folder)
        torch.save(found.state_dict(), f"{folder}/stored")
        read = [
            Path(folder, name).read_bytes() for name in ("config.json", "model.safetensors", "stored")
        ]
    return json.loads(read[0]), *read[1:]


nested = st.lists(st.tuples(st.sampled_from(MARKS), COUNTS), max_size=6).map(
    lambda parts: "".join(mark * count for mark, count in parts).encode()
)
tables = st.tuples(st.sampled_from(("a.json", "a.jsonl", "a.csv")), nested) | st.tuples(
    st.just("a.parquet"), st.deferred(lambda: mutated(parquet()))
)
numbers = st.sampled_from(EDGES) | st.integers(0, 40)
tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(("F32", "I64", "F8_E4M3", "x")),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, min_size=2, max_size=2),
    }
)
headers = st.dictionaries(st.sampled_from(("classifier.bias", "x")), tensors).map(safetensors)
weights = st.deferred(
    lambda: (
        st.tuples(
            st.just("model.safetensors"),
            st.just(model()[1]) | st.just(model()[1]) | mutated(model()[1]) | headers,
        )
        | st.tuples(st.just("pytorch_model.bin"), mutated(model()[2]))
    )
)
fields = st.deferred(lambda: st.dictionaries(st.sampled_from(sorted(model()[0])), numbers, max_size=1))


def read(use: Callable[[Any], object], files: Mapping[str, bytes], named: str) -> bool:
    """Return whether files are used; an error names the file or the folder."""
    with TemporaryDirectory() as folder, bounded():
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        try:
            use(Path(folder, named))
        except FedrotError as error:
            return str(Path(folder, named)) not in str(error) and pytest.fail(str(error))
    return True


@fuzzed(3, table=tables)
def test_a_table_is_read_or_refused(table: tuple[str, bytes]) -> bool:
    return read(read_table, dict([table]), table[0])


@fuzzed(2, changes=fields, file=weights)
def test_a_model_is_loaded_or_refused(changes: dict[str, Any], file: tuple[str, bytes]) -> bool:
    config = json.dumps({**model()[0], **changes}).encode()
    return read(lambda folder: load(str(folder)), {"config.json": config, file[0]: file[1]}, "")
