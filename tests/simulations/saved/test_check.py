"""``fedrot check``: a sound model, a broken one, and what cannot be checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import fedrot
from fedrot.simulations.cli.app import app
from fedrot.simulations.saved.load import SavedModel
from fedrot.simulations.saved.load import load as original
from tests.models import EVERY
from tests.simulations.saved.folders import change, configure, model_of, saved, with_state


def check(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Return what ``--json`` printed, which has to be one line and nothing else."""
    result = CliRunner().invoke(app, ["check", *map(str, arguments), "--json"])
    (line,) = result.stdout.splitlines()
    return result.exit_code, json.loads(line, parse_constant=pytest.fail)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(model_of("bert-classifier"), tmp_path / "model")


def test_a_sound_model_keeps_its_outputs(model: Path) -> None:
    code, found = check(model)
    assert code == 0
    assert list(found) == ["model", "family", "parts", "change", "holds", "sentence"]
    assert (found["model"], found["family"], found["holds"]) == (str(model), "bert", True)
    assert found["parts"] == ["residual", "output", "heads", "attention", "rescale", "ffn"]
    assert 0 < found["change"] <= 1e-10
    result = CliRunner().invoke(app, ["check", str(model)])
    assert result.exit_code == 0
    assert "The function is preserved" in result.stdout


@pytest.mark.parametrize("name", [name for name in EVERY if not name.endswith("-choice")])
def test_task_heads_are_checked_as_they_are_saved(name: str, tmp_path: Path) -> None:
    code, found = check(saved(model_of(name), tmp_path / "model"))
    assert (code, "residual" in found["parts"]) == (0, True), found


def test_a_packaged_model_and_one_with_more_tensors_are_sound(model: Path) -> None:
    assert check("minilm")[0] == 0
    change(model, lambda tensors: {**tensors, "bert.embeddings.ages": torch.arange(3)})
    assert check(model)[0] == 0
    configure(model, architectures=None)
    assert check(model, "--parts", "attention+ffn")[0] == 0


@pytest.mark.parametrize(("parts", "code"), [("ffn", 0), ("whole", 2), ("legs", 2), ("none", 2)])
def test_parts(parts: str, code: int, tmp_path: Path) -> None:
    """The residual stream of a bare encoder cannot be moved."""
    bare = saved(model_of("bert-bare"), tmp_path / "model")
    found, printed = check(bare, "--parts", parts)
    assert found == code
    assert printed["parts"] == ["ffn"] if code == 0 else list(printed) == ["error"]


class _FirstHead(transformers.BertForSequenceClassification):
    """Returns the attention of one head, a number that depends on which it is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.set_attn_implementation("eager")  # the only one that returns attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, output_attentions=True, **kwargs)
        return {"logits": out.logits, "first": out.attentions[0][:, 0]}


class _Broken(_FirstHead):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return {"logits": super().forward(*args, **kwargs)["logits"] * torch.nan}


class _Failing(_FirstHead):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("no inputs like these")


def test_models_without_the_symmetry(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded_as(cls: type[Any]) -> tuple[int, dict[str, Any]]:
        def load(name: str) -> SavedModel:
            found = original(name)
            return SavedModel(name, with_state(cls(found.config), found.tensors).eval())

        monkeypatch.setattr("fedrot.simulations.saved.check.load", load)
        return check(model)

    code, found = loaded_as(_FirstHead)
    assert (code, found["holds"], found["change"] > 1e-6) == (1, False, True)
    assert "Look at group 'encoder.layer.0.heads' (heads), which acts on" in found["sentence"]
    assert check(model, "--parts", "attention+ffn")[0] == 0
    code, found = loaded_as(_Broken)
    assert (code, found["holds"], found["change"]) == (1, False, None)
    code, found = loaded_as(_Failing)
    assert (code, "no inputs like these" in found["error"]) == (2, True)


def test_a_reader_that_does_not_take_up_the_gain_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A residual stream that can be rotated is rotated, too."""

    def wrong(*arguments: Any) -> fedrot.Symmetry:
        symmetry = fedrot.symmetry_of(*arguments)
        first, *others = symmetry.folds
        return replace(symmetry, folds=(replace(first, readers=()), *others))

    folder = saved(model_of("llama"), tmp_path / "a")
    assert check(folder)[0] == 0
    monkeypatch.setattr("fedrot.simulations.saved.check.symmetry_of", wrong)
    assert check(folder)[0] == 1
    assert check(folder, "--parts", "attention+ffn")[0] == 0
