"""Every registered aggregator keeps one contract; each has an oracle in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrot.aggregation import Fisher, Mean, RegMean, aggregations
from fedrot.errors import FedrotError, UpdateError
from tests.models import Parts, copied, same

Array = np.ndarray
OUT, IN = 3, 6
#: Tensors of a client: two weights of layers with the same inputs, and a bias.
W, V, B = "w", "v", "b"


@dataclass(frozen=True)
class Client:
    """Tensors, inputs ``[n, in]``, Fisher ``[out, in]`` of the weights, trained rows of
    ``w``, share.

    ``whole`` says that a mask of all rows or none is sent as one number and without
    statistics of an untrained layer; ``copies``, that layers with the same inputs send
    a Gram matrix each.
    """

    values: Mapping[str, Array]
    x: Array
    f: Mapping[str, Array]
    trained: Array
    share: float
    whole: bool
    copies: bool

    def rows(self, key):
        """Return which entries of a weight the client has trained, ``[out, in]``."""
        trained = self.trained if key == W else np.ones(OUT, dtype=bool)
        return np.broadcast_to(trained[:, None], (OUT, IN))

    def sent(self, kinds, dtype=torch.float64, **change):
        """Return what ``add`` takes; ``change`` replaces pieces of it."""
        update = {
            key: torch.tensor(value).to(dtype) for key, value in self.values.items()
        }
        gram = torch.tensor(self.x.T @ self.x / len(self.x))
        known = {
            "gram": {W: gram, V: gram.clone() if self.copies else gram},
            "fisher": {key: torch.tensor(value) for key, value in self.f.items()},
        }
        found = {kind: known[kind] for kind in kinds}
        if self.whole and not self.trained.any():
            for by_name in found.values():
                del by_name[W]
        uniform = self.whole and self.trained.all() == self.trained.any()
        if uniform or not self.trained.all():
            found["trained"] = {
                W: torch.tensor(self.trained.all() if uniform else self.trained)
            }
        given = {"update": update, "weight": self.share, "statistics": found} | change
        return given["update"], given["weight"], given["statistics"]


def clients(seed, count=3, masks=False, dead=()):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        x = rng.normal(size=(20, IN)) * 10.0 ** rng.uniform(-2, 2, IN)
        x[:, dead] = 0
        sizes = {W: (OUT, IN), V: (OUT, IN), B: (OUT,)}
        f = {
            key: np.where(
                rng.random((OUT, IN)) < 0.3, 0.0, 10.0 ** rng.uniform(-8, 2, (OUT, IN))
            )
            for key in (W, V)
        }
        trained = rng.random(OUT) < (rng.choice([0.0, 0.5, 1.0]) if masks else 1.0)
        values = {key: rng.normal(size=size) for key, size in sizes.items()}
        share = rng.choice([0.5, 1.0, 300.0])
        found.append(
            Client(values, x, f, trained, share, rng.random() < 0.5, rng.random() < 0.5)
        )
    return found


def weighted(values, weights, otherwise):
    """Return the mean over clients (axis 0), ``otherwise`` where all weights are 0."""
    total = np.broadcast_to(weights, values.shape).sum(0)
    return np.where(
        total > 0, (weights * values).sum(0) / np.where(total > 0, total, 1), otherwise
    )


def mean(given, key):
    values = np.stack([c.values[key] for c in given])
    shares = np.array([c.share for c in given])
    every = np.tensordot(shares / shares.sum(), values, 1)
    return (
        every
        if key == B
        else weighted(values, np.stack([c.share * c.rows(key) for c in given]), every)
    )


def fisher(given, key, floor=0.0):
    """Return the mean weighted by Fisher information, with a share of its common mean
    where it is 0.
    """
    common = sum(
        c.share
        * sum((c.rows(k) * c.f[k]).sum() for k in (W, V))
        / sum(c.rows(k).sum() for k in (W, V))
        for c in given
    )
    weights = np.stack([c.share * c.rows(key) * c.f[key] for c in given])
    total = weights.sum(0) + floor * common
    plain = mean(given, key)
    apart = (weights * (np.stack([c.values[key] for c in given]) - plain)).sum(0)
    return plain + apart / np.where(total > 0, total, 1)


def regmean(given, key, alpha=0.9, beta=0.0):
    """Return Eq. 2 of Jin et al. over the clients that trained a layer.

    Rows that one of them has not trained, and inputs that are 0 at all of them, are the
    mean.
    """
    found = mean(given, key)
    some = [c for c in given if c.rows(key).any()]
    total = np.zeros((IN, IN))
    product = np.zeros((OUT, IN))
    for c in some:
        gram = c.x.T @ c.x / len(c.x)
        shrunk = c.share * (alpha * gram + np.diag((1 - alpha) * np.diag(gram) + beta))
        total = total + shrunk
        product = product + c.values[key] @ shrunk
    seen = np.diag(total) > 0
    solved = found.copy()
    solved[:, seen] = np.linalg.solve(total[np.ix_(seen, seen)], product[:, seen].T).T
    return np.where(np.all([c.rows(key) for c in some], axis=0), solved, found)


@dataclass(frozen=True)
class Case:
    build: Callable[[], Any]
    oracle: Callable[[list[Client], str], Array]
    kinds: Parts = ()


CASES = {
    "mean": Case(Mean, mean),
    "fisher": Case(lambda: Fisher(0.0), fisher, ("fisher",)),
    "regmean": Case(RegMean, regmean, ("gram",)),
    "fisher, floor": Case(lambda: Fisher(0.1), partial(fisher, floor=0.1), ("fisher",)),
    "regmean, exact": Case(
        lambda: RegMean(1.0), partial(regmean, alpha=1.0), ("gram",)
    ),
    "regmean, beta": Case(
        lambda: RegMean(0.5, 2.0), partial(regmean, alpha=0.5, beta=2.0), ("gram",)
    ),
    "regmean, diagonal": Case(
        lambda: RegMean(0.0, 0.1), partial(regmean, alpha=0, beta=0.1), ("gram",)
    ),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
#: One case of each class.
ONE_EACH = {name: case for name, case in CASES.items() if "," not in name}
WITH_STATISTICS = pytest.mark.parametrize("case", [CASES["fisher"], CASES["regmean"]])


def added(case, given, dtype=torch.float64):
    aggregator = case.build()
    for client in given:
        aggregator.add(*client.sent(case.kinds, dtype))
    return aggregator


def test_every_aggregation_without_inputs_has_a_case():
    assert {entry.name for entry in aggregations(())} == ONE_EACH.keys()


@EVERY
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 5),
    masks=st.booleans(),
    dead=st.sampled_from([(), (1,), (0, 4)]),
)
def test_the_result_is_the_oracle_s_in_any_order_and_scale(
    case, seed, count, masks, dead
):
    """Layers that share their inputs may be untrained at any clients, in all rows or in
    some.
    """
    sent = clients(seed, count, masks, dead)
    turned = [replace(client, share=1e3 * client.share) for client in sent[::-1]]
    aggregator = added(case, sent)
    found = aggregator.result()
    again = added(case, turned).result()
    for key in (W, V):
        expected = case.oracle(sent, key)
        assert np.allclose(found[key], expected, rtol=1e-7, atol=1e-8)
        assert np.allclose(again[key], found[key], rtol=1e-7, atol=1e-8)
    assert np.allclose(found[B], mean(sent, B), atol=1e-10)
    assert dead or aggregator.notes == {}


@EVERY
@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)],
)
def test_dtypes_stay_and_sums_are_wide(case, dtype, error):
    sent = clients(1, 4)
    found = added(case, sent, dtype).result()[W]
    assert found.dtype == dtype
    assert np.abs(found.double().numpy() - case.oracle(sent, W)).max() <= error * 30


def bad_statistics(case):
    """Return statistics that are refused; those of a client without any are None."""
    good = clients(9)[0].sent(case.kinds)[2]
    found = {
        kind: {**good, kind: {W: BAD_VALUES[kind]}} for kind in ("trained", *case.kinds)
    }
    if case.kinds:
        no_row = torch.tensor(False)
        found |= {
            "no statistics": None,
            "an unknown kind": {**good, "hessian": {W: ONES}},
            "nothing is trained": {**good, "trained": {W: no_row, V: no_row}},
        }
    return found


ONES = torch.ones(OUT, IN)
BIAS = torch.ones(OUT)
BAD_UPDATES = [
    *({"weight": weight} for weight in (1e39, float("nan"), 0.0)),
    {"update": {W: ONES, V: ONES}},
    {"update": {W: ONES, V: ONES, B: BIAS, "more": BIAS}},
    {"update": {W: ONES.T, V: ONES, B: BIAS}},
]
#: One bad value of each kind; the table of them is in the tests of
#: ``check_statistics``.
BAD_VALUES = {"trained": BIAS, "gram": -torch.eye(IN), "fisher": -ONES}


@pytest.mark.parametrize("case", ONE_EACH.values(), ids=ONE_EACH)
def test_what_is_refused_leaves_nothing(case):
    one, two, three = clients(2)
    bad = [{"statistics": each} for each in bad_statistics(case).values()]
    for change in bad:
        aggregator = case.build()
        with pytest.raises(UpdateError):
            aggregator.add(*three.sent(case.kinds, **change))
        with pytest.raises(UpdateError, match="Nothing was added"):
            aggregator.result()
    expected = added(case, [one, two]).result()
    for change in [*BAD_UPDATES, *bad]:
        aggregator = added(case, [one])
        with pytest.raises(UpdateError):
            aggregator.add(*three.sent(case.kinds, **change))
        aggregator.add(*two.sent(case.kinds))
        assert same(aggregator.result(), expected)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        *((Fisher, (floor,)) for floor in (-1e-9, float("nan"), float("inf"))),
        *((RegMean, (alpha,)) for alpha in (-0.1, 1.1, float("nan"))),
        *((RegMean, (0.9, beta)) for beta in (-1, float("inf"))),
    ],
)
def test_settings_out_of_range_are_refused(build, arguments):
    with pytest.raises(FedrotError, match=r"floor|alpha"):
        build(*arguments)


@WITH_STATISTICS
@pytest.mark.parametrize(("weight", "most"), [(1.5, True), (2.0, False)])
def test_a_tensor_needs_statistics_from_most_of_the_weight(case, weight, most):
    """Clients without statistics of a tensor are left out; if they are most, it is the
    mean.
    """
    one, two, three = (
        replace(client, share=share, f={key: f + 1 for key, f in client.f.items()})
        for client, share in zip(clients(5), (1.0, 1.0, weight), strict=True)
    )
    sent = [one, two, three]
    expected = {
        V: case.oracle(sent, V),
        W: case.oracle([one, two], W) if most else mean(sent, W),
    }
    for order in permutations(sent):
        aggregator = case.build()
        for client in order:
            update, share, statistics = client.sent(case.kinds)
            if client is three:
                del statistics[case.kinds[0]][W]
            aggregator.add(update, share, statistics)
        result = aggregator.result()
        for key, value in expected.items():
            assert np.allclose(result[key], value, atol=1e-8)
        assert set(aggregator.notes) == {W}
        assert ("left out" if most else "mean") in aggregator.notes[W]


@pytest.mark.parametrize("masks", [False, True])
@EVERY
def test_results_may_be_taken_in_between_and_share_nothing(case, masks):
    pair = clients(3, 2, masks)
    aggregator = case.build()
    sent = [client.sent(case.kinds) for client in pair]
    kept = [copied(update) for update, _, _ in sent]
    sent[0][0][W].requires_grad_()
    aggregator.add(*sent[0])
    for tensor in aggregator.result().values():
        assert not tensor.requires_grad
        tensor.zero_()
    aggregator.add(*sent[1])
    expected = added(case, pair).result()
    for _ in range(2):
        assert same(aggregator.result(), expected)
    assert all(same(update, k) for (update, _, _), k in zip(sent, kept, strict=True))
