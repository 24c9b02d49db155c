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
from safetensors.torch import save_file
from typer.testing import CliRunner

from fedrot.simulations.cli.app import app, prepare
from fedrot.simulations.models.packaged import no_bars
from tests.models import fresh_model
from tests.simulations.commands import SMALL, options_of
from tests.simulations.saved_models.folders import WEIGHTS, change, configure, saved, tokenizer

#: Colour, title of the window, bell, controls of one character, delete, and the other direction.
POISON = "evil\x1b[31m\x1b]0;x\x07\x9b5m\x7f\u202e\u2066\b"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(autouse=True)
def prepared() -> Iterator[None]:
    """Logs as in the process of a command line."""
    factory, handler = logging.getLogRecordFactory(), signal.getsignal(signal.SIGTERM)
    prepare()
    yield
    logging.setLogRecordFactory(factory)
    signal.signal(signal.SIGTERM, handler)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code in (0, 2), result.exception
    return result.output


def csv(
    folder: Path, *options: str, name: str = "a", header: str = "text,label", row: str = "a,b"
) -> str:
    data = folder / f"{name}.csv"
    data.write_text(f"{header}\n" + f"{row}\na,c\n" * 20, "utf-8")
    return run(
        "simulate", "--data", data, "--dry-run", "--out", folder / "out", "--clients", 2, *options
    )


def images(folder: Path) -> str:
    for place in (folder / "images" / POISON, folder / "images" / "other"):
        place.mkdir(parents=True)
        for i in range(10):
            Image.new("L", (8, 8), i).save(place / f"{i}.png")
    data = ("--data", folder / "images", "--task", "image", "--clients", 2)
    return run("simulate", *data, "--dry-run", "--out", folder / "out")


def tags(folder: Path) -> str:
    rows = {"tokens": [["a", "b"]] * 20, "ner_tags": [["O", f"B-{POISON}"]] * 20}
    pq.write_table(pa.table(rows), folder / "a.parquet")
    data = ("--data", folder / "a.parquet", "--task", "ner", "--clients", 2)
    return run("simulate", *data, "--dry-run", "--out", folder / "out")


def grid(text: str, folder: Path) -> str:
    name, base = json.dumps(POISON), "[base]\nseeds = 1\ntrain_limit = 60\n[[setting]]\n"
    (folder / "grid.toml").write_text(base + text.replace("NAME", name), "utf-8")
    return run("simulate", folder / "grid.toml", "--dry-run", "--out", folder / "out")


def whole_run(folder: Path) -> str:
    """Everything that a run prints and writes: also its page, tables and log."""
    options = options_of({**SMALL, "clients": 2, "seeds": 1, "rounds": 1, "arms": "plain,aligned"})
    csv(folder, name=POISON, row=f"a,{POISON}")
    out, data = folder / f"out{POISON}", ("--data", folder / f"{POISON}.csv", "--workers", 1)
    said = run("simulate", *data, "--out", out, *options)
    said += run("report", out, "--markdown", folder / "tables.md")
    pages = [file.read_text("utf-8") for file in (out / "report.html", out / "flower.log")]
    assert all("evil" in page for page in pages)
    return said + "".join(pages) + (folder / "tables.md").read_text("utf-8")


def rows(folder: Path) -> str:
    """The page of a strategy's rows."""
    file, score = folder / f"{POISON}.jsonl", {"round": 1, "stage": "train", "metrics": {POISON: 1.0}}
    dropped = {"round": 1, "client": 0, "dropped": POISON}
    file.write_text(json.dumps(score) + "\n" + json.dumps(dropped) + "\n")
    return run("report", file) + file.with_suffix(".html").read_text("utf-8")


def models(spoil: Callable[[Path], object], folder: Path) -> str:
    with no_bars():
        a, b = (saved(fresh_model("bert-classifier").float(), folder / name) for name in "ab")
    b = spoil(b) or b
    return run("check", b) + run("merge", a, b, "--parts", "attention", "--out", folder / f"out{POISON}")


def tensor(folder: Path) -> None:
    change(folder, lambda tensors: {f"{POISON}.{name}": t for name, t in tensors.items()})


def shard(folder: Path) -> None:
    index = {"weight_map": {"a": f"{POISON}\ud800.safetensors"}}
    (folder / WEIGHTS).rename(folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def token(folder: Path) -> None:
    tokenizer(folder.parent / "a")
    tokenizer(folder, w3=POISON)


def adapters(folder: Path) -> str:
    for name in "ab":
        (folder / name).mkdir()
        settings = {"peft_type": "LORA", "r": 2, "target_modules": [f"{name}{POISON}"]}
        (folder / name / "adapter_config.json").write_text(json.dumps(settings))
        weights = {f"{POISON}.lora_A.weight": torch.ones(2, 2)}
        save_file(weights, folder / name / "adapter_model.safetensors")
    return run("merge", folder / "a", folder / "b", "--dry-run")


CASES: dict[str, Callable[[Path], str]] = {
    "label": partial(csv, row=f"a,{POISON}"),
    "column": partial(csv, header=f"{POISON},label"),
    "split": lambda folder: csv(folder, "--task", "mlm", header="split,text", row=f"{POISON},b"),
    "file": partial(csv, name=POISON),
    "folder of a class": images,
    "tag": tags,
    "setting": partial(grid, "setting = NAME"),
    "partition": partial(grid, "setting = 'a'\npartition = NAME"),
    "arm": partial(grid, "setting = 'a'\narms = [NAME]"),
    "table": partial(grid, "setting = 'a'\n[NAME]"),
    "run": whole_run,
    "rows": rows,
    "tensor": partial(models, tensor),
    "shard": partial(models, shard),
    "token": partial(models, token),
    "folder": partial(models, lambda folder: folder.rename(folder.parent / POISON)),
    "class": partial(models, partial(configure, architectures=[POISON])),
    "dtype": partial(models, partial(configure, dtype=POISON)),
    "model type": partial(models, partial(configure, model_type=POISON)),
    "field": partial(models, partial(configure, **{POISON: 1})),
    "label of a model": partial(models, partial(configure, id2label={"0": POISON})),
    "adapter": adapters,
    "app": lambda folder: run("flower-app", folder / POISON),
    "argument": lambda folder: run("check", folder, folder / POISON),
}


@pytest.mark.parametrize("name", CASES)
def test_a_name_steers_no_terminal(name: str, tmp_path: Path, capfd: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    said = CASES[name](tmp_path)
    assert "evil" in said
    said += "".join(capfd.readouterr()) + caplog.text
    assert not STEERS.search(said), ascii(said)
