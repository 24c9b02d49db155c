"""``fedrot check``: a sound model, a broken one, and what cannot be checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fedrot
from fedrot.simulations.saved.load import SavedModel
from fedrot.simulations.saved.load import load as original
from tests.models import EVERY
from tests.simulations.commands import invoke
from tests.simulations.saved.folders import change, configure, model_of, saved, with_state


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(model_of("bert-classifier"), tmp_path / "model")


@pytest.mark.parametrize("name", [name for name in EVERY if not name.endswith("-choice")])
def test_task_heads_are_checked_as_they_are_saved(name: str, tmp_path: Path) -> None:
    code, found = invoke("check", saved(model_of(name), tmp_path / "model"))
    assert (code, "The function is preserved" in found) == (0, True), found
    assert 0 < float(found.split(" of their size")[0].split()[-1]) <= 1e-10


def test_a_packaged_model_and_one_with_more_tensors_and_code_are_sound(model: Path) -> None:
    assert invoke("check", "minilm")[0] == 0
    (model / "custom.py").write_text(f"open({str(model / 'ran')!r}, 'w')\n")
    configure(model, auto_map={"AutoConfig": "custom.Config", "AutoModel": "custom.Model"})
    change(model, lambda tensors: {**tensors, "bert.embeddings.ages": torch.arange(3)})
    assert invoke("check", model)[0] == 0
    configure(model, architectures=None)
    assert invoke("check", model, "--parts", "attention+ffn")[0] == 0
    assert not (model / "ran").exists()  # the code


def test_parts(tmp_path: Path) -> None:
    """The residual stream of a bare encoder cannot be moved."""
    bare = saved(model_of("bert-bare"), tmp_path / "model")
    for parts, code in {"ffn": 0, "whole": 2, "legs": 2, "none": 2, "": 0}.items():
        found, printed = invoke("check", bare, "--parts", parts)
        assert (found, str(bare) in printed) == (code, code == 2), printed


class _FirstHead(transformers.BertForSequenceClassification):
    """Returns the attention of one head, a number that depends on which it is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.set_attn_implementation("eager")  # the only one that returns attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, output_attentions=True, **kwargs)
        return {"logits": out.logits, "first": out.attentions[0][:, 0]}


class _Failing(_FirstHead):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("no inputs like these")


WORDS = {
    _FirstHead: "Look at group 'encoder.layer.0.heads' (heads), which acts on",
    _Failing: "no inputs like these",
}


@pytest.mark.parametrize("cls", WORDS)
def test_models_without_the_symmetry(
    cls: type[Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> SavedModel:
        found = original(name)
        return SavedModel(name, with_state(cls(found.model.config), dict(found.tensors)).eval())

    monkeypatch.setattr("fedrot.simulations.saved.load.load", load)
    code, said = invoke("check", model)
    assert (code, WORDS[cls] in said) == (1, True), said
    assert invoke("check", model, "--parts", "attention+ffn")[0] == (cls is not _FirstHead)


def test_a_reader_that_does_not_take_up_the_gain_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A residual stream that can be rotated is rotated, too."""

    def wrong(*arguments: Any) -> fedrot.Symmetry:
        symmetry = original_symmetry(*arguments)
        first, *others = symmetry.folds
        return replace(symmetry, folds=(replace(first, readers=()), *others))

    original_symmetry = fedrot.symmetry_of
    folder = saved(model_of("llama"), tmp_path / "a")
    assert invoke("check", folder)[0] == 0
    monkeypatch.setattr("fedrot.symmetry.symmetry_of", wrong)
    assert invoke("check", folder)[0] == 1
    assert invoke("check", folder, "--parts", "attention+ffn")[0] == 0
