"""RegMean where least squares has no single solution, and with alignment in front of
it.
"""

import numpy as np
import pytest
import torch

from fedrot import WHOLE_MODEL, AlignmentOptions, collect_gram
from fedrot.aggregation import Mean, RegMean
from fedrot.check import Float64
from tests.families import KINDS, inputs, model_of, state_of, symmetry_for
from tests.fedrot.oracles import gap
from tests.fedrot.pairs import scrambled
from tests.models import largest_difference

OUT, IN = 3, 6
KEY = "layer.weight"


def client(weight, gram, share=1.0, kind="gram"):
    """Return what ``add`` takes; a weight ``[out, in]`` of ``Conv1D`` is sent as ``[in,
    out]``.
    """
    tensor = torch.as_tensor(weight if kind == "gram" else weight.T.copy())
    return {KEY: tensor}, share, {kind: {KEY: torch.as_tensor(gram)}}


def added(clients, alpha=1.0):
    regmean = RegMean(alpha)
    for one in clients:
        regmean.add(*one)
    return regmean, regmean.result()[KEY].numpy()


def plain(values, shares):
    return np.average(values, axis=0, weights=shares)


@pytest.mark.parametrize("dead", [(), (0,), (1, 5)], ids=str)
@pytest.mark.parametrize("ranks", [(0,), (2,), (4, 1, 0), (1, 2), (4, 4, 4)], ids=str)
@pytest.mark.parametrize("kind", ["gram", "gram_conv1d"])
def test_unseen_directions_keep_the_mean_and_seen_ones_are_solved(kind, ranks, dead):
    """Inputs of different sizes; the oracle is least squares on the rows of all
    clients.
    """
    rng = np.random.default_rng(len(ranks) + len(dead))
    basis = rng.normal(size=(4, IN)) * 10.0 ** rng.uniform(-2, 2, size=IN)
    basis[:, dead] = 0
    data = [rng.normal(size=(25, rank)) @ basis[:rank] for rank in ranks]
    weights = [rng.normal(size=(OUT, IN)) for _ in ranks]
    shares = [1.0, 3.0, 2.0][: len(ranks)]
    grams = [x.T @ x / 25 for x in data]
    regmean, found = added(
        [client(w, g, s, kind) for w, g, s in zip(weights, grams, shares, strict=True)]
    )
    found = found if kind == "gram" else found.T
    mean = plain(weights, shares)
    rank = max(ranks)
    assert np.abs(found[:, dead] - mean[:, dead]).max(initial=0) <= 1e-12
    unseen = np.linalg.svd(basis[:rank])[2][rank:]
    assert np.abs((found - mean) @ unseen.T).max() <= 1e-8
    rows = [np.sqrt(s) * x for s, x in zip(shares, data, strict=True)]
    targets = [x @ w.T for x, w in zip(rows, weights, strict=True)]
    expected = np.linalg.lstsq(
        np.concatenate(rows), np.concatenate(targets), rcond=None
    )[0].T
    outputs = expected @ basis[:rank].T
    assert np.abs(found @ basis[:rank].T - outputs).max(initial=0) <= 1e-8 * np.abs(
        outputs
    ).max(initial=1)
    assert regmean.notes.keys() == {KEY}
    assert f"{IN - rank} of {IN} directions" in regmean.notes[KEY]


def test_notes_are_those_of_the_last_result():
    rng = np.random.default_rng(9)
    regmean, _ = added([client(rng.normal(size=(OUT, IN)), np.zeros((IN, IN)))])
    assert regmean.notes.keys() == {KEY}
    x = rng.normal(size=(20, IN))
    regmean.add(*client(rng.normal(size=(OUT, IN)), x.T @ x))
    regmean.result()
    assert regmean.notes == {}


@pytest.mark.parametrize(
    ("left", "right"),
    [("float32", "float64"), ("float64", "float32"), ("float32", "float32")],
)
def test_the_rounding_of_the_coarsest_gram_matrix_is_no_input(left, right):
    """``collect_gram`` returns float32; another client may send exact float64."""
    rng = np.random.default_rng(1)
    width, rank = 24, 8
    basis = np.linalg.qr(rng.normal(size=(width, width)))[0]
    weights = [rng.normal(size=(OUT, width)) for _ in range(2)]
    data = [rng.normal(size=(60, rank)) @ basis[:, :rank].T for _ in range(2)]
    regmean, found = added(
        [
            client(w, torch.tensor(x.T @ x / 60).to(getattr(torch, dtype)))
            for w, x, dtype in zip(weights, data, (left, right), strict=True)
        ]
    )
    assert f"{width - rank} of {width} directions" in regmean.notes[KEY]
    assert np.abs((found - plain(weights, [1, 1])) @ basis[:, rank:]).max() <= 1e-3


@pytest.mark.parametrize(("turn", "solved"), [(0.1, True), (1e-5, False)])
def test_a_solution_far_from_all_clients_is_not_taken(turn, solved):
    """Each client sees one direction; if these are nearly the same, the solution is
    long.
    """
    seen = np.array([[1.0, 1.0 + turn], [1.0, 1.0]])
    weights = [np.zeros((1, 2)), np.array([[1.0, 0.0]])]
    grams = [np.outer(x, x) for x in seen]
    regmean, found = added([client(w, g) for w, g in zip(weights, grams, strict=True)])
    expected = np.linalg.solve(seen, [0.0, 1.0]) if solved else plain(weights, [1, 1])
    assert np.allclose(found, expected, atol=1e-6)
    assert bool(regmean.notes) != solved


def test_a_solution_that_the_dtype_cannot_hold_is_not_taken():
    weights = torch.tensor([[[6e4, 6e4]], [[6e4, -6e4]]]).half()
    grams = [torch.tensor([[1, c], [c, 1]]).double() for c in (0.99, -0.99)]
    regmean, found = added([client(w, g) for w, g in zip(weights, grams, strict=True)])
    assert found.tolist() == [[6e4, 0.0]]
    assert regmean.notes.keys() == {KEY}


def test_layers_that_share_a_matrix_are_factorised_once(
    monkeypatch,
):
    rng = np.random.default_rng(10)
    names = ["query.weight", "key.weight", "value.weight", "other.weight"]
    regmean = RegMean()
    for _ in range(2):
        update = {name: torch.tensor(rng.normal(size=(OUT, IN))) for name in names}
        one, other = (torch.tensor(x.T @ x) for x in rng.normal(size=(2, 20, IN)))
        regmean.add(
            update, 1.0, {"gram": dict(zip(names, [one] * 3 + [other], strict=True))}
        )
    calls = []
    real = torch.linalg.cholesky_ex
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda m: (calls.append(m), real(m))[1]
    )
    regmean.result()
    assert len(calls) == 2


def grams_of(name, state, rows):
    with Float64():
        return collect_gram(model_of(name, state), [inputs(name, rows)])


@pytest.mark.parametrize(
    ("name", "whole"), [(name, index % 2 == 0) for index, name in enumerate(KINDS)]
)
def test_scrambled_clients_give_the_same_regmean_with_transport_only(name, whole):
    symmetry = symmetry_for(name)
    asked = WHOLE_MODEL if whole else AlignmentOptions().parts
    parts = tuple(part for part in asked if part not in symmetry.refused)
    direct, transported, raw, mean = RegMean(), RegMean(), RegMean(), Mean()
    for seed, (state, moved, alignment) in enumerate(
        scrambled(state_of(name), symmetry, parts)
    ):
        weight = 1.0 + seed
        rows = 6 + 2 * seed
        direct.add(state, weight, grams_of(name, state, rows))
        mean.add(state, weight)
        statistics = grams_of(name, moved, rows)
        aligned = alignment.apply(moved)
        transported.add(aligned, weight, alignment.transport(statistics))
        raw.add(aligned, weight, statistics)
    expected = direct.result()
    without = raw.result()
    assert largest_difference(transported.result(), expected) <= 1e-8
    assert largest_difference(mean.result(), expected) > 1e-3
    far = [k for k, v in expected.items() if gap(v, without[k]) > 1e-3 * v.abs().max()]
    assert len(far) >= 2
