"""``fedrot merge`` of models: what comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import fedrot
from tests.models import inputs
from tests.simulations.commands import contents, invoke
from tests.simulations.saved.folders import (
    WEIGHTS,
    change,
    loaded,
    model_of,
    neighbour,
    saved,
    scrambled,
    state,
    tokenizer,
)


def merge(*arguments: object) -> str:
    code, output = invoke("merge", *arguments)
    assert code == 0, output
    return output


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A classifier and a neighbour of it in other coordinates."""
    model = model_of("bert-classifier")
    return saved(model, tmp_path / "a"), saved(scrambled(neighbour(model)), tmp_path / "b")


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 2e-5) -> bool:
    same = one.keys() == other.keys()
    return same and all(torch.allclose(one[n].float(), other[n].float(), atol=atol) for n in one)


@pytest.mark.parametrize("name", ["bert-classifier", "roberta-mlm", "distilbert-mlm", "bert-mlm-untied"])
def test_a_scrambled_copy_gives_the_original_back(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    a, b = saved(model, tmp_path / "a"), saved(scrambled(model), tmp_path / "b")
    output = merge(a, b, "--out", tmp_path / "out")
    assert "Diagnosis: Clients are in different coordinates" in output
    assert "Aligned parts: attention, ffn." in output
    merged = loaded(tmp_path / "out", model)
    assert close(state(merged), state(model))
    with torch.no_grad():
        assert torch.allclose(merged(**inputs()).logits, model(**inputs()).logits, atol=2e-4)
    assert load_file(tmp_path / "out" / WEIGHTS).keys() == load_file(a / WEIGHTS).keys()
    merge(a, b, "--parts", "none", "--out", tmp_path / "plain")
    assert not close(state(loaded(tmp_path / "plain", model)), state(model), atol=0.1)


#: Families with tied tables, with tables of their own, and whose files have other names than they.
@pytest.mark.parametrize("name", ["t5-gated", "gpt2", "llama", "clip", "vit", "gpt-neox", "mixtral"])
def test_other_families_are_matched_whole(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    symmetry = fedrot.symmetry_of(model.config, model.state_dict())
    a = saved(model, tmp_path / "a")
    b = saved(scrambled(model, fedrot.WHOLE_MODEL), tmp_path / "b")
    merge(a, b, "--parts", "whole", "--out", tmp_path / "out")
    expected = state(model)
    if symmetry.can_rotate:
        expected = fedrot.canonical(expected, symmetry)
    assert close(state(loaded(tmp_path / "out", model)), expected)
    assert load_file(tmp_path / "out" / WEIGHTS).keys() == load_file(a / WEIGHTS).keys()


def test_the_average_is_the_one_that_the_diagnosis_names(tmp_path: Path) -> None:
    model = model_of("bert-classifier")
    a, near = saved(model, tmp_path / "a"), saved(neighbour(model, scale=1e-3), tmp_path / "near")
    assert "Aligned parts: none." in merge(a, near, "--out", tmp_path / "out")
    ours, theirs = (load_file(folder / WEIGHTS) for folder in (a, near))
    assert close(load_file(tmp_path / "out" / WEIGHTS), {n: (ours[n] + theirs[n]) / 2 for n in ours})
    far = saved(model_of("bert-classifier", 1), tmp_path / "far")
    output = merge(a, far, "--dry-run")
    assert "come from another basis" in output
    assert "Aligned parts: residual, output, heads, attention, ffn." in output
    assert f"'{far}': squared distance to the anchor" in output


def test_the_mean_is_weighted_and_that_of_aligned_models(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    first = model_of("bert-classifier")
    ours, theirs = state(first), state(loaded(pair[1], first))
    symmetry = fedrot.symmetry_of(first.config, ours)
    moved = fedrot.align(theirs, ours, symmetry, fedrot.AlignmentOptions(("attention",))).apply(theirs)
    merge(*pair, "--parts", "attention", "--weights", "1, 3", "--out", tmp_path / "out")
    expected = {name: ours[name] / 4 + 3 * moved[name] / 4 for name in ours}
    assert close(state(loaded(tmp_path / "out", first)), expected, atol=1e-6)


def test_the_dtype_configuration_and_tokenizer_are_those_of_the_first_model(tmp_path: Path) -> None:
    model = model_of("distilbert-classifier")
    a = saved(model_of("distilbert-classifier").bfloat16(), tmp_path / "a")
    b = saved(neighbour(model), tmp_path / "b")
    tokenizer(a, size=60)
    merge(a, b, "--out", tmp_path / "out")
    found = load_file(tmp_path / "out" / WEIGHTS)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    ours, theirs = state(model_of("distilbert-classifier").bfloat16()), state(neighbour(model))
    assert all(torch.equal(t, ((ours[n].float() + theirs[n]) / 2).bfloat16()) for n, t in found.items())
    settings = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", a)]
    assert settings[0] == settings[1]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()["w7"] == 9


def test_shards_pickles_and_integers_are_read(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = model_of("bert-classifier")
    merge(*pair, "--out", tmp_path / "one")
    shards = saved(model, tmp_path / "shards", max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    torch.save(load_file(pair[1] / WEIGHTS), pair[1] / "pytorch_model.bin")
    (pair[1] / WEIGHTS).unlink()
    merge(shards, pair[1], "--out", tmp_path / "two")
    assert close(load_file(tmp_path / "one" / WEIGHTS), load_file(tmp_path / "two" / WEIGHTS))


def test_a_dry_run_writes_nothing_and_an_empty_folder_is_filled(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    before = contents(tmp_path)
    for out in (tmp_path / "out", pair[0]):
        assert "nothing was written" in merge(*pair, "--dry-run", "--out", out)
    assert contents(tmp_path) == before
    (tmp_path / "out").mkdir()
    merge(*pair, "--out", tmp_path / "out")
    loaded(tmp_path / "out", model_of("bert-classifier"))


@pytest.mark.parametrize("stage", ["merging", "writing", "renaming"])
def test_nothing_is_left_when_it_fails(
    stage: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise OSError("out of luck")

    cls, name = {
        "merging": (fedrot.aggregation.Mean, "result"),
        "writing": (transformers.PreTrainedModel, "save_pretrained"),
        "renaming": (Path, "replace"),
    }[stage]
    monkeypatch.setattr(cls, name, fail)
    before = contents(tmp_path)
    code, output = invoke("merge", *pair, "--out", tmp_path / "out")
    assert (code, "out of luck" in output) == (2, True)
    assert contents(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_values_beyond_the_dtype_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    saved(model_of("bert-classifier").half(), pair[0])
    change(pair[1], lambda tensors: {**tensors, "classifier.bias": torch.full((3,), 1e6)})
    code, output = invoke("merge", *pair, "--out", tmp_path / "out")
    assert (code, "'classifier.bias' has values beyond torch.float16" in output) == (2, True), output
    assert not (tmp_path / "out").exists()
