"""What ``fedrot merge`` and ``fedrot check`` refuse of models: what was changed, and a word."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import families
from tests.simulations.commands import invoke
from tests.simulations.saved.folders import (
    LFS,
    WEIGHTS,
    change,
    configure,
    hostile,
    model_of,
    refused,
    removed,
    saved,
    tokenizer,
    written,
)

QUERY = "bert.encoder.layer.0.attention.self.query"


def pair(name: str, folder: Path) -> tuple[Path, Path]:
    a, b = (saved(model_of(name, seed), folder / place) for seed, place in enumerate("ab"))
    return a, b


def line(a: Path, b: Path, *options: object) -> tuple[object, ...]:
    return ("merge", a, b, *options, "--parts", "none", "--out", a.parent / "out")


#: Fields of the second model, and the field that is named; empty if no output depends on them.
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
    ("llama", {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
    ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("gpt2-classifier", {"pad_token_id": 3}, "pad_token_id"),
    ("bart-classifier", {"eos_token_id": 3}, "eos_token_id"),
    ("bert-classifier", {"is_decoder": True}, "is_decoder"),
    ("bert-classifier", {"my_own_field": 3}, "my_own_field"),
    ("clip", {"text_config": {"hidden_act": "relu"}}, "text_config.hidden_act"),
    ("llama", {"use_cache": False, "pretraining_tp": 2, "bos_token_id": 7}, ""),
    ("gpt2", {"resid_pdrop": 0.5, "initializer_range": 0.5, "transformers_version": "4.9.0"}, ""),
    ("bert-classifier", {"_name_or_path": "mine", "problem_type": "single_label_classification"}, ""),
    ("clip", {"vision_config": {"attention_dropout": 0.5}}, ""),
]


@pytest.mark.parametrize(("name", "changes", "field"), FIELDS)
def test_a_field_that_changes_outputs_is_named_with_both_values_and_may_be_allowed(
    name: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    a, b = pair(name, tmp_path)
    configure(b, **changes)
    if field:
        refused(f"Different configurations: {field}", b, *line(a, b))
        assert f"in '{a}' and " in invoke(*line(a, b))[1]
        configure(b, another_field=3)
        allowed = ["--allow", field.partition(".")[0]]
        refused("another_field is None in", b, *line(a, b, *allowed))
        changed = {"is_decoder", "tie_word_embeddings"} & {field}  # other tensors
        assert changed or invoke(*line(a, b, *allowed, "--allow", "another_field"))[0] == 0
    else:
        assert invoke(*line(a, b))[0] == 0


NAMED = {"0": "a", "1": "b", "2": "c"}
UNNAMED = {str(n): f"LABEL_{n}" for n in range(3)}
SWAPPED = "the same classes in another order: output 1 is 'b' in"
#: How the labels of the second model are written, and what is said; empty: they can be merged.
LABELS: dict[str, tuple[dict[str, Any], str]] = {
    "swapped names": ({"id2label": {"0": "a", "1": "c", "2": "b"}}, SWAPPED),
    "swapped numbers": ({"label2id": {"a": 0, "c": 1, "b": 2}}, SWAPPED),
    "swapped beside defaults": ({"id2label": UNNAMED, "label2id": {"a": 0, "b": 2, "c": 1}}, SWAPPED),
    "other names": ({"id2label": {"0": "a", "1": "b", "2": "d"}}, "id2label.2 is"),
    "numbers as texts": ({"label2id": {"c": "2", "a": "0", "b": "1"}}, ""),
    "two ways": ({"id2label": UNNAMED, "label2id": {"a": 0, "b": 1, "c": 2}}, ""),
}


@pytest.mark.parametrize("first", [{"id2label": NAMED}, {"label2id": {"a": 0, "b": 1, "c": 2}}])
@pytest.mark.parametrize("how", LABELS)
def test_labels_are_compared_however_they_are_written(
    how: str, first: dict[str, Any], tmp_path: Path
) -> None:
    a, b = pair("bert-classifier", tmp_path)
    labels, expected = LABELS[how]
    for folder, given in ((a, first), (b, labels)):
        settings = json.loads((folder / "config.json").read_text())
        del settings["id2label"], settings["label2id"]
        (folder / "config.json").write_text(json.dumps(settings | given))
    if expected:
        refused(expected, b, *line(a, b))
    assert invoke(*line(a, b, *(["--allow", "id2label"] if expected else [])))[0] == 0
    merged = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert merged.id2label == {0: "a", 1: "b", 2: "c"}


def test_tables_that_are_tied_in_one_model_are_refused_also_if_the_field_is_allowed(
    tmp_path: Path,
) -> None:
    for place, tie in (("a", True), ("b", False)):
        settings = {**families.MEMBERS["llama"].settings, "tie_word_embeddings": tie}
        saved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)), tmp_path / place)
    for one, other in ("ab", "ba"):
        paths = tmp_path / one, tmp_path / other
        refused("'lm_head.weight'", paths[1], *line(*paths, "--allow", "tie_word_embeddings"))


def prefixed(prefix: str, folder: Path) -> None:
    change(folder, lambda tensors: {f"{prefix}{name}": t for name, t in tensors.items()})


def replaced(name: str, tensor: torch.Tensor | None, folder: Path) -> None:
    rest = {} if tensor is None else {name: tensor}
    change(folder, lambda tensors: {n: t for n, t in tensors.items() if n != name} | rest)


def lost_shard(folder: Path) -> None:
    saved(model_of("bert-classifier"), folder, max_shard_size="20KB")
    (folder / WEIGHTS).unlink(missing_ok=True)
    sorted(folder.glob("*.safetensors"))[1].unlink()


def tags(folder: Path) -> None:
    saved(transformers.BertForTokenClassification(model_of("bert-classifier").config), folder)


BIAS = partial(replaced, "classifier.bias")
#: Damaged or other models: the change, what is said, and whether ``check`` refuses it, too.
DAMAGED: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "no folder": (shutil.rmtree, "cannot be loaded", True),
    "no configuration": (partial(removed, "config.json"), "cannot be loaded", True),
    "another family": (partial(configure, model_type="ernie"), "'ernie' is not supported", True),
    "a class of its own": (partial(configure, architectures=["MyBert"]), "is a MyBert", True),
    "no class": (partial(configure, architectures=None), "classifier", False),
    "another class": (tags, "configurations: architectures", False),
    "another width": (partial(configure, hidden_size=64), "38 tensors such as", True),
    "more layers": (partial(configure, num_hidden_layers=3), "bert.encoder.layer.2", True),
    "quantised": (partial(configure, quantization_config={"bits": 4}), "quantised", True),
    "no weights": (partial(removed, WEIGHTS), "no file named", True),
    "git-lfs": (partial(written, WEIGHTS, LFS), "git-lfs", True),
    "a lost shard": (lost_shard, "cannot be loaded", True),
    "code": (partial(hostile, WEIGHTS), "cannot be loaded", True),
    "data parallel": (partial(prefixed, "module."), "without wrappers", True),
    "no tensor": (partial(BIAS, None), "1 tensors such as classifier.bias", True),
    "no entries": (partial(BIAS, torch.zeros(0)), "1 tensors such as classifier.bias", True),
    "packed": (partial(replaced, f"{QUERY}.SCB", torch.ones(32)), f"such as {QUERY}.SCB", False),
    "not finite": (partial(BIAS, torch.full((3,), torch.nan)), "'classifier.bias' holds NaN", False),
    "another token": (partial(tokenizer, w3="other"), "tokenizer.5 is 'w3' in", False),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_model_is_named(how: str, tmp_path: Path) -> None:
    spoil, expected, also_check = DAMAGED[how]
    a, b = pair("bert-classifier", tmp_path)
    tokenizer(a)
    spoil(b)
    refused(expected, b, *line(a, b))
    if also_check:
        refused(expected, b, "check", b)


#: Options beside two models, and what is said.
REQUESTS: dict[str, str] = {
    "--weights 1": "a positive weight for each",
    "--weights 1,0": "a positive weight for each",
    "--weights 1,x": "a positive weight for each",
    "--parts legs": "Unknown part 'legs'",
    "--rank 2": "--rank would have no effect",
    "--fit-head --label-column b": "label_column and --fit-head would have no effect",
    "--out {b}": "Choose another --out",
    "--out {b}/config.json": "Choose another --out",
    "--out {b}/config.json/out": "config.json",
}


@pytest.mark.parametrize("options", REQUESTS)
def test_requests_that_make_no_sense(options: str, tmp_path: Path) -> None:
    a, b = pair("bert-classifier", tmp_path)
    code, output = invoke("merge", a, b, "--out", tmp_path / "out", *options.format(b=b).split())
    assert (code, REQUESTS[options] in output) == (2, True), output
    assert not (tmp_path / "out").exists()
    assert "The weights of 1 models" in invoke("merge", a, "--dry-run")[1]
    assert "give --out, or --dry-run" in invoke("merge", a, b)[1]


def test_a_name_of_the_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("owner/name", "./nothing"):
        code, output = invoke("check", name)
        assert (code, f"'{name}' cannot be loaded" in output) == (2, True), output
        assert "There is no folder of this name; a model of the hub needs a network." in output


def test_custom_code_is_never_run(tmp_path: Path) -> None:
    folder = saved(model_of("bert-classifier"), tmp_path / "a")
    (folder / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    configure(folder, auto_map={"AutoConfig": "custom.Config", "AutoModel": "custom.Model"})
    assert invoke("check", folder)[0] == 0
    assert not (tmp_path / "ran").exists()
