"""What ``fedrot merge`` and ``fedrot check`` refuse: the change of the second model, and a word."""

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
from safetensors.torch import load_file

from tests import families
from tests.simulations.commands import invoke
from tests.simulations.saved.folders import (
    WEIGHTS,
    change,
    configure,
    model_of,
    saved,
    tokenizer,
)

QUERY = "bert.encoder.layer.0.attention.self.query"
Spoil = Callable[[Path], object]


def pair(name: str, folder: Path) -> tuple[Path, Path]:
    a, b = (saved(model_of(name, seed), folder / place) for seed, place in enumerate("ab"))
    return a, b


def merge(a: Path, b: Path, *options: object) -> tuple[int, str]:
    return invoke("merge", a, b, *options, "--parts", "none", "--out", a.parent / "out")


#: Fields that change what the same tensors compute: model, change, the field that is named.
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
    ("llama", {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("mistral", {"sliding_window": 3}, "sliding_window"),
    ("gemma3", {"final_logit_softcapping": 3.0}, "final_logit_softcapping"),
    ("gpt2", {"activation_function": "relu"}, "activation_function"),
    ("gpt2", {"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2-classifier", {"pad_token_id": 3}, "pad_token_id"),
    ("gpt2-classifier", {"id2label": {"0": "b", "1": "a", "2": "c"}}, "id2label.0"),
    ("bart-classifier", {"eos_token_id": 3}, "eos_token_id"),
    ("bert-classifier", {"is_decoder": True}, "is_decoder"),
    ("bert-classifier", {"layer_norm_eps": 1e-3}, "layer_norm_eps"),
    ("bert-classifier", {"architectures": ["BertForTokenClassification"]}, "architectures"),
    ("bert-classifier", {"my_own_field": 3}, "my_own_field"),
    ("distilbert-classifier", {"activation": "relu"}, "activation"),
    ("clip", {"text_config": {"hidden_act": "relu"}}, "text_config.hidden_act"),
]


@pytest.mark.parametrize(("name", "changes", "field"), FIELDS)
def test_a_field_that_differs_is_named_with_both_values(
    name: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    a, b = pair(name, tmp_path)
    if "id2label" in changes:
        for folder, labels in ((a, {"0": "a", "1": "b", "2": "c"}), (b, changes["id2label"])):
            configure(folder, id2label=labels, label2id={v: int(k) for k, v in labels.items()})
    elif name == "bert-classifier" and "architectures" in changes:
        saved(transformers.BertForTokenClassification(model_of(name).config), b)
    else:
        configure(b, **changes)
    code, output = merge(a, b)
    assert code == 2, output
    assert f"Different configurations: {field}" in output
    assert f"in '{a}' and " in output
    assert f"in '{b}'" in output
    assert not (tmp_path / "out").exists()


def test_a_field_may_be_allowed(tmp_path: Path) -> None:
    a, b = pair("llama", tmp_path)
    configure(b, rms_norm_eps=1e-3, rope_parameters={"rope_theta": 5e5}, my_own_field=3)
    allowed = ("--allow", "rms_norm_eps", "--allow", "rope_parameters")
    code, output = merge(a, b, *allowed)
    assert (code, "my_own_field is None in" in output) == (2, True), output
    code, output = merge(a, b, *allowed, "--allow", "my_own_field")
    assert code == 0, output


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"use_cache": False, "pretraining_tp": 2, "bos_token_id": 7}),
        ("gpt2", {"resid_pdrop": 0.5, "initializer_range": 0.5, "transformers_version": "4.9.0"}),
        ("bert-classifier", {"_name_or_path": "mine", "problem_type": "single_label_classification"}),
        ("clip", {"vision_config": {"attention_dropout": 0.5}}),
    ],
)
def test_fields_that_change_no_output_may_differ(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    a, b = pair(name, tmp_path)
    configure(b, **changes)
    code, output = merge(a, b)
    assert code == 0, output


def test_tables_that_are_tied_in_one_model_are_refused_also_if_the_field_is_allowed(
    tmp_path: Path,
) -> None:
    for place, tie in (("a", True), ("b", False)):
        settings = {**families.MEMBERS["llama"].settings, "tie_word_embeddings": tie}
        saved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)), tmp_path / place)
    for one, other in ("ab", "ba"):
        code, output = merge(tmp_path / one, tmp_path / other, "--allow", "tie_word_embeddings")
        assert code == 2
        assert "lm_head.weight and model.embed_tokens.weight are one tensor in only one of" in output


def test_the_token_that_differs_is_named(tmp_path: Path) -> None:
    a, b = pair("gpt2", tmp_path)
    tokenizer(a)
    tokenizer(b, w3="other")
    code, output = merge(a, b)
    assert (code, "'other' is token None of" in output) == (2, True), output


def prefixed(prefix: str, folder: Path) -> None:
    change(folder, lambda tensors: {f"{prefix}{name}": t for name, t in tensors.items()})


def replaced(name: str, tensor: torch.Tensor | None, folder: Path) -> None:
    rest = {} if tensor is None else {name: tensor}
    change(folder, lambda tensors: {n: t for n, t in tensors.items() if n != name} | rest)


def written(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text)


def removed(name: str, folder: Path) -> None:
    (folder / name).unlink()


def lost_shard(folder: Path) -> None:
    saved(model_of("bert-classifier"), folder, max_shard_size="20KB")
    (folder / WEIGHTS).unlink(missing_ok=True)
    sorted(folder.glob("*.safetensors"))[1].unlink()


class _Code:
    """What a pickle could do."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return self.marker.touch, ()


def hostile(folder: Path) -> None:
    torch.save({**load_file(folder / WEIGHTS), "x": _Code(folder / "ran")}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 9\n"
#: Damaged or other models: the change, what is said, and whether ``check`` refuses it, too.
DAMAGED: dict[str, tuple[Spoil, str, bool]] = {
    "no folder": (shutil.rmtree, "cannot be loaded", True),
    "no configuration": (partial(removed, "config.json"), "cannot be loaded", True),
    "another family": (partial(configure, model_type="ernie"), "'ernie' is not supported", True),
    "no type": (partial(configure, model_type=None), "cannot be loaded", True),
    "a class of its own": (partial(configure, architectures=["MyBert"]), "is a MyBert", True),
    "no class": (partial(configure, architectures=None), "classifier", False),
    "another width": (partial(configure, hidden_size=64), "LayerNorm.bias [32], not [64] (38", True),
    "more layers": (partial(configure, num_hidden_layers=3), "bert.encoder.layer.2", True),
    "quantised": (partial(configure, quantization_config={"bits": 4}), "quantised", True),
    "no weights": (partial(removed, WEIGHTS), "no file named", True),
    "git-lfs": (partial(written, WEIGHTS, LFS), "git-lfs", True),
    "a lost shard": (lost_shard, "cannot be loaded", True),
    "code": (hostile, "cannot be loaded", True),
    "data parallel": (partial(prefixed, "module."), "it has module.bert", True),
    "compiled": (partial(prefixed, "_orig_mod."), "it has _orig_mod.bert", True),
    "adapted": (partial(prefixed, "base_model.model."), "it has base_model.model.bert", True),
    "no tensor": (partial(replaced, "classifier.bias", None), "no tensor classifier.bias (1", True),
    "another shape": (
        partial(replaced, "classifier.bias", torch.zeros(4)),
        "classifier.bias [4], not [3]",
        True,
    ),
    "no entries": (
        partial(replaced, f"{QUERY}.bias", torch.zeros(0)),
        f"{QUERY}.bias [0], not [32]",
        True,
    ),
    "packed": (partial(replaced, f"{QUERY}.SCB", torch.ones(32)), f"tensor {QUERY}.SCB (1", False),
    "not finite": (
        partial(replaced, "classifier.bias", torch.full((3,), torch.nan)),
        "'classifier.bias' holds NaN or Inf",
        False,
    ),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_model_is_named(how: str, tmp_path: Path) -> None:
    spoil, expected, also_check = DAMAGED[how]
    a, b = pair("bert-classifier", tmp_path)
    spoil(b)
    code, output = merge(a, b)
    assert (code, expected in output, str(b) in output) == (2, True, True), output
    assert not (tmp_path / "out").exists()
    assert not (b / "ran").exists()
    if also_check:
        code, output = invoke("check", b)
        assert (code, expected in output, str(b) in output) == (2, True, True), output
    assert not (b / "ran").exists()


#: Requests: options beside two models, and what is said.
REQUESTS: dict[str, str] = {
    "--weights 1": "each model needs one",
    "--weights 1,0": "positive and finite",
    "--weights 1,x": "numbers separated by commas",
    "--parts legs": "Unknown part 'legs'",
    "--parts attention,ffn": "Join parts by '+'",
    "--rank 2": "on LoRA adapters",
    "--method exact": "on LoRA adapters",
}


@pytest.mark.parametrize("options", REQUESTS)
def test_requests_that_make_no_sense(options: str, tmp_path: Path) -> None:
    a, b = pair("bert-classifier", tmp_path)
    code, output = invoke("merge", a, b, *options.split(), "--out", tmp_path / "out")
    assert (code, REQUESTS[options] in output) == (2, True), output
    assert not (tmp_path / "out").exists()


def test_one_model_and_no_place_to_write_to_are_refused(tmp_path: Path) -> None:
    a, b = pair("bert-classifier", tmp_path)
    for arguments, expected in (
        ((a, "--dry-run"), "1 model is given"),
        ((a, b), "give --out, or --dry-run"),
        ((a, b, "--out", b), "Choose another --out"),
        ((a, b, "--out", a / "config.json"), "Choose another --out"),
        ((a, b, "--out", a / "config.json" / "out"), "config.json"),
    ):
        code, output = invoke("merge", *arguments)
        assert (code, expected in output) == (2, True), output


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


def test_configurations_are_those_that_transformers_reads(tmp_path: Path) -> None:
    """A field that a file leaves out has its default; old names of fields are translated."""
    a, b = pair("llama", tmp_path)
    settings = json.loads((b / "config.json").read_text())
    del settings["rope_parameters"]
    (b / "config.json").write_text(json.dumps(settings))
    assert merge(a, b)[0] == 0
    shutil.rmtree(tmp_path / "out")
    configure(b, rope_theta=5e5)
    code, output = merge(a, b)
    assert (code, "rope_parameters.rope_theta" in output) == (2, True), output
