"""Symmetry as data: names, prefixes, ties, and clear refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertModel,
    RobertaModel,
)

import fedrot
from fedrot.symmetry import NO_LAYER
from tests import families
from tests.models import (
    CASES,
    DIM,
    EVERYTHING,
    FULL,
    HEADS,
    LAYERS,
    NEURONS,
    WIDTH,
    State,
    bert_config,
    config_of,
    largest_difference,
    logits,
    randomise,
    state_of,
)

SUPPORTED = (
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "albert"),
    *("deberta", "deberta-v2", "modernbert", "t5", "mt5", "bart", "vit", "deit"),
    *("clip", "clip_text_model", "clip_vision_model", "gpt2", "gpt_neox", "opt"),
    *("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3"),
    *("gptj", "falcon", "bloom", "mixtral", "xglm"),
)


def _renamed(state: State, change: Any) -> State:
    return {change(name): tensor for name, tensor in state.items()}


@pytest.mark.parametrize("name", CASES)
def test_groups_act_on_what_they_should(name: str) -> None:
    """Against a table written here: which axis of which tensor belongs to which part."""
    names, state = CASES[name].names, state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), state)
    expected = set()
    for layer in range(LAYERS):
        qk = [
            (f"{names.of(layer, m)}.{leaf}", 0) for m in ("query", "key") for leaf in ("weight", "bias")
        ]
        vo = [(f"{names.of(layer, 'value')}.{leaf}", 0) for leaf in ("weight", "bias")]
        vo.append((f"{names.of(layer, 'output')}.weight", 1))
        ffn = [(f"{names.of(layer, 'up')}.{leaf}", 0) for leaf in ("weight", "bias")]
        ffn.append((f"{names.of(layer, 'down')}.weight", 1))
        expected |= {(layer, "heads", *slot, WIDTH) for slot in qk + vo}
        expected |= {
            (layer, part, *slot, WIDTH) for part in ("attention", "rescale") for slot in qk + vo
        }
        expected |= {(layer, "ffn", *slot, NEURONS) for slot in ffn}
    inside = [group for group in symmetry.groups if group.layer != NO_LAYER]
    found = {(g.layer, g.part, s.tensor, s.axis, s.slice.stop) for g in inside for s in g.slots}
    assert found == expected
    assert all(slot.slice.start == 0 for group in symmetry.groups for slot in group.slots)
    assert len(inside) == 6 * LAYERS
    assert symmetry.layers == LAYERS
    assert symmetry.shapes == {k: tuple(v.shape) for k, v in state.items()}
    assert {g.kind.units for g in inside if g.part == "ffn"} == {NEURONS}
    assert {g.kind.units for g in inside if g.part != "ffn"} == {HEADS}


def test_supported_families() -> None:
    assert set(fedrot.supported()) ^ set(SUPPORTED) == set(), "add it to SUPPORTED above"
    assert len(fedrot.supported()) == len(SUPPORTED)


def test_the_docs_list_every_supported_model_type() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "families.md"
    listed = page.read_text(encoding="utf-8")
    assert [name for name in fedrot.supported() if f"`{name}`" not in listed] == []


@pytest.mark.parametrize("name", CASES)
def test_shapes_alone_give_the_same_groups(name: str) -> None:
    state = state_of(name)
    shapes = {k: list(v.shape) for k, v in state.items()}
    meta = {k: v.to("meta") for k, v in state.items()}
    full = fedrot.symmetry_of(config_of(name), state)
    for tensors in (shapes, meta):
        described = fedrot.symmetry_of(config_of(name), tensors)
        assert described.groups == full.groups
        assert described.shapes == full.shapes
        assert described.tied == ()
    moved = fedrot.random_equivalent(state, fedrot.symmetry_of(config_of(name), shapes), 1, EVERYTHING)
    assert (logits(name, moved) - logits(name, state)).abs().max() <= 1e-10


@pytest.mark.parametrize("name", CASES)
def test_a_config_may_be_a_dictionary(name: str) -> None:
    state, config = state_of(name), config_of(name)
    assert fedrot.symmetry_of(config.to_dict(), state) == fedrot.symmetry_of(config, state)


@pytest.mark.parametrize(
    "prefix",
    [
        "module.",
        "_orig_mod.",
        "module._orig_mod.",
        "_orig_mod.module.",
        "model.",
        "model.module.",
        "a.b.",
    ],
)
@pytest.mark.parametrize("name", ["bert-classifier", "roberta-mlm", "distilbert-classifier"])
def test_prefixes_in_front_are_tolerated(name: str, prefix: str) -> None:
    state = state_of(name)
    wrapped = _renamed(state, lambda key: prefix + key)
    symmetry = fedrot.symmetry_of(config_of(name), wrapped)
    plain = fedrot.symmetry_of(config_of(name), state)
    moved = fedrot.random_equivalent(wrapped, symmetry, 3, EVERYTHING)
    expected = fedrot.random_equivalent(state, plain, 3, EVERYTHING)
    assert largest_difference(_renamed(moved, lambda key: key.removeprefix(prefix)), expected) == 0
    back = fedrot.align(
        moved, wrapped, symmetry, fedrot.AlignmentOptions(parts=EVERYTHING, canonical=False)
    ).apply(moved)
    assert largest_difference(back, wrapped) <= 1e-8


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
@pytest.mark.parametrize(
    "place", ["bert.", "bert.encoder.", "bert.encoder.layer.", "bert.encoder.layer.1."]
)
def test_wrappers_inside_are_tolerated(place: str, wrapper: str) -> None:
    name = "bert-classifier"
    state = state_of(name)
    wrapped = _renamed(state, lambda key: key.replace(place, f"{place}{wrapper}.", 1))
    assert wrapped.keys() != state.keys()
    symmetry = fedrot.symmetry_of(config_of(name), wrapped)
    moved = fedrot.random_equivalent(wrapped, symmetry, 3, EVERYTHING)
    assert moved.keys() == wrapped.keys()
    plain = _renamed(moved, lambda key: key.replace(f"{wrapper}.", "", 1))
    assert (logits(name, plain) - logits(name, state)).abs().max() <= 1e-10
    assert largest_difference(plain, state) > 0.1


@pytest.mark.parametrize("cls", [BertModel, RobertaModel, DistilBertModel])
def test_bare_encoders_have_no_prefix(cls: Any) -> None:
    name = {BertModel: "bert-mlm", RobertaModel: "roberta-mlm", DistilBertModel: "distilbert-mlm"}[cls]
    model = randomise(cls(config_of(name)).double()).eval()
    state = model.state_dict()
    symmetry = fedrot.symmetry_of(model.config, state)
    assert len(symmetry.groups) == 6 * LAYERS
    assert all(group.layer != NO_LAYER for group in symmetry.groups)
    expected = model(torch.tensor([[5, 6, 7, 8]])).last_hidden_state
    model.load_state_dict(fedrot.random_equivalent(state, symmetry, 1, FULL))
    assert (model(torch.tensor([[5, 6, 7, 8]])).last_hidden_state - expected).abs().max() <= 1e-10


def test_a_data_parallel_model_is_described() -> None:
    model = torch.nn.DataParallel(BertForSequenceClassification(bert_config()))
    symmetry = fedrot.symmetry_of(bert_config(), model.state_dict())
    plain = fedrot.symmetry_of(bert_config(), model.module.state_dict())
    assert [group.name for group in symmetry.groups] == [group.name for group in plain.groups]
    assert len(symmetry.groups) == 6 * LAYERS + 2


# Refusals


@pytest.mark.parametrize("model_type", ["xlnet", "mamba", "gemma3", None])
def test_unknown_architectures_name_what_is_supported(model_type: str | None) -> None:
    state = state_of("bert-classifier")
    with pytest.raises(fedrot.SymmetryError) as caught:
        fedrot.symmetry_of({"model_type": model_type}, state)
    message = str(caught.value)
    assert str(model_type) in message
    assert next(iter(state)) in message
    assert all(name in message for name in SUPPORTED)


@pytest.mark.parametrize("config", ["bert", 3, None, [("model_type", "bert")]])
def test_a_config_of_another_type_is_refused(config: object) -> None:
    with pytest.raises(fedrot.SymmetryError, match="config"):
        fedrot.symmetry_of(config, state_of("bert-classifier"))


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"]
)
def test_an_incomplete_config_is_refused(key: str) -> None:
    config = bert_config().to_dict()
    del config[key]
    with pytest.raises(fedrot.SymmetryError, match=key):
        fedrot.symmetry_of(config, state_of("bert-classifier"))


@pytest.mark.parametrize(
    "extra",
    [
        "crossattention.self.query.weight",
        "attention.self.distance_embedding.weight",
        "adapter.down.weight",
        "intermediate.dense_gate.weight",
    ],
)
def test_a_tensor_without_a_place_inside_a_layer_is_refused(extra: str) -> None:
    name = "bert-classifier"
    state = state_of(name)
    key = f"bert.encoder.layer.1.{extra}"
    state[key] = torch.ones(2, 2)
    with pytest.raises(fedrot.SymmetryError) as caught:
        fedrot.symmetry_of(config_of(name), state)
    assert f"'{key}'" in str(caught.value)
    assert all(supported in str(caught.value) for supported in SUPPORTED)


def test_real_cross_attention_is_refused() -> None:
    config = BertConfig(**{**bert_config().to_dict(), "is_decoder": True, "add_cross_attention": True})
    state = BertModel(config).state_dict()
    assert any("crossattention" in key for key in state)
    with pytest.raises(fedrot.SymmetryError, match="crossattention"):
        fedrot.symmetry_of(config, state)


def test_more_layers_than_the_config_says_are_refused() -> None:
    config = {**bert_config().to_dict(), "num_hidden_layers": 1}
    with pytest.raises(fedrot.SymmetryError, match=re.escape("encoder.layer.1.")):
        fedrot.symmetry_of(config, state_of("bert-classifier"))


def test_fewer_layers_than_the_config_says_are_refused() -> None:
    config = {**bert_config().to_dict(), "num_hidden_layers": 3}
    with pytest.raises(fedrot.SymmetryError, match=r"bert\.encoder\.layer\.2\..*missing"):
        fedrot.symmetry_of(config, state_of("bert-classifier"))


@pytest.mark.parametrize("module", ["query", "key", "value", "output", "up", "down"])
@pytest.mark.parametrize("name", ["bert-classifier", "distilbert-mlm"])
def test_a_missing_tensor_is_named(name: str, module: str) -> None:
    state = state_of(name)
    key = f"{CASES[name].names.of(1, module)}.weight"
    del state[key]
    with pytest.raises(fedrot.SymmetryError, match="missing") as caught:
        fedrot.symmetry_of(config_of(name), state)
    assert key in str(caught.value)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size"])
@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_config_of_another_size_is_refused(key: str, factor: float) -> None:
    config = bert_config().to_dict()
    config[key] = int(config[key] * factor)
    with pytest.raises(fedrot.SymmetryError, match="shape"):
        fedrot.symmetry_of(config, state_of("bert-classifier"))


def test_a_head_count_that_does_not_divide_the_width_is_refused() -> None:
    config = {**bert_config().to_dict(), "num_attention_heads": 5}
    with pytest.raises(fedrot.SymmetryError, match="shape"):
        fedrot.symmetry_of(config, state_of("bert-classifier"))


@pytest.mark.parametrize("leaf", ["weight", "bias"])
@pytest.mark.parametrize("module", ["query", "value", "up"])
def test_a_tensor_of_another_shape_is_named(module: str, leaf: str) -> None:
    name = "bert-classifier"
    state = state_of(name)
    key = f"{CASES[name].names.of(0, module)}.{leaf}"
    state[key] = state[key][: DIM // 2]
    with pytest.raises(fedrot.SymmetryError, match="shape") as caught:
        fedrot.symmetry_of(config_of(name), state)
    assert f"'{key}'" in str(caught.value)


def test_a_model_of_another_family_is_refused() -> None:
    with pytest.raises(fedrot.SymmetryError) as caught:
        fedrot.symmetry_of(config_of("distilbert-mlm"), state_of("bert-mlm"))
    assert "'bert.embeddings.word_embeddings.weight'" in str(caught.value)
    assert "distilbert" in str(caught.value)


def test_no_tensors_at_all_are_refused() -> None:
    with pytest.raises(fedrot.SymmetryError):
        fedrot.symmetry_of(bert_config(), {})


def test_two_encoders_in_one_state_dict_are_refused() -> None:
    state = state_of("bert-classifier")
    both = {f"{side}.{key}": tensor for side in ("left", "right") for key, tensor in state.items()}
    with pytest.raises(fedrot.SymmetryError, match="Several") as caught:
        fedrot.symmetry_of(bert_config(), both)
    assert "left.bert." in str(caught.value)
    assert "right.bert." in str(caught.value)


def test_the_same_model_with_and_without_a_wrapper_is_refused() -> None:
    state = state_of("bert-classifier")
    with pytest.raises(fedrot.SymmetryError, match="wrapper"):
        fedrot.symmetry_of(bert_config(), {**state, **_renamed(state, lambda key: f"module.{key}")})


@pytest.mark.parametrize("module", ["query", "output", "up", "down"])
def test_layers_that_share_storage_are_refused(module: str) -> None:
    name = "bert-classifier"
    state, names = state_of(name), CASES[name].names
    first, second = (f"{names.of(layer, module)}.weight" for layer in (0, 1))
    state[second] = state[first]
    with pytest.raises(fedrot.SymmetryError, match="share storage") as caught:
        fedrot.symmetry_of(config_of(name), state)
    assert first in str(caught.value)
    assert second in str(caught.value)


def test_query_and_key_that_share_storage_are_refused() -> None:
    name = "bert-classifier"
    state, names = state_of(name), CASES[name].names
    state[f"{names.of(0, 'key')}.weight"] = state[f"{names.of(0, 'query')}.weight"]
    with pytest.raises(fedrot.SymmetryError, match="share storage"):
        fedrot.symmetry_of(config_of(name), state)


def test_a_moved_tensor_tied_to_one_that_stays_is_refused() -> None:
    """Otherwise the two names would come back with different values, and the tie decide which."""
    name = "bert-classifier"
    state, names = state_of(name), CASES[name].names
    state["bert.pooler.dense.weight"] = state[f"{names.of(0, 'query')}.weight"]
    with pytest.raises(fedrot.SymmetryError, match="share storage"):
        fedrot.symmetry_of(config_of(name), state)


@pytest.mark.parametrize("still", ["embeddings.LayerNorm.bias", "encoder.layer.1.output.LayerNorm.bias"])
def test_a_moved_tensor_tied_to_one_that_nothing_moves_is_refused(still: str) -> None:
    """Whichever of the two comes first."""
    name = "bert-bare"
    state = state_of(name)
    state[still] = state["encoder.layer.0.attention.self.query.bias"]
    with pytest.raises(fedrot.SymmetryError, match="share storage"):
        fedrot.symmetry_of(config_of(name), state)


def test_the_rotary_share_of_older_configurations_is_read() -> None:
    """GPT-NeoX called it ``rotary_pct`` before transformers 5."""
    config = families.config_of("gpt-neox").to_dict()
    share = config.pop("rope_parameters")["partial_rotary_factor"]
    assert 0 < share < 1
    config.pop("partial_rotary_factor", None)
    shapes = {name: tuple(tensor.shape) for name, tensor in families.state_of("gpt-neox").items()}
    expected = fedrot.symmetry_of(families.config_of("gpt-neox"), shapes)
    for other in (share, 1.0):
        found = fedrot.symmetry_of({**config, "rotary_pct": other}, shapes)
        assert (found.groups == expected.groups) == (other == share)


@pytest.mark.parametrize("value", [None, "many", [2], {}, 1.5, float("nan")])
@pytest.mark.parametrize("key", ["num_attention_heads", "num_hidden_layers", "hidden_size"])
def test_a_config_of_impossible_values_is_refused(key: str, value: Any) -> None:
    name = "bert-classifier"
    config = {**config_of(name).to_dict(), key: value}
    with pytest.raises(fedrot.SymmetryError):
        fedrot.symmetry_of(config, state_of(name))


def test_a_config_without_heads_is_refused() -> None:
    name = "bert-classifier"
    config = {**config_of(name).to_dict(), "num_attention_heads": 0}
    with pytest.raises(fedrot.SymmetryError, match="does not describe a model of family 'bert'"):
        fedrot.symmetry_of(config, state_of(name))
