"""``fedrot merge``: folders of PEFT in, a folder of PEFT out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file

from fedrot.lora.adapters import LoraSettings, pairs_of
from tests.fedrot.lora.test_peft import bert, outputs
from tests.simulations.commands import contents, invoke

LORA: dict[str, Any] = {"task_type": "SEQ_CLS", "lora_alpha": 6, "target_modules": ["query", "value"]}


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


def products(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "adapter_model.safetensors")
    settings = LoraSettings.of(json.loads((folder / "adapter_config.json").read_text()))
    return {
        pair.module: settings.scale(pair.module, len(tensors[pair.a]))
        * tensors[pair.b]
        @ tensors[pair.a]
        for pair in pairs_of(tensors)
    }


def test_the_merged_adapter_is_one_of_peft(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2, rank=3, lora_alpha=12)
    before = contents(a), contents(b)
    out = tmp_path / "deep" / "merged"
    code, said = invoke("merge", a, b, "--weights", "1,3", "--rank", 5, "--out", out)
    assert code == 0, said
    assert "2 adapters: this average is " in " ".join(said.split())
    assert (contents(a), contents(b)) == before
    first, second, merged = products(a), products(b), products(out)
    for module, product in merged.items():
        # Ranks 2 and 3 fit into rank 5.
        assert torch.allclose(product, 0.25 * first[module] + 0.75 * second[module], atol=1e-5)
    loaded = peft.PeftModel.from_pretrained(base(), out).eval()
    assert loaded.peft_config["default"].r == 5
    dense = base()
    with torch.no_grad():
        for module, product in merged.items():
            dense.get_submodule(module.removeprefix("base_model.model.")).weight += product
    head = load_file(out / "adapter_model.safetensors")
    (weight,) = [tensor for name, tensor in head.items() if name.endswith("classifier.weight")]
    dense.classifier.weight.data = weight
    assert torch.allclose(outputs(loaded), outputs(dense), atol=1e-5)
    assert list(out.parent.iterdir()) == [out]


def test_equal_ranks_stay_and_dry_runs_write_nothing(tmp_path: Path) -> None:
    folders = [saved(tmp_path / name, seed) for seed, name in enumerate("ab")]
    out = tmp_path / "merged"
    code, said = invoke("merge", *folders, "--method", "mean", "--out", out)
    assert code == 0, said
    own = json.loads((folders[0] / "adapter_config.json").read_text())
    assert json.loads((out / "adapter_config.json").read_text()) == own
    given = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    for name, tensor in load_file(out / "adapter_model.safetensors").items():
        assert torch.allclose(tensor, (given[0][name] + given[1][name]) / 2, atol=1e-6)
    code, said = invoke("merge", *folders, "--dry-run")
    assert (code, "nothing was written" in " ".join(said.split())) == (0, True)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    a, b, wide = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2), saved(tmp_path / "c", 3, rank=4)
    other = saved(tmp_path / "dora", 3, use_dora=True)
    tokens = saved(tmp_path / "tokens", 3, trainable_token_indices=[1, 2])
    pissa = saved(tmp_path / "pissa", 3, init_lora_weights="pissa")
    few = saved(tmp_path / "few", 3, target_modules=["query"])
    (tmp_path / "empty").mkdir()
    for arguments, expected in (
        ([a], "1 model is given; at least two are needed"),
        ([a, b, "--weights", "1"], "The weights are 1 for 2 models"),
        ([a, b, "--method", "ties"], "Unknown method 'ties'; choose from exact, mean"),
        ([a, tmp_path / "empty"], "has no adapter_config.json. Give folders of LoRA adapters"),
        ([a, other], "has use_dora True"),
        ([a, tokens], "has trainable_token_indices [1, 2]"),
        ([a, pissa], "was initialised by pissa, which changes the base weights"),
        ([a, few], "few': The module"),
        ([a, wide, "--method", "mean"], "factors of different ranks have no mean"),
        ([a, b, "--method", "mean", "--rank", 8], "A mean of factors has their rank 2"),
    ):
        code, said = invoke("merge", *arguments, "--out", tmp_path / "out")
        assert code == 2
        assert expected in " ".join(said.split())
        assert not (tmp_path / "out").exists()
    code, said = invoke("merge", a, b)
    assert (code, "give --out, or --dry-run" in " ".join(said.split())) == (2, True)
    code, said = invoke("merge", a, b, "--out", a)
    assert (code, "exists and is not an empty folder" in " ".join(said.split())) == (2, True)
    code, said = invoke("merge", a, b, "--out", a / "deep" / "merged")
    assert (code, "Choose an --out outside of the adapters" in " ".join(said.split())) == (2, True)
    code, said = invoke("diagnose", a, b)
    assert (code, "fedrot merge" in " ".join(said.split())) == (2, True)
    code, said = invoke("merge", a, b, "--parts", "whole", "--dry-run")
    assert (code, "--parts has an effect only on models, not on LoRA adapters" in said) == (2, True)


def test_files_and_settings_of_clients_are_explained(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2)
    pointer = saved(tmp_path / "pointer", 3)
    (pointer / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "trainer").mkdir()
    deep = saved(tmp_path / "trainer" / "checkpoint-5", 3)
    more = saved(tmp_path / "more", 3, modules_to_save=["pooler"])
    moved, later, kind = (saved(tmp_path / name, 3) for name in ("moved", "later", "kind"))
    for folder, changes in (
        (moved, {"base_model_name_or_path": "/data/base"}),
        (later, {"revision": "v2"}),
        (kind, {"peft_type": "IA3"}),
    ):
        config = json.loads((folder / "adapter_config.json").read_text()) | changes
        config = {k: v for k, v in config.items() if folder != kind or k != "lora_alpha"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    for other, expected in (
        (pointer, "is a pointer of git-lfs"),
        (deep.parent, f"There is one below it: give '{deep}'."),
        (more, "All clients need the same modules_to_save and bias"),
        (moved, "If it is the same base by another name or path, write the same into both"),
        (later, "later' has revision 'v2'"),
        (kind, "The adapter is of kind IA3; only LORA adapters can be averaged"),
    ):
        code, said = invoke("merge", a, other, "--dry-run")
        assert (code, expected in " ".join(said.split())) == (2, True), said
    for name in ("optimizer.pt", "trainer_state.json", "checkpoint-5/optimizer.pt", "words.json"):
        (a / name).parent.mkdir(exist_ok=True)
        (a / name).write_text("{}")
    assert invoke("merge", a, b, "--out", tmp_path / "out")[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "words.json",
    ]


def test_older_configurations_and_starts_that_keep_the_base_are_merged(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", 1)
    b = saved(tmp_path / "b", 2, init_lora_weights="orthogonal")
    path = a / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "use_dora"}))
    code, said = invoke("merge", a, b, "--out", tmp_path / "out")
    assert code == 0, said


def rename(folder: Path, change: Any) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(change({name: tensor.clone() for name, tensor in load_file(file).items()}), file)


def prefixed(name: str) -> str:
    return f"module.{name}".replace("model.bert.", "model._orig_mod.bert.")


def test_wrapped_and_pickled_adapters_are_merged_like_their_own(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2)
    code, said = invoke("merge", a, b, "--out", tmp_path / "plain")
    assert code == 0, said
    rename(b, lambda tensors: {prefixed(name): tensor for name, tensor in tensors.items()})
    torch.save(load_file(a / "adapter_model.safetensors"), a / "adapter_model.bin")
    (a / "adapter_model.safetensors").unlink()
    code, said = invoke("merge", a, b, "--out", tmp_path / "out")
    assert code == 0, said
    plain, found = (
        load_file(tmp_path / place / "adapter_model.safetensors") for place in ("plain", "out")
    )
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert not (tmp_path / "out" / "adapter_model.bin").exists()


class Code:
    """A pickle that would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def no_b(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = next(name for name in tensors if "lora_B" in name)
    return {key: value for key, value in tensors.items() if key != name}


def no_entries(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(0) if "lora_A" in name else t for name, t in tensors.items()}


def flat(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.flatten() if "lora_A" in name else t for name, t in tensors.items()}


def test_damaged_adapters_are_named(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", 1)
    for name, change, expected in (
        ("no b", no_b, "has no partner"),
        ("no entries", no_entries, "without entries (4 of 10 tensors are empty). Sharded"),
        ("flat", flat, "has shape [32], like weights of sharded training"),
        (
            "twice",
            lambda t: {**t, **{f"module.{n}": v.clone() for n, v in t.items()}},
            "differ only in a wrapper",
        ),
    ):
        folder = saved(tmp_path / name, 2)
        rename(folder, change)
        code, said = invoke("merge", a, folder, "--out", tmp_path / "out")
        assert (code, expected in said, str(folder) in said) == (2, True, True), said
        assert "Send" not in said
    damaged = "is damaged or no safetensors file", "cannot be loaded: it is damaged"
    for text, messages in (
        (b"", ("is empty. Copy it again",) * 2),
        (b"version https://git-lfs.github.com/spec/v1\n", ("is a pointer of git-lfs",) * 2),
        (b"\x00" * 9, damaged),
    ):
        files = ("adapter_model.safetensors", "adapter_model.bin")
        for file, expected in zip(files, messages, strict=True):
            folder = saved(tmp_path / f"{len(text)} {file}", 2)
            (folder / "adapter_model.safetensors").unlink()
            (folder / file).write_bytes(text)
            code, said = invoke("merge", a, folder, "--out", tmp_path / "out")
            assert (code, f"'{folder / file}' {expected}" in said) == (2, True), said
    pickled = saved(tmp_path / "pickled", 2)
    (pickled / "adapter_model.safetensors").unlink()
    torch.save({"trouble": Code(tmp_path / "ran")}, pickled / "adapter_model.bin")
    code, said = invoke("merge", a, pickled, "--out", tmp_path / "out")
    assert (code, "adapter_model.bin' cannot be loaded" in said) == (2, True), said
    assert not (tmp_path / "ran").exists()
    saved(tmp_path / "deep" / "inside", 3)
    code, said = invoke("merge", a, tmp_path / "deep", "--out", tmp_path / "out")
    assert (code, f"There is one below it: give '{tmp_path / 'deep' / 'inside'}'" in said) == (
        2,
        True,
    )
    assert not (tmp_path / "out").exists()


def test_of_dora_the_report_says_what_it_is_about(tmp_path: Path) -> None:
    folders = [saved(tmp_path / name, seed, use_dora=True) for seed, name in enumerate("ab")]
    code, said = invoke("merge", *folders, "--dry-run")
    assert code == 0, said
    assert "these are errors of products only: DoRA's magnitudes were averaged separately" in said
    plain = [saved(tmp_path / f"plain {name}", seed) for seed, name in enumerate("ab")]
    assert "magnitudes" not in invoke("merge", *plain, "--dry-run")[1]


def test_ranks_of_single_modules_give_way_to_the_rank_of_the_average(tmp_path: Path) -> None:
    """PEFT builds every module with the rank of its pattern, and would refuse other factors."""
    a, b = saved(tmp_path / "a", 1, rank_pattern={"query": 4}), saved(tmp_path / "b", 2)
    out = tmp_path / "out"
    code, said = invoke("merge", a, b, "--out", out)
    assert code == 0, said
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["rank_pattern"]) == (4, {})
    tensors = load_file(out / "adapter_model.safetensors")
    assert {len(tensors[pair.a]) for pair in pairs_of(tensors)} == {4}
    loaded = peft.PeftModel.from_pretrained(base(), out)
    adapted = {name: t for name, t in loaded.state_dict().items() if "lora_A" in name}
    for name, tensor in tensors.items():
        if "lora_A" in name:
            own = name.replace("lora_A.weight", "lora_A.default.weight")
            assert torch.equal(adapted[own], tensor)
