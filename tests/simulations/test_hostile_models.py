"""Models with code of their own, and with files outside of their folder: no command
runs or reads them.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fedrot.errors import FedrotError
from fedrot.strategies import PooledClassifier
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
KERNEL = {"attn_implementation": "kernels-community/x"}
OWN = "never runs a model's code"
OUTSIDE = "Files outside of its folder are not read"


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
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def pooled_classifier(fields, folder):
    """A ``PooledClassifier`` of the model, with changes of its encoder."""
    PooledClassifier.from_encoder(folder).save_pretrained(folder)
    configure(folder, text_config=fields)


def linked(folder):
    """As in the hub's cache, files are links that lead out."""
    sharded("model-1.safetensors", INDEX, folder)
    (folder / "model-1.safetensors").symlink_to(folder.parent / "a" / WEIGHTS)


def another_index(path, folder):
    sharded(path, f"x.{INDEX}", folder)
    configure(folder, transformers_weights=f"x.{INDEX}")


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
    "kernels by part": (
        partial(configure, attn_implementation={"text_config": "owner/kernel"}),
        [OWN] * 3,
    ),
    "a kernel of experts": (
        partial(configure, experts_implementation="owner/kernel"),
        [OWN] * 3,
    ),
    "a kernel inside": (partial(pooled_classifier, KERNEL), [OWN] * 3),
    "a kernel under another name": (
        partial(configure, attribute_map={"x": "_attn_implementation"}, x="a/kernel"),
        [OWN] * 3,
    ),
    "a pickle": (partial(hostile, WEIGHTS), ["cannot be loaded"] * 3),
    "shards": (partial(sharded, f"../a/{WEIGHTS}", INDEX), [OUTSIDE] * 3),
    "an absolute path": (partial(sharded, f"{{}}/a/{WEIGHTS}", INDEX), [OUTSIDE] * 3),
    "pickled shards": (
        partial(sharded, f"../a/{PICKLES}", f"{PICKLES}.index.json"),
        [OUTSIDE] * 3,
    ),
    "another index": (partial(another_index, f"{{}}/a/{WEIGHTS}"), [OUTSIDE] * 3),
    "weights": (
        partial(configure, transformers_weights=f"../a/{WEIGHTS}"),
        [OUTSIDE] * 3,
    ),
    "links": (linked, SOUND),
    "pooling": (pooled_outside, [SOUND[0], "left over", OUTSIDE]),
    "an adapter": (
        adapter_inside,
        ["is an adapter", "--parts would", "is an adapter"],
    ),
}


@pytest.fixture
def asked(monkeypatch):
    """Who was asked: the user, or the hub for a kernel or a file."""
    names = list[str]()
    cached_files = transformers.utils.hub.cached_files

    def cached(path_or_repo_id, **options):
        if Path(path_or_repo_id).is_dir():
            return cached_files(path_or_repo_id, **options)
        names.append(path_or_repo_id)
        raise OSError

    monkeypatch.setattr("builtins.input", lambda text: names.append(text) or "y")
    monkeypatch.setattr("transformers.utils.hub.cached_files", cached)
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.load_and_register_attn_kernel",
        lambda name, *_: names.append(name),
    )
    return names


@pytest.mark.parametrize("how", MODELS)
def test_no_code_runs_nobody_is_asked_and_nothing_outside_is_read(
    how, model, tmp_path, asked
):
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
    if said[2] in (OWN, OUTSIDE) and how != "a configuration":
        with pytest.raises(FedrotError, match=said[2]):
            PooledClassifier.from_encoder(model)
    assert not asked


#: Names of models that are not there, and those that the hub is asked for.
OF_HUB = ["owner/model-1.5", "bert-base-uncased"]
OF_FILES = [
    "a/typo",
    "b/config.json",
    "x/model.bin",
    "./typo",
    "a\\typo",
    "x/a/b",
    "~/x",
]


@pytest.mark.parametrize("name", OF_HUB + OF_FILES)
def test_the_hub_is_not_asked_for_paths(name, model, tmp_path, asked, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in (("check",), ("simulate", *QUICK, "--out", "out", "--model")):
        run(*line, name, code=2, says="There is no folder")
    assert {*asked} == {name}.intersection(OF_HUB)
