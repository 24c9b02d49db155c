"""FedRot and the Aligned mixin against Flower's own strategies, on a grid in this
process.
"""

import inspect
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
)

import fedrot
from fedrot.aggregation import Mean
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import FedRot
from fedrot.strategies.settings import Reporting, Server
from fedrot.tensors import check_update
from tests.models import EAGER, config_of
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import (
    FakeGrid,
    aggregated,
    arrays_of,
    broadcast,
    failure,
    in_front_of,
    largest_difference,
    replies,
    reply,
)

CONFIG = config_of(NAME)
BASE = state()
GLOBAL = fedrot.AlignmentOptions(anchor="global")
ANCHORS = pytest.mark.parametrize("anchor", sorted(fedrot.alignment.anchors.ANCHORS))


AlignedMedian = in_front_of(FedMedian)


def updates(count=3, scale=0.01):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            k: v + scale * torch.randn(v.shape, generator=generator)
            for k, v in BASE.items()
        }
        for _ in range(count)
    ]


def turned(given):
    return [
        fedrot.random_equivalent(update, SYMMETRY, seed)
        for seed, update in enumerate(given)
    ]


def test_updates_are_aligned_to_the_running_mean_unless_told_otherwise():
    assert (
        FedRot(CONFIG).alignment
        == AlignedMedian(CONFIG).alignment
        == fedrot.AlignmentOptions()
    )
    found, running, fixed = (
        aggregated(
            FedRot(CONFIG, alignment=replace(EAGER, **given)), BASE, updates(scale=0.3)
        )[0]
        for given in ({}, {"anchor": "running"}, {"anchor": "global"})
    )
    assert largest_difference(found, running) == 0
    assert largest_difference(found, fixed) > 1e-3


@pytest.mark.parametrize("canonical", [False, True])
def test_global_anchor_is_the_weighted_mean_of_the_aligned_updates(
    canonical,
):
    options = fedrot.AlignmentOptions(canonical=canonical, chance=0)
    strategy = FedRot(CONFIG, alignment=replace(options, anchor="global"))
    result, _ = aggregated(strategy, BASE, updates(), (1, 5, 14))
    aligned = [fedrot.align(u, BASE, SYMMETRY, options).apply(u) for u in updates()]
    for name, array in arrays_of(result).items():
        expected = (
            sum(w * a[name].double() for w, a in zip((1, 5, 14), aligned, strict=True))
            / 20
        )
        np.testing.assert_allclose(array, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
@ANCHORS
def test_without_evidence_the_model_is_the_plain_mean_to_the_last_bit(
    anchor, deterministic, tmp_path
):
    sent, weights, plain = updates(scale=1e-3), (10, 20, 30), []
    # Deterministic rounds take updates in an order that their contents give.
    for order in itertools.permutations(range(3)) if deterministic else [(0, 1, 2)]:
        mean = Mean()
        for client in order:
            mean.add(sent[client], weights[client])
        plain.append(ArrayRecord(mean.result()))
    strategy = FedRot(
        CONFIG,
        alignment=fedrot.AlignmentOptions(anchor=anchor),
        server=Server(deterministic=deterministic),
        reporting=Reporting(rows=tmp_path / "rows.jsonl"),
    )
    result, _ = aggregated(strategy, BASE, sent, weights)
    assert min(largest_difference(result, mean) for mean in plain) == 0
    rows = [row for row in read_rows(tmp_path / "rows.jsonl") if "stage" not in row]
    assert len(rows) == 3 * 6
    for row in rows:
        assert not row["moved"]
        assert row["found"] <= 3 * row["chance"] or row["part"] == "ffn"


def test_one_turned_client_is_brought_back_and_the_others_stay(tmp_path):
    honest = updates(scale=1e-3)
    sent = [*honest[:2], fedrot.random_equivalent(honest[2], SYMMETRY, 1)]
    strategy = FedRot(CONFIG, reporting=Reporting(rows=tmp_path / "rows.jsonl"))
    result, _ = aggregated(strategy, BASE, sent)
    moved = {
        (row["client"], row["group"])
        for row in read_rows(tmp_path / "rows.jsonl")
        if row.get("moved")
    }
    assert moved == {(2, group.name) for group in SYMMETRY.select(("attention", "ffn"))}
    assert largest_difference(result, aggregated(FedAvg(), BASE, honest)[0]) <= 2e-3


@pytest.mark.parametrize("align", [True, False], ids=["aligned", "unaligned"])
def test_float32_replies_to_a_float16_model_are_rounded_once(align):
    base = {name: tensor.half() for name, tensor in BASE.items()}
    strategy = FedRot(CONFIG, alignment=GLOBAL if align else None)
    result, _ = aggregated(strategy, base, updates(), (1, 1, 1))
    for name, array in arrays_of(result).items():
        mean = torch.stack([u[name].double() for u in updates()]).mean(0)
        # A half-way case may go either way: float32 is what the sum is held in.
        assert torch.allclose(
            torch.from_numpy(array).double(), mean, rtol=2**-11 * 1.001, atol=2**-25
        )


@pytest.mark.parametrize("build", [FedRot, in_front_of(FedAdam)])
def test_updates_and_metrics_are_weighted_by_the_metric_that_is_named(
    build,
):
    results = []
    for name in ("num-examples", "rows"):
        strategy = build(CONFIG, weighted_by_key=name, alignment=GLOBAL)
        answers = replies(broadcast(strategy, BASE), updates())
        for rows, answer in zip((1, 5, 14), answers, strict=True):
            answer.content["metrics"] = MetricRecord({name: rows, "loss": float(rows)})
        arrays, metrics = strategy.aggregate_train(1, answers)
        results.append(arrays)
        assert metrics["loss"] == pytest.approx((1 + 25 + 196) / 20)
    assert largest_difference(*results) == 0


def renamed_record(message):
    answer = reply(message, BASE, 10, -1)
    answer.content["weights"] = answer.content.pop("arrays")
    return answer


@pytest.mark.parametrize(
    "odd", [lambda message: reply(message, BASE, 10, -1, surprise=1.0), renamed_record]
)
def test_what_a_strategy_that_needs_all_updates_cannot_compare_is_dropped(
    odd,
):
    strategy = AlignedMedian(CONFIG, alignment=GLOBAL)
    asked = broadcast(strategy, BASE, 4)
    good = replies(asked[:3], updates())
    expected, _ = strategy.aggregate_train(1, good)
    result, metrics = strategy.aggregate_train(1, [odd(asked[3]), *good])
    assert largest_difference(expected, result) == 0.0
    assert metrics["fedrot-replies-dropped"] == 1


def test_failed_clients_keep_their_names_in_rounds_in_which_they_say_nothing(
    tmp_path,
):
    """An error holds no id, and neither does silence; the average is left to the
    others.
    """
    report = tmp_path / "report.jsonl"
    strategy = FedRot(CONFIG, reporting=Reporting(rows=report))
    for number in (1, 2, 3):
        asked = broadcast(strategy, BASE, server_round=number)
        answers = [reply(message, BASE, 10, 7 + i) for i, message in enumerate(asked)]
        if number > 1:
            answers[1:] = [failure(asked[1])]
        answers[0] = reply(asked[0], updates()[0], 10, 7)
        arrays, metrics = strategy.aggregate_train(number, answers)
    assert largest_difference(arrays, ArrayRecord(updates()[0])) <= 1e-6
    assert metrics["fedrot-replies-dropped"] == 0
    assert metrics["fedrot-replies-failed"] == 2
    rows = [row for row in read_rows(report) if "failed" in row]
    assert [(row["round"], row["client"], row["failed"]) for row in rows] == [
        (number, *client)
        for number in (2, 3)
        for client in ((8, "crashed"), (9, "No answer before the timeout."))
    ]


def test_metrics_and_report_agree_with_the_alignments(tmp_path):
    """A client that is far away counts by its distance, and not as one of three."""
    report = tmp_path / "deep" / "report.jsonl"
    strategy = FedRot(CONFIG, alignment=GLOBAL, reporting=Reporting(rows=report))
    sent = turned([*updates(2), *updates(1, scale=0.3)])
    # A client's metric does not replace the server's figure.
    _, metrics = aggregated(strategy, BASE, sent, **{"fedrot-replies-dropped": 7.0})
    assert metrics["fedrot-replies-dropped"] == 0
    moved = {
        slot.tensor for g in SYMMETRY.select(("attention", "ffn")) for slot in g.slots
    }

    def distance(tensors):
        return sum(float((tensors[n] - BASE[n]).double().square().sum()) for n in moved)

    after = [distance(fedrot.align(u, BASE, SYMMETRY).apply(u)) for u in sent]
    before = [distance(u) for u in sent]
    removed = 1 - sum(after) / sum(before)
    assert metrics["fedrot-share-removed"] == pytest.approx(removed, rel=1e-4)
    rows = [row for row in read_rows(report) if "stage" not in row]
    assert len(rows) == 3 * 2 * 3
    assert {row["layer"] for row in rows} == {0, 1}
    assert sum(r["before"] for r in rows) == pytest.approx(sum(before), rel=1e-5)


def test_every_fedavg_argument_works():
    given = {
        "fraction_train": 0.5,
        "fraction_evaluate": 0.25,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 3,
        "weighted_by_key": "rows",
        "arrayrecord_key": "weights",
        "configrecord_key": "settings",
        "train_metrics_aggr_fn": lambda records, key: MetricRecord({"x": 1}),
        "evaluate_metrics_aggr_fn": lambda records, key: MetricRecord({"y": 2}),
    }
    assert set(given) == set(inspect.signature(FedAvg.__init__).parameters) - {"self"}
    strategy = FedRot(CONFIG, **given)
    assert {name: getattr(strategy, name) for name in given} == given


def of_another_model():
    return fedrot.symmetry_of(CONFIG, {**BASE, "classifier.bias": torch.zeros(5)})


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (
            lambda: broadcast(FedRot(of_another_model()), BASE),
            "another model: 'classifier.bias'",
        ),
        (
            lambda: FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor="median")),
            "Unknown anchor 'median'",
        ),
        (
            lambda: check_update(
                {"m.lora_A.weight": torch.ones(1, 2)}, {"m.weight": (2, 2)}
            ),
            "FedRotLoRA",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_training(call, word):
    with pytest.raises(fedrot.FedrotError, match=re.escape(word)):
        call()


class Unasked(FakeGrid):
    """A grid that is not to be asked for nodes: Flower would wait until there are
    enough.
    """

    def get_node_ids(self):
        raise AssertionError("nodes are waited for")


@pytest.mark.parametrize(
    ("rounds", "arguments", "expected"),
    [
        ("3", {}, "num_rounds is '3'; it must be a whole number"),
        (-1, {}, "num_rounds is -1"),
        (1, {"min_train_nodes": "2"}, "min_train_nodes is '2'"),
        (1, {"min_evaluate_nodes": 1.0}, "min_evaluate_nodes is 1.0"),
        (1, {"min_available_nodes": "2"}, "min_available_nodes is '2'"),
        (1, {"fraction_train": -0.5}, "fraction_train is -0.5"),
        (1, {"fraction_evaluate": float("nan")}, "fraction_evaluate is nan"),
        (
            1,
            {"fraction_train": "0.5"},
            "fraction_train is '0.5'; it must be a number from 0 to 1",
        ),
        (1, {"fraction_evaluate": 2.0}, "fraction_evaluate is 2.0"),
    ],
)
def test_numbers_of_a_run_are_checked_before_it_waits(rounds, arguments, expected):
    """With a fraction above 1, Flower waits for more nodes than there are."""
    wrapped = in_front_of(DifferentialPrivacyServerSideFixedClipping)(
        CONFIG, FedAvg(**arguments), 0.1, 1.0, 3, alignment=GLOBAL
    )
    for strategy in (FedRot(CONFIG, **arguments), wrapped):
        with pytest.raises(fedrot.FedrotError, match=re.escape(expected)):
            strategy.start(Unasked({}), ArrayRecord(BASE), rounds)


#: Settings, and what the summary before the first round says of them.
SAID = [
    (
        {},
        [
            "Alignment: attention + ffn to anchor 'running'",
            "Replies: averaged as they arrive",
        ],
    ),
    (
        {"alignment": None, "server": Server(deterministic=True)},
        ["Alignment: off", "held until all have arrived, sorted by their contents"],
    ),
    (
        {"guard": "loss", "fit_head": True, "aggregation": "regmean"},
        [
            "mean by 'loss'",
            "head: fitted",
            "RegMean",
            "every reply needs 'gram'",
            "add_statistics",
        ],
    ),
]


@pytest.mark.parametrize(("given", "words"), SAID)
def test_the_summary_says_what_is_set(given, words, caplog):
    with caplog.at_level("INFO", logger="flwr"):
        FedRot(CONFIG, **given).summary()
    assert all(word in caplog.text for word in words)
    assert ("Statistics:" in caplog.text) == ("aggregation" in given)
