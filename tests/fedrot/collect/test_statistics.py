"""Every kind of statistics keeps one contract: how it is checked, collected, and moved
with weights.

What moves is compared with the same statistics recomputed on the moved model of every
family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedrot import Alignment, AlignmentReport, FedrotError, collect_gram
from fedrot.aggregation import Mean, check_statistics
from fedrot.check import Float64
from fedrot.collect.statistics import (
    INPUT_AXIS,
    STATISTIC_KINDS,
    brings,
    kind_named,
    semidefinite,
    transport_statistics,
)
from fedrot.errors import UpdateError
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.rotary_actions import RotaryPhases
from tests.families import KINDS, answers, inputs, model_of, state_of, symmetry_for
from tests.fedrot.oracles import gap, normal, random_moves, seeded
from tests.models import (
    changed,
    copied,
    largest_difference,
    movable,
    same,
    tensors_of,
)

OUT, IN = 3, 6
EYE, ONES, BIAS = torch.eye(IN), torch.ones(OUT, IN), torch.ones(OUT)
#: Matrices whose first entry hides that they are no Gram matrices.
HIDING = {
    "a pair": ([[1e6, 0, 0], [0, 0, 1e3], [0, 1e3, 0]], "negative"),
    "a negative": ([[1e6, 0, 0], [0, -1e3, 0], [0, 0, 1]], "negative"),
    "a turn": ([[1e6, 0, 0], [0, 1, 0.5], [0, -0.5, 1]], "symmetric"),
}


@dataclass(frozen=True)
class Case:
    """Good and bad values of a kind, bad ones with a word of the error.

    Attributes:
        shape: of the weight, ``[in, out]`` for ``Conv1D``.
        collected: whether the kind is computed from batches under its own name.
        rotates: whether it follows rotations of heads.
    """

    good: list[Tensor]
    bad: Mapping[str, tuple[Tensor, str]]
    collected: bool = False
    rotates: bool = True
    shape: tuple[int, int] = (OUT, IN)


X = (
    torch.randn(50, IN, generator=seeded(0)).double()
    * torch.logspace(0, -3, IN).double()
)
GRAM_GOOD = [
    (X.mT @ X / (X.mT @ X).max() * largest).to(dtype)
    for largest in (1e-40, 1e-20, 1.0, 9e29)
    for dtype in (torch.bfloat16, torch.float32, torch.float64)
]
GRAM_BAD = {
    "half": (EYE.half(), "float16"),
    "integers": (EYE.long(), "int64"),
    "nan": (EYE * torch.nan, "NaN"),
    "too large": (EYE * 2e30, "above"),
    "size": (torch.eye(4), "shape"),
    "vector": (torch.ones(IN), "shape"),
    "negative": (-EYE, "negative"),
    "skew": (EYE + torch.triu(torch.ones(IN, IN), 1), "symmetric"),
    **{
        f"{name}, times {scale:g}": (
            torch.block_diag(torch.tensor(corner), torch.eye(3)) * scale,
            word,
        )
        for name, (corner, word) in HIDING.items()
        for scale in (1.0, 1e-40, 1e23)
    },
}
FISHER_BAD = {
    "nan": (ONES * torch.nan, "NaN"),
    "negative": (-ONES, "negative"),
    "inf in half": ((ONES * torch.inf).half(), "Inf"),
    "integers": (ONES.long(), "floating"),
    "transposed": (ONES.T, "shape"),
    "number": (torch.tensor(1.0), "shape"),
}
TRAINED_GOOD = [torch.tensor(True), torch.tensor([True, False, True])]
TRAINED_BAD = {
    "float": (BIAS, "bool"),
    "columns": (torch.ones(IN, dtype=torch.bool), "rows"),
}
CASES = {
    "gram": Case(GRAM_GOOD, GRAM_BAD, collected=True),
    "gram_conv1d": Case(GRAM_GOOD, GRAM_BAD, shape=(IN, OUT)),
    "fisher": Case([ONES, ONES.half()], FISHER_BAD, collected=True, rotates=False),
    "trained": Case(TRAINED_GOOD, TRAINED_BAD),
}
EVERY = pytest.mark.parametrize("kind", CASES)


def test_every_kind_has_a_case():
    assert CASES.keys() == STATISTIC_KINDS.keys()
    for name, case in CASES.items():
        kind = kind_named(name)
        assert (kind.name, kind.follows_rotations) == (name, case.rotates)
        assert (kind.collect is not None) == case.collected
        assert kind.meaning


@EVERY
def test_good_values_are_taken(kind):
    for value in CASES[kind].good:
        check_statistics({kind: {"w": value}}, {"w": CASES[kind].shape})


@pytest.mark.parametrize(
    ("kind", "what"),
    [(kind, what) for kind, case in CASES.items() for what in case.bad],
)
def test_bad_values_are_refused_by_kind_and_tensor(kind, what):
    value, word = CASES[kind].bad[what]
    with pytest.raises(UpdateError, match=f"{kind} .*'w' .*{word}"):
        check_statistics({kind: {"w": value}}, {"w": CASES[kind].shape})


@EVERY
def test_tensors_of_another_shape_and_unknown_ones_are_refused(kind):
    """One object for two layers is checked against both."""
    value = CASES[kind].good[-1]
    shape = CASES[kind].shape
    check_statistics({kind: {"w": value, "same": value}}, {"w": shape, "same": shape})
    for names in (("w", "other"), ("other", "w")):
        with pytest.raises(UpdateError, match="'other'"):
            check_statistics(
                {kind: dict.fromkeys(names, value)}, {"w": shape, "other": (4, 4)}
            )
    with pytest.raises(UpdateError, match="'nowhere'"):
        check_statistics({kind: {"nowhere": value}}, {"w": shape})
    with pytest.raises(UpdateError, match="'nowhere'"):
        transport_statistics({kind: {"nowhere": value}}, (), {"w": shape})
    if kind not in ("trained", "fisher"):
        with pytest.raises(UpdateError, match="no matrix"):
            check_statistics({kind: {"w": value}}, {"w": (IN,)})


def test_an_unknown_kind_is_refused_at_every_door():
    given = {"hessian": {"fc": BIAS}}
    for refuse in (
        lambda: kind_named("hessian"),
        lambda: check_statistics(given, {"fc": (OUT,)}),
        lambda: transport_statistics(given, (), {"fc": (OUT,)}),
        lambda: Mean().add({"fc": BIAS}, 1.0, given),
    ):
        with pytest.raises(UpdateError, match="'hessian'; known kinds: gram"):
            refuse()


def test_matrices_of_either_orientation_count_as_one_kind():
    for sent, asked in product(INPUT_AXIS, repeat=2):
        assert brings({sent: {"w": EYE}}, asked)
        assert not brings({sent: {}, "fisher": {"w": ONES}}, asked)
    assert brings({"fisher": {"w": ONES}}, "fisher")
    assert not brings({"gram": {"w": EYE}}, "fisher")


# Moves


def random_alignment(name, rotating=None):
    """Return a random element of every group, or of those that rotate or do not."""
    symmetry = symmetry_for(name)
    moves = [
        move
        for move in random_moves(symmetry, 1, movable(symmetry))
        if rotating
        in (None, isinstance(move.group.action, HeadRotation | RotaryPhases))
    ]
    return Alignment(symmetry, tuple(moves), AlignmentReport((), 0, 0, 0))


def collected(name, state):
    with Float64():
        return collect_gram(model_of(name, state), [inputs(name)])


@pytest.mark.parametrize("name", KINDS)
def test_gram_matrices_follow_a_random_element_of_all_parts(name):
    state = state_of(name)
    alignment = random_alignment(name)
    before, after = (collected(name, s) for s in (state, alignment.apply(state)))
    kept = {kind: copied(by_name) for kind, by_name in before.items()}
    moved = alignment.transport(before)
    assert moved.keys() == after.keys() == before.keys()
    for kind, expected in after.items():
        assert same(before[kind], kept[kind])
        assert moved[kind].keys() == expected.keys()
        far = set()
        for key, value in expected.items():
            found = moved[kind][key]
            assert value.dtype == found.dtype == torch.float64
            assert gap(found, value) <= 1e-9 * value.abs().max(), key
            old = before[kind][key]
            if gap(old, value) > 1e-3 * old.abs().max():
                far.add(key)
        read = {
            slot.tensor
            for move in alignment.moves
            if move.group.action.moved(move.element).any()
            for slot in move.group.slots
            if slot.axis == INPUT_AXIS[kind]
        }
        assert far == read & expected.keys()
    assert ("gram_conv1d" in after) == name.startswith("gpt2")


def squares_of(name, state):
    """Return the squared gradients of one loss, by every name of a parameter that the
    loss sees.
    """
    model = model_of(name, state)
    out = answers(name, model)
    ((out - normal(seeded(2), out.shape)).square() + 3 * out.sin()).sum().backward()
    named = model.named_parameters(remove_duplicate=False)
    return {key: p.grad.square() for key, p in named if p.grad is not None}


@pytest.mark.parametrize("name", KINDS)
def test_squares_of_gradients_follow_what_does_not_rotate(name):
    state = state_of(name)
    alignment = random_alignment(name, rotating=False)
    before, after = (squares_of(name, s) for s in (state, alignment.apply(state)))
    scale = max(float(value.max()) for value in after.values())
    moved = alignment.transport({"fisher": before})["fisher"]
    assert largest_difference(moved, after) <= 1e-9 * scale
    rotating = random_alignment(name, rotating=True)
    with pytest.raises(FedrotError, match="rotation"):
        rotating.transport({"fisher": before})
    # Tensors that are not rotated still travel, and are the same objects.
    turned = tensors_of(move.group for move in rotating.moves)
    others = {key: before[key] for key in before.keys() - turned}
    assert others
    found = rotating.transport({"fisher": others})["fisher"]
    assert all(found[key] is value for key, value in others.items())


@pytest.mark.parametrize("name", KINDS)
def test_masks_follow_the_rows_they_mark(name):
    """Rows set to zero where nothing was trained are zero in the moved model where its
    mask says so.
    """
    alignment = random_alignment(name, rotating=False)
    marked = state_of(name)
    rng = seeded(1)
    masks = {}
    for i, (key, value) in enumerate(marked.items()):
        if value.is_floating_point() and value.ndim:
            some = torch.rand(len(value), generator=rng) < 0.5
            masks[key] = some if i % 5 else torch.tensor(bool(i % 2))
            kept = masks[key].expand(len(value))
            shape = (-1, *[1] * (value.ndim - 1))
            marked[key] = (1 + value.abs()) * kept.reshape(shape)
    after = alignment.apply(marked)
    moved = alignment.transport({"trained": masks})["trained"]
    assert moved.keys() == masks.keys()
    for key, mask in moved.items():
        assert (mask.dtype, mask.shape) == (torch.bool, masks[key].shape)
        rows = after[key].reshape(len(after[key]), -1).any(1)
        assert torch.equal(mask.expand(len(rows)), rows), key
    assert changed(moved, masks)


LAYER = "bert.encoder.layer.0.attention"


def test_masks_of_all_rows_or_none_pass_a_rotation_and_others_do_not():
    alignment = random_alignment("bert", rotating=True)

    def moved(name, mask):
        masks = {f"{LAYER}.{name}.weight": mask}
        return alignment.transport({"trained": masks})["trained"].popitem()[1]

    some = torch.arange(24) < 5
    for mask in (torch.tensor(True), torch.tensor(False), some | True, some & False):
        assert torch.equal(moved("self.query", mask), mask)
    with pytest.raises(FedrotError, match="rotation"):
        moved("self.query", some)
    # Rows of the output projection are places in the residual stream, which no rotation
    # of heads moves.
    assert moved("output.dense", some) is some


def test_shared_matrices_stay_shared_and_one_object_moves_as_each_name_does():
    """The caller may pass one object for layers whose inputs do not move alike. Several
    kinds travel together, in their dtypes.
    """
    alignment = random_alignment("bert")
    grams = collect_gram(model_of("bert"), [inputs("bert")])["gram"]
    moved = alignment.transport({"gram": grams})["gram"]
    assert len({id(gram) for gram in grams.values()}) < len(grams)
    for one, other in product(grams, grams):
        assert (grams[one] is grams[other]) == (moved[one] is moved[other])
    names = ("self.query", "self.key", "output.dense")
    keys = [f"{LAYER}.{name}.weight" for name in names]
    gram = grams[keys[2]]
    together, apart = (
        alignment.transport({"gram": each})["gram"]
        for each in (dict.fromkeys(keys, gram), {key: gram.clone() for key in keys})
    )
    assert same(together, apart)
    assert not torch.equal(together[keys[0]], together[keys[2]])
    sent = {
        "gram": gram,
        "fisher": torch.ones(24, 24).bfloat16(),
        "trained": torch.arange(24) < 5,
    }
    still = random_alignment("bert", rotating=False)
    out = still.transport({kind: {keys[2]: value} for kind, value in sent.items()})
    for kind, value in sent.items():
        assert out[kind][keys[2]].dtype == value.dtype


@EVERY
def test_kinds_are_collected_with_and_without_their_limit_or_say_that_they_are_not(
    kind,
):
    if not CASES[kind].collected:
        with pytest.raises(FedrotError, match=f"'{kind}' cannot be computed"):
            kind_named(kind).collected(nn.Linear(2, 2), [])
    elif kind == "gram":
        model = nn.Sequential(nn.Linear(2, 2))
        batches = [{"input": torch.full((1, 2), float(i))} for i in range(102)]
        for limited, count in ((True, 100), (False, 102)):
            found = kind_named(kind).collected(model, batches, limited=limited)
            expected = sum(i**2 for i in range(count)) / count
            assert float(found[kind]["0.weight"][0, 1]) == pytest.approx(expected)


def indefinite(matrix, size):
    """Return a symmetric matrix with an eigenvalue of ``-size`` at unit diagonal."""
    scale = matrix.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(matrix / scale[:, None] / scale)
    values[0] = -size
    return vectors @ torch.diag(values) @ vectors.mT * scale[:, None] * scale


def test_negative_eigenvalues_at_unit_diagonal_become_zero():
    """The oracle clips eigenvalues in NumPy; other matrices stay the same object."""
    x = normal(seeded(1), 40, 12)
    x = x * torch.logspace(-0.3, 0.3, 12, dtype=torch.float64)
    gram = x.mT @ x / 40
    moved = indefinite(gram, 0.5)
    found = semidefinite(moved, gram)
    scale = np.sqrt(moved.diagonal().numpy())
    values, vectors = np.linalg.eigh(moved.numpy() / scale[:, None] / scale)
    assert values[0] < -0.3
    # The scales are those of ``check_statistics``, which add a little to the diagonal.
    expected = vectors @ np.diag(values.clip(0)) @ vectors.T
    assert np.allclose(found.numpy() / scale[:, None] / scale, expected, atol=1e-2)
    root = found.diagonal().sqrt()
    assert float(torch.linalg.eigvalsh(found / root[:, None] / root)[0]) > -1e-9
    assert torch.equal(found, found.mT)
    # Neither a Gram matrix, nor what was none when it arrived.
    rounded = gram.bfloat16().double()
    for value, received in (
        (gram, gram),
        (rounded, gram),
        (moved, indefinite(gram, 0.4)),
    ):
        assert semidefinite(value, received) is value
