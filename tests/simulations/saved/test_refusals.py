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
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("mistral", {"sliding_window": 3}, "sliding_window"),
    ("gemma3", {"final_logit_softcapping": 3.0}, "final_logit_softcapping"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2-classifier", {"pad_token_id": 3}, "pad_token_id"),
    ("bart-classifier", {"eos_token_id": 3}, "eos_token_id"),
    ("bert-classifier", {"is_decoder": True}, "is_decoder"),
    ("bert-classifier", {"layer_norm_eps": 1e-3}, "layer_norm_eps"),
    ("bert-classifier", {"my_own_field": 3}, "my_own_field"),
    ("clip", {"text_config": {"hidden_act": "relu"}}, "text_config.hidden_act"),
    ("llama", {"use_cache": False, "pretraining_tp": 2, "bos_token_id": 7}, ""),
    ("gpt2", {"resid_pdrop": 0.5, "initializer_range": 0.5, "transformers_version": "4.9.0"}, ""),
    ("bert-classifier", {"_name_or_path": "mine", "problem_type": "single_label_classification"}, ""),
    ("clip", {"vision_config": {"attention_dropout": 0.5}}, ""),
]


@pytest.mark.parametrize(("name", "changes", "field"), FIELDS)
def test_a_field_that_changes_outputs_is_named_with_both_values(
    name: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    a, b = pair(name, tmp_path)
    configure(b, **changes)
    if field:
        refused(f"Different configurations: {field}", b, *line(a, b))
        assert f"in '{a}' and " in invoke(*line(a, b))[1]
    else:
        assert invoke(*line(a, b))[0] == 0


def test_a_field_may_be_allowed(tmp_path: Path) -> None:
    a, b = pair("llama", tmp_path)
    configure(b, rms_norm_eps=1e-3, rope_parameters={"rope_theta": 5e5}, my_own_field=3)
    allowed = ("--allow", "rms_norm_eps", "--allow", "rope_parameters")
    refused("my_own_field is None in", b, *line(a, b, *allowed))
    assert invoke(*line(a, b, *allowed, "--allow", "my_own_field"))[0] == 0


def fields(**given: Any) -> Callable[[Path], None]:
    """Replace what a configuration says of labels."""

    def spoil(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        kept = {key: value for key, value in settings.items() if key not in ("id2label", "label2id")}
        (folder / "config.json").write_text(json.dumps({**kept, **given}))

    return spoil


UNNAMED = {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
BY_ID = fields(id2label={"0": "a", "1": "b", "2": "c"})
#: How the labels of both models are written, and what is said; empty: the models can be merged.
LABELS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str]] = {
    "swapped names": (BY_ID, fields(id2label={"0": "a", "1": "c", "2": "b"}), "output 1 is 'b' in"),
    "swapped numbers": (
        fields(label2id={"a": 0, "b": 1, "c": 2}),
        fields(label2id={"b": 0, "a": 1, "c": 2}),
        "the same classes in another order: output 0 is 'a' in",
    ),
    "swapped beside defaults": (
        fields(id2label=UNNAMED, label2id={"a": 0, "b": 1, "c": 2}),
        fields(id2label=UNNAMED, label2id={"a": 0, "b": 2, "c": 1}),
        "output 1 is 'b' in",
    ),
    "other names": (
        BY_ID,
        fields(id2label={"0": "a", "1": "b", "2": "d"}),
        "id2label.2 is",
    ),
    "numbers as texts": (BY_ID, fields(label2id={"c": "2", "a": "0", "b": "1"}), ""),
    "two ways": (BY_ID, fields(id2label=UNNAMED, label2id={"a": 0, "b": 1, "c": 2}), ""),
}


@pytest.mark.parametrize("how", LABELS)
def test_labels_are_compared_however_they_are_written(how: str, tmp_path: Path) -> None:
    a, b = pair("bert-classifier", tmp_path)
    *spoil, expected = LABELS[how]
    for change_labels, folder in zip(spoil, (a, b), strict=True):
        change_labels(folder)
    if expected:
        refused(expected, b, *line(a, b))
        assert invoke(*line(a, b, "--allow", "id2label"))[0] == 0
    else:
        assert invoke(*line(a, b))[0] == 0
        merged = transformers.AutoConfig.from_pretrained(tmp_path / "out")
        assert merged.id2label == {0: "a", 1: "b", 2: "c"}


def test_tables_that_are_tied_in_one_model_are_refused_also_if_the_field_is_allowed(
    tmp_path: Path,
) -> None:
    for place, tie in (("a", True), ("b", False)):
        settings = {**families.MEMBERS["llama"].settings, "tie_word_embeddings": tie}
        saved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)), tmp_path / place)
    words = "lm_head.weight and model.embed_tokens.weight are one tensor in only one of"
    for one, other in ("ab", "ba"):
        paths = tmp_path / one, tmp_path / other
        refused(words, paths[1], *line(*paths, "--allow", "tie_word_embeddings"))


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
    "no type": (partial(configure, model_type=None), "cannot be loaded", True),
    "a class of its own": (partial(configure, architectures=["MyBert"]), "is a MyBert", True),
    "no class": (partial(configure, architectures=None), "classifier", False),
    "another class": (tags, "configurations: architectures", False),
    "another width": (partial(configure, hidden_size=64), "LayerNorm.bias [32], not [64] (38", True),
    "more layers": (partial(configure, num_hidden_layers=3), "bert.encoder.layer.2", True),
    "quantised": (partial(configure, quantization_config={"bits": 4}), "quantised", True),
    "no weights": (partial(removed, WEIGHTS), "no file named", True),
    "git-lfs": (partial(written, WEIGHTS, LFS), "git-lfs", True),
    "a lost shard": (lost_shard, "cannot be loaded", True),
    "code": (partial(hostile, WEIGHTS), "cannot be loaded", True),
    "data parallel": (partial(prefixed, "module."), "it has module.bert", True),
    "compiled": (partial(prefixed, "_orig_mod."), "it has _orig_mod.bert", True),
    "adapted": (partial(prefixed, "base_model.model."), "it has base_model.model.bert", True),
    "no tensor": (partial(BIAS, None), "no tensor classifier.bias (1", True),
    "another shape": (partial(BIAS, torch.zeros(4)), "classifier.bias [4], not [3]", True),
    "no entries": (
        partial(replaced, f"{QUERY}.bias", torch.zeros(0)),
        f"{QUERY}.bias [0], not [32]",
        True,
    ),
    "packed": (partial(replaced, f"{QUERY}.SCB", torch.ones(32)), f"tensor {QUERY}.SCB (1", False),
    "not finite": (partial(BIAS, torch.full((3,), torch.nan)), "'classifier.bias' holds NaN", False),
    "another token": (partial(tokenizer, w3="other"), "'other' is token None of", False),
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
    "--weights 1": "each model needs one",
    "--weights 1,0": "positive and finite",
    "--weights 1,x": "numbers separated by commas",
    "--parts legs": "Unknown part 'legs'",
    "--parts attention,ffn": "Join parts by '+'",
    "--rank 2": "--rank has an effect only on LoRA adapters",
    "--method exact": "on LoRA adapters",
    "--fit-head": "--fit-head has an effect only with --data",
    "--text-column a --label-column b": "have an effect only with --data",
    "--out {b}": "Choose another --out",
    "--out {b}/config.json": "Choose another --out",
    "--out {b}/config.json/out": "config.json",
}


@pytest.mark.parametrize("options", REQUESTS)
def test_requests_that_make_no_sense(options: str, tmp_path: Path) -> None:
    a, b = pair("bert-classifier", tmp_path)
    given = options.format(b=b).split()
    code, output = invoke("merge", a, b, "--out", tmp_path / "out", *given)
    assert (code, REQUESTS[options] in output) == (2, True), output
    assert not (tmp_path / "out").exists()


def test_one_model_and_no_place_to_write_to_are_refused(tmp_path: Path) -> None:
    assert "1 model is given" in invoke("merge", tmp_path, "--dry-run")[1]
    assert "give --out, or --dry-run" in invoke("merge", tmp_path, tmp_path)[1]


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
