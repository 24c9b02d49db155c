"""``canonical`` and ``port``: what they write loads, and computes what it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fedrot
from reproductions.port.rewriting import Separate
from tests import families
from tests.models import State
from tests.reproductions.commands import invoke

CANONICAL = ["llama", "gpt2", "t5-gated", "mt5", "vit", "opt", "qwen3", "falcon-rw"]


def saved(name: str, folder: Path, tensors: State | None = None, seed: int = 0) -> Any:
    """Write a float32 model, tied as its configuration says, and return it as it is loaded."""
    model = families.model_of(name)
    model.load_state_dict(families.state_of(name, seed) if tensors is None else tensors)
    model.float().save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


def computed(name: str, model: Any) -> Tensor:
    with torch.no_grad():
        return families.answers(name, model.double())


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


# Canonical models


@pytest.mark.parametrize("name", CANONICAL)
def test_a_canonical_model_loads_and_computes_the_same(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "model")
    code, output = invoke("canonical", tmp_path / "model", tmp_path / "out")
    assert code == 0, output
    loaded = type(model).from_pretrained(tmp_path / "out").eval()
    assert relative(computed(name, loaded), computed(name, model)) <= 1e-5
    symmetry = fedrot.symmetry_of(loaded.config, loaded.state_dict())
    assert symmetry.can_rotate
    state = loaded.state_dict()
    assert all(bool((state[fold.gain] == 1).all()) for fold in symmetry.folds)
    # It may be rotated: the tensors are those that a canonical model has.
    update = fedrot.random_equivalent(state, symmetry.rotated, 1, ("residual",))
    loaded.load_state_dict(update)
    assert relative(computed(name, loaded), computed(name, model)) <= 1e-4


def test_tied_tables_become_two_and_are_named(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=20, n_layer=1, n_head=2, n_embd=8, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    code, output = invoke("canonical", tmp_path / "model", tmp_path / "out")
    assert code == 0
    assert "lm_head.weight" in output
    assert "were one table" in output
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert loaded.config.tie_word_embeddings is False
    assert loaded.lm_head.weight.data_ptr() != loaded.transformer.wte.weight.data_ptr()


def test_half_precision_stays(tmp_path: Path) -> None:
    families.model_of("llama").bfloat16().save_pretrained(tmp_path / "model")
    code, output = invoke("canonical", tmp_path / "model", tmp_path / "out")
    assert code == 0, output
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma3", "xglm"])
def test_models_without_foldable_norms_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "model")
    code, output = invoke("canonical", tmp_path / "model", tmp_path / "out")
    assert code == 2
    assert "cannot be folded" in output
    assert not (tmp_path / "out").exists()


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    for arguments in (
        ("canonical", tmp_path / "model", tmp_path / "out"),
        ("port", *[tmp_path / "model"] * 3, "--out", tmp_path / "out"),
    ):
        code, output = invoke(*arguments)
        assert code == 2
        assert "exists and is not an empty folder" in output
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]


# Ports


def fine_tuned(name: str) -> State:
    """Return a base with a small change of every tensor."""
    generator = torch.Generator().manual_seed(7)
    return {
        key: value + 0.05 * torch.randn(value.shape, generator=generator).to(value)
        if value.is_floating_point()
        else value
        for key, value in families.state_of(name).items()
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5-gated"])
def test_between_two_bases_of_one_function_the_port_is_the_fine_tuning(
    name: str, tmp_path: Path
) -> None:
    """The new base is the old one in other coordinates: then so is the port."""
    model = families.model_of(name)
    tied = bool(fedrot.symmetry_of(model.config, model.state_dict()).tied)
    symmetry, state = families.symmetry_for(name), families.state_of(name)
    rotates = symmetry.can_rotate and not tied
    if rotates:
        state, symmetry = fedrot.canonical(state, symmetry), symmetry.rotated
    other = fedrot.random_equivalent(state, symmetry, 3, fedrot.WHOLE_MODEL)
    saved(name, tmp_path / "base")
    tuned = saved(name, tmp_path / "tuned", fine_tuned(name))
    saved(name, tmp_path / "new", other)
    errors = {}
    for match in ("rotation", "none"):
        arguments = [tmp_path / n for n in ("base", "tuned", "new")]
        code, output = invoke("port", *arguments, "--out", tmp_path / match, "--match", match)
        assert code == 0, output
        found = type(tuned).from_pretrained(tmp_path / match).eval()
        errors[match] = relative(computed(name, found), computed(name, tuned))
    assert errors["rotation"] <= 1e-3
    assert errors["none"] > 0.05


def test_the_head_of_a_classifier_moves_as_a_whole(tmp_path: Path) -> None:
    """The bases are language models, the fine-tuned model is a classifier."""
    sizes = {"vocab_size": 20, "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, tie_word_embeddings=False, pad_token_id=0, num_labels=3)
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(config)
    tuned = transformers.GPT2ForSequenceClassification(config).eval()
    tuned.transformer.load_state_dict(base.transformer.state_dict())
    symmetry = fedrot.symmetry_of(config, base.state_dict())
    folded = fedrot.canonical(base.state_dict(), symmetry)
    new = transformers.GPT2LMHeadModel(config)
    new.load_state_dict(fedrot.random_equivalent(folded, symmetry.rotated, 1, fedrot.WHOLE_MODEL))
    for model, folder in ((base, "base"), (tuned, "tuned"), (new, "new")):
        model.save_pretrained(tmp_path / folder)
    arguments = [tmp_path / n for n in ("base", "tuned", "new")]
    code, output = invoke("port", *arguments, "--out", tmp_path / "out")
    assert code == 0, output
    assert "score.weight" in output
    found = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(1, 20, (4, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert relative(found(ids).logits, tuned(ids).logits) <= 1e-3


def test_scale_counts_the_difference(tmp_path: Path) -> None:
    name = "llama"
    saved(name, tmp_path / "base"), saved(name, tmp_path / "tuned", fine_tuned(name))
    saved(name, tmp_path / "new", seed=1)
    arguments = [tmp_path / n for n in ("base", "tuned", "new")]
    found = []
    for scale in (0, 1, 2):
        folder = tmp_path / str(scale)
        code, output = invoke(
            "port", *arguments, "--out", folder, "--scale", scale, "--match", "permutation"
        )
        assert code == 0, output
        found.append(Separate.load(folder).tensors)
    new = Separate.load(tmp_path / "new").tensors
    for key, value in new.items():
        assert torch.equal(found[0][key], value)
        assert torch.allclose(found[2][key] - value, 2 * (found[1][key] - value), atol=1e-5)


def test_unlike_models_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path / "a"), saved("gpt2", tmp_path / "b")
    code, output = invoke("port", *[tmp_path / n for n in "aab"], "--out", tmp_path / "out")
    assert code == 2
    assert "Different architectures" in output
    code, output = invoke("port", *[tmp_path / "a"] * 3, "--out", tmp_path / "out", "--match", "nothing")
    assert code == 2
    assert "Unknown match 'nothing'" in output
