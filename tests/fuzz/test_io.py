"""Whatever a file holds or claims, it is read or refused in words, in seconds and
without its memory.
"""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st

from fedrot.errors import FedrotError
from fedrot.simulations.data.read import READERS, read_table
from fedrot.simulations.saved.load import load
from tests.fuzz.cases import fuzzed, mutated
from tests.models import fresh_model
from tests.simulations.data.files import bounded

MARKS = (
    "[",
    "]",
    '{"a":',
    "}",
    '"',
    "\\",
    '"\\',
    "1",
    ",",
    "\n",
    '{"a":"b"}\n',
    '[{"a":1}]',
)
CHANGED = ("a.parquet", "model.safetensors", "pytorch_model.bin", "config.json")
parts = st.tuples(st.sampled_from(MARKS), st.sampled_from((1, 1, 1, 2, 190, 300_000)))
nested = st.lists(parts.map(lambda part: part[0] * part[1]), max_size=6).map(
    lambda p: "".join(p).encode()
)


@functools.cache
def made():
    """Return a table and the files of a model, by name."""
    with TemporaryDirectory() as folder:
        model = fresh_model("bert-classifier").float()
        texts = ["a" * 9, "b"] * 20
        model.save_pretrained(folder)
        torch.save(model.state_dict(), f"{folder}/pytorch_model.bin")
        pq.write_table(
            pa.table({"text": texts, "words": [texts] * 40}), f"{folder}/a.parquet"
        )
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


tables = st.tuples(
    st.sampled_from(("a.json", "a.jsonl", "a.csv", "config.json")), nested
)
changed = st.sampled_from(CHANGED).flatmap(
    lambda name: st.tuples(st.just(name), st.just(made()[name]) | mutated(made()[name]))
)


@fuzzed(8, file=tables | changed)
def test_a_file_is_read_or_refused(file):
    name, content = file
    with TemporaryDirectory() as folder, bounded():
        weights = {name} & {*CHANGED[1:3]} or {CHANGED[1]}
        for kept in ("config.json", *weights):
            Path(folder, kept).write_bytes(made()[kept])
        Path(folder, name).write_bytes(content)
        try:
            table = Path(name).suffix in READERS and name != "config.json"
            return bool(read_table(Path(folder, name)) if table else load(folder))
        except FedrotError as error:
            if folder not in str(error):
                raise
            return False
