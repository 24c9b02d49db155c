"""Damaged and hostile files: an error names the file, and nothing is written outside of the folder."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.federation.store import CellRows, RunFolder, cells_of
from fedrot.simulations.report.plots import LONGEST, as_label, rounds_plot
from fedrot.simulations.report.run_page import write_report
from fedrot.simulations.report.tables import result_tables
from tests.models import fresh_model
from tests.simulations.commands import invoke

HOSTILE = "</script><script>alert(1)</script> & \"q\" 'x' $\\x$ ../../../x | " + 300 * "y"


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bert"
    fresh_model("bert-classifier").float().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def commands_on(copied: Path, model: Path) -> list[tuple[object, ...]]:
    out = copied.parent / "out"
    return [
        ("merge", model, copied, "--out", out),
        ("check", copied),
        ("simulate", "--model", copied, "--dry-run", "--out", out),
    ]


@pytest.mark.parametrize(
    "content", ["[]", "3", "", '{"a":', '{"model_type": "bert", "hidden_size": "x"}']
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_damaged_configurations_and_tokenizers_are_named(
    name: str, content: str, copied: Path, model: Path
) -> None:
    (copied / name).write_text(content)
    for line in commands_on(copied, model)[::3]:
        code, output = invoke(*line)
        assert (code, "copy" in output) == (2, True), (line, output)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[base", b"no TOML"])
def test_a_grid_that_is_no_toml_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_bytes(text)
    code, output = invoke("simulate", tmp_path / "grid.toml", "--out", tmp_path / "out")
    assert code == 2
    assert "grid.toml" in output.replace(" ", "")


def test_only_numbers_that_occur_are_classes(tmp_path: Path) -> None:
    rows = "".join(f"word {i},{(i % 2) << 40}\n" for i in range(40))
    (tmp_path / "ids.csv").write_text("text,label\n" + rows)
    code, output = invoke(
        "simulate", "--data", tmp_path / "ids.csv", "--out", tmp_path / "o", "--dry-run"
    )
    assert code == 0, output
    assert "2 classes in the column 'label': 0, 1099511627776" in output


SETTINGS = {
    "setting": HOSTILE,
    "starts": ["same"],
    "arms": ["plain", HOSTILE],
    "seeds": [0, 1],
    "rounds": 1,
}


def hostile_run(path: Path) -> Path:
    config = SimulationConfig(setting=HOSTILE, arms=("plain",), seeds=(0, 1), rounds=1)
    store = RunFolder(path, [config], f"fedrot {HOSTILE}")
    counted = {"sizes": [3], "counts": [[1, 2]]}
    store.partitions({HOSTILE: {"label_names": [HOSTILE, "b"], "seeds": {"0": counted}}})
    for cell in cells_of([config]):
        found = CellRows()
        for arm in ("plain", HOSTILE):
            about = {"setting": HOSTILE, "arm": arm, "start": "same", "seed": cell.seed, "round": 1}
            for metric in (HOSTILE, "loss"):
                value = 0.5 + cell.seed
                found.row({**about, "scope": "central", "metric": metric, "value": value})
            shares = {"part": HOSTILE, "layer": 0, "before": 2.0, "after": 1.0, "client": 0}
            shares |= {"found": 1.0, "moved": 1}
            found.alignment({**about, **shares, "group": HOSTILE})
            found.alignment({**about, "client": 0, "dropped": HOSTILE})
        store.add(cell, found)
    store.close(complete=True)
    written = json.loads((path / "config.json").read_text())
    written["settings"] = [{**SETTINGS, "data": HOSTILE, "model": HOSTILE}]
    (path / "config.json").write_text(json.dumps(written))
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
    for table in result_tables(read_rows(run)):
        markdown = table.markdown()
        assert "<script>" not in markdown
        lines = [line for line in markdown.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_labels_of_pictures_are_cut_and_take_dollars_as_dollars(tmp_path: Path) -> None:
    assert len(as_label(HOSTILE).replace("\\$", "$")) == LONGEST
    assert as_label("a\0b\n$") == "a b \\$"
    rounds_plot(tmp_path / "plot.png", {HOSTILE: {1: 0.5}})


ROW = {"setting": "a", "arm": "plain", "start": "same", "seed": 0, "round": 1, "scope": "central"}


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("rows.jsonl", "[]"),
        ("rows.jsonl", '{"a": 1}'),
        ("rows.jsonl", json.dumps({**ROW, "metric": "loss", "value": "x"})),
        ("rows.jsonl", json.dumps({**ROW, "metric": "loss", "value": 1, "round": None})),
        ("rows.jsonl", json.dumps({**ROW, "metric": "loss", "value": 1, "arm": ["x"]})),
        ("alignment.jsonl", '{"before": 1}'),
        ("alignment.jsonl", '{"before": "x"}'),
    ],
)
def test_rows_of_other_types_are_named(file: str, line: str, tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run")
    (run / file).write_text(line + "\n")
    code, output = invoke("report", run)
    assert code == 2
    assert "has rows that fedrot did not write" in output


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"settings": [3]}'),
        ("config.json", '{"settings": [{"setting": "x"}]}'),
        ("versions.json", '{"date": [1]}'),
        ("partition.json", '{"a": 3}'),
        ("partition.json", '{"a": {"seeds": {"0": {"counts": 3}}}}'),
    ],
)
def test_a_file_of_another_kind_is_called_unreadable(file: str, content: str, tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run")
    (run / file).write_text(content)
    assert f"{file} is missing or unreadable" in write_report(run).read_text(encoding="utf-8")


def test_a_folder_with_the_config_of_a_model_is_left_alone(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "bert"}')
    with pytest.raises(
        FileExistsError, match=r"has a config.json of another kind, for example of a model"
    ):
        RunFolder(tmp_path, [SimulationConfig()], "one")
    assert config.read_text() == '{"model_type": "bert"}'


def test_sigterm_interrupts_as_ctrl_c_does() -> None:
    code = (
        "import os, signal\n"
        "from fedrot.simulations.cli import app\n"
        "app.app = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        "try:\n    app.main()\nexcept KeyboardInterrupt:\n    print('interrupted')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "interrupted\n"
