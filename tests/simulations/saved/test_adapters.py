"""``fedrot merge`` of adapters: folders of PEFT in, a folder of PEFT out."""

import json
import re
from functools import partial

import peft
import pytest
import torch
from safetensors.torch import load_file

from fedrot.lora.adapters import LoraSettings, pairs_of
from tests.fedrot.lora.test_peft import bert, outputs
from tests.simulations.commands import run
from tests.simulations.saved.folders import (
    change,
    configure,
    hostile,
    nested,
    refused,
)
from tests.simulations.tensors import close

LORA = {
    "task_type": "SEQ_CLS",
    "lora_alpha": 6,
    "target_modules": ["query", "value"],
}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def base():
    torch.manual_seed(3)
    return bert().eval()


def saved(folder, seed, rank=2, **changes):
    torch.manual_seed(seed)
    model = peft.get_peft_model(base(), peft.LoraConfig(r=rank, **{**LORA, **changes}))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def a(tmp_path):
    return saved(tmp_path / "a", 1)


@pytest.fixture
def b(tmp_path):
    return saved(tmp_path / "b", 2)


def products(folder):
    tensors = load_file(folder / WEIGHTS)
    settings = LoraSettings.of(json.loads((folder / CONFIG).read_text()))
    return {
        pair.module: settings.scale(pair.module, len(tensors[pair.a]))
        * tensors[pair.b]
        @ tensors[pair.a]
        for pair in pairs_of(tensors)
    }


def test_the_merged_adapter_is_one_of_peft(tmp_path):
    """Ranks, also of single modules, and alphas differ; ranks 4 and 3 fit into rank
    7.
    """
    a = saved(tmp_path / "a", 1, rank_pattern={"query": 4})
    b = saved(tmp_path / "b", 2, rank=3, lora_alpha=12)
    out = tmp_path / "deep" / "merged"
    line = ("merge", a, b, "--weights", "1,3")
    run(*line, says="Nothing was written")
    run(*line, "--out", tmp_path / "largest")
    config = json.loads((tmp_path / "largest" / CONFIG).read_text())
    assert (config["r"], config["rank_pattern"]) == (4, {})
    run(*line, "--rank", 7, "--out", out, says="2 adapters: this average is ")
    second = products(b)
    mean = {m: 0.25 * first + 0.75 * second[m] for m, first in products(a).items()}
    assert close(products(out), mean, atol=1e-5)
    loaded = peft.PeftModel.from_pretrained(base(), out).eval()
    assert loaded.peft_config["default"].r == 7
    dense = base()
    with torch.no_grad():
        for module, product in mean.items():
            layer = dense.get_submodule(module.removeprefix("base_model.model."))
            layer.weight += product
    dense.classifier.load_state_dict(
        {
            name.split(".")[-1]: tensor
            for name, tensor in load_file(out / WEIGHTS).items()
            if "classifier" in name
        },
        strict=False,
    )
    assert torch.allclose(outputs(loaded), outputs(dense), atol=1e-5)
    assert [path.name for path in out.parent.iterdir()] == ["merged"]


#: Fields of the second configuration, and what is said; empty: they say the same as
#: those of the first.
FIELDS = {
    "a regular expression": ({"target_modules": r".*\.(query|value)"}, ""),
    "defaults": (
        {
            "exclude_modules": [],
            "bias": None,
            "fan_in_fan_out": None,
            "revision": "main",
        },
        "",
    ),
    "all layers": (
        {"layers_to_transform": [0, 1], "init_lora_weights": "orthogonal"},
        "",
    ),
    "a slash": ({"base_model_name_or_path": "owner/base/"}, ""),
    "no alpha": ({"lora_alpha": None}, ""),
    "an unknown alpha": (
        {"lora_alpha": "six"},
        "cannot be loaded: ValueError: could not",
    ),
    "a negative alpha": ({"lora_alpha": -6}, "alpha is -6"),
    "another revision": ({"revision": "v2"}, "revision is None in"),
    "another kind": ({"peft_type": "IA3"}, "IA3"),
    "dora": ({"use_dora": True}, "use_dora"),
    "pissa": ({"init_lora_weights": "pissa"}, "was initialised by pissa"),
}


@pytest.mark.parametrize("how", FIELDS)
def test_fields_are_compared_by_what_they_say(how, a, b, tmp_path):
    changes, expected = FIELDS[how]
    for folder in (a, b):
        configure(folder, CONFIG, base_model_name_or_path="owner/base")
    configure(b, CONFIG, **changes)
    if expected:
        refused(expected, b, "merge", a, b, "--out", tmp_path / "out")
        return
    for pair in ((a, b), (b, a)):
        run("merge", *pair, "--out", tmp_path / pair[0].name / "out")
        peft.PeftModel.from_pretrained(base(), tmp_path / pair[0].name / "out")


def test_old_files_lack_fields_and_a_base_has_several_paths(tmp_path, monkeypatch):
    a = saved(tmp_path / "a", 1, lora_alpha=8)
    b = saved(tmp_path / "b", 2, lora_alpha=8)
    (tmp_path / "base").mkdir()
    old = ("base_model_name_or_path", "peft_type", "r", "target_modules", "task_type")
    settings = json.loads((b / CONFIG).read_text())
    (b / CONFIG).write_text(json.dumps({key: settings[key] for key in old}))
    configure(a, CONFIG, base_model_name_or_path="base")
    configure(b, CONFIG, base_model_name_or_path=f"{tmp_path}/base/")
    torch.save(load_file(b / WEIGHTS), b / "adapter_model.bin")
    monkeypatch.chdir(tmp_path)
    expected = {}
    for module, product in products(a).items():
        u, s, v = torch.linalg.svd((product + products(b)[module]) / 2)
        expected[module] = u[:, :2] * s[:2] @ v[:2]
    (b / WEIGHTS).unlink()
    run("merge", a, b, "--out", "out")
    assert close(products(tmp_path / "out"), expected, atol=1e-5)


def changed(folder, function):
    def applied(tensors):
        found = {name: function(name, tensor) for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    change(folder, applied, WEIGHTS)


#: How names of tensors are written that are not PEFT's; of all files, or the second.
NAMES = {
    "the adapter's name": ("", ".default"),
    "data parallel": ("module.", ""),
    "both": ("module.", ".own"),
    "compiled": ("_orig_mod.", ".default"),
}


@pytest.mark.parametrize("how", NAMES)
def test_names_of_a_state_dict_are_those_of_peft(how, a, b, tmp_path):
    before, adapter = NAMES[how]

    def named(name):
        name = re.sub(r"(?<=lora_[AB])", adapter, name)
        if adapter:
            name = re.sub(r"(?<=classifier)", f".modules_to_save{adapter}", name)
        return before + name

    run("merge", a, b, "--out", tmp_path / "expected")
    for folder in (b, a):
        change(folder, lambda ts: {named(n): t for n, t in ts.items()}, WEIGHTS)
        out = tmp_path / folder.name / "out"
        run("merge", a, b, "--out", out)
        assert close(
            load_file(out / WEIGHTS), load_file(tmp_path / "expected" / WEIGHTS)
        )


DAMAGED = {
    "no configuration": (lambda at: (at / CONFIG).unlink(), f"has no {CONFIG}"),
    "no weights": (lambda at: (at / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "code": (partial(hostile, WEIGHTS), "cannot be loaded"),
    "no partner": (
        partial(changed, function=lambda n, t: None if "lora_B" in n else t),
        "no partner",
    ),
    "sharded": (
        partial(changed, function=lambda _, t: t.flatten()),
        "like weights of sharded training",
    ),
    "targets": (lambda at: saved(at, 2, target_modules=["query"]), "The tensor"),
    "a named one": (partial(nested, "mine"), "give '"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_or_another_adapter_is_named(how, a, b, tmp_path):
    spoil, expected = DAMAGED[how]
    spoil(b)
    refused(expected, b, "merge", a, b, "--out", tmp_path / "out")


def test_requests_that_make_no_sense(a, b, tmp_path):
    out = tmp_path / "out"
    for options, words in {
        "--weights 1": "a positive weight for each",
        "--rank 0": "0 is not in the range",
        "--parts whole": "--parts would have no effect",
        "--data own.csv": "--data would have no effect",
    }.items():
        run("merge", a, b, *options.split(), "--out", out, code=2, says=words)
        assert not out.exists()
