"""Just outside the claimed groups the outputs change: the tests of function
preservation bite.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from fedrot.symmetry.actions import (
    HeadPermutation,
    HeadRotation,
    QueryPermutation,
)
from fedrot.symmetry.describe.mixture import ExpertNeurons
from fedrot.symmetry.groups import NO_LAYER, Move, apply_moves
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from fedrot.symmetry.signs import SignedPermutation
from tests import families
from tests.families import KINDS, MEMBERS, model_of, outputs, state_of, symmetry_for
from tests.fedrot.oracles import eye, gap, seeded
from tests.fedrot.symmetry import traits

#: A change of the outputs, relative to the largest, that no rounding makes, and one
#: that it may.
VISIBLE, ROUNDING = 1e-4, 1e-9

#: One member of each kind of structure, and those whose claims no other of these has.
TRIED = (
    *KINDS,
    "electra",
    "mpnet",
    "deberta",
    "deberta-v2-conv",
    "clip",
    "gpt-neox-tokens",
)
TRIED += ("phi3-partial", "qwen3", "falcon-40b", "modernbert-biased")

#: Models whose embeddings lie in a space of their own that no norm reads.
UNNORMED = ("deberta-embedding", "opt-projected")

CASES = []


def outside(
    *members,
):
    """Return a decorator that runs a check with those of the members that are tried."""

    def register(check):
        found = [name for name in dict.fromkeys(TRIED) if name in members]
        CASES.extend(
            pytest.param(check, name, id=f"{check.__name__}-{name}") for name in found
        )
        assert found
        return check

    return register


@cache
def _before(name):
    return outputs(name, state_of(name))


def _changed(name, state, before):
    """Return the largest change of an output, relative to the largest output."""
    return float(gap(outputs(name, state), before) / before.abs().max())


def _change(name, *moves):
    return _changed(name, apply_moves(state_of(name), moves), _before(name))


def _groups(name, wanted):
    """Return the groups of a member that are wanted, of which there is at least one."""
    found = [group for group in symmetry_for(name).groups if wanted(group)]
    assert found, f"{name} has no such group"
    return found


def _of_kind(name, *kinds):
    return _groups(name, lambda group: type(group.action) in kinds)


def _with(group, action, slots=None):
    return replace(
        group, action=action, slots=group.slots if slots is None else tuple(slots)
    )


def _moving(action, seed):
    """Return a random element that moves something."""
    rng = seeded(seed)
    element = action.random(rng)
    while not action.moved(element).any():
        element = action.random(rng)
    return element


def _signed(group):
    return isinstance(group.action, SignedPermutation | ExpertNeurons)


def _is_key_bias(name, slot):
    return slot.contravariant and len(symmetry_for(name).shapes[slot.tensor]) == 1


def _unseen(name, group, slot):
    """Whether a slot is a bias that adds the same to all scores of a query."""
    if not _is_key_bias(name, slot):
        return False
    still = traits.KEY_BIAS[name] == "not turned" and group.name.endswith("qk.still")
    return traits.KEY_BIAS[name] == "all" or still or "pos_key_proj" in slot.tensor


CLAIMS = {
    "phases": (lambda _, g: isinstance(g.action, RotaryPhases), traits.ROTARY),
    "signs of frequencies": (
        lambda _, g: isinstance(g.action, RotarySigns),
        traits.NORMED,
    ),
    "units that do not turn": (
        lambda _, g: g.name.endswith("qk.still"),
        traits.PARTIAL,
    ),
    "orders of queries": (
        lambda _, g: isinstance(g.action, QueryPermutation),
        traits.GROUPED,
    ),
    "signs of neurons": (lambda _, g: g.part == "ffn" and _signed(g), traits.GATED),
    "signs of the stream": (
        lambda _, g: g.part == "residual" and _signed(g),
        traits.RMS,
    ),
    "orders of the stream": (
        lambda _, g: g.part == "residual" and not _signed(g),
        traits.LAYERNORM,
    ),
    "heads of all layers": (
        lambda _, g: g.part == "heads" and g.layer == NO_LAYER,
        traits.SHARED,
    ),
    "biases of keys": (
        lambda n, g: any(_is_key_bias(n, slot) for slot in g.slots),
        traits.KEY_BIAS,
    ),
}


@pytest.mark.parametrize(("having", "expected"), CLAIMS.values(), ids=CLAIMS)
def test_members_claim_what_their_models_allow(having, expected):
    found = {
        name
        for name in MEMBERS
        if any(having(name, g) for g in symmetry_for(name).groups)
    }
    assert found == set(expected)


@pytest.mark.parametrize("name", KINDS)
def test_a_group_that_leaves_out_one_slot_changes_the_outputs(name):
    """In the first layer of each stack, and in every tensor of what crosses layers."""
    tied = {
        key: id(value)
        for key, value in model_of(name).state_dict(keep_vars=True).items()
    }
    tried = 0
    for group in _groups(
        name, lambda g: g.layer in (NO_LAYER, 0, 2) and g.action.units > 1
    ):
        element = _moving(group.action, 1)
        places = {s: (tied[s.tensor], s.axis, s.slice) for s in group.slots}
        for left_out in {*places.values()}:
            kept = [slot for slot, place in places.items() if place != left_out]
            slot = next(slot for slot, place in places.items() if place == left_out)
            change = _change(name, Move(_with(group, group.action, kept), element))
            rounding = _unseen(name, group, slot)
            assert change <= ROUNDING if rounding else change > VISIBLE, (
                group.name,
                slot.tensor,
            )
            tried += 1
    assert tried >= 19


# Attention


@outside(*traits.ROTARY, *traits.NORMED)
def rotary_heads_neither_reflect_nor_rotate(name):
    for group in _of_kind(name, RotaryPhases, RotarySigns):
        heads = group.action.heads
        dim = group.action.dim
        unit = eye(dim)
        reflection = unit.clone()
        reflection[0, 0] = -1
        exchanged = unit[torch.arange(dim).reshape(2, -1).roll(1, 1).flatten()]
        action = HeadRotation(heads, dim)
        elements = [m.repeat(heads, 1, 1) for m in (reflection, exchanged)]
        elements.append(action.random(seeded(2)))
        if dim == 2:  # one frequency, whose rotations are phases
            assert name == "gpt-neox-tokens"
            elements = elements[:1]
        for element in elements:
            yield _change(name, Move(_with(group, action), element)), True


@outside(*traits.NORMED)
def a_norm_on_queries_and_keys_leaves_the_phases_0_and_pi(name):
    for group in _of_kind(name, RotarySigns):
        action = RotaryPhases(group.action.heads, group.action.dim)
        halves = (
            (torch.arange(action.heads * action.dim // 2) % 2)
            .reshape(action.heads, -1)
            .double()
        )
        for more in (0, 0.1):
            yield (
                _change(name, Move(_with(group, action), torch.pi * halves + more)),
                more > 0,
            )


@outside(*(name for name in MEMBERS if name not in traits.ONE_KEY_HEAD))
def heads_do_not_mix(name):
    """Not even by a rotation of equal units, which commutes with rotary positions."""
    groups = {g.name: g for g in symmetry_for(name).groups}
    for values in _groups(name, lambda g: g.name.endswith("vo")):
        heads = values.action.heads
        dim = values.action.dim
        turn = eye(heads)
        turn[:2, :2] = torch.tensor([[0.8, -0.6], [0.6, 0.8]])
        mixing = torch.kron(turn, eye(dim))[None]
        scores = groups[f"{values.name.removesuffix('vo')}qk"]
        # Phases move a part of each head: what moves with all of it and is no value is
        # query or key.
        whole = (
            scores if isinstance(scores.action, HeadRotation) else groups[values.within]
        )
        for slots in (
            values.slots,
            [slot for slot in whole.slots if slot not in values.slots],
        ):
            yield (
                _change(
                    name,
                    Move(_with(values, HeadRotation(1, heads * dim), slots), mixing),
                ),
                True,
            )


@outside(*(name for name in traits.GROUPED if name not in traits.ONE_KEY_HEAD))
def query_heads_stay_with_their_key_head(name):
    for group in _of_kind(name, QueryPermutation):
        heads = group.action.units
        order = torch.arange(heads)
        order[[0, -1]] = order[[-1, 0]]
        yield _change(name, Move(_with(group, HeadPermutation(heads)), order)), True


@outside(*families.ALIBI)
def heads_with_slopes_of_their_own_do_not_change_places(name):
    """The order of heads is a symmetry of all else that the layer computes."""
    groups = {g.name: g for g in symmetry_for(name).groups}
    for values in _groups(name, lambda g: g.name.endswith("vo")):
        scores = groups[f"{values.name.removesuffix('vo')}qk"]
        heads = values.action.units
        moved = _with(values, HeadPermutation(heads), (*scores.slots, *values.slots))
        yield _change(name, Move(moved, torch.arange(heads).roll(1))), True


# Feed-forward


def _one_sign(n):
    element = torch.arange(1, n + 1)
    element[n // 2] *= -1
    return element


def _one_signed(name, groups):
    """Change one sign in each of the groups."""
    for group in groups:
        signed = _with(group, SignedPermutation(group.action.units))
        yield _change(name, Move(signed, _one_sign(group.action.units))), True


@outside(*(name for name in MEMBERS if name not in traits.GATED))
def neurons_without_a_gate_have_no_sign(name):
    return _one_signed(name, _groups(name, lambda g: g.part == "ffn"))


# The residual stream


def _normed_streams(name):
    """Return the groups of streams that a norm reads: some smaller embeddings pass
    none.
    """
    streams = _groups(name, lambda g: g.part == "residual")
    found = [group for group in streams if any(slot.unsigned for slot in group.slots)]
    assert len(found) + (name in UNNORMED) == len(streams)
    return found


@outside(*traits.LAYERNORM)
def layer_norm_allows_no_sign_of_one_coordinate(name):
    return _one_signed(name, _normed_streams(name))


def _turned(group):
    """Return one rotation of the whole stream, which leaves gains where they are."""
    action = HeadRotation(1, group.action.units)
    return Move(
        _with(group, action, (s for s in group.slots if not s.unsigned)),
        action.random(seeded(8)),
    )


@outside(*(name for name in MEMBERS if name not in (*traits.BARE, *families.FIXED)))
def gains_allow_no_rotation_of_the_stream(name):
    for group in _normed_streams(name):
        yield _change(name, _turned(group)), True


@outside(*traits.RMS)
def signs_of_an_rms_norm_s_stream_pass_its_gains(name):
    (group,) = _groups(name, lambda g: g.part == "residual")
    sign = _one_sign(group.action.units)
    state = state_of(name)
    everywhere = [replace(slot, unsigned=False) for slot in group.slots]
    yield _change(name, Move(group, sign)), False
    yield _change(name, Move(_with(group, group.action, everywhere), sign)), True
    # Without gains, RMSNorm allows every rotation: what folding them would make of the
    # group.
    for slot in (slot for slot in group.slots if slot.unsigned):
        state[slot.tensor] = torch.full_like(
            state[slot.tensor], 0.0 if name == "gemma3" else 1.0
        )
    yield (
        _changed(name, apply_moves(state, [_turned(group)]), outputs(name, state)),
        False,
    )


@pytest.mark.parametrize(("check", "name"), CASES)
def test_outside_the_group(check, name):
    tried = list(check(name))
    assert tried
    for change, visible in tried:
        assert change > VISIBLE if visible else change <= ROUNDING
