"""The greedy soup against the recipe in a plain loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedrot
from fedrot.aggregation import Mean, aggregation_named, aggregations
from fedrot.errors import FedrotError
from fedrot.simulations.federation.runner import check
from fedrot.simulations.settings import Experiment
from fedrot.strategies import FedRot, Reporting
from reproductions.soup import GreedySoup
from tests.fedrot.oracles import Array
from tests.models import EAGER, State, config_of, largest_difference, near
from tests.simulations.commands import SMALL
from tests.strategies.aggregating import Client, apart, honest, mean, merged, play
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import largest_difference as records_apart

Score = Callable[[Mapping[str, Tensor]], float]


def _soup(
    score: Score, values: Sequence[Array], weights: Sequence[float]
) -> tuple[GreedySoup, dict[str, Tensor]]:
    soup = GreedySoup(score)
    for value, weight in zip(values, weights, strict=True):
        soup.add({"w": torch.tensor(value)}, weight)
    return soup, soup.result()


def _near(target: Array) -> Score:
    return lambda tensors: -float(((tensors["w"].numpy() - target) ** 2).sum())


def _recipe(
    score: Callable[[Array], float], values: Sequence[Array], weights: Sequence[float]
) -> tuple[list[int], Array]:
    """Wortsman et al. 2022, recipe 1, with NaN as the lowest score and ties in the order of adding."""

    def scored(value: Array) -> float:
        found = score(value)
        return -np.inf if np.isnan(found) else found

    def average(members: Sequence[int]) -> Array:
        total = sum(weights[i] for i in members)
        return np.asarray(sum(weights[i] * values[i] for i in members) / total)

    left = list(range(len(values)))
    order = []
    while left:
        best = left[0]
        for i in left[1:]:
            if scored(values[i]) > scored(values[best]):
                best = i
        order.append(best)
        left.remove(best)
    members = [order[0]]
    for i in order[1:]:
        if scored(average([*members, i])) >= scored(average(members)):
            members.append(i)
    return members, average(members)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 6),
    spread=st.sampled_from([0.3, 1.0, 4.0]),
    failing=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_the_soup_is_the_greedy_recipe(seed: int, count: int, spread: float, failing: float) -> None:
    rng = np.random.default_rng(seed)
    target = rng.normal(size=4)
    values = [target + spread * rng.normal(size=4) for _ in range(count)]
    weights = [float(w) for w in rng.choice([1.0, 2.0, 16.0], size=count)]

    def score(value: Array) -> float:
        """No number at all on one side of a plane, for averages as for single updates."""
        if value[0] - target[0] > 1 / failing if failing else False:
            return float("nan")
        return float(-((value - target) ** 2).sum())

    members, expected = _recipe(score, values, weights)
    soup, result = _soup(lambda tensors: score(tensors["w"].numpy()), values, weights)
    assert soup.chosen == tuple(members)
    assert np.abs(result["w"].numpy() - expected).max() <= 1e-12
    assert f"{len(members)} of {count} updates" in soup.notes["soup"]


def test_a_harmful_update_stays_outside_and_a_helpful_pair_is_found() -> None:
    values = [np.array([3.0]), np.array([1.0]), np.array([-1.2]), np.array([9.0])]
    soup, result = _soup(_near(np.zeros(1)), values, [1.0] * 4)
    assert soup.chosen == (1, 2)
    assert result["w"].item() == pytest.approx(-0.1)
    assert soup.notes == {"soup": "2 of 4 updates, score -0.01"}


def test_weights_count_inside_the_soup() -> None:
    soup, result = _soup(lambda _: 0.0, [np.array([0.0]), np.array([4.0])], [3.0, 1.0])
    assert result["w"].item() == 1.0
    assert soup.chosen == (0, 1)


def test_ties_join_in_the_order_of_adding() -> None:
    values = [np.array([x]) for x in (1.0, -1.0, 2.0, -2.0)]
    soup, _ = _soup(lambda _: 7.0, values, [1.0] * 4)
    assert soup.chosen == (0, 1, 2, 3)
    soup, _ = _soup(_near(np.zeros(1)), values, [1.0] * 4)
    # 1 and -1 tie, their average is perfect; nobody else keeps it so.
    assert soup.chosen == (0, 1)


def test_an_update_without_a_score_comes_last_and_does_not_spoil_the_soup() -> None:
    def score(tensors: Mapping[str, Tensor]) -> float:
        value = tensors["w"].item()
        return float("nan") if abs(value) > 5 else -abs(value)

    soup, result = _soup(score, [np.array([90.0]), np.array([2.0]), np.array([-1.0])], [1.0] * 3)
    assert soup.chosen == (2, 1)
    assert result["w"].item() == 0.5


def test_no_score_at_all_still_gives_an_average() -> None:
    soup, result = _soup(lambda _: float("nan"), [np.array([0.0]), np.array([1.0])], [1.0, 1.0])
    assert soup.chosen[0] == 0
    assert 0 <= result["w"].item() <= 1


def test_one_update_is_the_soup() -> None:
    soup = GreedySoup(lambda _: float("-inf"))
    update = {"w": torch.tensor([0.1, 0.7]), "steps": torch.tensor([3])}
    assert not [*soup.chosen, *soup.notes]
    soup.add(update, 3.0)
    result = soup.result()
    assert soup.chosen == (0,)
    assert largest_difference(result, update) <= 1e-7
    result["w"].zero_()
    assert largest_difference(soup.result(), update) <= 1e-7


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_update_is_scored_twice_at_most(count: int) -> None:
    rng = np.random.default_rng(0)
    seen: list[Mapping[str, Tensor]] = []

    def score(tensors: Mapping[str, Tensor]) -> float:
        seen.append(tensors)
        return -float(tensors["w"].square().sum())

    _soup(score, [rng.normal(size=3) for _ in range(count)], [1.0] * count)
    assert len(seen) <= 2 * count


def test_adding_goes_on_after_a_result() -> None:
    score = _near(np.zeros(1))
    soup, _ = _soup(score, [np.array([2.0]), np.array([3.0])], [1.0, 1.0])
    assert list(soup.chosen) == [0]
    soup.add({"w": torch.tensor([-1.0], dtype=torch.float64)}, 1.0)
    assert soup.result()["w"].item() == 0.5
    assert soup.chosen == (2, 0)


def test_masks_of_trained_rows_are_those_of_the_chosen() -> None:
    mean, soup = Mean(), GreedySoup(lambda _: 0.0)
    for i in range(3):
        update = {"w": torch.full((3, 2), float(i))}
        statistics = {"trained": {"w": torch.tensor([True, i == 2, False])}}
        mean.add(update, 1.0, statistics)
        soup.add(update, 1.0, statistics)
    assert largest_difference(soup.result(), mean.result()) == 0
    assert soup.result()["w"][:, 0].tolist() == [1.0, 2.0, 1.0]


def test_an_empty_soup_is_refused() -> None:
    with pytest.raises(fedrot.UpdateError, match="Nothing was added"):
        GreedySoup(lambda _: 0.0).result()


def test_a_refused_update_leaves_the_soup_as_it_was() -> None:
    good = {"w": torch.ones(2), "b": torch.zeros(1)}
    soup = GreedySoup(lambda _: 0.0)
    with pytest.raises(fedrot.UpdateError):
        soup.add(good, -1.0)
    with pytest.raises(fedrot.UpdateError, match="Nothing was added"):
        soup.result()
    soup.add(good, 1.0)
    nan = {"fisher": {"w": torch.full((2,), float("nan"))}}
    for update, weight, statistics in (
        (good, 0.0, None),
        (good, float("nan"), None),
        ({"w": torch.ones(2)}, 1.0, None),
        ({**good, "w": torch.ones(3)}, 1.0, None),
        ({**good, "more": torch.ones(3)}, 1.0, None),
        (good, 1.0, nan),
        (good, 1.0, {"trained": {"w": torch.ones(2)}}),
    ):
        with pytest.raises(fedrot.UpdateError):
            soup.add(update, weight, statistics)
    soup.add({k: v + 2 for k, v in good.items()}, 1.0)
    assert largest_difference(soup.result(), {"w": torch.full((2,), 2.0), "b": torch.ones(1)}) == 0
    assert soup.chosen == (0, 1)


def test_the_soup_is_an_aggregation_by_name() -> None:
    assert aggregation_named("greedy", score=lambda: lambda tensors: 0.0)().needs == ()
    assert "greedy" not in [entry.name for entry in aggregations(("symmetry",))]
    told = r"needs the argument 'score': .* reproductions.soup.GreedySoup\(score\)"
    with pytest.raises(fedrot.FedrotError, match=told):
        aggregation_named("greedy")


def closeness(target: State) -> Callable[[Mapping[str, Tensor]], float]:
    return lambda tensors: -sum(float((tensors[n] - target[n]).square().sum()) for n in target)


def test_a_greedy_soup_of_aligned_updates(tmp_path: Path) -> None:
    clients, report = honest(), tmp_path / "report.jsonl"
    stranger = Client(near(state(), 0.8, 9), 4.0, {})
    clients = [*clients, stranger]
    target = mean(clients[:3])
    direct = GreedySoup(closeness(target))
    expected = merged(direct, [replace(client, statistics={}) for client in clients])
    assert sorted(direct.chosen) == [0, 1, 2]
    soup = partial(GreedySoup, closeness(target))
    bare = [replace(client, statistics={}) for client in clients]
    result, _ = play(
        FedRot(config_of(NAME), alignment=None, aggregation=soup, reporting=Reporting(rows=report)), bare
    )
    assert apart(result, expected) == 0
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    (note,) = [row for row in rows if "stage" not in row]
    assert (note["tensor"], note["note"][:14]) == ("soup", "3 of 4 updates")
    strategy = FedRot(config_of(NAME), alignment=replace(EAGER, anchor="global"), aggregation=soup)
    moved = [
        Client(fedrot.random_equivalent(c.update, SYMMETRY, i), c.weight, {}) for i, c in enumerate(bare)
    ]
    aligned, _ = play(strategy, bare)
    assert records_apart(play(strategy, moved)[0], aligned) <= 1e-4


def test_a_soup_needs_held_out_rows_of_the_clients() -> None:
    config = Experiment(**SMALL, arms=("plain", "greedy"), holdout=0.005)
    with pytest.raises(FedrotError, match="arm 'greedy' needs clients' held-out rows"):
        check([config])
