"""A name in a file steers no terminal: no control character is printed, logged or put
into a page.
"""

import json
import logging
import re
from functools import partial

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from fedrot.simulations.cli.app import app, prepare
from fedrot.simulations.pretrained import loading
from tests.models import fresh_model
from tests.simulations.commands import SMALL, settings
from tests.simulations.saved.folders import WEIGHTS, change, configure, saved, tokenizer

#: Colour, title of the window, bell, controls of one character, delete, and the other
#: direction.
POISON = "evil\x1b[31m\x1b]0;x\x07\x9b5m\x7f\u202e\u2066\b"
STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
DRY = "simulate --dry-run"
DATA = f"{DRY} --strategies fedavg --data"
EXPERIMENT = "[[experiment]]\nname = "
TAGS = (json.dumps({"tokens": ["a"], "ner_tags": [POISON]}) + "\n") * 20
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": f"{POISON}.safetensors"}})
RUN = {**SMALL, "clients": 2, "seeds": 1, "rounds": 1, "strategies": "fedavg"}


def table(header, row):
    return f"{header}\n" + f"{row}\na,c\n" * 20


#: A file, its content and the command that reads it, by what has the name.
FILES = {
    "label": ("a.csv", table("text,label", f"a,{POISON}"), DATA),
    "column": ("a.csv", table(f"{POISON},label", "a,b"), DATA),
    "tag": ("a.jsonl", TAGS, f"{DRY} --task ner --data"),
    "experiment": ("a.toml", (EXPERIMENT + json.dumps(POISON) + "\n") * 2, DRY),
    "strategy": (
        "a.toml",
        f"{EXPERIMENT}'a'\nstrategies = [{json.dumps(POISON)}]",
        DRY,
    ),
    "run": (
        f"{POISON}.csv",
        table("text,label", f"a,{POISON}"),
        f"simulate {' '.join(settings(RUN))} --workers 1 --data",
    ),
    "metric": (
        f"{POISON}.jsonl",
        json.dumps({"round": 1, "stage": "train", "metrics": {POISON: 1.0}}) + "\n",
        "report",
    ),
}

#: What is done to a model, by what has the name.
MODELS = {
    "tensor": partial(
        change, function=lambda held: {f"{POISON}.{n}": t for n, t in held.items()}
    ),
    "shard": lambda at: (
        (at / WEIGHTS).rename(at / f"{WEIGHTS}.index.json").write_text(INDEX) and at
    ),
    "token": partial(tokenizer, w3=POISON),
    "folder": lambda folder: folder.rename(folder.parent / POISON),
    "class": partial(configure, architectures=[POISON]),
    "label of a model": partial(configure, id2label={"0": POISON}),
}


def images(folder):
    for place in (folder / "images" / POISON, folder / "images" / "other"):
        place.mkdir(parents=True)
        for i in range(10):
            Image.new("L", (8, 8), i).save(place / f"{i}.png")
    return [
        *f"{DRY} --task image --clients 2 --strategies fedavg --data".split(),
        str(folder / "images"),
    ]


def adapters(folder):
    for name in "ab":
        (folder / name).mkdir()
        settings = {"peft_type": "LORA", "r": 2, "target_modules": [f"{name}{POISON}"]}
        (folder / name / "adapter_config.json").write_text(json.dumps(settings))
        weights = {f"{POISON}.lora_A.weight": torch.ones(2, 2)}
        save_file(weights, folder / name / "adapter_model.safetensors")
    return ["merge", str(folder / "a"), str(folder / "b")]


#: The command that reads a folder, by what has the name.
FOLDERS = {
    "folder of a class": images,
    "adapter": adapters,
}


@pytest.mark.parametrize("name", [*FILES, *MODELS, *FOLDERS])
def test_a_name_steers_no_terminal(name, tmp_path, capfd, caplog, monkeypatch):
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    prepare()
    caplog.set_level("INFO")
    out = ["--out", str(tmp_path / f"out{POISON}")]
    if name in FILES:
        file, content, words = FILES[name]
        (tmp_path / file).write_text(content, "utf-8")
        lines = [
            [
                *words.split(),
                str(tmp_path / file),
                *(out if "simulate" in words else []),
            ]
        ]
    elif name in FOLDERS:
        lines = [[*FOLDERS[name](tmp_path), *out]]
    else:
        with loading(tmp_path):  # without progress bars
            a, b = (
                saved(fresh_model("bert-classifier").float(), tmp_path / name)
                for name in "ab"
            )
        tokenizer(a)
        b = MODELS[name](b) or b
        lines = [
            ["check", str(b)],
            ["merge", str(a), str(b), "--parts", "attention", *out],
        ]
    results = [CliRunner().invoke(app, line) for line in lines]
    assert {result.exit_code for result in results} <= {0, 2}, results
    pages = [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.log")]
    assert bool(pages) == (name in ("run", "metric"))
    said = [
        *(result.output for result in results),
        *(page.read_text("utf-8") for page in pages),
    ]
    assert "evil" in "".join(said)
    said += [*capfd.readouterr(), caplog.text]
    assert not STEERS.search("".join(said)), ascii(said)
