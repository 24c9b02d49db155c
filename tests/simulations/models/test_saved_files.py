"""Saved models as training leaves them: wrapped, sharded, pickled, adapted, quantised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedrot.errors import FedrotError, UpdateError
from fedrot.simulations.models.model_files import (
    WRAPPERS,
    about,
    below,
    clean_names,
    instead,
    read_model,
    read_tensors,
    refuse_missing,
    refuse_quantised,
    write_model,
)
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


# Files, one by one


def test_old_pickles_are_read_and_other_things_are_no_tensors(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    tensors = {"a": torch.arange(3.0)}
    for zipped in (True, False):
        torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
        assert torch.equal(read_tensors(file)["a"], tensors["a"])
    for other in ([torch.zeros(2)], {"a": 3}):
        torch.save(other, file)
        with pytest.raises(FedrotError, match=r"a\.bin' holds no tensors by name"):
            read_tensors(file)


def test_safetensors_are_read_before_pickles_and_files_before_shards(tmp_path: Path) -> None:
    def write(name: str, value: float) -> None:
        tensors = {"a.weight": torch.full((2,), value)}
        (save_file if name.endswith("safetensors") else torch.save)(tensors, tmp_path / name)

    def index(name: str, shard: str) -> None:
        (tmp_path / name).write_text(json.dumps({"weight_map": {"a.weight": shard}}))

    found = []
    write("model-00001-of-00001.safetensors", 3.0)
    write("pytorch_model-00001-of-00001.bin", 1.0)
    index("pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin")
    found.append(float(read_model(tmp_path)["a.weight"][0]))
    write("pytorch_model.bin", 2.0)
    found.append(float(read_model(tmp_path)["a.weight"][0]))
    index("model.safetensors.index.json", "model-00001-of-00001.safetensors")
    found.append(float(read_model(tmp_path)["a.weight"][0]))
    write("model.safetensors", 4.0)
    found.append(float(read_model(tmp_path)["a.weight"][0]))
    assert found == [1, 2, 3, 4]


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(FedrotError, match=r"index\.json' is damaged: it has no readable 'weight_map'"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        *((f"{QUERY}.{leaf}.weight", "an adapter") for leaf in ("lora_A.default", "lora_embedding_B")),
        (f"{QUERY}.ia3_l.default", "an adapter"),
        *(
            (f"{QUERY}.{leaf}", "a quantised model")
            for leaf in ("qzeros", "weight.absmax", "weight.quant_map", "weight.quant_state.nf4")
        ),
    ],
)
def test_tensors_of_adapters_and_quantised_models_are_named(
    name: str, owner: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(2)}, file)
    with pytest.raises(FedrotError, match=rf"holds '{name}', a tensor of {owner}\."):
        read_model(tmp_path)
    save_file({f"{QUERY}.my_qweight": torch.zeros(2), "colora_A": torch.zeros(1)}, file)
    assert len(read_model(tmp_path)) == 2


def test_configurations_of_quantised_models_are_refused() -> None:
    for plain in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        refuse_quantised(plain, "here")
    for described, said in (
        ({"quant_method": "awq"}, "quantised (awq): "),
        ({"bits": 4}, "quantised: "),
    ):
        with pytest.raises(FedrotError) as error:
            refuse_quantised({"quantization_config": described}, "here")
        assert f"'here' is {said}its weights cannot be moved" in str(error.value)
    with pytest.raises(FedrotError, match="'here' is quantised: "):
        refuse_quantised({"quantization_config": "of another kind"}, "here")


def test_models_below_a_folder_are_listed(tmp_path: Path) -> None:
    assert below(tmp_path, "config.json") == ""
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "linked.txt").symlink_to("notes.txt")
    assert "save_pretrained" in instead(tmp_path)
    for number, name in enumerate(("b", "a/x", "c", "d"), start=1):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
        folders = [f"'{tmp_path / one}'" for one in sorted(("b", "a/x", "c", "d")[:number])[:3]]
        listed = ", ".join(folders) + (", ..." if number > 3 else "")
        assert below(tmp_path, "config.json") == f"There is one below it: give {listed}."
    assert instead(tmp_path) == below(tmp_path, "config.json")


def test_what_a_saved_model_lacks_is_named(model: Path) -> None:
    shell = fresh_model(NAME)
    refuse_missing(model, shell, [], ["more.weight"])
    with pytest.raises(FedrotError) as error:
        refuse_missing(model, shell, ["a.weight", "b.weight"], [])
    assert (
        f"'{model}' has no tensor 'a.weight' (2 missing in all), which a {type(shell).__name__} has. "
        "Check that weights and configuration belong together. Load it with transformers"
    ) in str(error.value)
    with pytest.raises(FedrotError) as error:
        refuse_missing(model, shell, ["a.weight", "b.weight"], ["x.c", "net.b.weight"])
    assert "has 'x.c', which a" in str(error.value)
    assert "The stored names have a prefix 'net.': save the model inside" in str(error.value)


def test_a_model_is_written_with_its_tokenizer_and_nothing_else_of_its_folder(
    model: Path, tmp_path: Path
) -> None:
    beside = [
        *("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"),
        *("tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
        *("merges.txt", "chat_template.jinja", "generation_config.json"),
    ]
    for name in (*beside, "README.md", "training_args.bin"):
        (model / name).write_text(name)
    tensors, shell = load_file(model / "model.safetensors"), fresh_model(NAME)
    out = tmp_path / "new" / "deep" / "out"
    write_model(out, tensors, shell, model)
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors", *beside}
    assert all((out / name).read_text() == name for name in beside)
    assert (out / "config.json").read_bytes() == (model / "config.json").read_bytes()
    with pytest.raises(FileExistsError, match="exists and is not an empty folder"):
        write_model(out, tensors, shell, model)


def test_only_whole_names_of_modules_are_wrappers() -> None:
    names = {
        "submodule.a": "submodule.a",
        "a.module.b": "a.b",
        "module.module.c": "c",
        "base_model.d": "base_model.d",
        "module.": "module.",
        "e.LayerNorm.gamma": "e.LayerNorm.weight",
        "e.LayerNorm.beta": "e.LayerNorm.bias",
        "gamma": "gamma",
        "e.LayerNorm.gamma.f": "e.LayerNorm.gamma.f",
    }
    found = clean_names(Path("here"), names, WRAPPERS)
    assert found == {clean: name for name, clean in names.items()}
    with pytest.raises(
        FedrotError, match=r"'here' holds both 'a' and 'module\.a', which differ only in"
    ):
        clean_names(Path("here"), ["a", "module.a"], WRAPPERS)


def test_an_error_is_about_a_file_and_stays_of_its_kind() -> None:
    for kind in (FedrotError, UpdateError):
        with pytest.raises(kind, match=r"^'a/b\.json': no family$") as found, about(Path("a/b.json")):
            raise kind("no family")
        assert type(found.value) is kind
    with pytest.raises(ValueError, match=r"^of another kind$"), about(Path("a")):
        raise ValueError("of another kind")
