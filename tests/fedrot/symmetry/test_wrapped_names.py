"""State dicts as they come out of wrappers: parallel, compiled, sharded, with adapters, quantised."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import fedrot
from fedrot.symmetry import Symmetry
from tests import families
from tests.models import EVERYTHING, FEW, State, config_of, largest_difference, state_of, symmetry_for

PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.")
NESTED = ["".join(pair) for pair in itertools.permutations(PREFIXES, 2)]
LAYERS = {"bert-classifier": "bert.encoder.layer.", "distilbert-mlm": "distilbert.transformer.layer."}
QUERIES = {"bert-classifier": "attention.self.query", "distilbert-mlm": "attention.q_lin"}


def _wrapped(state: State, prefix: str) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def _inside(name: str, state: State, wrapper: str) -> State:
    """Wrap every layer, as sharding and compilation of single blocks do."""
    return {_inside_name(name, key, wrapper): tensor for key, tensor in state.items()}


def _inside_name(name: str, key: str, wrapper: str) -> str:
    if not key.startswith(LAYERS[name]):
        return key
    layer, _, rest = key.removeprefix(LAYERS[name]).partition(".")
    return f"{LAYERS[name]}{layer}.{wrapper}{rest}"


def _adapted(name: str, state: State) -> State:
    """Return a state dict of peft: every query has a LoRA beside it, the weight itself a new name."""
    found: State = {}
    for key, tensor in _wrapped(state, "base_model.model.").items():
        module, _, leaf = key.rpartition(".")
        if not module.endswith(QUERIES[name]):
            found[key] = tensor
            continue
        found[f"{module}.base_layer.{leaf}"] = tensor
        if leaf == "weight":
            found[f"{module}.lora_A.default.weight"] = torch.randn(2, tensor.shape[1])
            found[f"{module}.lora_B.default.weight"] = torch.randn(tensor.shape[0], 2)
    return found


def _without_adapters(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if ".lora_" not in name}


def _renamed(symmetry: Symmetry, names: dict[str, str]) -> list[object]:
    """Return the groups under other tensor names; a group's own name is the family's."""
    return [
        replace(g, slots=tuple(replace(s, tensor=names[s.tensor]) for s in g.slots))
        for g in symmetry.groups
    ]


def _check_same(name: str, state: State, names: dict[str, str]) -> None:
    """Check that a state dict under other names has the groups of the model, refuses what it does,
    and is moved like it."""
    plain = symmetry_for(name)
    symmetry = fedrot.symmetry_of(config_of(name), state)
    assert list(symmetry.groups) == _renamed(plain, names)
    assert symmetry.refused == plain.refused == {}
    assert symmetry.shapes == {names[key]: shape for key, shape in plain.shapes.items()}
    moved = fedrot.random_equivalent(state, symmetry, 3, EVERYTHING)
    expected = fedrot.random_equivalent(state_of(name), plain, 3, EVERYTHING)
    assert largest_difference(moved, {names[key]: t for key, t in expected.items()}) == 0


@pytest.mark.parametrize("prefix", [*PREFIXES, *NESTED])
@pytest.mark.parametrize("name", FEW)
def test_wrapped_models_are_described_like_their_own(name: str, prefix: str) -> None:
    state = state_of(name)
    _check_same(name, _wrapped(state, prefix), {key: f"{prefix}{key}" for key in state})


@pytest.mark.parametrize("prefix", PREFIXES[:3])
@pytest.mark.parametrize("name", FEW)
def test_shapes_alone_may_be_wrapped(name: str, prefix: str) -> None:
    shapes = {f"{prefix}{key}": tuple(tensor.shape) for key, tensor in state_of(name).items()}
    assert fedrot.symmetry_of(config_of(name), shapes).refused == {}


@pytest.mark.parametrize("wrapper", PREFIXES[:3])
@pytest.mark.parametrize("outer", ["", "module.", "_fsdp_wrapped_module."])
@pytest.mark.parametrize("name", FEW)
def test_single_blocks_may_be_wrapped(name: str, outer: str, wrapper: str) -> None:
    state = state_of(name)
    names = {key: f"{outer}{_inside_name(name, key, wrapper)}" for key in state}
    _check_same(name, _wrapped(_inside(name, state, wrapper), outer), names)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_update_and_anchor_are_aligned_under_their_names(prefix: str) -> None:
    name = FEW[0]
    anchor = _wrapped(state_of(name), prefix)
    symmetry = fedrot.symmetry_of(config_of(name), anchor)
    options = fedrot.AlignmentOptions(parts=("attention", "ffn"))
    update = fedrot.random_equivalent(anchor, symmetry, 3, ("attention", "ffn"))
    aligned = fedrot.align(update, anchor, symmetry, options).apply(update)
    assert largest_difference(aligned, anchor) < 1e-9


@pytest.mark.parametrize("outer", ["", "module.", "_orig_mod.", "_fsdp_wrapped_module."])
@pytest.mark.parametrize("name", FEW)
def test_adapters_are_refused_with_what_to_do(name: str, outer: str) -> None:
    with pytest.raises(fedrot.SymmetryError) as caught:
        fedrot.symmetry_of(config_of(name), _wrapped(_adapted(name, state_of(name)), outer))
    message = str(caught.value)
    assert f"{QUERIES[name]}.lora_A.default.weight" in message
    assert "merge_and_unload" in message
    assert "base" in message


@pytest.mark.parametrize(
    "adapter",
    [
        "lora_A.default.weight",
        "lora_B.client7.weight",
        "lora_A.weight",  # as peft stores an adapter alone
        "lora_embedding_A.default",
        "lora_magnitude_vector.default.weight",  # DoRA
    ],
)
def test_every_tensor_of_an_adapter_is_known_as_one(adapter: str) -> None:
    name = FEW[0]
    state = state_of(name)
    state[f"bert.encoder.layer.0.attention.self.query.{adapter}"] = torch.zeros(2, 2)
    with pytest.raises(fedrot.SymmetryError, match="merge_and_unload"):
        fedrot.symmetry_of(config_of(name), state)


def test_an_adapter_alone_is_refused_as_one() -> None:
    name = FEW[0]
    alone = {key: t for key, t in _adapted(name, state_of(name)).items() if ".lora_" in key}
    with pytest.raises(fedrot.SymmetryError, match="merge_and_unload"):
        fedrot.symmetry_of(config_of(name), alone)


@pytest.mark.parametrize("outer", ["", "module."])
@pytest.mark.parametrize("name", FEW)
def test_the_base_of_an_adapted_model_is_described_without_its_adapters(name: str, outer: str) -> None:
    base = _wrapped(_without_adapters(_adapted(name, state_of(name))), outer)

    def adapted_name(key: str) -> str:
        module, _, leaf = key.rpartition(".")
        layer = ".base_layer" if module.endswith(QUERIES[name]) else ""
        return f"{outer}base_model.model.{module}{layer}.{leaf}"

    _check_same(name, base, {key: adapted_name(key) for key in state_of(name)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
@pytest.mark.parametrize("name", FEW)
def test_quantised_weights_are_refused(name: str, dtype: torch.dtype) -> None:
    state = state_of(name)
    query = f"{LAYERS[name]}1.{QUERIES[name]}.weight"
    state[query] = state[query].to(dtype)
    with pytest.raises(fedrot.SymmetryError) as caught:
        fedrot.symmetry_of(config_of(name), state)
    message = str(caught.value)
    assert f"'{query}'" in message
    assert str(dtype) in message or "quantis" in message


def test_packed_weights_are_refused_for_what_they_are() -> None:
    """4-bit weights are stored two in a byte, in a column: not a matter of a wrong shape."""
    name = FEW[0]
    state = state_of(name)
    query = "bert.encoder.layer.0.attention.self.query.weight"
    state[query] = torch.zeros(state[query].numel() // 2, 1, dtype=torch.uint8)
    with pytest.raises(fedrot.SymmetryError, match=r"uint8|quantis"):
        fedrot.symmetry_of(config_of(name), state)


def test_weights_in_eight_bits_of_floating_point_are_refused() -> None:
    name = FEW[0]
    state = state_of(name)
    query = "bert.encoder.layer.0.attention.self.query.weight"
    state[query] = state[query].to(torch.float8_e4m3fn)
    with pytest.raises(fedrot.SymmetryError, match=r"float8|quantis"):
        fedrot.symmetry_of(config_of(name), state)


def test_integers_that_are_no_weights_are_fine() -> None:
    name = FEW[0]
    state = state_of(name)
    state["bert.embeddings.position_ids"] = torch.arange(40)[None]
    assert fedrot.symmetry_of(config_of(name), state).refused == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_floats_are_fine(dtype: torch.dtype) -> None:
    name = FEW[0]
    assert fedrot.symmetry_of(config_of(name), state_of(name, dtype=dtype)).refused == {}


def test_two_models_in_one_state_dict_are_refused() -> None:
    name = FEW[0]
    both = {**state_of(name), **_wrapped(state_of(name), "module.")}
    with pytest.raises(fedrot.SymmetryError, match="differ only in a wrapper prefix"):
        fedrot.symmetry_of(config_of(name), both)


@pytest.mark.parametrize(
    "name", ["prompt_encoder.default.embedding.weight", "base_model.model.x.adaption_prompt"]
)
def test_prompts_that_hold_keys_and_values_are_refused(name: str) -> None:
    """They lie beside the layers, and hold what lies inside heads."""
    state = {**families.state_of("llama"), name: torch.zeros(3, 4)}
    with pytest.raises(fedrot.SymmetryError, match="adapter"):
        fedrot.symmetry_of(families.config_of("llama"), state)
