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
from fedrot.errors import UpdateError

Array = np.ndarray
OUT, IN = 3, 6


@dataclass(frozen=True)
class Client:
    """Weight ``[out, in]`` and bias, inputs ``[n, in]``, Fisher ``[out, in]``, trained rows, share."""

    w: Array
    b: Array
    x: Array
    f: Array
    trained: Array
    share: float

    def sent(self, kinds: tuple[str, ...], dtype: torch.dtype = torch.float64, **change: Any) -> tuple:
        """Return what ``add`` takes; ``change`` replaces pieces of it."""
        update = {"w": torch.tensor(self.w).to(dtype), "b": torch.tensor(self.b).to(dtype)}
        all_kinds = {
            "gram": torch.tensor(self.x.T @ self.x / len(self.x)),
            "fisher": torch.tensor(self.f),
        }
        found: dict[str, Any] = {kind: {"w": all_kinds[kind]} for kind in kinds}
        if not self.trained.all():
            found["trained"] = {"w": torch.tensor(self.trained)}
        given = {"update": update, "weight": self.share, "statistics": found} | change
        return given["update"], given["weight"], given["statistics"]


def clients(seed: int, count: int = 3, masks: bool = False, dead: tuple[int, ...] = ()) -> list[Client]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        x = rng.normal(size=(20, IN)) * 10.0 ** rng.uniform(-2, 2, IN)
        x[:, dead] = 0
        f = np.where(rng.random((OUT, IN)) < 0.3, 0.0, 10.0 ** rng.uniform(-8, 2, (OUT, IN)))
        trained = rng.random(OUT) < 0.5 if masks else np.ones(OUT, dtype=bool)
        trained[0] = True
        found.append(
            Client(
                rng.normal(size=(OUT, IN)),
                rng.normal(size=OUT),
                x,
                f,
                trained,
                rng.choice([0.5, 1.0, 300.0]),
            )
        )
    return found


def weighted(values: Array, weights: Array, otherwise: Array) -> Array:
    """Return the mean over clients (axis 0), ``otherwise`` where all weights are 0."""
    total = np.broadcast_to(weights, values.shape).sum(0)
    return np.where(total > 0, (weights * values).sum(0) / np.where(total > 0, total, 1), otherwise)


def mean(given: list[Client], key: str = "w") -> Array:
    values, shares = np.stack([getattr(c, key) for c in given]), np.array([c.share for c in given])
    every = np.tensordot(shares / shares.sum(), values, 1)
    if key == "b":
        return every
    rows = np.stack([c.share * c.trained for c in given])[..., None]
    return weighted(values, rows, every)


def fisher(given: list[Client], floor: float = 0.0) -> Array:
    """Return the mean weighted by Fisher information, with a share of its common mean where it is 0."""
    values, shares = np.stack([c.w for c in given]), np.array([c.share for c in given])
    trained = np.stack([np.broadcast_to(c.trained[:, None], c.f.shape) for c in given])
    known = trained * np.stack([c.f for c in given])
    common = (shares * known.sum((1, 2)) / trained.sum((1, 2))).sum()
    rows = shares[:, None, None] * known
    total = rows.sum(0) + floor * common
    found = ((rows * values).sum(0) + floor * common * mean(given)) / np.where(total > 0, total, 1)
    return np.where(total > 0, found, mean(given))


def regmean(given: list[Client], alpha: float = 0.9, beta: float = 0.0) -> Array:
    """Return Eq. 2 of Jin et al.; rows that some client has not trained are the mean."""
    total, product = np.zeros((IN, IN)), np.zeros((OUT, IN))
    for c in given:
        gram = c.x.T @ c.x / len(c.x)
        shrunk = c.share * (alpha * gram + np.diag((1 - alpha) * np.diag(gram) + beta))
        total, product = total + shrunk, product + c.w @ shrunk
    seen = np.diag(total) > 0
    found = mean(given)
    solved = found.copy()
    solved[:, seen] = np.linalg.solve(total[np.ix_(seen, seen)], product[:, seen].T).T
    rows = np.stack([c.trained for c in given]).all(0)
    return np.where(rows[:, None], solved, found)


@dataclass(frozen=True)
class Case:
    build: Callable[[], Any]
    oracle: Callable[[list[Client]], Array]
    kinds: tuple[str, ...] = ()


CASES = {
    "mean": Case(Mean, mean),
    "fisher": Case(lambda: Fisher(0.0), fisher, ("fisher",)),
    "regmean": Case(RegMean, regmean, ("gram",)),
    "fisher, floor": Case(lambda: Fisher(0.1), partial(fisher, floor=0.1), ("fisher",)),
    "regmean, beta": Case(lambda: RegMean(0.5, 2.0), partial(regmean, alpha=0.5, beta=2.0), ("gram",)),
    "regmean, diagonal": Case(lambda: RegMean(0.0, 0.1), partial(regmean, alpha=0, beta=0.1), ("gram",)),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def merged(case: Case, given: list[Client], dtype: torch.dtype = torch.float64) -> dict[str, Array]:
    aggregator = case.build()
    for client in given:
        aggregator.add(*client.sent(case.kinds, dtype))
    return {name: t.double().numpy() for name, t in aggregator.result().items()}


def test_every_aggregation_without_inputs_has_a_case() -> None:
    assert {entry.name for entry in aggregations(())} == {name.partition(",")[0] for name in CASES}


@EVERY
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 5),
    masks=st.booleans(),
    dead=st.sampled_from([(), (1,), (0, 4)]),
)
def test_the_result_is_the_oracle_s_in_any_order_and_scale(
    case: Case, seed: int, count: int, masks: bool, dead: tuple
) -> None:
    given_ = clients(seed, count, masks, dead)
    found = merged(case, given_)
    assert np.allclose(found["w"], case.oracle(given_), rtol=1e-7, atol=1e-8)
    assert np.allclose(found["b"], mean(given_, "b"), atol=1e-10)
    turned = [Client(c.w, c.b, c.x, c.f, c.trained, 1e3 * c.share) for c in given_[::-1]]
    assert np.allclose(merged(case, turned)["w"], found["w"], rtol=1e-7, atol=1e-8)


@EVERY
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)]
)
def test_dtypes_stay_and_sums_are_wide(case: Case, dtype: torch.dtype, error: float) -> None:
    given_ = clients(1, 4)
    aggregator = case.build()
    for client in given_:
        aggregator.add(*client.sent(case.kinds, dtype))
    found = aggregator.result()["w"]
    assert found.dtype == dtype
    assert np.abs(found.double().numpy() - case.oracle(given_)).max() <= error * 30


W, B = torch.ones(OUT, IN), torch.ones(OUT)
BAD_UPDATES: Mapping[str, dict[str, Any]] = {
    **{f"weight {w}": {"weight": w} for w in (1e39, 1e-60, float("inf"), float("nan"), 0.0, -1.0)},
    "a tensor is missing": {"update": {"w": W}},
    "a tensor is extra": {"update": {"w": W, "b": B, "more": B}},
    "another shape": {"update": {"w": W.T, "b": B}},
}
#: Matrices whose first entry hides that they are no Gram matrices.
HIDING = {
    "a pair": [[1e6, 0, 0], [0, 0, 1e3], [0, 1e3, 0]],
    "a negative": [[1e6, 0, 0], [0, -1e3, 0], [0, 0, 1]],
    "a turn": [[1e6, 0, 0], [0, 1, 0.5], [0, -0.5, 1]],
}
BAD_VALUES: Mapping[str, Mapping[str, Any]] = {
    "trained": {"float": torch.ones(OUT), "columns": torch.ones(IN, dtype=torch.bool), "nowhere": None},
    "gram": {
        "half": torch.eye(IN).half(),
        "nan": torch.eye(IN) * torch.nan,
        "size": torch.eye(4),
        "negative": -torch.eye(IN),
        "skew": torch.eye(IN) + torch.triu(torch.ones(IN, IN), 1),
        "nowhere": None,
        **{
            f"{name}, times {scale:g}": torch.block_diag(torch.tensor(corner), torch.eye(IN - 3)) * scale
            for name, corner in HIDING.items()
            for scale in (1.0, 1e-40, 1e23)
        },
    },
    "fisher": {
        "nan": W * torch.nan,
        "negative": -W,
        "inf": W * torch.inf,
        "inf in half": (W * torch.inf).half(),
        "transposed": W.T,
        "number": torch.tensor(1.0),
        "nowhere": None,
    },
}


def bad(case: Case) -> dict[str, dict[str, Any]]:
    found = dict(BAD_UPDATES)
    good = clients(9)[0].sent(case.kinds)[2]
    for kind in ("trained", *case.kinds):
        for what, value in BAD_VALUES[kind].items():
            tensors = {"nowhere": B} if value is None else {"w": value}
            found[f"{kind} {what}"] = {"statistics": {**good, kind: tensors}}
    if case.kinds:
        found |= {
            "no statistics": {"statistics": None},
            "an unknown kind": {"statistics": {**good, "hessian": {"w": W}}},
        }
    return found


@pytest.mark.parametrize(
    ("case", "change"),
    [
        pytest.param(case, change, id=f"{name}: {what}")
        for name, case in CASES.items()
        for what, change in bad(case).items()
    ],
)
def test_what_is_refused_leaves_nothing(case: Case, change: dict[str, Any]) -> None:
    one, two, three = clients(2)
    aggregator = case.build()
    if "update" not in change:
        with pytest.raises(UpdateError):
            aggregator.add(*three.sent(case.kinds, **change))
        with pytest.raises(UpdateError, match="Nothing was added"):
            aggregator.result()
    aggregator.add(*one.sent(case.kinds))
    with pytest.raises(UpdateError):
        aggregator.add(*three.sent(case.kinds, **change))
    aggregator.add(*two.sent(case.kinds))
    expected = merged(case, [one, two])
    assert all(np.array_equal(t.numpy(), expected[n]) for n, t in aggregator.result().items())


@pytest.mark.parametrize("case", [CASES["fisher"], CASES["regmean"]], ids=["fisher", "regmean"])
@pytest.mark.parametrize(("weight", "most"), [(1.5, True), (2.5, False)])
def test_a_tensor_needs_statistics_from_most_of_the_weight(
    case: Case, weight: float, most: bool
) -> None:
    """Clients without statistics of a tensor are left out; if they are most, it is the mean."""
    one, two, three = (replace(client, share=1.0, f=client.f + 1) for client in clients(5))
    three = replace(three, share=weight)
    for order in permutations((one, two, three)):
        aggregator = case.build()
        for client in order:
            update, share, found = client.sent(case.kinds)
            ((kind, by_name),) = found.items()
            own = {"v": by_name["w"]} if client is three else {"v": by_name["w"], **by_name}
            aggregator.add({**update, "v": update["w"]}, share, {kind: own})
        result = {name: tensor.numpy() for name, tensor in aggregator.result().items()}
        assert np.allclose(result["v"], case.oracle([one, two, three]), atol=1e-8)
        expected = case.oracle([one, two]) if most else mean([one, two, three])
        assert np.allclose(result["w"], expected, atol=1e-8)
        assert set(aggregator.notes) == {"w"}
        assert ("left out" if most else "mean") in aggregator.notes["w"]


@pytest.mark.parametrize("masks", [False, True])
@EVERY
def test_results_may_be_taken_in_between_and_share_nothing(case: Case, masks: bool) -> None:
    one, two = clients(3, 2, masks)
    aggregator = case.build()
    with pytest.raises(UpdateError, match="Nothing was added"):
        aggregator.result()
    sent = one.sent(case.kinds), two.sent(case.kinds)
    kept = [{n: t.clone() for n, t in update.items()} for update, _, _ in sent]
    sent[0][0]["w"].requires_grad_()
    aggregator.add(*sent[0])
    for tensor in aggregator.result().values():
        assert not tensor.requires_grad
        tensor.zero_()
    aggregator.add(*sent[1])
    expected = merged(case, [one, two])
    for _ in range(2):
        assert all(np.array_equal(t.numpy(), expected[n]) for n, t in aggregator.result().items())
    assert all(
        torch.equal(update[n], before[n])
        for (update, _, _), before in zip(sent, kept, strict=True)
        for n in before
    )
