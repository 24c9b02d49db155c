"""Saved models as training leaves them: wrapped, sharded, pickled, adapted, quantised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedrot.simulations.models.model_files import read_model
from tests.models import State, fresh_model
from tests.simulations import commands

NAME = "bert-classifier"
QUERY = "bert.encoder.layer.0.attention.self.query"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    fresh_model(NAME).float().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, function: Callable[[State], State]) -> None:
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    save_file(function(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))


def prefixed(prefix: str) -> Callable[[State], State]:
    return lambda tensors: {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def renamed(old: str, new: str) -> Callable[[State], State]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def check(folder: Path) -> tuple[int, str]:
    return commands.invoke("check", folder)


def merge(folder: Path, *options: object) -> tuple[int, str]:
    return commands.invoke("merge", folder, folder, *options)


# Wrappers are seen through


WRAPPED = {
    "parallel": prefixed("module."),
    "compiled": prefixed("_orig_mod."),
    "sharded": prefixed("_fsdp_wrapped_module."),
    "adapted": prefixed("base_model.model."),
    "nested": prefixed("module._orig_mod.base_model.model."),
    "blocks": renamed(".layer.1.", ".layer.1._fsdp_wrapped_module._orig_mod."),
    "base": renamed(".query.", ".query.base_layer."),
    "old": lambda tensors: renamed("LayerNorm.weight", "LayerNorm.gamma")(
        renamed("LayerNorm.bias", "LayerNorm.beta")(tensors)
    ),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_wrapped_models_are_checked_like_their_own(how: str, model: Path) -> None:
    plain = json.loads(commands.invoke("check", model, "--json")[1])
    change(model, WRAPPED[how])
    code, output = commands.invoke("check", model, "--json")
    found = json.loads(output)
    assert code == 0
    assert {**found, "seconds": 0} == {**plain, "seconds": 0}


@pytest.mark.parametrize("how", WRAPPED)
def test_wrapped_models_are_merged_under_their_own_names(how: str, model: Path, tmp_path: Path) -> None:
    before = load_file(model / "model.safetensors")
    change(model, WRAPPED[how])
    assert set(read_model(model)) == set(before)
    code, output = merge(model, "--out", tmp_path / "out")
    assert code == 0, output
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-5, rtol=1e-5)


def test_two_models_in_one_file_are_refused(model: Path) -> None:
    change(model, lambda tensors: {**tensors, "module.classifier.bias": torch.zeros(3)})
    for code, output in (check(model), merge(model, "--dry-run")):
        assert (code, "which differ only in a wrapper" in output) == (2, True), output


# Shards and pickles


def test_shards_are_checked_like_one_file(model: Path, tmp_path: Path) -> None:
    plain = json.loads(commands.invoke("check", model, "--json")[1])
    fresh_model(NAME).float().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    code, output = commands.invoke("check", tmp_path / "shards", "--json")
    found = json.loads(output)
    assert code == 0
    assert {key: found[key] for key in ("kinds", "groups")} == {
        key: plain[key] for key in ("kinds", "groups")
    }


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fresh_model(NAME).float().save_pretrained(folder, max_shard_size="20KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()
    for code, output in (check(folder), merge(folder, "--dry-run")):
        assert (code, "which does not have it. Copy all shards" in output) == (2, True), output


def no_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def deeper(folder: Path) -> None:
    files = list(folder.iterdir())
    (folder / "checkpoint-5").mkdir()
    for file in files:
        file.rename(folder / "checkpoint-5" / file.name)


def broken_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/0a1b")


def pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 9\n"
    (folder / "model.safetensors").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (no_index, "There are shards, but model.safetensors.index.json, which lists them, is missing"),
        (deeper, "There is one below it: give '{folder}/checkpoint-5'."),
        (broken_link, "'model.safetensors' links to '../blobs/0a1b', which does not exist"),
        (pointer, "'{folder}/model.safetensors' is a pointer of git-lfs, not the file itself."),
        (
            lambda folder: change(folder, prefixed("model.")),
            "have a prefix 'model.': save the model inside of the wrapper (wrapper.model.save",
        ),
    ],
)
def test_files_that_a_copy_or_a_wrapper_left_incomplete_are_explained(
    spoil: Callable[[Path], None], expected: str, model: Path
) -> None:
    spoil(model)
    code, output = merge(model, "--dry-run")
    assert (code, expected.format(folder=model) in output) == (2, True), output


def _pickled(folder: Path, prefix: str = "", **also: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    torch.save(prefixed(prefix)(tensors) | also, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_pickles_and_names_without_the_prefix_of_the_class_are_merged_too(
    model: Path, tmp_path: Path
) -> None:
    before = load_file(model / "model.safetensors")
    change(model, renamed("bert.", ""))
    _pickled(model)
    assert check(model)[0] == 0
    code, output = merge(model, "--out", tmp_path / "out")
    assert code == 0, output
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


class _Code:
    """What a pickle could do."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return self.marker.touch, ()


def test_pickles_of_more_than_tensors_are_not_loaded(model: Path, tmp_path: Path) -> None:
    _pickled(model, trouble=_Code(tmp_path / "ran"))
    code, output = check(model)
    assert (code, "cannot be loaded" in output) == (2, True), output
    assert not (tmp_path / "ran").exists()


def test_wrapped_pickles_are_checked_like_their_own(model: Path) -> None:
    plain = json.loads(commands.invoke("check", model, "--json")[1])
    _pickled(model, prefix="module.")
    code, output = commands.invoke("check", model, "--json")
    assert code == 0, output
    assert {**json.loads(output), "seconds": 0} == {**plain, "seconds": 0}


# What is no model of its own


def _adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def _adapter_weights(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def _lora(folder: Path) -> None:
    change(folder, lambda tensors: {**tensors, f"{QUERY}.lora_A.default.weight": torch.zeros(2, 32)})


def _said_to_be_quantised(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def _quantised(dtype: torch.dtype) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        change(folder, lambda t: {**t, f"{QUERY}.weight": t[f"{QUERY}.weight"].to(dtype)})

    return spoil


def _packed(leaf: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        def packed(tensors: State) -> State:
            del tensors[f"{QUERY}.weight"]
            return {**tensors, f"{QUERY}.{leaf}": torch.zeros(4, 32, dtype=torch.int32)}

        change(folder, packed)

    return spoil


def _scaled(folder: Path) -> None:
    change(folder, lambda tensors: {**tensors, f"{QUERY}.SCB": torch.ones(32)})


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_lora, f"holds '{QUERY}.lora_A.default.weight', a tensor of an adapter. Merge the adapters"),
        (
            _said_to_be_quantised,
            "is quantised (gptq): its weights cannot be moved. Give the model before",
        ),
        (_quantised(torch.int8), f"holds '{QUERY}.weight' as int8: it is quantised"),
        (_quantised(torch.uint8), f"holds '{QUERY}.weight' as uint8: it is quantised"),
        (
            _quantised(torch.float8_e4m3fn),
            f"holds '{QUERY}.weight' as float8_e4m3fn: it is",
        ),
        (_packed("qweight"), f"holds '{QUERY}.qweight', a tensor of a quantised model"),
        (_packed("weight_packed"), f"holds '{QUERY}.weight_packed', a tensor of a quantised model"),
        (_scaled, f"holds '{QUERY}.SCB', a tensor of a quantised model"),
    ],
)
def test_what_is_no_model_of_its_own_is_refused(
    spoil: Callable[[Path], None], expected: str, model: Path, tmp_path: Path
) -> None:
    spoil(model)
    for code, output in (check(model), merge(model, "--out", tmp_path / "out")):
        assert (code, expected in output) == (2, True), output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("spoil", [_adapter, _adapter_weights])
def test_adapters_are_no_models(spoil: Callable[[Path], None], model: Path, tmp_path: Path) -> None:
    spoil(model)
    code, output = check(model)
    advice = "There is 'adapter_config.json' instead. Average adapters with fedrot merge"
    assert (code, advice in output) == (2, True), output
    code, output = merge(model, "--out", tmp_path / "out")
    assert (code, "no configuration of a LoRA adapter" in output) == (2, True), output
    assert not (tmp_path / "out").exists()


def test_integers_that_are_no_weights_are_fine(model: Path) -> None:
    change(model, lambda t: {**t, "bert.embeddings.position_ids": torch.arange(40)[None]})
    assert check(model)[0] == 0
    assert merge(model, "--dry-run")[0] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_are_checked_in_float64(dtype: torch.dtype, model: Path) -> None:
    change(model, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    configure(model, dtype=str(dtype).removeprefix("torch."))
    found = json.loads(commands.invoke("check", model, "--json")[1])
    assert found["change"] <= 1e-10


# Files without content


def no_entries(tensors: State) -> State:
    return {name: torch.zeros(0) if "query" in name else t for name, t in tensors.items()}


def test_tensors_without_entries_are_named(model: Path) -> None:
    change(model, no_entries)
    expected = f"'{model / 'model.safetensors'}' holds '{QUERY}.bias' without entries (4 of 41 tensors"
    for code, output in (check(model), merge(model, "--dry-run")):
        assert (code, expected in output, "zero_to_fp32.py" in output) == (2, True, True), output
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    code, output = check(model)
    assert (code, "pytorch_model.bin' holds" in output, "zero_to_fp32.py" in output) == (2, True, True)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_empty_files_are_named(name: str, model: Path) -> None:
    if name == "pytorch_model.bin":
        (model / "model.safetensors").unlink()
    (model / name).write_bytes(b"")
    code, output = check(model)
    expected = "is damaged: it is not JSON" if name == "config.json" else "is empty. Copy it again"
    assert (code, f"'{model / name}' {expected}" in output) == (2, True), output


def test_pointers_of_git_lfs_are_named(model: Path) -> None:
    (model / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    for code, output in (check(model), merge(model, "--dry-run")):
        assert (code, "is a pointer of git-lfs" in output) == (2, True), output
