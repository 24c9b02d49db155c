"""What two models must share before their weights are compared: fields, tokens, labels, ties."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fedrot.errors import FedrotError
from fedrot.simulations.models.alike import check_alike, check_fields, label_elsewhere, moved_label
from fedrot.simulations.models.saved_model import SavedModel, open_saved_model
from tests import families
from tests.models import fresh_model
from tests.simulations.commands import invoke


def pair(name: str, folder: Path) -> tuple[Path, Path]:
    for seed, place in enumerate("ab"):
        model = families.model_of(name, families.state_of(name, seed)).float()
        model.save_pretrained(folder / place)
    return folder / "a", folder / "b"


def configure(folder: Path, **changes: Any) -> None:
    """Change fields of a configuration; None leaves one out, dictionaries are changed inside."""
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    for name, value in changes.items():
        settings[name] = {**settings[name], **value} if isinstance(value, dict) else value
    file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


def commands(a: Path, b: Path) -> list[tuple[str, ...]]:
    """The commands that compare two models."""
    out = str(a.parent / "out")
    return [
        ("merge", str(a), str(b), "--dry-run"),
        ("diagnose", str(a), str(b)),
        ("barrier", str(a), str(b), "--data", "goemotions_ekman", "--out", out),
    ]


FUNCTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta is 10000.0 in"),
    ("llama", {"rope_parameters": None, "rope_theta": 5e5}, "rope_parameters.rope_theta is 10000.0 in"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "rope_parameters.rope_type is 'default' in",
    ),
    ("llama", {"rms_norm_eps": 1e-3}, "rms_norm_eps is 1e-06 in"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is silu in"),
    ("mistral", {"sliding_window": 3}, "sliding_window is 4096 in"),
    ("gemma3", {"final_logit_softcapping": 3.0}, "final_logit_softcapping is not set in"),
    ("gemma3", {"query_pre_attn_scalar": 9}, "query_pre_attn_scalar is 256 in"),
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'gelu_new' in"),
    ("gpt2", {"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon is 1e-05 in"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is False in"),
    ("gpt2-classifier", {"pad_token_id": 3}, "pad_token_id is 0 in"),
    ("bart-classifier", {"eos_token_id": 3}, "eos_token_id is 2 in"),
    ("roberta", {"pad_token_id": 3}, "pad_token_id is 1 in"),
    ("t5", {"feed_forward_proj": "gelu", "dense_act_fn": "gelu"}, "feed_forward_proj is 'relu' in"),
    ("clip", {"text_config": {"hidden_act": "relu"}}, "text_config.hidden_act is 'quick_gelu' in"),
]


@pytest.mark.parametrize(("name", "changes", "expected"), FUNCTIONS)
def test_other_functions_of_the_same_shapes_are_refused(
    name: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    a, b = pair(name, tmp_path)
    configure(b, **changes)
    for command in commands(a, b):
        code, output = invoke(*command)
        assert code == 2, (command, output)
        assert expected in output
        assert all(f"'{folder}" in output for folder in (a, b))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_distilbert_has_a_name_of_its_own_for_activations(tmp_path: Path) -> None:
    for place in "ab":
        fresh_model("distilbert-classifier").float().save_pretrained(tmp_path / place)
    configure(tmp_path / "b", activation="relu")
    code, output = invoke("merge", tmp_path / "a", tmp_path / "b", "--dry-run")
    assert (code, "activation is 'gelu' in" in output) == (2, True), output


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "llama",
            {"rope_parameters": None, "attention_bias": None, "use_cache": None},
        ),
        ("llama", {"hidden_act": "swish", "pretraining_tp": 2, "max_position_embeddings": 99}),
        ("llama", {"bos_token_id": 7, "eos_token_id": 8, "pad_token_id": 9, "temperature": 0.5}),
        ("gpt2", {"resid_pdrop": 0.5, "initializer_range": 0.5, "torch_dtype": "float16"}),
        ("gpt2", {"transformers_version": "4.9.0", "_name_or_path": "mine", "n_inner": 20}),
        ("bert", {"position_embedding_type": "absolute", "gradient_checkpointing": False}),
        ("bert", {"problem_type": "single_label_classification", "unsloth_version": "1"}),
        ("clip", {"vision_config": {"attention_dropout": 0.5, "tf_legacy_loss": False}}),
        ("clip", {"text_config": {"cross_attention_hidden_size": 3, "num_beams": 2}}),
        ("qwen2", {"max_window_layers": 3}),
    ],
)
def test_fields_that_change_no_output_may_differ(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    a, b = pair(name, tmp_path)
    configure(b, **changes)
    for command in commands(a, b)[:-1]:
        code, output = invoke(*command)
        assert code == 0, (command, output)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_a_vocabulary_that_was_padded_is_no_other_tokenizer(tmp_path: Path) -> None:
    a, b = pair("gpt2", tmp_path)
    model = type(families.model_of("gpt2")).from_pretrained(b)
    model.resize_token_embeddings(64)
    model.save_pretrained(b)
    for folder in (a, b):
        _tokenizer(folder)
    code, output = invoke("merge", a, b, "--dry-run")
    assert code == 2
    assert "have 40 and 64 embeddings, and the same tokens" in output
    assert "resize_token_embeddings(64)" in output


def test_the_token_that_differs_is_named(tmp_path: Path) -> None:
    a, b = pair("gpt2", tmp_path)
    _tokenizer(a)
    _tokenizer(b, w3="other")
    code, output = invoke("merge", a, b, "--dry-run")
    assert code == 2
    assert "has id 8 in" in output
    assert f"is not in '{a}'" in output or f"is not in '{b}'" in output


@pytest.mark.parametrize("text", ["{", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_named(text: str, tmp_path: Path) -> None:
    a, b = pair("gpt2", tmp_path)
    for folder in (a, b):
        _tokenizer(folder)
    (b / "tokenizer.json").write_text(text)
    for command in commands(a, b)[:1] + commands(b, a)[-1:]:
        code, output = invoke(*command)
        assert (code, f"'{b / 'tokenizer.json'}' is damaged" in output) == (2, True), output


def test_an_empty_tokenizer_is_named(tmp_path: Path) -> None:
    a, b = pair("bert", tmp_path)
    (b / "vocab.txt").write_bytes(b"")
    _tokenizer(a)
    code, output = invoke("merge", a, b, "--dry-run")
    assert (code, f"'{b / 'vocab.txt'}' is empty" in output) == (2, True), output


def _tokenizer(folder: Path, **renamed: str) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(35))]
    numbers = {renamed.get(word, word): number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def test_labels_in_another_order_are_refused(tmp_path: Path) -> None:
    a, b = pair("gpt2-classifier", tmp_path)
    names = {"0": "Joy", "1": "ANGER", "2": "fear"}
    configure(a, id2label=names, label2id={name: int(n) for n, name in names.items()})
    swapped = {"0": "anger", "1": "joy", "2": "fear"}
    configure(b, id2label=swapped, label2id={name: int(n) for n, name in swapped.items()})
    for command in commands(a, b):
        code, output = invoke(*command)
        assert code == 2, (command, output)
        assert "Different labels: '" in output
    configure(b, id2label=names, label2id={name: int(n) for n, name in names.items()})
    assert invoke(*commands(a, b)[0])[0] == 0


def test_labels_of_other_models_are_not_read(tmp_path: Path) -> None:
    """A language model has no outputs by label, whatever its configuration keeps."""
    a, b = pair("gpt2", tmp_path)
    configure(b, id2label={"0": "LABEL_1", "1": "LABEL_0"}, label2id={"LABEL_1": 0, "LABEL_0": 1})
    assert invoke(*commands(a, b)[0])[0] == 0


def test_moved_labels() -> None:
    assert moved_label({0: "not_x", 1: "x"}, {0: "X", 1: "not x"}) == ("not_x", 0, 1)
    assert moved_label({0: "x", 1: "y"}, {0: "x", 1: "z"}) is None
    assert moved_label({0: "x", 1: "y"}, {0: "a", 1: "b"}) is None
    assert moved_label(None, {0: "a"}) is None


@pytest.mark.parametrize("first", ["tied", "untied"])
def test_a_tied_and_an_untied_model_are_refused_in_both_orders(first: str, tmp_path: Path) -> None:
    for place, tie in (("tied", True), ("untied", False)):
        settings = {**families.MEMBERS["llama"].settings, "tie_word_embeddings": tie}
        LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(tmp_path / place)
        _tokenizer(tmp_path / place)
    other = "untied" if first == "tied" else "tied"
    a, b = tmp_path / first, tmp_path / other
    for command in (*commands(a, b)[:2], commands(a, b)[-1]):
        code, output = invoke(*command)
        assert code == 2, output
        assert "'lm_head.weight' and 'model.embed_tokens.weight' are one tensor in" in output
        assert f"'{tmp_path / 'tied'}', and two in '{tmp_path / 'untied'}'" in output


@pytest.mark.parametrize(("kind", "code"), [("default", 0), ("linear", 0), ("dynamic", 2), ("yarn", 2)])
def test_the_largest_position_counts_where_angles_depend_on_it(
    kind: str, code: int, tmp_path: Path
) -> None:
    a, b = pair("llama", tmp_path)
    for folder, largest in ((a, 64), (b, 128)):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        configure(folder, max_position_embeddings=largest, rope_parameters=rope)
    found, output = invoke("merge", a, b, "--dry-run")
    assert (found, "max_position_embeddings is 64 in" in output) == (code, code == 2), output


@pytest.mark.parametrize(("kind", "code"), [("default", 0), ("yarn", 2)])
def test_the_largest_position_counts_where_the_angles_of_one_kind_of_layer_depend_on_it(
    kind: str, code: int, tmp_path: Path
) -> None:
    a, b = pair("gemma3", tmp_path)
    for folder, largest in ((a, 64), (b, 128)):
        rope = {"rope_type": kind, "rope_theta": 1e6, "factor": 2.0}
        configure(folder, max_position_embeddings=largest, rope_parameters={"full_attention": rope})
    found, output = invoke("merge", a, b, "--dry-run")
    assert (found, "max_position_embeddings is 64 in" in output) == (code, code == 2), output


def test_outputs_of_a_tagger_are_compared_with_tags_not_with_types() -> None:
    tags = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    data = SimpleNamespace(name="news", tags=tags, label_names=("LOC", "PER"))
    named = dict(enumerate(tags))
    config = SimpleNamespace(architectures=["BertForTokenClassification"], id2label=named)
    assert label_elsewhere(config, data) == ""
    config.id2label = {**named, 1: "B-LOC", 3: "B-PER"}
    assert label_elsewhere(config, data) == "'B-LOC' is output 1 of the model, and label 3 of news"


def described(folder: Path, kind: str, class_name: str, **changes: Any) -> SavedModel:
    """Return a model of which there is only the configuration."""
    folder.mkdir()
    settings = AutoConfig.for_model(kind).to_dict()
    for name, value in {"architectures": [class_name], **changes}.items():
        outer, _, inner = name.rpartition("__")
        (settings[outer] if outer else settings)[inner] = value
    (folder / "config.json").write_text(json.dumps(settings))
    return open_saved_model(folder)


#: Types whose positions depend on the padding token, and others.
PADDED = ("roberta", "xlm-roberta", "camembert", "mpnet", "bart", "t5", "mt5")
ENCODERS = ("bert", "electra", "distilbert", "deberta", "deberta-v2", "albert", "modernbert")
TOKENS = [
    *((kind, "XModel", "pad_token_id", True) for kind in PADDED),
    *((kind, "XForSequenceClassification", "pad_token_id", False) for kind in ENCODERS),
    ("gpt2", "XForSequenceClassification", "pad_token_id", True),
    ("gpt2", "XLMHeadModel", "pad_token_id", False),
    ("gpt2", "XForSequenceClassification", "eos_token_id", False),
    *((kind, "XForSequenceClassification", "eos_token_id", True) for kind in ("bart", "t5", "mt5")),
    ("bart", "XForConditionalGeneration", "eos_token_id", False),
    ("t5", "XForConditionalGeneration", "decoder_start_token_id", True),
    ("clip", "CLIPModel", "text_config__eos_token_id", True),
    ("clip_text_model", "CLIPTextModel", "eos_token_id", True),
    ("bert", "XForSequenceClassification", "cls_token_id", False),
]


@pytest.mark.parametrize(("kind", "class_name", "token", "matters"), TOKENS)
def test_tokens_matter_to_the_classes_that_read_them(
    kind: str, class_name: str, token: str, matters: bool, tmp_path: Path
) -> None:
    one, other = (described(tmp_path / f"{n}", kind, class_name, **{token: n}) for n in (5, 6))
    if not matters:
        check_alike(one, other)
        return
    with pytest.raises(FedrotError, match=f"{token.replace('__', '.')} is 5 in .* and 6 in"):
        check_alike(one, other)


def test_a_token_that_only_one_of_two_classes_reads_may_differ(tmp_path: Path) -> None:
    check_alike(
        described(tmp_path / "a", "gpt2", "GPT2ForSequenceClassification", pad_token_id=5),
        described(tmp_path / "b", "gpt2", "GPT2LMHeadModel", pad_token_id=6),
    )


#: Fields that transformers reads of some types although no class declares them.
READ: dict[str, Any] = {
    **{"attention_chunk_size": 8, "conv_act": "gelu", "conv_groups": 2, "conv_kernel_size": 3},
    **{"embedding_size": 8, "head_dim": 4, "is_causal": True, "max_relative_positions": 8},
    **{"norm_rel_ebd": "layer_norm", "partial_rotary_factor": 0.5, "position_biased_input": True},
    **{"position_buckets": 8, "relative_attention": True, "share_att_key": True},
    **{"sliding_window": 3, "talking_head": True, "token_classification_bias": True},
    **{"layer_types": ["full_attention"] * 12},
}


def test_a_field_that_only_one_file_has_matters_if_anything_reads_it(tmp_path: Path) -> None:
    plain = described(tmp_path / "plain", "bert", "BertModel")
    check_fields(plain, described(tmp_path / "mine", "bert", "BertModel", my_notes="x"))
    for name, value in READ.items():
        other = described(tmp_path / name, "bert", "BertModel", **{name: value})
        with pytest.raises(FedrotError, match=rf"{name} is not set in .*plain.* and .* in"):
            check_fields(plain, other)
        with pytest.raises(FedrotError, match=rf"{name} is .* and not set in"):
            check_fields(other, plain)


#: Two values of fields on which no output depends.
HARMLESS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(
        [
            *("_name_or_path", "_commit_hash", "auto_map", "finetuning_task", "task_specific_params"),
            *("prefix", "language", "tokenizer_class", "processor_class", "name_or_path"),
            *("init_std", "init_factor", "init_range", "initializer_cutoff_factor", "my_version"),
        ],
        ("x", "y"),
    ),
    **dict.fromkeys(
        [
            *("tf_legacy_loss", "gradient_checkpointing", "output_attentions", "output_hidden_states"),
            *("use_cache", "return_dict", "torchscript", "use_bfloat16", "slow_but_exact"),
            *("reorder_and_upcast_attn", "deterministic_flash_attn", "reference_compile"),
            *("output_router_logits", "repad_logits_with_grad", "sparse_prediction"),
        ],
        (True, False),
    ),
    **dict.fromkeys(
        [
            *("chunk_size_feed_forward", "pretraining_tp", "bos_token_id", "cls_token_id"),
            *("sep_token_id", "mask_token_id", "unk_token_id", "forced_bos_token_id"),
            *("forced_eos_token_id", "n_inner", "max_window_layers", "sparse_pred_ignore_index"),
        ],
        (1, 2),
    ),
    **dict.fromkeys(
        [
            *("router_aux_loss_coef", "router_jitter_noise", "logit_scale_init_value"),
            *("hidden_dropout_prob", "classifier_dropout", "my_droppath"),
        ],
        (0.1, 0.2),
    ),
    "dtype": ("float16", "float32"),
    "temperature": (0.5, 0.7),
}


def test_fields_on_which_no_output_depends_may_differ(tmp_path: Path) -> None:
    for name, values in HARMLESS.items():
        one, other = (
            described(tmp_path / f"{name} {place}", "bert", "BertModel", **{name: value})
            for place, value in enumerate(values)
        )
        check_alike(one, other)


def test_the_field_that_an_error_names_is_chosen_in_order(tmp_path: Path) -> None:
    changes = {"layer_norm_eps": 0.5, "hidden_act": "relu", "num_hidden_layers": 3}
    one = described(tmp_path / "a", "bert", "BertModel")
    other = described(tmp_path / "b", "bert", "BertModel", **changes)
    with pytest.raises(FedrotError, match=r"architectures: num_hidden_layers is 12 in .*a' and 3 in"):
        check_fields(one, other)
    with pytest.raises(FedrotError, match=r"architectures: layer_norm_eps is"):
        check_fields(one, other, first=("layer_norm_eps",))


def test_only_classifiers_have_labels_elsewhere() -> None:
    data = SimpleNamespace(name="news", tags=(), label_names=("a", "b"))
    config = SimpleNamespace(architectures=["BertForSequenceClassification"], id2label={0: "b", 1: "a"})
    assert label_elsewhere(config, data) == "'b' is output 0 of the model, and label 1 of news"
    for architectures in (["BertForMaskedLM"], [], None):
        config.architectures = architectures
        assert label_elsewhere(config, data) == ""
    # A label with several outputs is where the data have it if one of them is.
    assert moved_label({0: "x", 1: "X", 2: "y"}, {1: "x", 0: "z", 2: "y"}) is None
    assert moved_label({2: "x", 1: "y", 0: "z"}, {0: "y", 1: "x", 2: "z"}) == ("z", 0, 2)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("gelu_new", "gelu_pytorch_tanh", True),
        ("silu", "swish", True),
        ("gelu", "gelu_new", False),
        ("gelu", "gelu_10", False),
        ("relu", "relu6", False),
        ("relu", "leaky_relu", False),
        ("relu", "of my own", False),
    ],
)
def test_activations_are_compared_by_their_values(
    one: str, other: str, same: bool, tmp_path: Path
) -> None:
    a, b = (
        described(tmp_path / str(place), "bert", "BertModel", hidden_act=name)
        for place, name in enumerate((one, other))
    )
    if same:
        check_alike(a, b)
        return
    with pytest.raises(FedrotError, match=f"hidden_act is {one} in .* and {other} in"):
        check_alike(a, b)


def test_kinds_of_problems_are_of_classifiers(tmp_path: Path) -> None:
    kinds = ("regression", "single_label_classification", None)
    one, other, unset = (
        described(tmp_path / str(kind), "bert", "BertForSequenceClassification", problem_type=kind)
        for kind in kinds
    )
    with pytest.raises(FedrotError, match=r"problem_type is 'regression' in .* and 'single_label_class"):
        check_alike(one, other)
    check_alike(one, unset)
    check_alike(unset, other)
    check_alike(
        *(
            described(tmp_path / f"encoder {kind}", "bert", "BertModel", problem_type=kind)
            for kind in kinds[:2]
        )
    )
