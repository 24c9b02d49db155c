"""The residual stream and the task heads' hidden units: what they are, and when they may not move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fedrot
from fedrot.symmetry import DEFAULT_PARTS, NO_LAYER
from fedrot.symmetry.actions import Permutation, SignedPermutation
from tests.models import (
    BARE,
    EVERY,
    EVERYTHING,
    LAYERS,
    VOCABULARY,
    WIDTH,
    State,
    config_of,
    largest_difference,
    logits,
    state_of,
    symmetry_for,
)

Axis = tuple[str, int]

_LEAVES = ("weight", "bias")

#: The axes of every task head on the residual stream (or the narrower embeddings), then on its hidden
#: units; written down here from the models' code, independently of the library's own tables.
_LM = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm"),
    "electra": ("generator_predictions.dense", "generator_predictions.LayerNorm"),
    "distilbert": ("vocab_transform", "vocab_layer_norm"),
}
_DECODERS = {
    "bert": "cls.predictions.decoder",
    "roberta": "lm_head.decoder",
    "electra": "generator_lm_head",
    "distilbert": "vocab_projector",
}


def _split(name: str) -> tuple[str, str]:
    """Return the family whose module names a case has, and its task."""
    family, _, task = name.partition("-")
    for other, known in (("xlm", "roberta"), ("electra", "electra")):
        if family == other:
            return known, task.removeprefix("r-").removeprefix("wide-")
    return family, task


def _hidden_layer(name: str) -> tuple[str, str] | None:
    """Return the module that writes a task head's hidden units and the one that reads them."""
    family, task = _split(name)
    if family == "distilbert":
        pair = ("pre_classifier", "classifier")
        return pair if task in ("classifier", "choice") else None
    if task == "discriminator":
        return "discriminator_predictions.dense", "discriminator_predictions.dense_prediction"
    pooler = f"{family}.pooler.dense"
    if task == "classifier":
        return (
            (pooler, "classifier") if family == "bert" else ("classifier.dense", "classifier.out_proj")
        )
    if task in ("next", "pretraining"):
        return pooler, "cls.seq_relationship"
    return (pooler, "classifier") if task == "choice" else None


def _body_axes(name: str, state: State) -> set[Axis]:
    """Return the axes of embeddings and layers on the stream, from the shapes of their modules."""
    names = EVERY[name].names
    stem = names.stack.split(".")[0]
    axes = {(f"{stem}.embeddings.LayerNorm.{leaf}", 0) for leaf in ("weight", "bias")}
    axes |= {(key, 1) for key in state if key.startswith(f"{stem}.embeddings.") and "_embeddings" in key}
    for layer in range(LAYERS):
        axes |= {(f"{names.of(layer, m)}.weight", 1) for m in ("query", "key", "value", "up")}
        axes |= {(f"{names.of(layer, m)}.{leaf}", 0) for m in ("output", "down") for leaf in _LEAVES}
        norms = [
            key for key in state if key.startswith(f"{names.stack}.{layer}.") and "norm" in key.lower()
        ]
        assert len(norms) == 4
        axes |= {(key, 0) for key in norms}
    return axes


def _expected(name: str, state: State) -> dict[str, set[Axis]]:
    """Return the axes on the residual stream, on narrower embeddings, and on hidden units."""
    family, task = _split(name)
    stream = _body_axes(name, state)
    hidden = _hidden_layer(name)
    if hidden:
        stream.add((f"{hidden[0]}.weight", 1))
    if task.startswith(("mlm", "causal", "pretraining")):
        dense, norm = _LM[family]
        stream |= {(f"{dense}.weight", 0), (f"{dense}.weight", 1), (f"{dense}.bias", 0)}
        stream |= {(f"{norm}.{leaf}", 0) for leaf in _LEAVES} | {(f"{_DECODERS[family]}.weight", 1)}
    if task in ("qa", "tokens"):
        stream.add(("qa_outputs.weight" if task == "qa" else "classifier.weight", 1))
    narrow: set[Axis] = set()
    if "electra.embeddings_project.weight" in state:
        into_stream = {("electra.embeddings_project.weight", 0), ("electra.embeddings_project.bias", 0)}
        width = state["electra.embeddings_project.weight"].shape[1]
        narrow = {axis for axis in stream if state[axis[0]].shape[axis[1]] == width}
        stream = (stream - narrow) | into_stream
        narrow.add(("electra.embeddings_project.weight", 1))
    units: set[Axis] = set()
    if hidden:
        units = {(f"{hidden[0]}.{leaf}", 0) for leaf in _LEAVES} | {(f"{hidden[1]}.weight", 1)}
    return {"residual": stream, "embedding": narrow, "output": units}


@pytest.mark.parametrize("name", EVERY)
def test_groups_across_layers_are_those_of_the_models(name: str) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    found: dict[str, set[Axis]] = {"residual": set(), "embedding": set(), "output": set()}
    for group in symmetry.groups:
        if group.layer == NO_LAYER:
            key = group.part if group.part == "output" else group.name
            found[key] |= {(slot.tensor, slot.axis) for slot in group.slots}
            assert len(group.slots) == len({(slot.tensor, slot.axis) for slot in group.slots})
            assert {slot.size for slot in group.slots} == {group.kind.units}
    assert found == _expected(name, state)


@pytest.mark.parametrize("name", EVERY)
def test_signs_are_free_only_under_odd_activations(name: str) -> None:
    """Hidden units of BERT's and RoBERTa's heads follow a tanh, ELECTRA's and DistilBERT's do not."""
    family, _ = _split(name)
    across = [group for group in symmetry_for(name).groups if group.layer == NO_LAYER]
    assert across
    for group in across:
        odd = group.part == "output" and family in ("bert", "roberta")
        assert type(group.kind) is (SignedPermutation if odd else Permutation)


@pytest.mark.parametrize("name", EVERY)
def test_shapes_alone_move_every_part(name: str) -> None:
    state = state_of(name)
    symmetry = fedrot.symmetry_of(config_of(name), {k: list(v.shape) for k, v in state.items()})
    assert symmetry.groups == symmetry_for(name).groups
    moved = fedrot.random_equivalent(state, symmetry, 5, EVERYTHING)
    assert (
        largest_difference(moved, fedrot.random_equivalent(state, symmetry_for(name), 5, EVERYTHING))
        == 0
    )


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "a.b."])
@pytest.mark.parametrize("name", EVERY)
def test_prefixed_names_move_every_part(name: str, prefix: str) -> None:
    state = state_of(name)
    wrapped = {prefix + key: tensor for key, tensor in state.items()}
    symmetry = fedrot.symmetry_of(config_of(name), wrapped)
    moved = fedrot.random_equivalent(wrapped, symmetry, 5, EVERYTHING)
    plain = {key.removeprefix(prefix): tensor for key, tensor in moved.items()}
    assert (
        largest_difference(plain, fedrot.random_equivalent(state, symmetry_for(name), 5, EVERYTHING))
        == 0
    )


# Refusals: of the parts that cross layers, and of nothing else


def _check_refused(state: State, symmetry: fedrot.Symmetry, *parts: str, message: str) -> None:
    for part in parts:
        for run in (
            lambda p: fedrot.align(state, state, symmetry, fedrot.AlignmentOptions(parts=p)),
            lambda p: fedrot.random_equivalent(state, symmetry, 1, p),
        ):
            with pytest.raises(fedrot.SymmetryError, match=message) as caught:
                run((*DEFAULT_PARTS, part))
            assert f"'{part}'" in str(caught.value)
    assert set(symmetry.refused) == set(parts)


def _check_the_rest_moves(name: str, state: State, symmetry: fedrot.Symmetry) -> None:
    rest = tuple(part for part in EVERYTHING if part not in symmetry.refused)
    assert {"heads", "attention", "rescale", "ffn"} <= set(rest)
    moved = fedrot.random_equivalent(state, symmetry, 1, rest)
    changed = {key for key in state if not torch.equal(moved[key], state[key])}
    names = symmetry_for(name).groups
    assert changed >= {slot.tensor for g in names if g.layer != NO_LAYER for slot in g.slots}
    known = {key: tensor for key, tensor in moved.items() if key in state_of(name)}
    if len(known) == len(state_of(name)):
        assert (logits(name, known) - logits(name, state_of(name))).abs().max() <= 1e-10
    aligned = fedrot.align(
        moved, state, symmetry, fedrot.AlignmentOptions(parts=rest, canonical=False)
    ).apply(moved)
    assert largest_difference(aligned, state) <= 1e-8


@pytest.mark.parametrize("name", BARE)
def test_a_bare_encoder_keeps_its_residual_stream(name: str) -> None:
    """Its output is the stream itself: moved, the outputs would be other outputs."""
    state, symmetry = state_of(name), symmetry_for(name)
    _check_refused(state, symmetry, "residual", message="no task head")
    assert not symmetry.select(("output",))
    _check_the_rest_moves(name, state, symmetry)


@pytest.mark.parametrize("key", ["my_head.weight", "my_head.dense.bias", "bert.adapter.weight"])
def test_an_unknown_tensor_outside_the_layers_keeps_what_it_may_read(key: str) -> None:
    name = "bert-classifier"
    state = state_of(name) | {key: torch.ones(3, WIDTH, dtype=torch.float64)}
    symmetry = fedrot.symmetry_of(config_of(name), state)
    _check_refused(state, symmetry, "residual", "output", message=key)
    _check_the_rest_moves(name, state, symmetry)


def test_a_head_of_transformers_that_is_not_described_is_not_guessed_at() -> None:
    """ELECTRA's multiple-choice head summarises with a module that the family does not list."""
    name = "electra-tokens"
    state = state_of(name)
    for leaf, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,))):
        state[f"sequence_summary.summary.{leaf}"] = torch.ones(shape, dtype=torch.float64)
    symmetry = fedrot.symmetry_of(config_of(name), state)
    _check_refused(state, symmetry, "residual", "output", message="sequence_summary")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("bert-classifier", "bert.embeddings.LayerNorm.weight"),
        ("distilbert-mlm", "distilbert.embeddings.position_embeddings.weight"),
        ("roberta-qa", "roberta.encoder.layer.1.output.LayerNorm.weight"),
    ],
)
def test_an_incomplete_body_keeps_its_residual_stream(name: str, key: str) -> None:
    state = state_of(name)
    del state[key]
    symmetry = fedrot.symmetry_of(config_of(name), state)
    assert "missing" in symmetry.refused["residual"]
    with pytest.raises(fedrot.SymmetryError, match="missing"):
        symmetry.select(("residual",))
    assert symmetry.select(DEFAULT_PARTS)


def test_a_language_model_saved_without_its_tied_decoder_keeps_its_residual_stream() -> None:
    """Nothing shows that the transform's output ends in the vocabulary."""
    name = "bert-mlm"
    state = state_of(name)
    del state["cls.predictions.decoder.weight"]
    symmetry = fedrot.symmetry_of(config_of(name), state)
    with pytest.raises(fedrot.SymmetryError, match="residual"):
        fedrot.random_equivalent(state, symmetry, 1, ("residual",))


def _second_pooler(state: State) -> str:
    key = "pooler.dense.weight"
    state[key] = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
    return key


def _wide_classifier(state: State) -> str:
    key = "classifier.weight"
    state[key] = torch.ones(3, 2 * WIDTH, dtype=torch.float64)
    return key


def _flat_classifier(state: State) -> str:
    key = "classifier.weight"
    state[key] = torch.ones(3 * WIDTH, dtype=torch.float64)
    return key


def _wide_positions(state: State) -> str:
    key = "bert.embeddings.position_embeddings.weight"
    state[key] = torch.ones(40, 2 * WIDTH, dtype=torch.float64)
    return key


def _narrow_norm(state: State) -> str:
    key = "bert.encoder.layer.0.output.LayerNorm.weight"
    state[key] = torch.ones(WIDTH // 2, dtype=torch.float64)
    return key


def _refusals(name: str, state: State) -> dict[str, str]:
    """Return the refused parts with the reason: all of them where the model itself is refused."""
    try:
        return fedrot.symmetry_of(config_of(name), state).refused
    except fedrot.SymmetryError as error:
        return dict.fromkeys(EVERYTHING, str(error))


@pytest.mark.parametrize("name", ["bert-classifier", "bert-tokens"])
@pytest.mark.parametrize(
    "damage", [_second_pooler, _wide_classifier, _flat_classifier, _wide_positions, _narrow_norm]
)
def test_a_tensor_that_is_not_what_its_name_says_is_never_moved(
    name: str, damage: Callable[[State], str]
) -> None:
    """Either the model is refused, or the parts that would move the tensor are."""
    state = state_of(name)
    key = damage(state)
    refused = _refusals(name, state)
    assert {"residual", "output"} <= set(refused)
    assert all(f"'{key}'" in reason for reason in refused.values())


def test_a_moved_table_tied_to_a_head_of_its_own_is_refused() -> None:
    """The decoder shares the embeddings' storage: both are on the stream, or neither moves."""
    name = "bert-tokens"
    state = state_of(name)
    state["bert.embeddings.position_embeddings.weight"] = torch.ones(3, WIDTH, dtype=torch.float64)
    state["classifier.weight"] = state["bert.embeddings.position_embeddings.weight"]
    symmetry = fedrot.symmetry_of(config_of(name), state)
    assert symmetry.tied == (("bert.embeddings.position_embeddings.weight", "classifier.weight"),)
    name = "bert-classifier"
    state = state_of(name)
    state["bert.embeddings.position_embeddings.weight"] = torch.ones(3, WIDTH, dtype=torch.float64)
    state["classifier.weight"] = state["bert.embeddings.position_embeddings.weight"]
    with pytest.raises(fedrot.SymmetryError, match="share storage"):
        fedrot.symmetry_of(config_of(name), state)


def test_untied_decoders_move_on_their_own() -> None:
    name = "bert-mlm-untied"
    state = state_of(name)
    words, decoder = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    assert state[words].shape == state[decoder].shape == (VOCABULARY, WIDTH)
    assert not torch.equal(state[words], state[decoder])
    tied = state_of("bert-mlm")
    assert torch.equal(tied[words], tied[decoder])
    for key, one in (("bert-mlm-untied", state), ("bert-mlm", tied)):
        moved = fedrot.random_equivalent(one, symmetry_for(key), 2, ("residual",))
        order = (one[words][0][:, None] == moved[words][0]).int().argmax(0)
        for table in (words, decoder):
            assert torch.equal(moved[table], one[table][:, order])
