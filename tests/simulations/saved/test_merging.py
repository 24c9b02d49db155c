"""``fedrot merge`` of models: what comes out."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import fedrot
from tests.models import inputs
from tests.simulations.commands import contents, invoke, run
from tests.simulations.saved.folders import (
    WEIGHTS,
    change,
    model_of,
    near,
    saved,
    scrambled,
    tokenizer,
)
from tests.simulations.tensors import close, equal


def loaded(folder, like):
    """Load with the model's class; nothing may be missing or left over."""
    model, found = type(like).from_pretrained(folder, output_loading_info=True)
    assert not any(
        found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    return model.eval()


@pytest.fixture
def pair(tmp_path):
    """A classifier and a neighbour of it in other coordinates."""
    model = model_of("bert-classifier")
    return saved(model, tmp_path / "a"), saved(scrambled(near(model)), tmp_path / "b")


DIAGNOSED = ["bert-classifier", "distilbert-mlm"]
#: Families with tied tables, with tables of their own, and whose files have other names
#: than they.
MATCHED = ["t5-gated", "gpt2", "clip", "gpt-neox"]


@pytest.mark.parametrize("name", [*DIAGNOSED, *MATCHED])
def test_a_scrambled_copy_gives_the_original_back(name, tmp_path):
    model = model_of(name)
    whole = ["--parts", "whole"] if name in MATCHED else []
    symmetry = fedrot.symmetry_of(model.config, model.state_dict())
    expected = model.state_dict()
    a = saved(model, tmp_path / "a")
    b = saved(
        scrambled(model, fedrot.WHOLE_MODEL if whole else ("attention", "ffn")),
        tmp_path / "b",
    )
    said = run("merge", a, b, *whole, "--out", tmp_path / "out")
    merged = loaded(tmp_path / "out", model)
    if not whole:
        assert "Diagnosis: Clients are in different coordinates" in said
        assert "Aligned parts: attention, ffn." in said
        with torch.no_grad():
            assert torch.allclose(
                merged(**inputs()).logits, model(**inputs()).logits, atol=2e-4
            )
    elif symmetry.can_rotate:
        expected = fedrot.canonical(expected, symmetry)
    assert close(merged.state_dict(), expected)
    assert load_file(tmp_path / "out" / WEIGHTS).keys() == load_file(a / WEIGHTS).keys()
    run("merge", a, b, "--parts", "none", "--out", tmp_path / "plain")
    assert not close(
        loaded(tmp_path / "plain", model).state_dict(), model.state_dict(), atol=0.1
    )


def test_the_average_is_the_one_that_the_diagnosis_names(tmp_path):
    model = model_of("bert-classifier")
    a = saved(model, tmp_path / "a")
    b = saved(near(model, scale=1e-3), tmp_path / "b")
    assert "Aligned parts: none." in run(
        "merge", a, b, "--weights", "1, 3", "--out", tmp_path / "out"
    )
    ours, theirs, found = (
        load_file(folder / WEIGHTS) for folder in (a, b, tmp_path / "out")
    )
    assert close(found, {n: ours[n] / 4 + 3 * theirs[n] / 4 for n in ours}, atol=1e-6)
    far = saved(model_of("bert-classifier", 1), tmp_path / "far")
    output = run("merge", a, far)
    assert "come from another basis" in output
    assert "Aligned parts: residual, output, heads, attention, ffn." in output
    assert f"'{far}': squared distance to the anchor" in output


def test_shards_and_pickles_are_read_and_the_rest_is_as_in_the_first_model(
    tmp_path,
):
    model = model_of("distilbert-classifier").bfloat16()
    a = saved(model, tmp_path / "a", max_shard_size="20KB")
    assert len(list(a.glob("*.safetensors"))) > 2
    b = saved(near(model_of("distilbert-classifier")), tmp_path / "b")
    ours = model.state_dict()
    theirs = load_file(b / WEIGHTS)
    torch.save(theirs, b / "pytorch_model.bin")
    (b / WEIGHTS).unlink()
    tokenizer(a, size=60)
    (tmp_path / "out").mkdir()  # an empty folder is filled
    run("merge", a, b, "--out", tmp_path / "out")
    found = load_file(tmp_path / "out" / WEIGHTS)
    mean = {n: ((t.float() + theirs[n]) / 2).bfloat16() for n, t in ours.items()}
    assert equal(mean, found)
    settings, expected = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "out", a)
    )
    assert settings == expected
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    assert words["w7"] == 9


@pytest.mark.parametrize("stage", ["no path", "merging", "writing", "renaming"])
def test_nothing_is_left_without_a_path_or_when_it_fails(
    stage, pair, tmp_path, monkeypatch
):
    def fail(*_, **__):
        raise OSError("out of luck")

    broken = {
        "merging": (fedrot.aggregation.Mean, "result"),
        "writing": (transformers.PreTrainedModel, "save_pretrained"),
        "renaming": (Path, "replace"),
    }
    if stage in broken:
        monkeypatch.setattr(*broken[stage], fail)
    before = contents(tmp_path)
    out = ["--out", tmp_path / "out"] if stage in broken else []
    code, output = invoke("merge", *pair, *out)
    failed = stage in broken
    assert (code, "out of luck" in output) == (2 * failed, failed), output
    assert contents(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_values_beyond_the_dtype_are_refused(pair, tmp_path):
    saved(model_of("bert-classifier").half(), pair[0])
    change(
        pair[1], lambda tensors: {**tensors, "classifier.bias": torch.full((3,), 1e6)}
    )
    out = tmp_path / "out"
    run("merge", *pair, "--out", out, code=2, says="'classifier.bias' holds NaN or Inf")
    assert not out.exists()
