"""Models with code of their own, and with files outside of their folder: no command
runs or reads them.
"""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.simulations.commands import run, settings
from tests.simulations.saved.folders import WEIGHTS, configure, hostile
from tests.simulations.tasks.cases import SIZES, save

CODE = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import *
class Config(BertConfig): model_type = "mine"
class Model(BertForSequenceClassification): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
def generate(*_, **__): pass
"""
CLASSES = {
    f"Auto{kind}": f"custom.{kind.removesuffix('ForSequenceClassification')}"
    for kind in ("Config", "Model", "ModelForSequenceClassification")
}
INDEX = f"{WEIGHTS}.index.json"
PICKLES = "pytorch_model.bin"
QUICK = (
    *settings({"train_limit": 64, "test_limit": 20, "max_length": 32}),
    *("--strategies", "fedavg", "--dry-run"),
)
OWN = "never runs a model's code"
OUTSIDE = "Files outside of a model's folder are not read"


@pytest.fixture
def model(tmp_path):
    folder = save(
        tmp_path / "b",
        transformers.BertConfig(**SIZES),
        "AutoModelForSequenceClassification",
    )
    shutil.copytree(folder, tmp_path / "a")
    code = CODE.format(ran=str(folder / "ran"))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    (folder / "custom.py").write_text(code)
    return folder


def sharded(path, index, folder):
    """Name all tensors in one file, and remove it from the folder."""
    tensors = load_file(folder / WEIGHTS)
    torch.save(tensors, folder.parent / "a" / PICKLES)
    (folder / WEIGHTS).unlink()
    names = dict.fromkeys(tensors, path.format(folder.parent))
    text = json.dumps({"metadata": {}, "weight_map": names})
    (folder / index).write_text(text)


def linked(folder):
    """As in the hub's cache, files are links that lead out."""
    sharded("model-1.safetensors", INDEX, folder)
    (folder / "model-1.safetensors").symlink_to(folder.parent / "a" / WEIGHTS)


def pooled_outside(folder):
    kinds = {"Transformer": "", "Pooling": "../a/1_Pooling"}
    modules = [{"type": f"m.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    configure(folder, architectures=["BertModel"])


def adapter_inside(folder):
    fields = {"peft_type": "LORA", "base_model_name_or_path": str(folder.parent / "a")}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


#: What the commands say of a sound model.
SOUND = ["The function is preserved", "Nothing was written", "without such a label: "]
#: What is done to a model, and what ``check``, ``merge`` and ``simulate`` say.
MODELS = {
    "a configuration": (
        partial(configure, model_type="mine", auto_map=CLASSES),
        [OWN] * 3,
    ),
    "a class": (
        partial(configure, architectures=["Model"], auto_map=CLASSES),
        ["is a Model", "is a Model", "as many classes as the data"],
    ),
    "a tokenizer": (
        partial(
            configure,
            file="tokenizer_config.json",
            tokenizer_class="Own",
            auto_map={"AutoTokenizer": [None, "custom.Tokenizer"]},
        ),
        SOUND,
    ),
    "a kernel": (partial(configure, attn_implementation="owner/kernel"), [OWN] * 3),
    "a pickle": (partial(hostile, WEIGHTS), ["cannot be loaded"] * 3),
    "shards": (partial(sharded, f"../a/{WEIGHTS}", INDEX), [OUTSIDE] * 3),
    "an absolute path": (partial(sharded, f"{{}}/a/{WEIGHTS}", INDEX), [OUTSIDE] * 3),
    "pickled shards": (
        partial(sharded, f"../a/{PICKLES}", f"{PICKLES}.index.json"),
        [OUTSIDE] * 3,
    ),
    "links": (linked, SOUND),
    "pooling": (pooled_outside, [SOUND[0], "left over", OUTSIDE]),
    "an adapter": (
        adapter_inside,
        ["is an adapter", "--parts would", "is an adapter"],
    ),
}


@pytest.mark.parametrize("how", MODELS)
def test_no_code_runs_nobody_is_asked_and_nothing_outside_is_read(
    how, model, tmp_path, monkeypatch
):
    asked = list[str]()
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    change, said = MODELS[how]
    change(model)
    lines = [
        ("check", model),
        ("merge", tmp_path / "a", model, "--parts", "none"),
        ("simulate", "--model", model, *QUICK, "--out", tmp_path / "out"),
    ]
    for line, words in zip(lines, said, strict=True):
        run(*line, code=0 if words in SOUND else 2, says=words)
        assert not (model / "ran").exists()
    assert not asked
