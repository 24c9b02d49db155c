"""Just outside the claimed groups the outputs change: the tests of function preservation bite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from fedrot.symmetry.actions import (
    HeadPermutation,
    HeadRotation,
    InsideHeads,
    Kind,
    Permutation,
    QueryPermutation,
    SignedPermutation,
)
from fedrot.symmetry.describe.mixture import ExpertNeurons
from fedrot.symmetry.families import FAMILIES
from fedrot.symmetry.groups import NO_LAYER, Group, Slice, Slot
from fedrot.symmetry.moves import Move, apply_moves
from fedrot.symmetry.resolve import family_of
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from tests.families import (
    ALIBI,
    FIXED,
    KINDS,
    MEMBERS,
    answers,
    model_of,
    outputs,
    state_of,
    symmetry_for,
)
from tests.fedrot.oracles import seeded
from tests.models import State

#: A change of the outputs, relative to the largest, that no rounding makes, and one that it may.
VISIBLE, ROUNDING = 1e-4, 1e-9

ROTARY = [
    "gpt-neox",
    "gpt-neox-odd",
    "gpt-neox-tokens",
    "llama",
    "llama-factor",
    "llama-biased",
    "mistral",
    "qwen2",
    "phi3",
]
MIXTURES = ["mixtral"]
ROTARY += ["phi3-partial", "modernbert", "modernbert-biased", *MIXTURES]
ROTARY += ["gptj", "gptj-whole", "falcon-7b", "falcon-11b", "falcon-40b"]
PARTIAL = ["gpt-neox", "gpt-neox-odd", "gpt-neox-tokens", "gptj", "phi3-partial"]
NORMED = ["qwen3", "gemma3"]
GROUPED = ["llama", "llama-factor", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "phi3-partial"]
GROUPED += MIXTURES
ONE_KEY_HEAD = ["mistral", "falcon-7b"]
GATED = [*GROUPED, "llama-biased", "modernbert", "modernbert-biased"]
GATED += ["t5-gated", "t5-classifier", "mt5"]
RMS = [*GROUPED, "llama-biased", "t5", "t5-gated", "t5-classifier", "mt5"]
GROUPED += ["falcon-7b", "falcon-11b", "falcon-40b"]
BARE = ["t5-encoder", "clip-text-bare"]
#: DeBERTa with projections of positions alone.
SEPARATE = ["deberta", "deberta-c2p", "deberta-embedding", "deberta-v2", "deberta-v2-conv"]
#: Layers that share a bias per head.
SHARED = ["mpnet", "mpnet-mlm", "t5", "t5-gated", "t5-classifier", "t5-encoder", "mt5"]
LAYERNORM = [name for name in MEMBERS if name not in (*RMS, *BARE, *FIXED)]

#: For which units of a head the bias of the key adds the same to all scores of a query.
_HIDDEN = ["bert", "roberta", "camembert", "electra", "mpnet", "mpnet-mlm", "albert", "albert-groups"]
_HIDDEN += ["bart", "bart-classifier", "vit", "deit", "gpt2", "gpt2-classifier"]
_HIDDEN += [
    *ALIBI,
    *FIXED,
    "opt",
    "opt-open",
    "opt-projected",
    "clip",
    "clip-classifier",
    "clip-text",
    "clip-image",
    "clip-text-bare",
]
KEY_BIAS = dict.fromkeys(_HIDDEN, "all") | {"gpt-neox": "not turned", "gpt-neox-odd": "not turned"}
KEY_BIAS |= dict.fromkeys(["llama-biased", "qwen2", "qwen3", "modernbert-biased"], "none")
KEY_BIAS |= dict.fromkeys(["deberta-v2", "deberta-v2-conv", "deberta-v3", "deberta-v3-new"], "none")

#: Models whose embeddings lie in a space of their own that no norm reads.
UNNORMED = ["deberta-embedding", "opt-projected"]

#: What a model holds and does not compute with.
UNREAD = {"clip-classifier": "vision_model.post_layernorm."}


@cache
def _before(name: str) -> Tensor:
    return outputs(name, state_of(name))


def _changed(name: str, state: State, before: Tensor) -> float:
    """Return the largest change of an output, relative to the largest output."""
    return float((outputs(name, state) - before).abs().max() / before.abs().max())


def _change(name: str, *moves: Move) -> float:
    return _changed(name, apply_moves(state_of(name), moves), _before(name))


def _groups(name: str, wanted: Callable[[Group], bool]) -> list[Group]:
    """Return the groups of a member that are wanted, of which there is at least one."""
    found = [group for group in symmetry_for(name).groups if wanted(group)]
    assert found, f"{name} has no such group"
    return found


def _of_kind(name: str, *kinds: type) -> list[Group]:
    return _groups(name, lambda group: type(group.kind) in kinds)


def _with(group: Group, kind: Kind, slots: Iterable[Slot] | None = None) -> Group:
    return replace(group, kind=kind, slots=group.slots if slots is None else tuple(slots))


def _side(group: Group, contravariant: bool) -> Group:
    return _with(group, group.kind, (s for s in group.slots if s.contravariant == contravariant))


def _heads(group: Group) -> tuple[int, int]:
    """Return how many heads a group inside heads has, and their units."""
    assert isinstance(group.kind, InsideHeads)
    return group.kind.heads, group.kind.dim


def _moving(kind: Kind, seed: int) -> Tensor:
    """Return a random element that moves something."""
    rng = seeded(seed)
    element = kind.random(rng)
    while not kind.moved(element).any():
        element = kind.random(rng)
    return element


def _is_key_bias(name: str, slot: Slot) -> bool:
    return slot.contravariant and len(symmetry_for(name).shapes[slot.tensor]) == 1


def _unseen(name: str, group: Group, slot: Slot) -> bool:
    """Whether a slot is a bias that adds the same to all scores of a query."""
    if not _is_key_bias(name, slot):
        return False
    still = KEY_BIAS[name] == "not turned" and group.name.endswith("qk.still")
    return KEY_BIAS[name] == "all" or still or "pos_key_proj" in slot.tensor


def test_the_lists_above_are_those_of_the_symmetries() -> None:
    def having(wanted: Callable[[str, Group], bool]) -> set[str]:
        return {name for name in MEMBERS if any(wanted(name, g) for g in symmetry_for(name).groups)}

    assert having(lambda _, g: isinstance(g.kind, RotaryPhases)) == set(ROTARY)
    assert having(lambda _, g: isinstance(g.kind, RotarySigns)) == set(NORMED)
    assert having(lambda _, g: g.name.endswith("qk.still")) == set(PARTIAL)
    assert having(lambda _, g: isinstance(g.kind, QueryPermutation)) == set(GROUPED)
    assert having(lambda _, g: g.part == "ffn" and _signed(g)) == set(GATED)
    assert having(lambda _, g: g.part == "residual" and _signed(g)) == set(RMS)
    assert having(lambda _, g: g.part == "residual" and not _signed(g)) == set(LAYERNORM)
    assert having(lambda _, g: g.part == "heads" and g.layer == NO_LAYER) == set(SHARED)
    assert having(lambda n, g: any(_is_key_bias(n, slot) for slot in g.slots)) == set(KEY_BIAS)


def _signed(group: Group) -> bool:
    return isinstance(group.kind, SignedPermutation | ExpertNeurons)


# Every tensor of the description is needed


def _tied(name: str) -> dict[str, int]:
    """Return by the name of each tensor what it shares with the names that it is tied to."""
    return {key: id(value) for key, value in model_of(name).state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("name", KINDS)
def test_a_group_that_leaves_out_one_slot_changes_the_outputs(name: str) -> None:
    """In the first layer of each stack, and in every tensor of what crosses layers."""
    tied = _tied(name)
    tried = 0
    for group in _groups(name, lambda g: g.layer in (NO_LAYER, 0, 2) and g.kind.units > 1):
        element = _moving(group.kind, 1)
        for left_out in {(tied[s.tensor], s.axis, s.slice) for s in group.slots}:
            places = {s: (tied[s.tensor], s.axis, s.slice) for s in group.slots}
            kept = [slot for slot, place in places.items() if place != left_out]
            slot = next(slot for slot, place in places.items() if place == left_out)
            change = _change(name, Move(_with(group, group.kind, kept), element))
            unseen = _unseen(name, group, slot) or slot.tensor.startswith(UNREAD.get(name, "-"))
            assert change <= ROUNDING if unseen else change > VISIBLE, (group.name, slot.tensor)
            tried += 1
    assert tried >= 19


# Attention


def _reflection(heads: int, dim: int) -> Tensor:
    element = torch.eye(dim, dtype=torch.float64).repeat(heads, 1, 1)
    element[:, 0, 0] = -1
    return element


def _frequencies_exchanged(heads: int, dim: int) -> Tensor:
    order = torch.arange(dim).reshape(2, -1).roll(1, 1).flatten()
    return torch.eye(dim, dtype=torch.float64)[order].repeat(heads, 1, 1)


def _rotation(heads: int, dim: int) -> Tensor:
    return HeadRotation(heads, dim).random(seeded(2))


@pytest.mark.parametrize("drawn", [_reflection, _frequencies_exchanged, _rotation])
@pytest.mark.parametrize("name", [*ROTARY, *NORMED])
def test_rotary_heads_neither_reflect_nor_rotate(name: str, drawn: Callable[[int, int], Tensor]) -> None:
    for group in _of_kind(name, RotaryPhases, RotarySigns):
        heads, dim = _heads(group)
        if dim == 2 and drawn is not _reflection:  # one frequency, whose rotations are phases
            assert name == "gpt-neox-tokens"
            continue
        turned = _with(group, HeadRotation(heads, dim))
        assert _change(name, Move(turned, drawn(heads, dim))) > VISIBLE


@pytest.mark.parametrize("name", PARTIAL)
def test_units_that_are_turned_do_not_mix_with_those_that_are_not(name: str) -> None:
    for group in _groups(name, lambda g: g.name.endswith("qk.scale")):
        dim = next(s.size for s in group.slots if s.contravariant) // group.kind.units
        kind = HeadRotation(group.kind.units, dim)
        assert _change(name, Move(_with(group, kind), kind.random(seeded(3)))) > VISIBLE


@pytest.mark.parametrize("name", [name for name in GROUPED if name in ROTARY])
def test_query_heads_of_one_key_head_share_its_phases(name: str) -> None:
    for group in _of_kind(name, RotaryPhases):
        heads, (keys, dim) = _of_kind(name, QueryPermutation)[0].kind.units, _heads(group)
        query, key = _side(group, False), _side(group, True)
        own = RotaryPhases(heads, dim)
        phases = group.kind.random(seeded(4))
        shared = phases.repeat_interleave(heads // keys, 0)
        other = shared.clone()
        other[1] += 1
        follows = Move(key, phases)
        assert _change(name, Move(_with(query, own), shared), follows) <= ROUNDING
        assert _change(name, Move(_with(query, own), other), follows) > VISIBLE


@pytest.mark.parametrize("name", NORMED)
def test_a_norm_on_queries_and_keys_leaves_the_phases_0_and_pi(name: str) -> None:
    for group in _of_kind(name, RotarySigns):
        kind = RotaryPhases(*_heads(group))
        halves = (torch.arange(kind.heads * kind.dim // 2) % 2).reshape(kind.heads, -1).double()
        assert _change(name, Move(_with(group, kind), torch.pi * halves)) <= ROUNDING
        assert _change(name, Move(_with(group, kind), torch.pi * halves + 0.1)) > VISIBLE


def _mixing(heads: int, dim: int) -> Tensor:
    """Return what turns every unit of head 0 with the same unit of head 1, as one head."""
    turn = torch.eye(heads, dtype=torch.float64)
    turn[:2, :2] = torch.tensor([[0.8, -0.6], [0.6, 0.8]])
    return torch.kron(turn, torch.eye(dim, dtype=torch.float64))[None]


@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in ONE_KEY_HEAD])
@pytest.mark.parametrize("pair", ["qk", "vo"])
def test_heads_do_not_mix(name: str, pair: str) -> None:
    """Not even by a rotation of equal units, which commutes with rotary positions."""
    for values in _groups(name, lambda g: g.name.endswith("vo")):
        heads, dim = _heads(values)
        groups = {g.name: g for g in symmetry_for(name).groups}
        # Where a norm allows no scale, what moves with the heads and is no value is query or key.
        scaled = groups.get(f"{values.name.removesuffix('vo')}qk.scale") or groups[values.within]
        slots = [slot for slot in scaled.slots if slot not in values.slots]
        mixed = _with(values, HeadRotation(1, heads * dim), values.slots if pair == "vo" else slots)
        assert _change(name, Move(mixed, _mixing(heads, dim))) > VISIBLE


@pytest.mark.parametrize("name", SEPARATE)
def test_content_does_not_rotate_without_positions(name: str) -> None:
    for group in _groups(name, lambda g: g.name.endswith("qk")):
        content = [slot for slot in group.slots if ".pos_" not in slot.tensor]
        assert len(content) < len(group.slots)
        element = group.kind.random(seeded(5))
        assert _change(name, Move(_with(group, group.kind, content), element)) > VISIBLE


@pytest.mark.parametrize("name", SHARED)
def test_heads_that_share_a_bias_move_in_all_layers_or_none(name: str) -> None:
    for group in _groups(name, lambda g: g.part == "heads" and g.layer == NO_LAYER):
        bias = [slot for slot in group.slots if "relative_attention_bias" in slot.tensor]
        layer = ".block.0." if ".block.0." in bias[0].tensor else ".encoder.layer.0."
        first = [slot for slot in group.slots if layer in slot.tensor and slot not in bias]
        assert len(bias) == 1
        assert 2 * len(first) == len(group.slots) - 1
        rest = [slot for slot in group.slots if slot not in bias]
        element = _moving(group.kind, 6)
        for slots in (first, [*first, *bias], rest, bias):
            assert _change(name, Move(_with(group, group.kind, slots), element)) > VISIBLE


@pytest.mark.parametrize("name", [name for name in GROUPED if name not in ONE_KEY_HEAD])
def test_query_heads_stay_with_their_key_head(name: str) -> None:
    for group in _of_kind(name, QueryPermutation):
        heads = group.kind.units
        order = torch.arange(heads)
        order[[0, -1]] = order[[-1, 0]]
        assert _change(name, Move(_with(group, HeadPermutation(heads)), order)) > VISIBLE


@pytest.mark.parametrize("name", KEY_BIAS)
def test_biases_of_keys_show_where_scores_depend_on_positions_through_them(name: str) -> None:
    state, rng = state_of(name), seeded(7)
    tried = 0
    for group in _groups(name, lambda g: g.part == "attention"):
        for slot in filter(lambda s: _is_key_bias(name, s), group.slots):
            bias = state[slot.tensor].clone()
            slot.slice.write(bias, 0, slot.of(bias) + torch.randn(slot.size, generator=rng).double())
            change = _changed(name, {**state, slot.tensor: bias}, _before(name))
            assert change <= ROUNDING if _unseen(name, group, slot) else change > VISIBLE
            tried += 1
    assert tried >= 1


# Feed-forward


def _one_sign(n: int) -> Tensor:
    element = torch.arange(1, n + 1)
    element[n // 2] *= -1
    return element


@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in GATED])
def test_neurons_without_a_gate_have_no_sign(name: str) -> None:
    for group in _groups(name, lambda g: g.part == "ffn"):
        signed = _with(group, SignedPermutation(group.kind.units))
        assert _change(name, Move(signed, _one_sign(group.kind.units))) > VISIBLE


@pytest.mark.parametrize("name", GATED)
def test_the_sign_of_gated_neurons_is_that_of_up_and_down(name: str) -> None:
    for group in _groups(name, lambda g: g.part == "ffn" and _signed(g)):
        sign = _one_sign(group.kind.units)
        if isinstance(group.kind, ExpertNeurons):
            sign = (_one_sign(group.kind.n)).expand(group.kind.experts, -1)
        on_gate = [s if s.contravariant else replace(s, unsigned=not s.unsigned) for s in group.slots]
        assert sum(slot.unsigned for slot in on_gate) == sum(slot.unsigned for slot in group.slots)
        assert _change(name, Move(group, sign)) <= ROUNDING
        assert _change(name, Move(_with(group, group.kind, on_gate), sign)) > VISIBLE


@pytest.mark.parametrize("name", MIXTURES)
def test_neurons_do_not_change_experts(name: str) -> None:
    """Neither two of them, nor all neurons of two experts without the router's rows."""
    for group in _groups(name, lambda g: isinstance(g.kind, ExpertNeurons)):
        assert isinstance(group.kind, ExpertNeurons)
        experts, state = group.kind.experts, state_of(name)
        for slot in group.slots:
            units = slot.of(state[slot.tensor]).movedim(slot.axis, 1)
            units[:2, 0] = units[:2, 0].flip(0).clone()
        assert _changed(name, state, _before(name)) > VISIBLE
        order = torch.arange(experts).roll(1)
        whole = next(g for g in symmetry_for(name).groups if g.name == group.within)
        inner = [slot for slot in whole.slots if "gate.weight" not in slot.tensor]
        assert len(inner) == 2
        assert _change(name, Move(whole, order)) <= ROUNDING
        assert _change(name, Move(_with(whole, whole.kind, inner), order)) > VISIBLE


@pytest.mark.parametrize("name", ALIBI)
def test_heads_with_slopes_of_their_own_do_not_change_places(name: str) -> None:
    """The order of heads is a symmetry of all else that the layer computes."""
    for values in _groups(name, lambda g: g.name.endswith("vo.scale")):
        groups = {g.name: g for g in symmetry_for(name).groups}
        scores = groups[f"{values.name.removesuffix('vo.scale')}qk.scale"]
        heads = values.kind.units
        moved = _with(values, HeadPermutation(heads), (*scores.slots, *values.slots))
        assert _change(name, Move(moved, torch.arange(heads).roll(1))) > VISIBLE


# The residual stream, and the hidden units of task heads


def _normed_streams(name: str) -> list[Group]:
    """Return the groups of streams that a norm reads: some smaller embeddings pass none."""
    streams = _groups(name, lambda g: g.part == "residual")
    found = [group for group in streams if any(slot.unsigned for slot in group.slots)]
    assert len(found) + (name in UNNORMED) == len(streams)
    return found


@pytest.mark.parametrize("name", LAYERNORM)
def test_layer_norm_allows_no_sign_of_one_coordinate(name: str) -> None:
    for group in _normed_streams(name):
        signed = _with(group, SignedPermutation(group.kind.units))
        assert _change(name, Move(signed, _one_sign(group.kind.units))) > VISIBLE


@pytest.mark.parametrize("name", ["bert", "albert", "bart", "vit", "clip", "gpt2", "gpt-neox"])
def test_layer_norm_allows_one_sign_of_the_whole_stream(name: str) -> None:
    """Unless an activation stands in the stream, as in heads that predict tokens; left unused."""
    for group in _normed_streams(name):
        signed = _with(group, SignedPermutation(group.kind.units))
        assert _change(name, Move(signed, -torch.arange(1, group.kind.units + 1))) <= ROUNDING


@pytest.mark.parametrize(
    "name", ["electra", "deberta", "deberta-v2", "deberta-v2-conv", "modernbert-biased"]
)
def test_hidden_units_of_a_head_without_an_odd_activation_have_no_sign(name: str) -> None:
    for group in _groups(name, lambda g: g.part == "output"):
        signed = _with(group, SignedPermutation(group.kind.units))
        assert type(group.kind) is Permutation
        assert _change(name, Move(signed, _one_sign(group.kind.units))) > VISIBLE


@pytest.mark.parametrize("name", RMS)
def test_signs_of_an_rms_norm_s_stream_pass_its_gains(name: str) -> None:
    for group in _groups(name, lambda g: g.part == "residual"):
        sign = _one_sign(group.kind.units)
        everywhere = [replace(slot, unsigned=False) for slot in group.slots]
        assert sum(slot.unsigned for slot in group.slots) >= 5
        assert _change(name, Move(group, sign)) <= ROUNDING
        assert _change(name, Move(_with(group, group.kind, everywhere), sign)) > VISIBLE


@pytest.mark.parametrize("name", FIXED)
def test_fixed_positions_are_all_that_holds_their_stream(name: str) -> None:
    model, state = model_of(name), state_of(name)
    family = family_of(model.config.to_dict(), FAMILIES)
    names = {key.removeprefix("model."): key for key in state}
    body, heads = family.describe(model.config.to_dict(), names)
    slots = [
        Slot(names[key], axis, Slice(0, state[names[key]].shape[axis]))
        for key, entries in {**body.axes, **heads}.items()
        for axis, entry in enumerate(entries)
        if entry and key in names
    ]
    kind = Permutation(slots[0].slice.stop)
    move = Move(Group("stream", NO_LAYER, "residual", kind, tuple(slots)), _moving(kind, 9))
    for positions in (True, False):
        if not positions:
            model.model.embed_positions.weights.zero_()
        model.load_state_dict(state)
        before = answers(name, model)
        model.load_state_dict(apply_moves(state, [move]))
        change = (answers(name, model) - before).abs().max() / before.abs().max()
        assert change > VISIBLE if positions else change <= ROUNDING


def _turned(group: Group) -> Move:
    """Return one rotation of the whole stream, which leaves gains where they are."""
    kind = HeadRotation(1, group.kind.units)
    return Move(_with(group, kind, (s for s in group.slots if not s.unsigned)), kind.random(seeded(8)))


@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in (*BARE, *FIXED)])
def test_gains_allow_no_rotation_of_the_stream(name: str) -> None:
    for group in _normed_streams(name):
        assert _change(name, _turned(group)) > VISIBLE


@pytest.mark.parametrize("name", RMS)
def test_without_gains_rms_norm_allows_every_rotation_of_the_stream(name: str) -> None:
    """What folding the gains into the layers would make of the group; it is left unused."""
    state = state_of(name)
    (group,) = _groups(name, lambda g: g.part == "residual")
    for slot in (slot for slot in group.slots if slot.unsigned):
        state[slot.tensor] = torch.full_like(state[slot.tensor], 0.0 if name == "gemma3" else 1.0)
    moved = apply_moves(state, [_turned(group)])
    assert _changed(name, moved, outputs(name, state)) <= ROUNDING
