"""Ways to merge aligned updates behind FedRot: statistics are asked for, checked, moved and used."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

import fedrot
from fedrot.aggregation import Aggregator, Fisher, Mean, RegMean
from fedrot.collect.statistics import TRAINED
from fedrot.strategies import Aligned, FedRot, statistics_record, wanted_statistics
from fedrot.strategies.settings import OtherBasis, Reporting
from fedrot.strategies.wire.arrays import STATISTICS
from tests.models import EAGER, WIDTH, config_of, near
from tests.strategies.aggregating import (
    ANCHOR,
    DOWN,
    HEAD,
    PERMUTATIONS,
    QUERY,
    Client,
    Statistics,
    answer,
    apart,
    ask,
    batches,
    fishers,
    grams,
    honest,
    loaded,
    mean,
    merged,
    play,
    scrambled,
)
from tests.strategies.classifier import NAME, SYMMETRY, build, error, state
from tests.strategies.fakes import (
    FakeGrid,
    arrays_of,
    failure,
    largest_difference,
    reply,
    tensors_of,
)

# --- RegMean -----------------------------------------------------------------------------------------


def test_regmean_behind_flower_is_regmean() -> None:
    result, metrics = play(FedRot(config_of(NAME), alignment=None, aggregation=RegMean), honest())
    assert apart(result, merged(RegMean(), honest())) == 0
    assert apart(result, mean(honest())) > 1e-3
    assert not metrics


def test_options_of_the_aggregation_are_its_own() -> None:
    strategy = FedRot(config_of(NAME), alignment=None, aggregation=lambda: RegMean(alpha=0.3, beta=0.1))
    result, _ = play(strategy, honest())
    assert apart(result, merged(RegMean(0.3, 0.1), honest())) == 0


@ANCHOR
def test_regmean_merges_what_alignment_moved(anchor: str) -> None:
    """The oracle: align the round, move each client's statistics by hand, merge."""
    clients = scrambled(honest())
    aligned = fedrot.align_round(
        [(c.update, c.weight) for c in clients],
        state(),
        SYMMETRY,
        fedrot.AlignmentOptions(anchor=anchor),
    )
    moved = [
        Client(dict(a.tensors), a.weight, a.alignment.transport(client.statistics))
        for client, a in zip(clients, aligned, strict=True)
    ]
    result, _ = play(
        FedRot(config_of(NAME), alignment=fedrot.AlignmentOptions(anchor=anchor), aggregation=RegMean),
        clients,
    )
    assert apart(result, merged(RegMean(), moved)) <= 1e-6


@ANCHOR
def test_scrambled_clients_give_the_unscrambled_regmean(anchor: str) -> None:
    clients = honest()
    strategy = FedRot(config_of(NAME), alignment=replace(EAGER, anchor=anchor), aggregation=RegMean)
    expected, _ = play(strategy, clients)
    result, _ = play(strategy, scrambled(clients))
    assert largest_difference(result, expected) <= 1e-4
    unaligned = FedRot(config_of(NAME), alignment=None, aggregation=RegMean)
    assert largest_difference(play(unaligned, scrambled(clients))[0], expected) > 0.1


def test_weights_count() -> None:
    equal = [replace(client, weight=1.0) for client in honest()]
    strategy = FedRot(config_of(NAME), aggregation=RegMean)
    assert largest_difference(play(strategy, equal)[0], play(strategy, honest())[0]) > 1e-3
    tenfold = [replace(client, weight=10 * client.weight) for client in honest()]
    assert largest_difference(play(strategy, tenfold)[0], play(strategy, honest())[0]) <= 1e-5


def test_clients_that_agree_are_left_as_they_are() -> None:
    base = state()
    clients = [Client(base, 1.0 + seed, grams(base, seed)) for seed in range(3)]
    assert apart(play(FedRot(config_of(NAME), aggregation=RegMean), clients)[0], base) <= 1e-5
    result, _ = play(FedRot(config_of(NAME), aggregation=RegMean), scrambled(clients))
    assert apart(result, base) <= 1e-4


def test_other_basis_replies_bring_statistics_of_the_whole_model() -> None:
    other = state(3)
    clients = [Client(other, 9.0, grams(other)), *[Client(other, 5.0, grams(other, s)) for s in (1, 2)]]
    moved = scrambled(clients, parts=fedrot.WHOLE_MODEL)
    moved[0] = clients[0]
    strategy = FedRot(config_of(NAME), aggregation=RegMean, other_basis=OtherBasis(model=build))
    result, _ = play(strategy, moved)
    assert apart(result, other) <= 1e-3


def test_statistics_in_bfloat16_are_nearly_the_same() -> None:
    strategy = FedRot(config_of(NAME), aggregation=RegMean)
    expected, _ = play(strategy, honest())
    result, half = play(strategy, honest(), dtype=torch.bfloat16)
    assert half["fedrot-replies-dropped"] == 0
    gain = apart(expected, mean(honest()))
    assert largest_difference(result, expected) < 0.1 * gain


def test_few_tokens_in_bfloat16_are_gram_matrices_too() -> None:
    """Rounding to three digits leaves eigenvalues below zero where a direction was not seen."""
    clients = [
        Client(c.update, c.weight, fedrot.collect_gram(loaded(c.update), batches(seed, 2, 5)))
        for seed, c in enumerate(honest())
    ]
    strategy = FedRot(config_of(NAME), aggregation=RegMean)
    expected, _ = play(strategy, clients)
    messages = ask(strategy, state(), 3)
    replies = [
        answer(m, c, i, torch.bfloat16) for i, (m, c) in enumerate(zip(messages, clients, strict=True))
    ]
    result, metrics = strategy.aggregate_train(1, replies)
    assert metrics is not None
    assert metrics["fedrot-replies-dropped"] == 0
    gain = apart(expected, mean(clients))
    assert largest_difference(result, expected) < 0.1 * gain


def test_models_of_conv1d_alone_are_merged_too() -> None:
    """GPT-2 reads its inputs with the weights' first axis: all of its matrices are ``gram_conv1d``."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for weight in (1.0, 4.0):
        inputs = torch.randn(20, 4, generator=generator)
        update = {"h.c_fc.weight": torch.randn(4, 3, generator=generator)}
        gram = {"gram_conv1d": {"h.c_fc.weight": inputs.T @ inputs}}
        clients.append(Client(update, weight, gram))
    strategy = FedRot(None, alignment=None, aggregation=RegMean)
    result, _ = play(strategy, clients, base=clients[0].update)
    assert apart(result, merged(RegMean(), clients)) <= 1e-6


def test_integer_buffers_are_averaged_and_rounded() -> None:
    more = {"steps": torch.tensor(7), "mask": torch.tensor([True, False])}
    base = {**state(), **more}
    symmetry = fedrot.symmetry_of(config_of(NAME), base)
    clients = [
        replace(client, update={**client.update, "steps": torch.tensor(9 + i), "mask": more["mask"]})
        for i, client in enumerate(honest())
    ]
    weights = [client.weight for client in clients]
    mean = sum(w * (9 + i) for i, w in enumerate(weights)) / sum(weights)
    assert round(mean) != mean
    for align in (True, False):
        strategy = FedRot(
            symmetry, alignment=fedrot.AlignmentOptions() if align else None, aggregation=RegMean
        )
        arrays = arrays_of(play(strategy, clients, base=base)[0])
        assert (arrays["steps"].dtype, int(arrays["steps"])) == (np.dtype("int64"), round(mean))
        assert arrays["mask"].tolist() == [True, False]


def test_names_dtypes_and_order_are_the_broadcasts() -> None:
    base = state()
    half = [
        replace(client, update={name: tensor.half() for name, tensor in client.update.items()})
        for client in honest()
    ]
    result, _ = play(FedRot(config_of(NAME), aggregation=RegMean), half)
    assert list(result) == list(base)
    assert {array.dtype for array in arrays_of(result).values()} == {np.dtype("float32")}


def test_the_replies_and_their_statistics_are_not_changed() -> None:
    strategy = FedRot(config_of(NAME), aggregation=RegMean)
    messages = ask(strategy, state(), 3)
    clients = scrambled(honest())
    replies = [answer(m, c, i) for i, (m, c) in enumerate(zip(messages, clients, strict=True))]
    before = [copy.deepcopy(message.content) for message in replies]
    strategy.aggregate_train(1, replies)
    for was, message in zip(before, replies, strict=True):
        assert list(was) == list(message.content)
        for record in ("arrays", STATISTICS):
            ours, theirs = arrays_of(was[record]), arrays_of(message.content[record])
            assert all((ours[name] == theirs[name]).all() for name in ours)


# --- asking ------------------------------------------------------------------------------------------


class EveryOther(FedRot):
    """A strategy of a user's own that uses statistics in odd rounds only."""

    def needs(self, server_round: int) -> tuple[str, ...]:
        return super().needs(server_round) if server_round % 2 else ()

    def aggregator(self, server_round: int) -> Callable[[], Aggregator] | None:
        return super().aggregator(server_round) if server_round % 2 else Mean


def test_a_subclass_may_ask_for_statistics_in_some_rounds() -> None:
    strategy = EveryOther(config_of(NAME), alignment=None, aggregation=RegMean)
    for server_round in range(1, 6):
        config = ask(strategy, state(), 3, server_round)[0].content.config_records["config"]
        assert config[STATISTICS] == ("gram" if server_round % 2 else "")
    bare = [replace(client, statistics={}) for client in honest()]
    for server_round in (2, 4):
        for clients in (bare, honest()):
            result, _ = play(strategy, clients, server_round)
            assert apart(result, mean(honest())) <= 1e-6
    for server_round in (1, 3):
        assert apart(play(strategy, honest(), server_round)[0], merged(RegMean(), honest())) == 0


def test_the_clients_read_what_is_asked_round_by_round() -> None:
    """The whole loop of Flower, over rounds whose configuration is one and the same record."""
    asked: list[list[tuple[str, ...]]] = [[], []]

    def client(index: int) -> Callable[[Message], Message]:
        def train(message: Message) -> Message:
            asked[index].append(wanted_statistics(message))
            chosen = honest()[index]
            return answer(message, chosen if asked[index][-1] else replace(chosen, statistics={}), index)

        return train

    given: dict[str, Any] = {"fraction_evaluate": 0.0}
    strategy = EveryOther(config_of(NAME), aggregation=RegMean, min_evaluate_nodes=0, **given)
    grid = FakeGrid({100 + i: client(i) for i in range(2)})
    result = strategy.start(grid, ArrayRecord(state()), 5, train_config=ConfigRecord({"lr": 0.1}))
    assert asked == [[("gram",), (), ("gram",), (), ("gram",)]] * 2
    assert {m["fedrot-replies-dropped"] for m in result.train_metrics_clientapp.values()} == {0}


def test_without_needs_nothing_is_asked_for() -> None:
    for aggregation in (None, Mean):
        strategy = FedRot(config_of(NAME), aggregation=aggregation)
        (config,) = ask(strategy, state(), 3)[0].content.config_records.values()
        assert STATISTICS not in config


def test_the_summary_names_the_aggregation(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    caplog.set_level(logging.INFO)
    for build_it in (RegMean, lambda: RegMean(0.5), partial(RegMean, 0.5)):
        caplog.clear()
        FedRot(config_of(NAME), aggregation=build_it).summary()
        assert "Aggregation: RegMean\n" in caplog.text
    FedRot(config_of(NAME), aggregation=Mean).summary()
    assert "Aggregation: Mean\n" in caplog.text


# --- bad statistics ----------------------------------------------------------------------------------


def changed(kind: str, name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Client], Client]:
    """Return a function that changes one value of a client's statistics."""

    def change(client: Client) -> Client:
        by_name = dict(client.statistics[kind])
        return replace(
            client, statistics={**client.statistics, kind: {**by_name, name: value(by_name[name])}}
        )

    return change


def added(kind: str, **values: Any) -> Callable[[Client], Client]:
    """Return a function that adds statistics of a kind, by tensor."""
    return lambda client: replace(client, statistics={**client.statistics, kind: dict(**values)})


def nan(value: Tensor) -> Tensor:
    return torch.where(torch.eye(len(value)).bool(), torch.nan, value)


def without(client: Client) -> Client:
    return replace(client, statistics={})


#: What a client may get wrong, and what the warning says.
BAD: dict[str, tuple[Callable[[Client], Client], str]] = {
    "none": (without, "has no statistics 'gram'"),
    "empty": (added("gram"), "has no statistics 'gram'"),
    "other kind instead": (
        lambda c: replace(c, statistics={"fisher": {HEAD[0]: torch.ones(3, WIDTH)}}),
        "has no statistics 'gram'",
    ),
    "nan": (changed("gram", DOWN, nan), "hold NaN, Inf"),
    "inf": (changed("gram", DOWN, lambda g: g / 0), "hold NaN, Inf"),
    "negative": (changed("gram", DOWN, torch.neg), "have negative eigenvalues"),
    "a diagonal": (changed("gram", DOWN, lambda g: g.diagonal().clone()), "have shape [48]"),
    "asymmetric": (changed("gram", DOWN, torch.triu), "are not symmetric"),
    "too small": (changed("gram", DOWN, lambda g: g[1:, 1:]), "have shape [47, 47]"),
    "not square": (changed("gram", DOWN, lambda g: g[1:]), "have shape [47, 48]"),
    "a number": (changed("gram", DOWN, lambda g: torch.tensor(1.0)), "have shape []"),
    "four axes": (changed("gram", DOWN, lambda g: g[None, None]), "have shape [1, 1, 48, 48]"),
    "blocks": (changed("gram", DOWN, lambda g: torch.ones(4, 12, 12)), "have shape [4, 12, 12]"),
    "empty matrix": (changed("gram", DOWN, lambda g: torch.ones(0, 0)), "have shape [0, 0]"),
    "unknown kind": (added("hessian", **{DOWN: torch.ones(2)}), "Unknown statistics 'hessian'"),
    "unknown name": (
        lambda c: replace(c, statistics={"gram": {**c.statistics["gram"], "nowhere": torch.eye(3)}}),
        "belong to no tensor",
    ),
    "of a bias": (
        lambda c: replace(c, statistics={"gram": {**c.statistics["gram"], HEAD[1]: torch.eye(3)}}),
        "belong to a tensor that is no matrix",
    ),
    "negative fisher": (added("fisher", **{HEAD[0]: -torch.ones(3, WIDTH)}), "are negative"),
    "rotated fisher": (
        added("fisher", **{QUERY: torch.rand(WIDTH, WIDTH)}),
        "diagonal does not determine the rotated diagonal",
    ),
    "float mask": (added(TRAINED, **{HEAD[0]: torch.ones(3)}), "send bool"),
    "long mask": (added(TRAINED, **{HEAD[0]: torch.ones(4, dtype=torch.bool)}), "have shape [4]"),
    "rotated mask": (
        added(TRAINED, **{QUERY: torch.arange(WIDTH) % 2 == 0}),
        "diagonal does not determine the rotated diagonal",
    ),
}


@pytest.mark.parametrize("place", [0, 3], ids=["first", "last"])
@pytest.mark.parametrize("case", BAD)
def test_bad_statistics_are_dropped_with_their_client_and_the_round_goes_on(
    case: str, place: int, warnings: Callable[[], str]
) -> None:
    change, reason = BAD[case]
    strategy = FedRot(config_of(NAME), alignment=replace(EAGER, anchor="global"), aggregation=RegMean)
    messages = ask(strategy, state(), 4)
    good = [answer(m, c, i + 1) for i, (m, c) in enumerate(zip(messages, honest(), strict=False))]
    expected, _ = strategy.aggregate_train(1, good)
    odd = change(Client(near(state(), 0.05, 7), 4.0, grams(near(state(), 0.05, 7), 7)))
    who = 9 if place else -9
    message = reply(messages[3], odd.update, odd.weight, who)
    message.content[STATISTICS] = record_of(odd.statistics)
    result, metrics = strategy.aggregate_train(1, [*good, message])
    assert metrics is not None
    assert metrics["fedrot-replies-dropped"] == 1
    assert f"Reply of client {who} dropped" in warnings()
    assert reason.lower() in warnings().lower()
    assert largest_difference(result, expected) <= 1e-6


def record_of(statistics: Statistics) -> ArrayRecord:
    """Return statistics as a client would send them that leaves them in their own precision."""
    usual = statistics_record(statistics)
    values = {key: statistics[key.split("/")[0]][key.split("/")[1].split("|")[0]] for key in usual}
    return ArrayRecord({key: Array(value.numpy()) for key, value in values.items()})


@pytest.mark.parametrize("align", [True, False])
def test_undecodable_statistics_are_dropped(align: bool, warnings: Callable[[], str]) -> None:
    strategy = FedRot(
        config_of(NAME),
        alignment=fedrot.AlignmentOptions(anchor="global") if align else None,
        aggregation=RegMean,
    )
    messages = ask(strategy, state(), 4)
    clients = honest()
    good = [answer(m, c, i) for i, (m, c) in enumerate(zip(messages, clients, strict=False))]
    expected, _ = strategy.aggregate_train(1, good)
    garbage = Array(dtype="float32", shape=(2, 2), stype="numpy.ndarray", data=b"garbage")
    for key, array, reason in (
        ("gram/" + DOWN, garbage, "cannot be decoded"),
        ("gram", Array(np.ones(2)), "have no kind"),
        ("gram/", Array(np.ones(2)), "belong to no tensor"),
        ("gram/" + DOWN, Array(np.array(["a", "b"])), "cannot be decoded"),
        ("gram/" + DOWN, Array(np.ones(48, dtype=">f4")), "cannot be decoded"),
    ):
        broken = answer(messages[3], replace(clients[0], statistics={}), 9)
        broken.content[STATISTICS] = ArrayRecord({key: array})
        result, metrics = strategy.aggregate_train(1, [*good, broken])
        assert largest_difference(result, expected) == 0
        assert metrics is not None
        assert metrics["fedrot-replies-dropped"] == 1
        assert "Reply of client 9 dropped" in warnings()
        assert reason in warnings()


def test_statistics_in_a_record_of_another_kind_are_none(warnings: Callable[[], str]) -> None:
    strategy = FedRot(
        config_of(NAME), alignment=fedrot.AlignmentOptions(anchor="global"), aggregation=RegMean
    )
    messages = ask(strategy, state(), 4)
    good = [answer(m, c, i) for i, (m, c) in enumerate(zip(messages, honest(), strict=False))]
    expected, _ = strategy.aggregate_train(1, good)
    for record in (ConfigRecord({"gram": 1.0}), MetricRecord({"gram": 1.0})):
        odd = answer(messages[3], replace(honest()[0], statistics={}), 9)
        odd.content[STATISTICS] = record
        result, _ = strategy.aggregate_train(1, [*good, odd])
        assert largest_difference(result, expected) == 0
    assert warnings().count("Reply of client 9 dropped") == 2


def test_matrices_too_large_to_add_up_are_no_end_of_the_round() -> None:
    """Finite in float64, infinite once they are weighed."""
    strategy = FedRot(
        config_of(NAME), alignment=fedrot.AlignmentOptions(anchor="global"), aggregation=RegMean
    )
    messages = ask(strategy, state(), 3)
    replies = [answer(m, c, i) for i, (m, c) in enumerate(zip(messages, honest(), strict=True))]
    huge = changed("gram", DOWN, lambda g: torch.eye(len(g), dtype=torch.float64) * 1e308)
    replies[1].content[STATISTICS] = record_of(huge(honest()[1]).statistics)
    result, _ = strategy.aggregate_train(1, replies)
    assert all(np.isfinite(array).all() for array in arrays_of(result).values())


@pytest.mark.parametrize("align", [True, False])
def test_if_nobody_sends_statistics_nothing_is_averaged(
    align: bool, warnings: Callable[[], str]
) -> None:
    strategy = FedRot(
        config_of(NAME), alignment=fedrot.AlignmentOptions() if align else None, aggregation=RegMean
    )
    messages = ask(strategy, state(), 3, server_round=2)
    bare = [replace(client, statistics={}) for client in honest()]
    replies = [answer(m, c, i) for i, (m, c) in enumerate(zip(messages, bare, strict=True))]
    arrays, metrics = strategy.aggregate_train(2, replies)
    assert arrays is None
    assert metrics is not None
    assert metrics["fedrot-replies-dropped"] == 3
    assert all(f"Reply of client {i} dropped" in warnings() for i in range(3))
    # As the strategy behind does it where every reply failed.
    plain, _ = FedAvg().aggregate_train(1, [failure(message) for message in messages])
    assert plain is None


class Picky(Mean):
    """Takes no update at all."""

    def add(self, *args: Any, **kwargs: Any) -> None:
        raise fedrot.UpdateError("I do not like it.")


def test_if_the_aggregation_takes_nothing_nothing_is_averaged(warnings: Callable[[], str]) -> None:
    strategy = FedRot(config_of(NAME), aggregation=Picky)
    messages = ask(strategy, state(), 3, server_round=2)
    replies = [answer(m, c, i) for i, (m, c) in enumerate(zip(messages, honest(), strict=True))]
    arrays, metrics = strategy.aggregate_train(2, replies)
    assert warnings().count("I do not like it") == 3
    assert metrics is not None
    assert metrics["fedrot-replies-dropped"] == 3
    assert arrays is None


def test_the_report_tells_who_was_dropped_and_what_was_noted(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    strategy = FedRot(
        config_of(NAME), aggregation=partial(RegMean, alpha=1.0), reporting=Reporting(rows=report)
    )
    few = [
        Client(c.update, c.weight, fedrot.collect_gram(loaded(c.update), batches(seed, 2, 5)))
        for seed, c in enumerate(honest())
    ]
    play(strategy, [*few, replace(honest()[0], statistics={})])
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert [row["client"] for row in rows if "dropped" in row] == [3]
    notes = {row["tensor"]: row["note"] for row in rows if "note" in row}
    assert "directions of its input are zero at every client" in notes[DOWN]
    assert {row["client"] for row in rows if "client" in row} == {0, 1, 2, 3}


# --- FedAvg itself -----------------------------------------------------------------------------------


def test_fedavg_is_unchanged_to_the_last_bit() -> None:
    found = []
    for strategy in (FedRot(config_of(NAME), alignment=None), FedAvg()):
        messages = ask(strategy, state(), 3)
        assert all(list(m.content.config_records["config"]) == ["server-round"] for m in messages)
        bare = [replace(client, statistics={}) for client in honest()]
        replies = [
            answer(m, c, i, loss=0.1 * i) for i, (m, c) in enumerate(zip(messages, bare, strict=True))
        ]
        found.append(strategy.aggregate_train(1, replies))
    assert largest_difference(found[0][0], found[1][0]) == 0
    assert {name: array.data for name, array in (found[0][0] or {}).items()} == {
        name: array.data for name, array in (found[1][0] or {}).items()
    }
    assert dict(found[0][1] or {}) == dict(found[1][1] or {})


def test_statistics_that_nobody_asked_for_leave_the_mean_alone() -> None:
    bare = [replace(client, statistics={}) for client in honest()]
    expected, _ = play(FedRot(config_of(NAME), alignment=None), bare)
    result, metrics = play(FedRot(config_of(NAME), alignment=None), honest())
    assert largest_difference(result, expected) <= 1e-6
    assert not metrics


class Inspecting(FedAvg):
    """Writes down which records it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[set[str]] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        given = list(replies)
        self.seen += [set(message.content) for message in given if message.has_content()]
        return super().aggregate_train(server_round, given)


class AlignedInspecting(Aligned, Inspecting):
    """The mixin alone, in front of another strategy."""


class FedRotInspecting(FedRot, Inspecting):
    """FedRot with its aggregation."""


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("kind", [AlignedInspecting, partial(FedRotInspecting, aggregation=RegMean)])
def test_statistics_never_reach_the_strategy_behind(kind: Callable[..., Any], align: bool) -> None:
    strategy = kind(config_of(NAME), alignment=fedrot.AlignmentOptions() if align else None)
    play(strategy, honest())
    all_of_them = [{"arrays", "metrics", "client"}] * 3
    assert strategy.seen == (all_of_them if kind is AlignedInspecting else [{"arrays", "metrics"}])


# --- Fisher ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alignment": fedrot.AlignmentOptions(parts=("attention",))},
        {
            "alignment": PERMUTATIONS,
            "other_basis": OtherBasis(options=fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL)),
        },
        {"alignment": PERMUTATIONS, "other_basis": OtherBasis(build)},
    ],
    ids=["default", "attention", "other_basis", "model"],
)
def test_fisher_with_rotations_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(fedrot.FedrotError, match="Rotations of heads cannot be applied") as caught:
        FedRot(config_of(NAME), aggregation=Fisher, **options)
    for way_out in ("align_mod", "alignment=None", "parts=('heads', 'ffn')"):
        assert way_out in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"alignment": None},
        {"alignment": None, "other_basis": OtherBasis(build)},
        {"alignment": PERMUTATIONS},
        {
            "alignment": PERMUTATIONS,
            "other_basis": OtherBasis(options=fedrot.AlignmentOptions(parts=("residual", "ffn"))),
        },
    ],
)
def test_fisher_without_rotations_is_accepted(options: dict[str, Any]) -> None:
    FedRot(config_of(NAME), aggregation=Fisher, **options)


def test_orders_of_a_heads_units_are_no_rotations() -> None:
    """``within_heads="permutation"``: every element is a permutation, which Fisher can follow."""
    options, clients = fedrot.AlignmentOptions(within_heads="permutation"), honest(fishers)
    aligned = [fedrot.align(c.update, state(), SYMMETRY, options) for c in clients]
    moved = [
        Client(a.apply(c.update), c.weight, a.transport(c.statistics))
        for c, a in zip(clients, aligned, strict=True)
    ]
    strategy = FedRot(config_of(NAME), alignment=replace(options, anchor="global"), aggregation=Fisher)
    assert apart(play(strategy, clients)[0], merged(Fisher(), moved)) <= 1e-6


def test_fisher_behind_flower_is_fisher() -> None:
    clients = honest(fishers)
    result, _ = play(FedRot(config_of(NAME), alignment=None, aggregation=Fisher), clients)
    assert apart(result, merged(Fisher(), clients)) == 0
    assert apart(result, mean(clients)) > 1e-3


@ANCHOR
def test_permutations_carry_fisher_information(anchor: str) -> None:
    clients = honest(fishers)
    strategy = FedRot(
        config_of(NAME),
        alignment=replace(PERMUTATIONS, anchor=anchor),
        aggregation=Fisher,
    )
    expected, _ = play(strategy, clients)
    moved = scrambled(clients, fishers, PERMUTATIONS.parts)
    result, metrics = play(strategy, moved)
    assert metrics["fedrot-groups-moved"] > 0
    # Of a key's bias, which the loss does not see, the average is the mean.
    assert largest_difference(result, expected) <= 1e-4
    assert error(result, tensors_of(expected)) <= 1e-4
    unaligned = FedRot(config_of(NAME), alignment=None, aggregation=Fisher)
    assert largest_difference(play(unaligned, moved)[0], expected) > 0.1
