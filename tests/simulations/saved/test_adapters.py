"""``fedrot merge`` of adapters: folders of PEFT in, a folder of PEFT out."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from fedrot.lora.adapters import LoraSettings, pairs_of
from tests.fedrot.lora.test_peft import bert, outputs
from tests.models import State
from tests.simulations.commands import contents, invoke
from tests.simulations.saved.folders import change, configure, hostile, refused, removed, written

LORA: dict[str, Any] = {"task_type": "SEQ_CLS", "lora_alpha": 6, "target_modules": ["query", "value"]}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def base() -> Any:
    torch.manual_seed(3)
    return bert().eval()


def saved(folder: Path, seed: int, rank: int = 2, **changes: Any) -> Path:
    torch.manual_seed(seed)
    model: Any = peft.get_peft_model(base(), peft.LoraConfig(r=rank, **{**LORA, **changes}))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def products(folder: Path) -> State:
    tensors = load_file(folder / WEIGHTS)
    settings = LoraSettings.of(json.loads((folder / CONFIG).read_text()))
    return {
        pair.module: settings.scale(pair.module, len(tensors[pair.a]))
        * tensors[pair.b]
        @ tensors[pair.a]
        for pair in pairs_of(tensors)
    }


def test_the_merged_adapter_is_one_of_peft(tmp_path: Path) -> None:
    """Ranks and alphas differ; ranks 2 and 3 fit into rank 5."""
    a, b = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2, rank=3, lora_alpha=12)
    before = contents(a), contents(b)
    out = tmp_path / "deep" / "merged"
    line = ("merge", a, b, "--weights", "1,3", "--rank", 5)
    assert "nothing was written" in invoke(*line, "--dry-run")[1]
    code, said = invoke(*line, "--out", out)
    assert (code, "2 adapters: this average is " in said) == (0, True), said
    assert (contents(a), contents(b)) == before
    first, second, merged = products(a), products(b), products(out)
    for module, product in merged.items():
        assert torch.allclose(product, 0.25 * first[module] + 0.75 * second[module], atol=1e-5)
    loaded: Any = peft.PeftModel.from_pretrained(base(), out).eval()
    assert loaded.peft_config["default"].r == 5
    dense = base()
    with torch.no_grad():
        for module, product in merged.items():
            dense.get_submodule(module.removeprefix("base_model.model.")).weight += product
    (head,) = [t for name, t in load_file(out / WEIGHTS).items() if name.endswith("classifier.weight")]
    dense.classifier.weight.data = head
    assert torch.allclose(outputs(loaded), outputs(dense), atol=1e-5)
    assert [path.name for path in out.parent.iterdir()] == ["merged"]


def test_ranks_of_single_modules_give_way_to_the_largest_rank(tmp_path: Path) -> None:
    """PEFT builds every module with the rank of its pattern, and would refuse other factors."""
    a, b = saved(tmp_path / "a", 1, rank_pattern={"query": 4}), saved(tmp_path / "b", 2)
    code, said = invoke("merge", a, b, "--out", tmp_path / "out")
    assert code == 0, said
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["r"], config["rank_pattern"]) == (4, {})
    assert {len(t) for n, t in load_file(tmp_path / "out" / WEIGHTS).items() if "lora_A" in n} == {4}
    peft.PeftModel.from_pretrained(base(), tmp_path / "out")


#: Fields of the second configuration, and what is said; empty: they say the same as those of the first.
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "another order": ({"target_modules": ["value", "query"]}, ""),
    "a regular expression": ({"target_modules": r".*\.(query|value)"}, ""),
    "defaults": ({"exclude_modules": [], "bias": None, "fan_in_fan_out": None, "revision": "main"}, ""),
    "all layers": ({"layers_to_transform": [0, 1], "init_lora_weights": "orthogonal"}, ""),
    "a slash": ({"base_model_name_or_path": "owner/base/"}, ""),
    "no alpha": ({"lora_alpha": None}, ""),
    "an alpha in quotes": ({"lora_alpha": "6"}, ""),
    "an unknown alpha": ({"lora_alpha": "six"}, "cannot be loaded: could not convert"),
    "a negative alpha": ({"lora_alpha": -6}, "alpha is -6"),
    "another base": ({"base_model_name_or_path": "/data/base"}, "base_model_name_or_path is 'owner"),
    "another revision": ({"revision": "v2"}, "revision is None in"),
    "another kind": ({"peft_type": "IA3"}, "IA3"),
    "another task": ({"task_type": "TOKEN_CLS"}, "task_type"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    "dora": ({"use_dora": True}, "use_dora"),
    "pissa": ({"init_lora_weights": "pissa"}, "was initialised by pissa"),
}


@pytest.mark.parametrize("how", FIELDS)
def test_fields_are_compared_by_what_they_say(how: str, tmp_path: Path) -> None:
    changes, expected = FIELDS[how]
    a, b = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2)
    for folder in (a, b):
        configure(folder, CONFIG, base_model_name_or_path="owner/base")
    configure(b, CONFIG, **changes)
    if expected:
        refused(expected, b, "merge", a, b, "--out", tmp_path / "out")
        return
    for pair in ((a, b), (b, a)):
        code, said = invoke("merge", *pair, "--out", tmp_path / pair[0].name / "out")
        assert code == 0, said
        peft.PeftModel.from_pretrained(base(), tmp_path / pair[0].name / "out")


def test_old_files_lack_fields_and_a_base_has_several_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = saved(tmp_path / "a", 1, lora_alpha=8), saved(tmp_path / "b", 2, lora_alpha=8)
    (tmp_path / "base").mkdir()
    old = ("base_model_name_or_path", "peft_type", "r", "target_modules", "task_type")
    settings = json.loads((b / CONFIG).read_text())
    (b / CONFIG).write_text(json.dumps({key: settings[key] for key in old}))
    configure(a, CONFIG, base_model_name_or_path="base")
    configure(b, CONFIG, base_model_name_or_path=f"{tmp_path}/base/")
    torch.save(load_file(b / WEIGHTS), b / "adapter_model.bin")
    monkeypatch.chdir(tmp_path)
    expected = {module: (product + products(b)[module]) / 2 for module, product in products(a).items()}
    (b / WEIGHTS).unlink()
    code, said = invoke("merge", a, b, "--out", "out")
    assert code == 0, said
    for module, product in products(tmp_path / "out").items():
        u, s, v = torch.linalg.svd(expected[module])
        assert torch.allclose(product, u[:, :2] * s[:2] @ v[:2], atol=1e-5)


def no_b(given: State) -> State:
    name = next(name for name in given if "lora_B" in name)
    return {key: value for key, value in given.items() if key != name}


def flat(given: State) -> State:
    return {name: t.flatten() if "lora_A" in name else t for name, t in given.items()}


def wrapped(given: State) -> State:
    return {f"module.{name}": tensor for name, tensor in given.items()}


def other(folder: Path, **changes: Any) -> None:
    saved(folder, 2, **changes)


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (partial(removed, CONFIG), f"has no {CONFIG}"),
    "no weights": (partial(removed, WEIGHTS), f"has no {WEIGHTS}"),
    "no JSON": (partial(written, CONFIG, "{"), f"{CONFIG}' is damaged"),
    "code": (partial(hostile, WEIGHTS), "cannot be loaded"),
    "no partner": (partial(change, function=no_b, file=WEIGHTS), "has no partner"),
    "sharded": (partial(change, function=flat, file=WEIGHTS), "like weights of sharded training"),
    "wrapped": (partial(change, function=wrapped, file=WEIGHTS), "The tensor"),
    "targets": (partial(other, target_modules=["query"]), "The tensor"),
    "layers": (partial(other, layers_to_transform=[0]), "The tensor"),
    "more": (partial(other, modules_to_save=["pooler"]), "The tensor"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_or_another_adapter_is_named(how: str, tmp_path: Path) -> None:
    spoil, expected = DAMAGED[how]
    a, b = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2)
    spoil(b)
    refused(expected, b, "merge", a, b, "--out", tmp_path / "out")


#: Options beside two adapters, and what is said.
REQUESTS = {
    "--weights 1": "a positive weight for each",
    "--rank 0": "0 is not in the range",
    "--parts whole": "--parts would have no effect",
    "--data own.csv": "--data would have no effect",
}


@pytest.mark.parametrize("options", REQUESTS)
def test_requests_that_make_no_sense(options: str, tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2)
    code, said = invoke("merge", a, b, *options.split(), "--out", tmp_path / "out")
    assert (code, REQUESTS[options] in said) == (2, True), said
    assert not (tmp_path / "out").exists()
