"""``fedrot check``: a sound model, a broken one, and what cannot be checked."""

from dataclasses import replace

import pytest
import torch

import fedrot
from tests.simulations.commands import invoke, run
from tests.simulations.saved.folders import change, configure, model_of, saved


@pytest.fixture
def model(tmp_path):
    return saved(model_of("bert-classifier"), tmp_path / "model")


@pytest.mark.parametrize(
    "name",
    [
        "bert-pretraining",
        "bert-causal",
        "electra-discriminator",
        "distilbert-qa",
        "roberta-tokens",
    ],
)
def test_task_heads_are_checked_as_they_are_saved(name, tmp_path):
    found = run(
        "check",
        saved(model_of(name), tmp_path / "model"),
        says="The function is preserved",
    )
    assert 0 < float(found.split(" of their size")[0].split()[-1]) <= 1e-10


def test_a_packaged_model_and_one_with_more_tensors_are_sound(model):
    run("check", "minilm")
    change(model, lambda tensors: {**tensors, "bert.embeddings.ages": torch.arange(3)})
    run("check", model)
    configure(model, architectures=None)
    run("check", model, "--parts", "attention+ffn")


def test_parts(tmp_path):
    """The residual stream of a bare encoder cannot be moved."""
    bare = saved(model_of("bert-bare"), tmp_path / "model")
    for parts, code in {"ffn": 0, "whole": 2, "legs": 2, "none": 2, "": 0}.items():
        found, printed = invoke("check", bare, "--parts", parts)
        assert (found, str(bare) in printed) == (code, code == 2), printed


def test_a_reader_that_does_not_take_up_the_gain_is_found(tmp_path, monkeypatch):
    """A residual stream that can be rotated is rotated, too."""

    def wrong(*arguments):
        symmetry = original_symmetry(*arguments)
        first, *others = symmetry.folds
        return replace(symmetry, folds=(replace(first, readers=()), *others))

    original_symmetry = fedrot.symmetry_of
    folder = saved(model_of("llama"), tmp_path / "a")
    run("check", folder)
    monkeypatch.setattr("fedrot.symmetry.symmetry_of", wrong)
    run("check", folder, code=1)
    run("check", folder, "--parts", "attention+ffn")
