"""Options: what they restrict, and which are refused."""

import numpy as np
import pytest
import torch

from fedrot import WHOLE_MODEL, AlignmentOptions, FedrotError, align, random_equivalent
from fedrot.symmetry import NO_LAYER
from tests import families
from tests.fedrot.oracles import gap
from tests.fedrot.pairs import touched_by
from tests.models import (
    CASES,
    EVERYTHING,
    FULL,
    LAYERS,
    align_tensors,
    logits,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"


@pytest.mark.parametrize(
    ("layers", "parts", "chosen"),
    [
        ("all", FULL, (0, 1)),
        ("first:1", ("attention",), (0,)),
        ("last:1", ("ffn",), (1,)),
        ("first:9", ("ffn",), (0, 1)),
        ("last:9", ("ffn",), (0, 1)),
        ("last:0", FULL, ()),
        ([0], FULL, (0,)),
        ((1, 0), ("attention",), (0, 1)),
        ([], FULL, ()),
        ({1}, ("attention",), (1,)),
        (range(1, 2), ("ffn",), (1,)),
        (np.array([1]), ("ffn",), (1,)),
    ],
)
def test_layers_and_parts_restrict_what_moves(layers, parts, chosen):
    anchor, update, symmetry = (
        state_of(NAME),
        state_of(NAME, seed=3),
        symmetry_for(NAME),
    )
    options = AlignmentOptions(parts=parts, layers=layers, chance=0)
    aligned = align_tensors(update, anchor, symmetry, options)
    changed = {key for key in update if not torch.equal(aligned[key], update[key])}
    assert changed == touched_by(CASES[NAME].names, parts, chosen)


REFUSED = [
    *(
        ({"layers": layers}, "'first:N'")
        for layers in ("", "first", "first:", "first:-1", "last")
    ),
    *(
        ({"layers": layers}, "'last:N'")
        for layers in ("last:x", "middle:1", "first:1.5", "first:²")
    ),
    *(
        ({"layers": layers}, "(?i)layer .* is not in the model")
        for layers in ([2], [0, -1])
    ),
    ({"layers": 1}, r"\[1\]"),
    # It would be empty the second time it is read.
    ({"layers": iter([1])}, "give a list of indices"),
    ({"parts": ("atention",)}, "atention"),
    ({"parts": "attention"}, r"write parts=\('attention',\)"),
    ({"parts": "attention+ffn"}, r"write parts=\('attention', 'ffn'\)"),
    ({"parts": "whole+heads"}, "write parts=a tuple of some of"),
    ({"parts": "atention"}, r"a tuple of some of \('residual', "),
    *(({"chance": value}, "chance") for value in (-1.0, float("nan"), float("inf"))),
    ({"within_heads": "order"}, "within_heads"),
    *(
        ({"activation_weight": value}, "activation_weight")
        for value in (-0.1, 1.1, float("nan"))
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_bad_options_are_refused(settings, message):
    with pytest.raises(FedrotError, match=message):
        AlignmentOptions(**settings).layer_indices(LAYERS)


@pytest.mark.parametrize("value", [0, 1])
def test_the_ends_of_ranges_are_allowed(value):
    assert AlignmentOptions(chance=value, activation_weight=value).chance == value


def test_the_whole_model_has_a_name_and_parts_may_be_any_sequence():
    assert AlignmentOptions(parts="whole") == AlignmentOptions(WHOLE_MODEL)
    assert (
        len(
            {
                AlignmentOptions(parts=["heads"]),
                AlignmentOptions(("heads",)),
            }
        )
        == 1
    )


def test_random_equivalent_refuses_unknown_parts():
    with pytest.raises(FedrotError, match="neurons"):
        random_equivalent(state_of(NAME), symmetry_for(NAME), parts=("neurons",))


@pytest.mark.parametrize("layers", ["first:1", []])
def test_layers_do_not_restrict_what_belongs_to_none(layers):
    """The residual stream and the task head are of the whole model, whatever layers are
    chosen.
    """
    anchor, update, symmetry = state_of(NAME), state_of(NAME, 3), symmetry_for(NAME)
    options = AlignmentOptions(parts=EVERYTHING, layers=layers)
    alignment = align(update, anchor, symmetry, options)
    chosen = options.layer_indices(LAYERS)
    assert {move.group.layer for move in alignment.moves} - {NO_LAYER} == set(chosen)
    assert {m.group.part for m in alignment.moves if m.group.layer == NO_LAYER} == {
        "residual",
        "output",
    }
    assert {row["layer"] for row in alignment.report.rows()} == {NO_LAYER, *chosen}
    assert gap(logits(NAME, alignment.apply(update)), logits(NAME, update)) <= 1e-10


def test_parts_that_cannot_be_moved_are_left_out_but_the_stream():
    whole = AlignmentOptions(WHOLE_MODEL)
    bloom = whole.movable(families.symmetry_for("bloom"))
    assert bloom.parts == tuple(part for part in WHOLE_MODEL if part != "heads")
    assert whole.movable(families.symmetry_for("xglm")).parts == WHOLE_MODEL
    assert whole.movable(families.symmetry_for("gpt2")) == whole
