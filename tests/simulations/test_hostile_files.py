"""Damaged and hostile files: an error names the file, and nothing is written outside of
the folder.
"""

import json
import struct

import pytest

from tests.models import fresh_model
from tests.simulations.commands import invoke
from tests.simulations.data.files import bounded
from tests.simulations.report.runs import write_folder
from tests.simulations.saved.folders import WEIGHTS, saved


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


#: A parser that recurses ends the process at so many brackets.
DEEP = "[" * 300_000
HALF = json.dumps({"metadata": {}, "weight_map": {"classifier.bias": "\ud800.bin"}})
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
INDEX = f"{WEIGHTS}.index.json"
PARTS = "pytorch_model.bin.index.json"
#: A file, its content and what is said.
FILES = [
    ("a.toml", b"\xff\xfe", "is no TOML"),
    ("a.toml", f"a = {DEEP}", "is no TOML"),
    *(
        (name, text, "cannot be")
        for name in (CONFIG, TOKENIZER)
        for text in ("[]", "3", "", "{", DEEP)
    ),
    *(
        (name, text, word)
        for name in (INDEX, PARTS)
        for text, word in ((DEEP, "is damaged"), (HALF, "cannot be loaded"))
    ),
    (WEIGHTS, safetensors(DEEP.encode()), "cannot be loaded"),
    (WEIGHTS, safetensors(b"{}", length=8 << 30), "cannot be loaded"),
    (
        WEIGHTS,
        safetensors(
            {"a": {"dtype": "F32", "shape": [1 << 31], "data_offsets": [0, 8 << 30]}}
        ),
        "",
    ),
    (WEIGHTS, safetensors(b" " * (1 << 24)), "cannot be loaded"),
]


@pytest.mark.parametrize(("name", "content", "said"), FILES, ids=range(len(FILES)))
def test_a_file_is_refused(name, content, said, tmp_path):
    file = tmp_path / "b" / name
    out = tmp_path / "out"
    a, b = (
        saved(fresh_model("bert-classifier").float(), tmp_path / name) for name in "ab"
    )
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    if name in (INDEX, PARTS):
        (b / WEIGHTS).unlink()
    lines = [("merge", a, b, "--out", out), ("check", b)]
    if name[0] == "a":
        lines = [
            (
                "simulate",
                *["--data"][name == "a.toml" :],
                file,
                "--dry-run",
                "--out",
                out,
            )
        ]
    for line in lines[: 1 if name == TOKENIZER else 2]:
        with bounded():
            code, output = invoke(*line)
        assert (code, said in output, len(output) < 1000) == (2, True, True), output
        assert str(b) in output.replace(" ", ""), output
    assert not out.exists()


@pytest.mark.parametrize("file", ["config.json", "cells/a.json"])
def test_a_damaged_run_is_named(file, tmp_path):
    run = write_folder(tmp_path / "run", {"one": {"fedavg": 0.0, "aligned": 0.1}})
    path = next((run / "cells").iterdir()) if file.startswith("cells") else run / file
    path.write_text(DEEP)
    with bounded():
        code, output = invoke("report", run)
    assert (code, path.name in output.replace(" ", ""), "Traceback" in output) == (
        2,
        True,
        False,
    ), output
