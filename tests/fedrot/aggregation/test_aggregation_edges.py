"""Aggregators at their edges: layers that some have not trained, rounded matrices, dead inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedrot
from fedrot.aggregation import Fisher, Mean, RegMean, check_statistics
from tests.fedrot.oracles import Array, seeded
from tests.models import (
    State,
    largest_difference,
    near,
)

Statistics = Mapping[str, Mapping[str, Tensor]]
Client = tuple[State, float, Statistics]

OUT, IN = 3, 6
ORDERS = list(permutations(range(3)))
FALSE = torch.tensor(False)


def merged(aggregator: Any, clients: Sequence[Client]) -> State:
    for client in clients:
        aggregator.add(*client)
    result: State = aggregator.result()
    return result


def least_squares(data: Sequence[Array], weights: Sequence[Array], shares: Sequence[float]) -> Array:
    """Return the weights ``[out, in]`` that fit all clients' outputs, their rows weighted."""
    roots = [np.sqrt(share / len(x)) for x, share in zip(data, shares, strict=True)]
    rows = np.concatenate([r * x for r, x in zip(roots, data, strict=True)])
    targets = np.concatenate([r * x @ w.T for r, x, w in zip(roots, data, weights, strict=True)])
    return np.asarray(np.linalg.lstsq(rows, targets, rcond=None)[0].T)


def mean(values: Sequence[Array], shares: Sequence[float]) -> Array:
    return np.asarray(sum(s * v for s, v in zip(shares, values, strict=True)) / sum(shares))


# Layers that share their input, and were not trained by everybody


def sharing_clients(
    lacking: Sequence[set[str]], names: Sequence[str], leaves_out: bool, seed: int = 0
) -> tuple[list[Client], dict[str, Array]]:
    """Return clients whose layers read one input, and the least squares over those who trained each."""
    rng = np.random.default_rng(seed)
    clients: list[Client] = []
    data = [rng.normal(size=(20, IN)) for _ in lacking]
    weights = [{name: rng.normal(size=(OUT, IN)) for name in names} for _ in lacking]
    shares = [float(i + 1) for i in range(len(lacking))]
    for x, own, share, without in zip(data, weights, shares, lacking, strict=True):
        gram = torch.tensor(x.T @ x / len(x))
        held = {n: gram for n in names if not (leaves_out and n in without)}
        masks = {"trained": dict.fromkeys(sorted(without), FALSE)} if without else {}
        update = {name: torch.tensor(value) for name, value in own.items()}
        clients.append((update, share, {"gram": held, **masks}))
    expected = {}
    for name in names:
        some = [i for i, without in enumerate(lacking) if name not in without]
        sent = [w[name] for w in weights]
        expected[name] = (
            least_squares([data[i] for i in some], [sent[i] for i in some], [shares[i] for i in some])
            if some
            else mean(sent, shares)
        )
    return clients, expected


def check(clients: Sequence[Client], expected: Mapping[str, Array]) -> None:
    found = merged(RegMean(1.0), clients)
    for name, value in expected.items():
        assert np.abs(found[name].numpy() - value).max() <= 1e-9, name


@settings(max_examples=60, deadline=None)
@given(
    lacking=st.lists(
        st.sets(st.sampled_from(["key", "query", "value"]), max_size=2), min_size=2, max_size=5
    ),
    leaves_out=st.booleans(),
)
def test_any_layers_may_be_untrained_at_any_clients(lacking: list[set[str]], leaves_out: bool) -> None:
    clients, expected = sharing_clients(lacking, ("key", "query", "value"), leaves_out)
    check(clients, expected)


# Fisher with masks


def fisher_client(seed: int, rows: Sequence[bool], untrained: float = 1.0) -> Client:
    rng = np.random.default_rng(seed)
    mask = torch.tensor(list(rows))
    fisher = {"w": torch.tensor(rng.random((OUT, IN))), "b": torch.tensor(rng.random(OUT))}
    fisher = {
        n: torch.where(mask.reshape(-1, *[1] * (f.ndim - 1)), f, untrained) for n, f in fisher.items()
    }
    update = {"w": torch.tensor(rng.normal(size=(OUT, IN))), "b": torch.tensor(rng.normal(size=OUT))}
    return update, seed + 1.0, {"fisher": fisher, "trained": dict.fromkeys(("w", "b"), mask)}


ROWS = ((True, False, False), (True, True, False), (False, True, False))


def test_the_fisher_of_untrained_rows_does_not_matter_even_for_the_floor() -> None:
    few, many = (
        merged(Fisher(), [fisher_client(seed, rows, size) for seed, rows in enumerate(ROWS)])
        for size in (1.0, 1e9)
    )
    assert largest_difference(few, many) <= 1e-5


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("leaves_out", [False, True], ids=["sends its Fisher", "leaves its Fisher out"])
def test_a_client_without_a_head_sends_no_fisher_for_it(
    leaves_out: bool, order: tuple[int, ...]
) -> None:
    generator = seeded(0)
    names = {"body": (4, 4), "head.bias": (2,), "head.weight": (2, 4)}
    received = {n: torch.randn(s, generator=generator).double() for n, s in names.items()}
    clients: list[Client] = []
    for seed in range(3):
        update = near(received, 0.5, seed)
        fisher = {n: torch.rand(s, generator=generator).double() for n, s in names.items()}
        masks: dict[str, dict[str, Tensor]] = {}
        if seed == 1:
            update, masks = fedrot.completed({"body": update["body"]}, received)
            fisher = {"body": fisher["body"]} if leaves_out else fisher
        clients.append((update, seed + 1.0, {"fisher": fisher, **masks}))
    found = merged(Fisher(0.0), [clients[i] for i in order])
    for name in names:
        some = [clients[i] for i in ((0, 1, 2) if name == "body" else (0, 2))]
        total = sum(weight * s["fisher"][name] for _, weight, s in some)
        expected = sum(weight * s["fisher"][name] * u[name] for u, weight, s in some) / total
        assert (found[name] - expected).abs().max() <= 1e-12, name


def test_fisher_of_nothing_but_untrained_tensors_is_refused() -> None:
    update, weight, statistics = fisher_client(0, (True, True, True))
    masks = {"trained": dict.fromkeys(("w", "b"), FALSE)}
    fisher = Fisher()
    with pytest.raises(fedrot.UpdateError):
        fisher.add(update, weight, {**statistics, **masks})
    fisher.add(update, weight, statistics)
    assert largest_difference(fisher.result(), update) <= 1e-12


# Precision of Gram matrices


def wide_clients(dtype: torch.dtype, rows: int) -> list[Client]:
    rng = np.random.default_rng(1)
    clients: list[Client] = []
    for share in (1.0, 2.0, 4.0):
        x = rng.normal(size=(rows, 24)) @ rng.normal(size=(24, 24))
        gram = torch.tensor(x.T @ x / rows).float().to(dtype)
        update = {"layer.weight": torch.tensor(rng.normal(size=(OUT, 24))).float()}
        clients.append((update, share, {"gram": {"layer.weight": gram}}))
    return clients


@pytest.mark.parametrize("rows", [4, 200], ids=["few tokens", "many tokens"])
def test_bfloat16_gram_matrices_nearly_give_the_float32_result(rows: int) -> None:
    expected = merged(RegMean(0.9), wide_clients(torch.float32, rows))
    regmean = RegMean(0.9)
    found = merged(regmean, wide_clients(torch.bfloat16, rows))
    plain = merged(Mean(), wide_clients(torch.float32, rows))
    assert regmean.notes == {}
    assert 0 < largest_difference(found, expected) < 0.1 * largest_difference(plain, expected)


# Dead inputs


@pytest.mark.parametrize("rank", [1, 2, 4], ids=lambda rank: f"rank {rank}")
@pytest.mark.parametrize("dead", [(0,), (1, 5), (0, 1)], ids=str)
@pytest.mark.parametrize("kind", ["gram", "gram_conv1d"])
def test_dead_inputs_and_unseen_directions_keep_the_mean(
    kind: str, dead: tuple[int, ...], rank: int
) -> None:
    rng = np.random.default_rng(2)
    live = [i for i in range(IN) if i not in dead]
    rank = min(rank, len(live))
    # The inputs are of different sizes.
    basis = np.zeros((rank, IN))
    basis[:, live] = rng.normal(size=(rank, len(live))) * 10.0 ** rng.uniform(-2, 2, size=len(live))
    data = [rng.normal(size=(30, rank)) @ basis for _ in range(3)]
    weights, shares = [rng.normal(size=(OUT, IN)) for _ in data], [1.0, 3.0, 2.0]
    regmean, clients = RegMean(1.0), []
    for w, x, share in zip(weights, data, shares, strict=True):
        held = torch.tensor(w if kind == "gram" else w.T.copy())
        clients.append(({"w": held}, share, {kind: {"w": torch.tensor(x.T @ x / len(x))}}))
    found = merged(regmean, clients)["w"].numpy()
    found = found if kind == "gram" else found.T
    plain = mean(weights, shares)
    assert np.abs(found[:, dead] - plain[:, dead]).max() <= 1e-12
    unseen = np.linalg.svd(basis)[2][rank:]
    assert np.abs((found - plain) @ unseen.T).max() <= 1e-8
    expected = least_squares(data, weights, shares)
    assert np.abs((found - expected) @ basis.T).max() <= 1e-8 * np.abs(expected @ basis.T).max()
    count = IN - rank
    assert f"{count} of {IN} directions" in regmean.notes["w"]


@pytest.mark.parametrize("alpha", [1.0, 0.9])
def test_an_input_that_one_client_has_seen_is_not_dead(alpha: float) -> None:
    rng = np.random.default_rng(3)
    data = [rng.normal(size=(30, IN)) for _ in range(2)]
    data[0][:, 2] = 0
    weights = [rng.normal(size=(OUT, IN)) for _ in data]
    regmean = RegMean(alpha)
    clients = [
        ({"w": torch.tensor(w)}, 1.0, {"gram": {"w": torch.tensor(x.T @ x / 30)}})
        for w, x in zip(weights, data, strict=True)
    ]
    found = merged(regmean, clients)["w"].numpy()
    assert regmean.notes == {}
    if alpha == 1:
        assert np.abs(found - least_squares(data, weights, [1.0, 1.0])).max() <= 1e-9


# Statistics of several tensors


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("kind", ["gram", "fisher"])
def test_one_tensor_for_layers_of_two_shapes_is_checked_against_both(
    kind: str, order: tuple[int, int]
) -> None:
    shapes: list[tuple[str, tuple[int, ...]]] = [("narrow", (4, 4)), ("wide", (4, 6))]
    shared = torch.eye(4)
    given = {kind: {shapes[i][0]: shared for i in order}}
    with pytest.raises(fedrot.UpdateError, match=r"'wide' have shape \[4, 4\]"):
        check_statistics(given, dict(shapes))
    check_statistics({kind: {"narrow": shared, "other": shared}}, {"narrow": (4, 4), "other": (4, 4)})


@pytest.mark.parametrize("largest", [1e-40, 1e-20, 1.0, 9e29])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gram_matrices_of_any_size_are_taken(largest: float, dtype: torch.dtype) -> None:
    inputs = torch.randn(50, 6, generator=seeded(0), dtype=torch.float64)
    inputs = inputs * torch.logspace(0, -3, 6, dtype=torch.float64)
    gram = inputs.T @ inputs
    value = (gram / gram.max() * largest).to(dtype)
    check_statistics({"gram": {"w": value}}, {"w": (2, 6)})
