"""What ``fedrot merge`` and ``fedrot check`` refuse of models: what was changed, and a
word.
"""

import json
import shutil
from functools import partial

import pytest
import torch
import transformers

from tests import families
from tests.simulations.commands import run
from tests.simulations.saved.folders import (
    WEIGHTS,
    change,
    configure,
    hostile,
    model_of,
    nested,
    refused,
    saved,
)
from tests.simulations.saved.folders import tokenizer as tokenized

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 9\n"


def pair(name, folder):
    a, b = (
        saved(model_of(name, seed), folder / place) for seed, place in enumerate("ab")
    )
    return a, b


def line(a, b, *options):
    return ("merge", a, b, *options, "--parts", "none", "--out", a.parent / "out")


#: Fields of the second model, and the field that is named; empty if no output depends
#: on them.
FIELDS = [
    ("llama", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta"),
    ("gpt2-classifier", {"pad_token_id": 3}, "pad_token_id"),
    ("bert-mlm-untied", {"architectures": ["BertLMHeadModel"]}, "architectures"),
    ("bert-classifier", {"my_own_field": 3}, "my_own_field"),
    ("llama", {"use_cache": False, "pretraining_tp": 2, "bos_token_id": 7}, ""),
    (
        "gpt2",
        {"resid_pdrop": 0.5, "initializer_range": 0.5, "transformers_version": "4.9.0"},
        "",
    ),
    (
        "bert-classifier",
        {"_name_or_path": "mine", "problem_type": "single_label_classification"},
        "",
    ),
    ("clip", {"vision_config": {"attention_dropout": 0.5}}, ""),
]


@pytest.mark.parametrize(("name", "changes", "field"), FIELDS)
def test_a_field_that_changes_outputs_is_named_with_both_values_and_may_be_allowed(
    name, changes, field, tmp_path
):
    a, b = pair(name, tmp_path)
    configure(b, **changes)
    if field:
        refused(f"Different configurations: {field}", b, *line(a, b))
        run(*line(a, b), code=2, says=f"in '{a}' and ")
    run(*line(a, b, *(["--allow", field.partition(".")[0]] if field else [])))


NAMED = {"0": "a", "1": "b", "2": "c"}
FIRST = {"label2id": {"a": 0, "b": 1, "c": 2}}
UNNAMED = {str(n): f"LABEL_{n}" for n in range(3)}
SWAPPED = "the same classes in another order: output 1 is 'b' in"
#: How the labels of the second model are written, and what is said; empty: they can be
#: merged.
LABELS = {
    "swapped names": ({"id2label": {"0": "a", "1": "c", "2": "b"}}, SWAPPED),
    "swapped numbers": ({"label2id": {"a": 0, "c": 1, "b": 2}}, SWAPPED),
    "swapped beside defaults": (
        {"id2label": UNNAMED, "label2id": {"a": 0, "b": 2, "c": 1}},
        SWAPPED,
    ),
    "other names": ({"id2label": {"0": "a", "1": "b", "2": "d"}}, "id2label.2 is"),
    "numbers as texts": ({"label2id": {"c": "2", "a": "0", "b": "1"}}, ""),
    "two ways": ({"id2label": NAMED}, ""),
    "beside defaults": ({"id2label": UNNAMED, **FIRST}, ""),
}


@pytest.mark.parametrize("how", LABELS)
def test_labels_are_compared_however_they_are_written(how, tmp_path):
    a, b = pair("bert-classifier", tmp_path)
    labels, expected = LABELS[how]
    for folder, given in ((a, FIRST), (b, labels)):
        settings = json.loads((folder / "config.json").read_text())
        del settings["id2label"], settings["label2id"]
        (folder / "config.json").write_text(json.dumps(settings | given))
    if expected:
        refused(expected, b, *line(a, b))
    run(*line(a, b, *(["--allow", "id2label"] if expected else [])))
    merged = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert merged.id2label == {0: "a", 1: "b", 2: "c"}


def test_tables_that_are_tied_in_one_model_are_refused_also_if_allowed(
    tmp_path,
):
    for place, tie in (("a", True), ("b", False)):
        settings = {**families.MEMBERS["llama"].settings, "tie_word_embeddings": tie}
        saved(
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)),
            tmp_path / place,
        )
    for first, second in ("ab", "ba"):
        spoilt = tmp_path / second
        merge = line(tmp_path / first, spoilt, "--allow", "tie_word_embeddings")
        refused("'lm_head.weight'", spoilt, *merge)


def prefixed(prefix, folder):
    change(
        folder, lambda tensors: {f"{prefix}{name}": t for name, t in tensors.items()}
    )


def replaced(name, tensor, folder):
    rest = {} if tensor is None else {name: tensor}
    change(
        folder, lambda tensors: {n: t for n, t in tensors.items() if n != name} | rest
    )


BIAS = partial(replaced, "classifier.bias")
#: Damaged or other models: the change, and what is said.
DAMAGED = {
    "no folder": (shutil.rmtree, "There is no folder of this name"),
    "another family": (
        partial(configure, model_type="ernie"),
        "'ernie' is not supported",
    ),
    "a class of its own": (partial(configure, architectures=["MyBert"]), "is a MyBert"),
    "no class": (partial(configure, architectures=None), "classifier"),
    "another width": (partial(configure, hidden_size=64), "38 tensors are missing"),
    "quantised": (partial(configure, quantization_config={"bits": 4}), "quantised"),
    "no weights": (lambda at: (at / WEIGHTS).unlink(), "no file named"),
    "git-lfs": (lambda at: (at / WEIGHTS).write_text(LFS), "git-lfs"),
    "code": (partial(hostile, WEIGHTS), "cannot be loaded"),
    "data parallel": (partial(prefixed, "module."), "see module.bert"),
    "no tensor": (partial(BIAS, None), "see classifier.bias"),
    "packed": (partial(replaced, "bert.SCB", torch.ones(32)), "see bert.SCB"),
    "not finite": (
        partial(BIAS, torch.full((3,), torch.nan)),
        "'classifier.bias' holds NaN",
    ),
    "the folder of a checkpoint": (partial(nested, "checkpoint-500"), "give '"),
    "the folder of a folder": (partial(nested, "0_Transformer"), "0_Transformer'."),
    "another token": (partial(tokenized, w3="other"), "tokenizer.5 is 'w3' in"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_model_is_named(how, tmp_path):
    spoil, expected = DAMAGED[how]
    a, b = pair("bert-classifier", tmp_path)
    tokenized(a)
    spoil(b)
    refused(expected, b, *line(a, b))


def test_requests_that_make_no_sense(tmp_path):
    a, b = pair("bert-classifier", tmp_path)
    for options, words in {
        "--weights 1,0": "a positive weight for each",
        "--weights=": "a positive weight for each",
        "--weights 1,x": "a positive weight for each",
        "--parts legs": "Unknown part 'legs'",
        "--rank 2": "--rank would have no effect",
        f"--base {b}": "--base would have no effect",
        "--fit-head --label-column "
        "b": "label_column and --fit-head would have no effect",
        f"--out {b}": "Choose another --out",
        f"--out {b}/config.json": "Choose another --out",
        f"--out {b}/config.json/out": "config.json",
    }.items():
        out = tmp_path / "out"
        run("merge", a, b, "--out", out, *options.split(), code=2, says=words)
        assert not out.exists()
    run("merge", a, code=2, says="The weights of 1 models")
