"""Damaged and hostile files: an error names the file, and nothing is written outside of the folder."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedrot.simulations.federation.cells import cells_of
from fedrot.simulations.folder import RunFolder
from fedrot.simulations.report.plots import LONGEST, as_label, data_uri, rounds_plot
from fedrot.simulations.report.run_page import markdown_report, write_report
from fedrot.simulations.settings import Experiment
from tests.models import fresh_model
from tests.simulations.commands import invoke
from tests.simulations.data.files import bounded
from tests.simulations.saved.folders import WEIGHTS, configure, saved

HOSTILE = "</script><script>alert(1)</script> & \"q\" 'x' $\\x$ ../../../x | " + 300 * "y"


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


#: A parser that recurses ends the process at so many brackets.
DEEP, MILLION = "[" * 300_000, 10**6
HALF = json.dumps({"metadata": {}, "weight_map": {"classifier.bias": "\ud800.bin"}})
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
INDEX, PARTS = f"{WEIGHTS}.index.json", "pytorch_model.bin.index.json"
#: A file, its content (or fields, columns) and what is said.
FILES: list[tuple[str, str | bytes | dict[str, Any], str]] = [
    ("a.toml", b"\xff\xfe", "is no TOML"),
    ("a.toml", f"a = {DEEP}", "is no TOML"),
    (CONFIG, {"num_hidden_layers": MILLION}, "config.json' has 1000000 as num_hidden_layers"),
    (CONFIG, {"num_labels": MILLION, "id2label": None}, "has 1000000 as num_labels"),
    (CONFIG, {"id2label": dict.fromkeys(range(MILLION), "")}, "has 1000000 as id2label"),
    (CONFIG, {"hidden_size": 40_000}, "has 40000 as hidden_size"),
    (CONFIG, {"hidden_size": "x"}, "cannot be loaded"),
    *((name, text, "is damaged") for name in (CONFIG, TOKENIZER) for text in ("[]", "3", "", "{", DEEP)),
    *((name, text, f"{name}' is damaged") for name in (INDEX, PARTS) for text in (DEEP, HALF)),
    ("pytorch_model.bin", bytes(1 << 20), "pytorch_model.bin' is compressed: it holds 1048576 bytes"),
    (WEIGHTS, safetensors(DEEP.encode()), "cannot be loaded"),
    (WEIGHTS, safetensors(b"{}", length=8 << 30), "cannot be loaded"),
    (
        WEIGHTS,
        safetensors({"a": {"dtype": "F32", "shape": [1 << 31], "data_offsets": [0, 8 << 30]}}),
        "",
    ),
    (WEIGHTS, safetensors(b" " * (1 << 24)), "model.safetensors' has 16777216 bytes of names"),
    (WEIGHTS, "", "cannot be loaded"),
]


@pytest.mark.parametrize(("name", "content", "said"), FILES, ids=range(len(FILES)))
def test_a_file_is_refused(name: str, content: Any, said: str, tmp_path: Path) -> None:
    file, out = tmp_path / "b" / name, tmp_path / "out"
    a, b = (saved(fresh_model("bert-classifier").float(), tmp_path / name) for name in "ab")
    if isinstance(content, dict):
        configure(b, **content)
    elif name == "pytorch_model.bin":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("archive/data/0", content)
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    if name in (INDEX, PARTS, "pytorch_model.bin"):
        (b / WEIGHTS).unlink()
    lines: list[tuple[object, ...]] = [("merge", a, b, "--out", out), ("check", b)]
    if name[0] == "a":
        lines = [("simulate", *["--data"][name == "a.toml" :], file, "--dry-run", "--out", out)]
    for line in lines[: 1 if name == TOKENIZER else 2]:
        with bounded():
            code, output = invoke(*line)
        assert (code, said in output, len(output) < 1000) == (2, True, True), output
        assert str(b) in output.replace(" ", ""), output
    assert not out.exists()


def hostile_run(path: Path) -> Path:
    experiment = Experiment.from_flat(
        {"name": HOSTILE, "strategies": [{"name": HOSTILE[:80]}, "fedavg"], "seeds": 2, "rounds": 1}
    )
    seeds = {"0": {"sizes": [3], "counts": [[1, 2]]}}
    partitions = {HOSTILE: {"label_names": [HOSTILE, "b"], "seeds": seeds}}
    folder = RunFolder(path, [experiment], f"fedrot {HOSTILE}", partitions)
    for cell in cells_of([experiment]):
        about = {"experiment": HOSTILE, "strategy": cell.strategy.name, "seed": cell.seed, "round": 1}
        rows = [
            {**about, "scope": "central", "metric": metric, "value": 0.5 + cell.seed}
            for metric in (HOSTILE, "loss")
        ]
        shares = {"part": HOSTILE, "layer": 0, "before": 2.0, "after": 1.0, "client": 0}
        shares |= {"found": 1.0, "moved": 1, "group": HOSTILE}
        folder.add(cell, rows, [{**about, **shares}, {**about, "client": 0, "dropped": HOSTILE}])
    return path


class Tags(HTMLParser):
    """Collects the names of elements, and of attributes beside those of the templates."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(name for name, _ in attrs)}


def test_names_are_text_in_the_page_and_no_paths_or_formulas_in_its_pictures(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "a" / "b" / "c" / "run")
    page = write_report(run)
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    assert "alert(1)" in page.read_text(encoding="utf-8")
    assert "script" not in tags.found
    assert not {name for name in tags.found if name.startswith("on")} | tags.found & {"q", "x"}
    written = {path.relative_to(tmp_path).parts[:4] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {("a", "b", "c", "run")}
    tables = markdown_report(run)
    assert "<script>" not in tables
    for table in tables.split("\n\n"):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) <= 1


def test_labels_of_pictures_are_cut_and_take_dollars_as_dollars() -> None:
    assert len(as_label(HOSTILE).replace("\\$", "$")) == LONGEST
    assert as_label("a\0b\n$") == "a b \\$"
    assert data_uri(rounds_plot({HOSTILE: {1: 0.5}})).startswith("data:image/svg+xml")


def test_sigterm_interrupts_as_ctrl_c_does() -> None:
    code = (
        "import os, signal\n"
        "from fedrot.simulations.cli import app\n"
        "app.app = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        "try:\n    app.main()\nexcept KeyboardInterrupt:\n    print('interrupted')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "interrupted\n"
