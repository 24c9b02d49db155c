"""A name in a file steers no terminal: no control character is printed, logged or put into a page."""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fedrot.simulations.cli.app import app, prepare
from fedrot.simulations.models.packaged import no_bars
from tests.models import fresh_model
from tests.simulations.commands import SMALL, options_of
from tests.simulations.saved_models.folders import change, configure, saved, tokenizer
from tests.simulations.test_hostile_files import hostile_run

#: Colour, title of the window, bell, two-character controls, delete, and the other direction.
POISON = "evil\x1b[31m\x1b]0;x\x07\x9b5m\x7f\u202e\u2066\b"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
BERT = "bert-classifier"


@pytest.fixture(autouse=True)
def prepared() -> Iterator[None]:
    """Logs as in the process of a command line."""
    factory, handler = logging.getLogRecordFactory(), signal.getsignal(signal.SIGTERM)
    prepare()
    yield
    logging.setLogRecordFactory(factory)
    signal.signal(signal.SIGTERM, handler)


def run(*arguments: object) -> str:
    """Return all that a command prints, which has the poisoned name without its controls."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code in (0, 2), result.exception
    assert not STEERS.search(result.output), ascii(result.output)
    return result.output


def simulate(folder: Path, *options: object) -> str:
    return run("simulate", "--dry-run", "--clients", 2, "--out", folder / "out", *options)


def csv(folder: Path, name: str = "rows.csv", header: str = "text,label", first: str = "a,b") -> Path:
    (folder / name).write_text(f"{header}\n" + f"{first}\na,c\n" * 20, "utf-8")
    return folder / name


def label(folder: Path) -> str:
    return simulate(folder, "--data", csv(folder, first=f"a,{POISON}"))


def column(folder: Path) -> str:
    return simulate(folder, "--data", csv(folder, header=f"{POISON},label"))


def split(folder: Path) -> str:
    return simulate(
        folder, "--data", csv(folder, header="split,text", first=f"{POISON},b"), "--task", "mlm"
    )


def file_name(folder: Path) -> str:
    return simulate(folder, "--data", csv(folder, f"{POISON}.csv"))


def class_folder(folder: Path) -> str:
    for place in (POISON, "other"):
        (folder / "images" / place).mkdir(parents=True)
        for i in range(10):
            Image.new("L", (8, 8), i).save(folder / "images" / place / f"{i}.png")
    return simulate(folder, "--data", folder / "images", "--task", "image")


def tag(folder: Path) -> str:
    rows = {"tokens": [["a", "b"]] * 20, "ner_tags": [["O", f"B-{POISON}"]] * 20}
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    return simulate(folder, "--data", folder / "rows.parquet", "--task", "ner")


def grid(folder: Path, text: str) -> str:
    (folder / "grid.toml").write_text(text % {"name": json.dumps(POISON)}, "utf-8")
    return run("simulate", folder / "grid.toml", "--dry-run", "--out", folder / "out")


def whole_run(folder: Path) -> str:
    """Run, print and report everything that a run has: also logs, pages and tables."""
    options = options_of({**SMALL, "clients": 2, "seeds": 1, "rounds": 1, "arms": "plain,aligned"})
    data, out = csv(folder, f"{POISON}.csv", first=f"a,{POISON}"), folder / f"out{POISON}"
    said = run("simulate", "--data", data, "--workers", 1, "--out", out, *options)
    said += run("report", out, "--markdown", folder / "tables.md")
    files = [out / "report.html", out / "flower.log", folder / "tables.md"]
    pages = [file.read_text("utf-8") for file in files]
    assert all("evil" in page for page in pages[:2])
    assert not STEERS.search("".join(pages))
    return said


def models(folder: Path) -> tuple[Path, Path]:
    with no_bars():
        a, b = (saved(fresh_model(BERT, seed=s).float(), folder / name) for s, name in enumerate("ab"))
    return a, b


def merged(spoil: Callable[[Path], object], folder: Path) -> str:
    a, b = models(folder)
    spoil(b)
    return run("check", b) + run("merge", a, b, "--dry-run")


def tensor(folder: Path) -> None:
    change(folder, lambda tensors: {f"{POISON}.{name}": t for name, t in tensors.items()})


def shard(folder: Path) -> None:
    listed = dict.fromkeys(load_file(folder / "model.safetensors"), f"{POISON}\ud800.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def token(folder: Path) -> None:
    tokenizer(folder.parent / "a")
    tokenizer(folder, w3=POISON)


def adapter(folder: Path) -> str:
    for name in "ab":
        (folder / name).mkdir()
        settings = {"peft_type": "LORA", "r": 2, "target_modules": [f"{name}{POISON}"]}
        (folder / name / "adapter_config.json").write_text(json.dumps(settings))
        save_file(
            {f"{POISON}.lora_A.weight": torch.ones(2, 2)}, folder / name / "adapter_model.safetensors"
        )
    return run("merge", folder / "a", folder / "b", "--dry-run")


def model_folder(folder: Path) -> str:
    a, b = models(folder)
    b = b.rename(folder / POISON)
    return run("check", b) + run("merge", a, b, "--parts", "attention", "--out", folder / f"out{POISON}")


def rows_of_a_strategy(folder: Path) -> str:
    rows = folder / f"{POISON}.jsonl"
    about = {"round": 1, "stage": "train", "metrics": {POISON: 1.0}}
    rows.write_text(
        "".join(json.dumps(row) + "\n" for row in ({"round": 1, "client": 0, "dropped": POISON}, about))
    )
    said = run("report", rows, "--out", folder / "page.html")
    page = (folder / "page.html").read_text("utf-8")
    assert "evil" in page
    assert not STEERS.search(page)
    return said + run("report", rows)


def rows_of_a_run(folder: Path) -> str:
    out = hostile_run(folder / "run")
    for file in ("rows.jsonl", "config.json", "partition.json", "alignment.jsonl"):
        (out / file).write_text((out / file).read_text().replace("alert(1)", json.dumps(POISON)[1:-1]))
    said = run("report", out)
    assert not STEERS.search((out / "report.html").read_text("utf-8"))
    return said


SETTING = "[base]\nseeds = 1\ntrain_limit = 60\n[[setting]]\n"
CASES: dict[str, Callable[[Path], str]] = {
    "label": label,
    "column": column,
    "split": split,
    "file": file_name,
    "class folder": class_folder,
    "tag": tag,
    "name of a setting": partial(grid, text=f"{SETTING}setting = %(name)s"),
    "partition": partial(grid, text=f"{SETTING}setting = 'a'\npartition = %(name)s"),
    "arm": partial(grid, text=f"{SETTING}setting = 'a'\narms = [%(name)s]"),
    "table": partial(grid, text="[%(name)s]\n[[setting]]\nsetting = 'a'"),
    "run": whole_run,
    "tensor": partial(merged, tensor),
    "shard": partial(merged, shard),
    "token": partial(merged, token),
    "class": partial(merged, partial(configure, architectures=[POISON])),
    "dtype": partial(merged, partial(configure, dtype=POISON)),
    "model type": partial(merged, partial(configure, model_type=POISON)),
    "field": partial(merged, partial(configure, **{POISON: 1})),
    "label of a model": partial(merged, partial(configure, id2label={"0": POISON})),
    "adapter": adapter,
    "model": model_folder,
    "rows of a strategy": rows_of_a_strategy,
    "rows of a run": rows_of_a_run,
    "app": lambda folder: run("flower-app", folder / POISON),
    "argument": lambda folder: run("check", folder, folder / POISON),
}


@pytest.mark.parametrize("name", CASES)
def test_a_name_steers_no_terminal(name: str, tmp_path: Path, capfd: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    said = CASES[name](tmp_path)
    assert "evil" in said
    printed = "".join(capfd.readouterr()) + caplog.text
    assert not STEERS.search(printed), ascii(printed)
