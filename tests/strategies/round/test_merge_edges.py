"""Merging behind FedRot at its edges: odd replies, odd aggregations, and who is told what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
)
from torch import Tensor

import fedrot
from fedrot.aggregation import Fisher, Mean, RegMean
from fedrot.collect.statistics import TRAINED
from fedrot.strategies import Aligned, FedRot
from fedrot.strategies.settings import Reporting
from fedrot.strategies.wire.arrays import STATISTICS
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.groups import Move, apply_moves
from tests.models import DIM, HEADS, State, config_of
from tests.strategies.aggregating import (
    ANCHOR,
    HEAD,
    OUTPUT,
    PERMUTATIONS,
    Client,
    answer,
    apart,
    ask,
    fishers,
    headless,
    honest,
    mean,
    merged,
    play,
)
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import largest_difference, tensors_of

CONFIG = config_of(NAME)
ALIGN = pytest.mark.parametrize("align", [True, False], ids=["aligned", "unaligned"])
POOLER = "bert.pooler.dense.weight"


def bare(clients: Iterable[Client]) -> list[Client]:
    return [replace(client, statistics={}) for client in clients]


def answers(
    strategy: FedAvg,
    clients: Sequence[Client],
    ids: Sequence[int] = range(9),
    **metrics: Sequence[float],
) -> list[Message]:
    """Return the clients' replies to the strategy's first round."""
    messages = ask(strategy, state(), len(clients))
    return [
        answer(m, c, ids[i], **{name: values[i] for name, values in metrics.items()})
        for i, (m, c) in enumerate(zip(messages, clients, strict=True))
    ]


def finished(strategy: FedAvg, replies: Sequence[Message]) -> tuple[ArrayRecord | None, dict[str, Any]]:
    arrays, metrics = strategy.aggregate_train(1, replies)
    return arrays, dict(metrics or {})


# --- what some clients have not trained ---------------------------------------------------------------


def marked(client: Client, **rows: Iterable[int]) -> Client:
    """Return a client that trained only some rows of the tensors named by their place in the head."""
    named = {HEAD[int(place[-1])]: list(found) for place, found in rows.items()}
    full, masks = fedrot.completed(client.update, state(), named)
    return Client(full, client.weight, {**client.statistics, **masks})


def diagonal(client: Client) -> Client:
    """Return a client that sends the diagonals of its Gram matrices."""
    diagonals = {name: gram.diagonal().clone() for name, gram in client.statistics["gram"].items()}
    return replace(client, statistics={"gram": diagonals})


def reversed_statistics(client: Client) -> Client:
    """Return a client whose dictionaries are filled the other way round."""
    return replace(
        client,
        statistics={
            kind: dict(reversed(list(by_name.items())))
            for kind, by_name in reversed(list(client.statistics.items()))
        },
    )


@ALIGN
@pytest.mark.parametrize("turned", [False, True], ids=["as collected", "reversed"])
def test_masks_drop_nobody(turned: bool, align: bool, warnings: Callable[[], str]) -> None:
    one, two, three = honest()
    good = [marked(one, h0=[0, 1], h1=[0, 1]), marked(two, h1=[2]), three]
    strategy = FedRot(
        CONFIG, alignment=replace(PERMUTATIONS, anchor="global") if align else None, aggregation=RegMean
    )
    expected, _ = play(strategy, good)
    if turned:
        good[0], good[2] = reversed_statistics(good[0]), reversed_statistics(good[2])
    others = [marked(diagonal(c), h0=[0]) for c in (one, two)]
    for ids in ((1, 2, 3, -8, -9), (1, 2, 3, 8, 9)):
        arrays, metrics = finished(strategy, answers(strategy, [*good, *others], ids))
        assert metrics["fedrot-replies-dropped"] == 2
        assert all(f"Reply of client {i} dropped" in warnings() for i in ids[3:])
        assert not any(f"Reply of client {i} dropped" in warnings() for i in ids[:3])
        assert largest_difference(arrays, expected) <= 1e-6


def without(client: Client, name: str) -> Client:
    """Return a client that has not trained a weight, and has no Gram matrix of its input."""
    grams = {n: g for n, g in client.statistics["gram"].items() if n != name}
    return replace(client, statistics={"gram": grams, TRAINED: {name: torch.tensor(False)}})


def test_what_clients_lack_drops_nobody(warnings: Callable[[], str]) -> None:
    one, two, three = honest()
    good = [without(one, HEAD[0]), without(two, POOLER), three]
    strategy = FedRot(CONFIG, alignment=None, aggregation=RegMean)
    expected, _ = play(strategy, good)
    for ids in ((1, 2, 3, -8, -9), (1, 2, 3, 8, 9)):
        others = [diagonal(c) for c in (one, two)]
        arrays, metrics = finished(strategy, answers(strategy, [*good, *others], ids))
        assert metrics["fedrot-replies-dropped"] == 2
        assert all(f"Reply of client {i} dropped" in warnings() for i in ids[3:])
        assert largest_difference(arrays, expected) <= 1e-6


class Behind(Aligned, FedAvg):
    """FedAvg with alignment and nothing else."""


# --- precision ---------------------------------------------------------------------------------------


class Noting(RegMean):
    """RegMean with the paper's alpha that keeps all notes."""

    kept: list[dict[str, str]] = []  # noqa: RUF012

    def result(self) -> dict[str, Tensor]:
        found = super().result()
        Noting.kept.append(dict(self.notes))
        return found


def test_bfloat16_records_nearly_give_the_float32_result_without_notes() -> None:
    Noting.kept.clear()
    strategy = FedRot(CONFIG, alignment=None, aggregation=Noting)
    expected, _ = play(strategy, honest())
    found, metrics = play(strategy, honest(), dtype=torch.bfloat16)
    assert metrics.get("fedrot-replies-dropped", 0) == 0
    assert Noting.kept == [{}, {}]
    gain = apart(expected, mean(honest()))
    assert 0 < largest_difference(found, expected) < 0.1 * gain


# --- Fisher and the orders of heads' units -----------------------------------------------------------


def reordered(tensors: State, seed: int) -> State:
    """Return the same function with heads, their units and neurons in another order."""
    generator = torch.Generator().manual_seed(seed)
    moves = []
    for group in SYMMETRY.select(("heads", "attention", "ffn")):
        if isinstance(group.kind, HeadRotation):
            orders = [torch.randperm(DIM, generator=generator) for _ in range(HEADS)]
            element = torch.stack([torch.eye(DIM, dtype=torch.float64)[order] for order in orders])
        else:
            element = group.kind.random(generator)
        moves.append(Move(group, element))
    return apply_moves(tensors, moves)


@ANCHOR
def test_fisher_follows_every_permutation_inside_and_outside_of_heads(anchor: str) -> None:
    parts = ("heads", "attention", "ffn")
    options = fedrot.AlignmentOptions(parts=parts, within_heads="permutation")
    clients = honest(fishers)
    moved = []
    for seed, client in enumerate(clients):
        update = reordered(client.update, seed)
        moved.append(Client(update, client.weight, fishers(update, seed)))
    strategy = FedRot(CONFIG, alignment=replace(options, anchor=anchor), aggregation=Fisher)
    expected, _ = play(strategy, clients)
    found, metrics = play(strategy, moved)
    assert metrics["fedrot-replies-dropped"] == 0
    assert metrics["fedrot-groups-moved"] > 0
    assert largest_difference(found, expected) <= 1e-4
    assert apart(expected, mean(clients)) > 1e-3
    unaligned = FedRot(CONFIG, alignment=None, aggregation=Fisher)
    assert largest_difference(play(unaligned, moved)[0], expected) > 0.1


@pytest.mark.parametrize("place", range(3))
def test_a_client_without_a_head_sends_no_fisher_for_it(place: int) -> None:
    clients = honest(fishers)
    lacking = headless(clients[place], None)
    left = {n: f for n, f in lacking.statistics["fisher"].items() if n not in HEAD}
    clients[place] = replace(lacking, statistics={**lacking.statistics, "fisher": left})
    strategy = FedRot(CONFIG, alignment=replace(PERMUTATIONS, anchor="global"), aggregation=Fisher)
    found, metrics = play(strategy, clients)
    assert metrics["fedrot-replies-dropped"] == 0
    others = [client for i, client in enumerate(clients) if i != place]
    expected = merged(Fisher(0.0), others)
    for name in HEAD:
        assert (tensors_of(found)[name] - expected[name]).abs().max() <= 1e-3


# --- what the metrics say ----------------------------------------------------------------------------


class Choosy(Mean):
    """Refuses whatever weighs 10."""

    def add(self, update: Any, weight: float, statistics: Any = None) -> None:
        if weight == 10:
            raise fedrot.UpdateError("I do not like it.")
        super().add(update, weight, statistics)


@ALIGN
def test_what_an_aggregation_of_ones_own_refuses_is_not_in_the_metrics(align: bool) -> None:
    strategy = FedRot(
        CONFIG, alignment=fedrot.AlignmentOptions(anchor="global") if align else None, aggregation=Choosy
    )
    clients = bare(honest())
    arrays, metrics = finished(strategy, answers(strategy, clients, loss=[1.0, 1000.0, 3.0]))
    assert metrics["fedrot-replies-dropped"] == 1
    assert metrics["loss"] == pytest.approx((3 * 1.0 + 5 * 3.0) / 8)
    plain = FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor="global") if align else None)
    expected, _ = play(plain, [clients[0], clients[2]])
    assert largest_difference(arrays, expected) <= 1e-6


@ALIGN
@pytest.mark.parametrize("aggregation", [None, Mean, RegMean])
def test_metrics_under_the_name_of_statistics_do_not_crash_the_round(
    aggregation: Any, align: bool
) -> None:
    clients = honest() if aggregation is RegMean else bare(honest())
    strategy = FedRot(
        CONFIG,
        alignment=fedrot.AlignmentOptions(anchor="global") if align else None,
        aggregation=aggregation,
    )
    expected, _ = play(strategy, clients)
    replies = answers(strategy, bare(clients))
    for message in replies:
        message.content[STATISTICS] = message.content.metric_records["metrics"]
        del message.content["metrics"]
    if aggregation is RegMean:
        # One fault of all ends the run.
        with pytest.raises(fedrot.FedrotError, match="has no statistics 'gram'"):
            finished(strategy, replies)
    else:
        found, metrics = finished(strategy, replies)
        assert largest_difference(found, expected) <= 1e-6
        assert metrics.get("fedrot-replies-dropped", 0) == 0


# --- what is refused at once -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "given"),
    [
        (DifferentialPrivacyServerSideFixedClipping, {"clipping_norm": 1.0}),
        (DifferentialPrivacyClientSideFixedClipping, {"clipping_norm": 1.0}),
        (DifferentialPrivacyServerSideAdaptiveClipping, {}),
    ],
)
def test_a_privacy_wrapper_around_an_aggregation_is_refused(wrapper: Any, given: dict[str, Any]) -> None:
    behind = FedRot(CONFIG, alignment=None, aggregation=RegMean)
    strategy = wrapper(behind, noise_multiplier=0.0, num_sampled_clients=3, **given)
    with pytest.raises(fedrot.FedrotError, match=r"clips updates before .*class Private\(Aligned, "):
        ask(strategy, state(), 3)


@pytest.mark.parametrize("aggregator", [RegMean(), Mean(), Fisher()], ids=["RegMean", "Mean", "Fisher"])
@ALIGN
def test_an_aggregator_in_the_place_of_its_class_is_refused(align: bool, aggregator: Any) -> None:
    with pytest.raises(fedrot.FedrotError, match="or a class, aggregation=fedrot"):
        FedRot(CONFIG, alignment=fedrot.AlignmentOptions() if align else None, aggregation=aggregator)


# --- results that are no model -----------------------------------------------------------------------


class Broken(Mean):
    """Returns NaN in one tensor."""

    def result(self) -> dict[str, Tensor]:
        found = super().result()
        return {**found, OUTPUT: found[OUTPUT] * torch.nan}


class Overflowing(Mean):
    """Returns Inf in one entry."""

    def result(self) -> dict[str, Tensor]:
        found = super().result()
        found[HEAD[1]][0] = torch.inf
        return found


@pytest.mark.parametrize("aggregation", [Broken, Overflowing])
@ALIGN
def test_a_result_that_is_not_finite_leaves_the_model_as_it_was(
    align: bool, aggregation: Any, warnings: Callable[[], str], tmp_path: Path
) -> None:
    report = tmp_path / "report.jsonl"
    strategy = FedRot(
        CONFIG,
        alignment=fedrot.AlignmentOptions() if align else None,
        aggregation=aggregation,
        reporting=Reporting(rows=report),
    )
    arrays, metrics = finished(strategy, answers(strategy, bare(honest()), loss=[1.0, 1.0, 1.0]))
    assert arrays is None
    assert "not finite" in warnings()
    assert "dropped" not in warnings()
    assert metrics.get("fedrot-replies-dropped", 0) == 0
    assert metrics["loss"] == pytest.approx(1.0)
    assert report.exists()


class AlignedAdam(Aligned, FedAdam):
    """Makes a step from the mean of the aligned updates."""


def test_a_step_beyond_float32_leaves_the_model_as_it_was(warnings: Callable[[], str]) -> None:
    strategy = AlignedAdam(CONFIG, eta=1e39)
    with np.errstate(over="ignore", invalid="ignore"):
        arrays, metrics = finished(strategy, answers(strategy, bare(honest())))
    assert arrays is None
    assert "the aggregation is not finite" in warnings()
    assert metrics["fedrot-replies-accepted"] == 3


# --- statistics that nobody uses ---------------------------------------------------------------------


@ALIGN
def test_alignment_alone_warns_that_it_uses_no_statistics(
    align: bool, warnings: Callable[[], str]
) -> None:
    expected, _ = play(
        Behind(CONFIG, alignment=fedrot.AlignmentOptions() if align else None), bare(honest())
    )
    assert "not used" not in warnings()
    found, _ = play(Behind(CONFIG, alignment=fedrot.AlignmentOptions() if align else None), honest())
    assert "The statistics 'gram', 'input_mean' are not used" in warnings()
    assert largest_difference(found, expected) == 0
    masks = [marked(client, h0=[0]) for client in bare(honest())]
    play(Behind(CONFIG, alignment=fedrot.AlignmentOptions() if align else None), masks)
    assert f"The statistics '{TRAINED}' are not used" in warnings()
