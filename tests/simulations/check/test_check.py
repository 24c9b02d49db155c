"""``fedrot check``: a sound model, a broken one, and what cannot be checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import fedrot
from fedrot.simulations.check import checking
from fedrot.simulations.cli.app import app
from fedrot.simulations.models.saved_model import SavedModel
from fedrot.symmetry import FAMILIES
from tests.models import EVERY, HEADS, LAYERS, NEURONS, WIDTH, fresh_model

KINDS = {
    ("residual", "Permutation"): 1,
    ("output", "SignedPermutation"): 1,
    ("heads", "HeadPermutation"): LAYERS,
    ("attention", "HeadRotation"): 2 * LAYERS,
    ("rescale", "Rescale"): 2 * LAYERS,
    ("ffn", "Permutation"): LAYERS,
}
INSIDE = ["heads", "attention", "rescale", "ffn"]


def check(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *map(str, arguments)])
    return result.exit_code, result.stdout


def read(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Return what ``--json`` printed, which has to be one line and nothing else."""
    code, output = check(*arguments, "--json")
    (line,) = output.splitlines()
    return code, json.loads(line, parse_constant=pytest.fail)


def saved(name: str, folder: Path) -> Path:
    fresh_model(name).float().save_pretrained(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved("bert-classifier", tmp_path / "model")


# Models that are what they say


def test_a_sound_model_is_reported_in_full(model: Path) -> None:
    code, found = read(model)
    assert code == 0
    assert list(found) == [
        *("model", "model_type", "family", "architecture", "parts", "refused", "groups"),
        *("kinds", "change", "tolerance", "holds", "suspects", "notes", "seconds"),
    ]
    assert found["architecture"] == "BertForSequenceClassification"
    assert (found["model"], found["model_type"], found["family"]) == (str(model), "bert", "bert")
    assert (found["refused"], found["suspects"]) == ({}, "")
    (note,) = found["notes"]
    assert note.startswith("Its residual stream is permuted, not rotated: the gain 'bert.embeddings.")
    assert found["parts"] == ["residual", "output", *INSIDE]
    assert (found["holds"], found["tolerance"]) == (True, 1e-6)
    assert 0 < found["change"] <= 1e-10
    assert {(kind["part"], kind["kind"]): kind["groups"] for kind in found["kinds"]} == KINDS
    assert all(kind["holds"] and 0 < kind["change"] <= 1e-10 for kind in found["kinds"])


@pytest.mark.parametrize("tied", [False, True])
def test_the_stream_of_a_pre_norm_model_is_rotated(tied: bool, tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=20, n_layer=2, n_head=2, n_embd=8, n_positions=8, tie_word_embeddings=tied
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "a")
    code, found = read(tmp_path / "a")
    assert (code, found["holds"]) == (0, True)
    (note,) = found["notes"]
    kinds = {kind["kind"]: kind for kind in found["kinds"]}
    assert ("StreamRotation" in kinds) != tied
    assert ("untied tables" in note) == tied
    if not tied:
        assert 0 < kinds["StreamRotation"]["change"] <= 1e-10
        assert "can be rotated" in note
    code, found = read(tmp_path / "a", "--parts", "attention+ffn")
    assert (code, found["notes"]) == (0, [])


def test_a_reader_that_does_not_take_up_the_gain_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> fedrot.Symmetry:
        symmetry = fedrot.symmetry_of(*arguments)
        first, *others = symmetry.folds
        return replace(symmetry, folds=(replace(first, readers=()), *others))

    monkeypatch.setattr("fedrot.simulations.check.checking.symmetry_of", wrong)
    config = transformers.GPT2Config(
        vocab_size=20, n_layer=1, n_head=2, n_embd=8, n_positions=8, tie_word_embeddings=False
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "a")
    code, found = read(tmp_path / "a")
    assert (code, found["holds"]) == (1, False)
    assert "Rotations of its residual stream change them" in found["suspects"]


def test_every_group_is_listed(model: Path) -> None:
    groups = {group["name"]: group for group in read(model)[1]["groups"]}
    loaded = fresh_model("bert-classifier")
    symmetry = fedrot.symmetry_of(loaded.config, loaded.state_dict())
    assert list(groups) == [group.name for group in symmetry.groups]
    assert groups["residual"]["layer"] is None
    assert groups["residual"]["units"] == WIDTH
    assert groups["encoder.layer.1.ffn"] == {
        "name": "encoder.layer.1.ffn",
        "layer": 1,
        "part": "ffn",
        "kind": "Permutation",
        "units": NEURONS,
        "tensors": 3,
    }
    assert groups["encoder.layer.0.heads"]["units"] == HEADS
    assert groups["encoder.layer.0.heads"]["tensors"] == 7


@pytest.mark.parametrize("name", [name for name in EVERY if not name.endswith("-choice")])
def test_task_heads_are_checked_as_they_are_saved(name: str, tmp_path: Path) -> None:
    code, found = read(saved(name, tmp_path / "model"))
    assert (code, found["holds"]) == (0, True), found
    assert found["architecture"] == type(EVERY[name].build("eager")).__name__
    assert "residual" in found["parts"]


def test_the_terminal_shows_layers_kinds_and_the_verdict(model: Path) -> None:
    code, output = check(model)
    assert code == 0
    shown = " ".join(output.replace("│", " ").split())
    assert "BertForSequenceClassification (bert), family bert" in shown
    assert f"0-{LAYERS - 1} heads encoder.layer.*.heads HeadPermutation {HEADS} " in shown
    assert f"attention encoder.layer.*.qk HeadRotation {HEADS} " in shown
    assert f"ffn encoder.layer.*.ffn Permutation {NEURONS} " in shown
    assert "model residual residual Permutation 32" in shown
    assert "together" in shown
    assert "BROKEN" not in shown
    assert "The function is preserved: the largest relative change of outputs is" in shown


def test_layers_that_differ_are_listed_apart() -> None:
    from fedrot.simulations.check.checking import GroupFound, _alike

    sizes = {"a.0.ffn": 8, "a.1.ffn": 8, "a.2.ffn": 8, "a.3.ffn": 6, "a.4.ffn": 8}
    sizes |= {"b.0.ffn": 8, "b.1.ffn": 8}
    groups = [
        GroupFound(name, layer, "ffn", "Permutation", size, 3)
        for layer, (name, size) in enumerate(sizes.items())
    ]
    assert [layers for layers, _ in _alike(groups)] == ["0-2", "3", "4", "5-6"]


def test_parts_that_cannot_be_moved_are_named_with_the_reason(tmp_path: Path) -> None:
    bare = saved("bert-bare", tmp_path / "model")
    code, found = read(bare)
    assert (code, found["parts"], list(found["refused"])) == (0, INSIDE, ["residual"])
    code, output = check(bare)
    assert code == 0
    assert "Part 'residual' cannot be moved: no task head reads the residual stream" in output


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("ffn", ["ffn"]),
        ("attention+ffn", ["attention", "ffn"]),
        ("whole", ["residual", "output", "heads", "attention", "ffn"]),
    ],
)
def test_only_what_is_asked_for_is_moved(option: str, parts: list[str], model: Path) -> None:
    code, found = read(model, "--parts", option)
    assert (code, found["parts"]) == (0, parts)
    assert list(dict.fromkeys(kind["part"] for kind in found["kinds"])) == parts
    assert {group["part"] for group in found["groups"]} == set(parts)


def test_a_check_repeated_gives_the_same_numbers(model: Path) -> None:
    first, again = (read(model)[1] for _ in range(2))
    assert [kind["change"] for kind in first["kinds"]] == [kind["change"] for kind in again["kinds"]]


def test_a_model_that_names_no_class_is_loaded_bare(model: Path) -> None:
    _configure(model, architectures=None)
    code, found = read(model)
    assert (code, found["architecture"]) == (0, "BertModel")
    assert [note.partition(":")[0] for note in found["notes"]] == ["Not part of a BertModel, left out"]
    assert "classifier.weight" in found["notes"][0]
    assert "left out: classifier.bias" in check(model)[1]


def test_the_model_of_the_demonstration_is_sound() -> None:
    code, found = read("minilm")
    assert (code, found["holds"], len(found["groups"])) == (0, True, 36)


def test_families_are_listed_without_a_model() -> None:
    expected = {
        family.name: {"model_types": list(family.model_types), "stream": family.stream}
        for family in FAMILIES
    }
    assert read("--list") == (0, {"families": expected})
    code, output = check("--list")
    assert code == 0
    shown = " ".join(output.split())
    assert all(name in shown for family in FAMILIES for name in (family.name, *family.model_types))
    assert "permuted" in shown


# Models that are not


class _FirstHead(transformers.BertForSequenceClassification):
    """Looks at the attention of one head, and returns a number that depends on which it is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.set_attn_implementation("eager")  # the only one that says where it looked

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, output_attentions=True, **kwargs)
        return {"logits": out.logits, "first": out.attentions[0][:, 0]}


class _Broken(_FirstHead):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return {"logits": super().forward(*args, **kwargs)["logits"] * torch.nan}


class _Failing(_FirstHead):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("no inputs like these")


def _as(model_class: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavedModel, "model_class", model_class)


def test_a_model_that_looks_at_single_heads_is_caught(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as(_FirstHead, monkeypatch)
    code, found = read(model)
    assert (code, found["holds"]) == (1, False)
    assert {kind["part"] for kind in found["kinds"] if not kind["holds"]} == {"heads"}
    assert found["change"] > 1e-6
    code, output = check(model)
    shown = " ".join(output.replace("│", " ").split())
    assert code == 1
    assert shown.count("BROKEN") == 2  # of the heads, and together
    assert "BROKEN attention" in shown
    assert "The description of family 'bert' is wrong for this model" in shown
    assert "Look at group 'encoder.layer.0.heads' (heads), which acts on" in shown
    assert found["suspects"] in shown
    assert "is preserved" not in shown
    assert read(model, "--parts", "attention+ffn")[0] == 0


def test_parts_that_are_sound_alone_may_not_be_together(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checking.output_change

    def output_change(*args: Any) -> Callable[[Callable[[Any], bool]], float]:
        change, (_, _, symmetry, chosen) = real(*args), args
        groups = symmetry.select(chosen)
        return lambda wanted: 0.5 if all(map(wanted, groups)) else change(wanted)

    monkeypatch.setattr(checking, "output_change", output_change)
    code, found = read(model)
    assert (code, found["holds"], found["change"]) == (1, False, 0.5)
    assert all(kind["holds"] for kind in found["kinds"])


def test_outputs_that_are_no_numbers_prove_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _as(_Broken, monkeypatch)
    code, found = read(model)
    assert (code, found["holds"], found["change"]) == (1, False, None)
    assert not any(kind["holds"] for kind in found["kinds"])
    code, output = check(model)
    assert (code, "not finite" in output) == (1, True)


def test_a_model_that_does_not_run_cannot_be_checked(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as(_Failing, monkeypatch)
    code, output = check(model)
    assert code == 2
    assert "does not run on its inputs (no inputs like these)" in output


# Requests that cannot be met


def _configure(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "Give a model to check, or --list"),
        (("{model}", "--parts", "legs"), "Unknown part 'legs' in parts"),
        (("{model}", "--parts", "heads,ffn"), "Join parts by '+'"),
        (("{model}", "--parts", "none"), "has no groups of the parts (none)"),
        (("{model}/config.json",), "config.json' is a file. Give the folder of a saved model."),
        (("{model}/model.safetensors",), "Put config.json beside it, and name it model.safetensors"),
        (("{model}/../nothing",), "does not exist. Give the folder of a saved model, or a hub name"),
        (("./nothing",), "'./nothing' does not exist"),
    ],
)
def test_requests_that_make_no_sense(options: tuple[str, ...], expected: str, model: Path) -> None:
    filled = [option.format(model=model) for option in options]
    code, output = check(*filled)
    assert (code, expected in output) == (2, True), output
    code, found = read(*filled)
    assert (code, list(found), expected in found["error"]) == (2, ["error"], True)


def test_an_unknown_option_is_a_usage_error(model: Path) -> None:
    assert check(model, "--legs")[0] == 2


def test_a_refused_part_that_is_asked_for_is_an_error(tmp_path: Path) -> None:
    code, output = check(saved("bert-bare", tmp_path / "model"), "--parts", "whole")
    assert (code, "Part 'residual' cannot be moved: no task head" in output) == (2, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "xlnet"}, "The architecture 'xlnet' is not supported"),
        ({"model_type": None}, "The architecture 'None' is not supported"),
        ({"architectures": ["MyBert"]}, "is a MyBert, which transformers does not have"),
        ({"hidden_size": 64}, "has shape [32], but needs shape [64] for '"),
        ({"num_hidden_layers": 30}, "most of the model would be random"),
    ],
)
def test_configurations_of_other_models(changes: dict[str, Any], expected: str, model: Path) -> None:
    _configure(model, **changes)
    code, output = check(model)
    assert (code, expected in output) == (2, True), output


def test_a_layer_without_weights_is_noted(model: Path) -> None:
    _configure(model, num_hidden_layers=LAYERS + 1)
    code, found = read(model)
    assert code == 0
    assert found["notes"][0].startswith("Not stored, therefore random: bert.encoder.layer.2.")


def test_custom_code_is_never_run(model: Path) -> None:
    marker = model / "ran"
    (model / "custom.py").write_text(f"open({str(marker)!r}, 'w')\n")
    _configure(model, auto_map={"AutoConfig": "custom.Config", "AutoModel": "custom.Model"})
    assert check(model)[0] in (0, 2)
    assert not marker.exists()
