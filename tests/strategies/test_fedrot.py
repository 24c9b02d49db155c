"""FedRot and the Aligned mixin against Flower's own strategies, on a grid in this process."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
)
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import fedrot
from fedrot.aggregation import Mean
from fedrot.report import AlignmentReport, GroupReport
from fedrot.strategies import Aligned, FedRot
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.settings import Reporting, Server
from fedrot.tensors import check_update
from tests.models import EAGER
from tests.strategies.fakes import (
    FakeGrid,
    arrays_of,
    broadcast,
    failure,
    largest_difference,
    reply,
)

CONFIG = BertConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    vocab_size=50,
    max_position_embeddings=20,
)
Tensors = dict[str, Tensor]


def model() -> Tensors:
    torch.manual_seed(0)
    tensors = dict(BertForSequenceClassification(CONFIG).state_dict())
    return {name: t + 0.05 * torch.randn_like(t) for name, t in tensors.items()}


def updates(base: Tensors, count: int = 3, scale: float = 0.01) -> list[Tensors]:
    generator = torch.Generator().manual_seed(1)
    return [
        {k: v + scale * torch.randn(v.shape, generator=generator) for k, v in base.items()}
        for _ in range(count)
    ]


def test_without_alignment_the_result_is_fedavgs_to_the_last_bit() -> None:
    base = model()
    ours, stock = FedRot(CONFIG, alignment=None), FedAvg()
    results = []
    for strategy in (ours, stock):
        messages = broadcast(strategy, base)
        replies = [
            reply(m, u, 10 + i, i, loss=0.5)
            for i, (m, u) in enumerate(zip(messages, updates(base), strict=True))
        ]
        results.append(strategy.aggregate_train(1, replies))
    assert largest_difference(results[0][0], results[1][0]) == 0.0
    assert dict(results[0][1] or {}) == dict(results[1][1] or {})


def test_updates_are_aligned_to_the_running_mean_unless_told_otherwise() -> None:
    assert FedRot(CONFIG).alignment == AlignedMedian(CONFIG).alignment == fedrot.AlignmentOptions()
    assert fedrot.AlignmentOptions().anchor == "running"
    base, results = model(), {}
    for name in ("", "running", "global"):
        strategy = FedRot(CONFIG, alignment=replace(EAGER, **({"anchor": name} if name else {})))
        messages = broadcast(strategy, base)
        sent = enumerate(zip(messages, updates(base, scale=0.3), strict=True))
        answers = [reply(m, u, 10, i) for i, (m, u) in sent]
        results[name] = strategy.aggregate_train(1, answers)[0]
    assert largest_difference(results[""], results["running"]) == 0
    assert largest_difference(results[""], results["global"]) > 1e-3


def test_every_fedavg_argument_works() -> None:
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


@pytest.mark.parametrize("anchor", sorted(fedrot.anchors.ANCHORS))
def test_scrambled_clients_give_the_unscrambled_average(anchor: str) -> None:
    base = model()
    symmetry = fedrot.symmetry_of(CONFIG, base)
    strategy = FedRot(symmetry, alignment=replace(EAGER, anchor=anchor))
    messages = broadcast(strategy, base)
    honest = updates(base)
    scrambled = [fedrot.random_equivalent(u, symmetry, seed=i) for i, u in enumerate(honest)]
    results = [
        strategy.aggregate_train(
            1,
            [reply(m, u, 10 * (i + 1), i) for i, (m, u) in enumerate(zip(messages, sent, strict=True))],
        )[0]
        for sent in (honest, scrambled)
    ]
    assert largest_difference(*results) < 1e-5
    plain, _ = FedAvg().aggregate_train(
        1, [reply(m, u, 10 * (i + 1)) for i, (m, u) in enumerate(zip(messages, scrambled, strict=True))]
    )
    assert largest_difference(results[0], plain) > 0.05


@pytest.mark.parametrize("canonical", [False, True])
def test_global_anchor_is_the_weighted_mean_of_the_aligned_updates(canonical: bool) -> None:
    base = model()
    symmetry = fedrot.symmetry_of(CONFIG, base)
    options = fedrot.AlignmentOptions(canonical=canonical, chance=0)
    strategy = FedRot(CONFIG, alignment=replace(options, anchor="global"))
    messages = broadcast(strategy, base)
    sent, weights = updates(base), [1, 5, 14]
    result, _ = strategy.aggregate_train(
        1, [reply(m, u, w, i) for i, (m, u, w) in enumerate(zip(messages, sent, weights, strict=True))]
    )
    aligned = [fedrot.align(u, base, symmetry, options).apply(u) for u in sent]
    for name, array in arrays_of(result).items():
        expected = sum(w * a[name].double() for w, a in zip(weights, aligned, strict=True)) / 20
        np.testing.assert_allclose(array, expected.numpy(), atol=1e-6)


def test_in_deterministic_mode_the_order_of_arrival_does_not_matter() -> None:
    base = model()
    strategy = FedRot(CONFIG, server=Server(deterministic=True))
    messages = broadcast(strategy, base)
    replies = [reply(m, u, 10, i) for i, (m, u) in enumerate(zip(messages, updates(base), strict=True))]
    first, _ = strategy.aggregate_train(1, replies)
    second, _ = strategy.aggregate_train(1, replies[::-1])
    assert largest_difference(first, second) == 0.0


def no_examples(m: Message, base: Tensors) -> Message:
    return reply(m, base, 0, 9)


def renamed_record(m: Message, base: Tensors) -> Message:
    answer = reply(m, base, 10, -1)
    answer.content["weights"] = answer.content.pop("arrays")
    return answer


def no_metrics(m: Message, base: Tensors) -> Message:
    answer = reply(m, base, 1, 9)
    del answer.content["metrics"]
    return answer


#: To a strategy that needs all updates at once; alone, the mean can do with them.
ODD = {
    "Send the same metrics": lambda m, b: reply(m, b, 10, -1, surprise=1.0),
    "records and metrics are": renamed_record,
}


#: Metrics beside the number of examples, by how many keys of lists and numbers they are.
MANY: dict[str, tuple[int, dict[str, Any]]] = {
    "a list": (99_999, {"loss": [0.5] * 99_998}),
    "a list too long": (100_000, {"loss": [0.5] * 99_999}),
    "lists": (99_999, {"a": [1] * 50_000, "b": [0.5] * 49_996, "c": 2}),
    "lists too long together": (100_000, {"a": [1] * 50_000, "b": [0.5] * 49_997, "c": 2}),
    "too many names": (100_000, dict.fromkeys(map(str, range(100_000)), 0.5)),
}


@pytest.mark.parametrize("what", MANY)
def test_a_reply_may_have_a_hundred_thousand_numbers_of_metrics(
    what: str, warnings: Callable[[], str]
) -> None:
    beside, more = MANY[what]
    base = {"w": torch.zeros(3)}
    strategy = FedRot(CONFIG, alignment=None, aggregation=Mean)
    messages = broadcast(strategy, base, 2)
    flood = reply(messages[0], {"w": torch.ones(3)}, 10, 0)
    flood.content["metrics"] = MetricRecord({"num-examples": 10, **more})
    arrays, metrics = strategy.aggregate_train(1, [flood, reply(messages[1], base, 10, 1)])
    taken = 1 + beside <= 100_000
    assert arrays_of(arrays)["w"].tolist() == [0.5 if taken else 0.0] * 3
    assert (metrics or {}).get("fedrot-replies-dropped", 0) == (0 if taken else 1)
    assert ("Reply of client 0 dropped: The MetricRecord holds more than" in warnings()) != taken


def test_failed_clients_leave_the_average_to_the_others() -> None:
    base = model()
    strategy = FedRot(CONFIG)
    messages = broadcast(strategy, base)
    sent = updates(base)
    two = [reply(messages[i], sent[i], 10, i) for i in range(2)]
    expected, _ = strategy.aggregate_train(1, two)
    result, metrics = strategy.aggregate_train(1, [*two, failure(messages[2])])
    assert largest_difference(expected, result) == 0.0
    assert metrics is not None
    assert metrics["fedrot-replies-dropped"] == 0
    assert metrics["fedrot-replies-failed"] == 1


def test_clients_keep_their_names_in_rounds_in_which_they_say_nothing(tmp_path: Path) -> None:
    """An error holds no id, and neither does silence."""
    base, report = model(), tmp_path / "report.jsonl"
    strategy = FedRot(CONFIG, reporting=Reporting(rows=report))
    grid = FakeGrid(dict.fromkeys((100, 101, 102), failure))
    for number in (1, 2, 3):
        messages = list(strategy.configure_train(number, ArrayRecord(base), ConfigRecord(), grid))
        messages.sort(key=lambda message: message.metadata.dst_node_id)
        answers = [reply(messages[0], base, 10, 7)]
        if number == 1:
            answers += [reply(messages[i], base, 10, 7 + i) for i in (1, 2)]
        else:
            answers.append(failure(messages[1]))
        strategy.aggregate_train(number, answers)
    rows = [row for row in map(json.loads, report.read_text().splitlines()) if "failed" in row]
    assert [(row["round"], row["client"]) for row in rows] == [(2, 8), (2, 9), (3, 8), (3, 9)]
    assert [row["failed"] for row in rows] == ["crashed", "No answer before the timeout."] * 2


class AlignedMedian(Aligned, FedMedian):
    """The mixin in front of a strategy that looks at every update."""


@pytest.mark.parametrize("reason", sorted(ODD))
def test_what_a_strategy_cannot_compare_is_dropped(reason: str) -> None:
    base = model()
    strategy = AlignedMedian(CONFIG, alignment=fedrot.AlignmentOptions(anchor="global"))
    messages = broadcast(strategy, base, clients=4)
    good = [reply(m, u, 10, i) for i, (m, u) in enumerate(zip(messages, updates(base), strict=False))]
    expected, _ = strategy.aggregate_train(1, good)
    result, metrics = strategy.aggregate_train(1, [ODD[reason](messages[3], base), *good])
    assert largest_difference(expected, result) == 0.0
    assert metrics is not None
    assert metrics["fedrot-replies-dropped"] == 1


@pytest.mark.parametrize("loss", [[0.5, 0.4], None])
def test_metrics_unlike_the_others_are_left_out_but_the_update_is_not(
    loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    base = model()
    strategy = FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor="global"))
    messages = broadcast(strategy, base)
    sent = updates(base)
    logging.getLogger("flwr").propagate = True
    replies = [reply(messages[i], sent[i], 10, i, loss=0.5) for i in range(3)]
    expected, _ = strategy.aggregate_train(1, replies)
    odd = {} if loss is None else {"loss": loss}
    replies[0] = reply(messages[0], sent[0], 10, 0, **odd)
    result, metrics = strategy.aggregate_train(1, replies)
    assert largest_difference(expected, result) == 0.0
    assert metrics is not None
    assert (metrics["loss"], metrics["fedrot-replies-accepted"]) == (0.5, 3)
    assert "The metrics of 1 clients are left out" in caplog.text
    own = "num-examples in" if loss is None else "loss (list of 2), num-examples in"
    assert f"it has {own} 'metrics'; most have loss, num-examples in 'metrics'" in caplog.text


@pytest.mark.parametrize("align", [True, False], ids=["aligned", "unaligned"])
def test_float32_replies_to_a_float16_model_are_rounded_once(align: bool) -> None:
    base = {name: tensor.half() for name, tensor in model().items()}
    strategy = FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor="global") if align else None)
    sent = updates(model())
    answers = [
        reply(m, u, 10, i) for i, (m, u) in enumerate(zip(broadcast(strategy, base), sent, strict=True))
    ]
    result, _ = strategy.aggregate_train(1, answers)
    for name, array in arrays_of(result).items():
        mean = torch.stack([u[name].double() for u in sent]).mean(0)
        # A half-way case may go either way: float32 is what the sum is held in.
        assert torch.allclose(torch.from_numpy(array).double(), mean, rtol=2**-11 * 1.001, atol=2**-25)


def test_without_a_good_reply_the_model_stays() -> None:
    base = model()
    clients = {100: lambda m: no_examples(m, base), 101: lambda m: no_metrics(m, base)}
    result = FedRot(CONFIG, fraction_evaluate=0.0).start(FakeGrid(clients), ArrayRecord(base), 2)
    assert result.arrays.object_id == ArrayRecord(base).object_id
    assert result.train_metrics_clientapp[2]["fedrot-replies-dropped"] == 2


def test_metrics_and_report_agree_with_the_alignments(tmp_path: Path) -> None:
    base = model()
    symmetry = fedrot.symmetry_of(CONFIG, base)
    report = tmp_path / "deep" / "report.jsonl"
    strategy = FedRot(
        CONFIG,
        alignment=fedrot.AlignmentOptions(anchor="global"),
        reporting=Reporting(rows=report),
    )
    messages = broadcast(strategy, base)
    sent = [fedrot.random_equivalent(u, symmetry, seed=i) for i, u in enumerate(updates(base))]
    _, metrics = strategy.aggregate_train(
        1, [reply(m, u, 10, i) for i, (m, u) in enumerate(zip(messages, sent, strict=True))]
    )
    assert metrics is not None
    moved = {slot.tensor for g in symmetry.select(("attention", "ffn")) for slot in g.slots}

    def distance(tensors: Tensors) -> float:
        return sum(float((tensors[n] - base[n]).double().square().sum()) for n in moved)

    after = [distance(fedrot.align(u, base, symmetry).apply(u)) for u in sent]
    before = [distance(u) for u in sent]
    removed = 1 - sum(after) / sum(before)
    assert metrics["fedrot-share-removed"] == pytest.approx(removed, rel=1e-4)
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    rows = [row for row in rows if "stage" not in row]
    assert len(rows) == 3 * 2 * 3
    assert {row["layer"] for row in rows} == {0, 1}
    assert sum(r["before"] for r in rows) == pytest.approx(sum(before), rel=1e-5)


def test_shares_of_a_round_are_of_all_clients_distances_together() -> None:
    """A client that is far away counts by its distance, and not as one of two."""
    this_round = RoundRecord(1)
    for client, before, rotated, permuted in ((0, 90.0, 45.0, 9.0), (1, 10.0, 1.0, 8.0)):
        attention = GroupReport("a", 0, "attention", before, before - rotated, 3, 4)
        neurons = GroupReport("f", 0, "ffn", permuted, 0.0, 5, 9)
        left = before - rotated - permuted
        this_round.reports.append((client, AlignmentReport((attention, neurons), before, left, 0.1)))
    metrics = this_round.metrics(aligned=True)
    assert metrics["fedrot-share-removed"] == pytest.approx(63 / 100)


def test_integer_and_boolean_buffers_are_averaged_and_keep_their_dtypes() -> None:
    base = {**model(), "steps": torch.tensor(7), "mask": torch.tensor([True, False])}
    strategy = FedRot(CONFIG)
    messages = broadcast(strategy, base)
    sent = [
        {**u, "steps": torch.tensor(9 + i), "mask": base["mask"]} for i, u in enumerate(updates(model()))
    ]
    result, _ = strategy.aggregate_train(
        1, [reply(m, u, 10, i) for i, (m, u) in enumerate(zip(messages, sent, strict=True))]
    )
    arrays = arrays_of(result)
    assert (arrays["steps"].dtype, int(arrays["steps"])) == (np.dtype("int64"), 10)
    assert (arrays["mask"].dtype, arrays["mask"].tolist()) == (np.dtype("bool"), [True, False])


def test_the_replies_are_not_changed() -> None:
    base = model()
    strategy = FedRot(CONFIG)
    messages = broadcast(strategy, base)
    replies = [reply(m, u, 10, i) for i, (m, u) in enumerate(zip(messages, updates(base), strict=True))]
    before = [arrays_of(r.content["arrays"]) for r in replies]
    strategy.aggregate_train(1, replies)
    for was, message in zip(before, replies, strict=True):
        now = arrays_of(message.content["arrays"])
        assert all((was[name] == now[name]).all() for name in was)


class AlignedAdam(Aligned, FedAdam):
    """The mixin in front of a server optimiser."""


def test_the_mixin_works_in_front_of_a_server_optimiser() -> None:
    base = model()
    symmetry = fedrot.symmetry_of(CONFIG, base)
    sent = updates(base)

    def run(strategy: FedAvg, scramble: bool) -> ArrayRecord:
        def client(index: int) -> Any:
            tensors = sent[index]
            if scramble:
                tensors = fedrot.random_equivalent(tensors, symmetry, seed=index)
            return lambda m: reply(m, tensors, 10, index)

        grid = FakeGrid({100 + i: client(i) for i in range(3)})
        return strategy.start(grid, ArrayRecord(base), 2).arrays

    options = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0, "eta": 0.01}
    aligned = {"alignment": replace(EAGER, anchor="global")}
    honest = run(AlignedAdam(CONFIG, **aligned, **options), scramble=False)
    scrambled = run(AlignedAdam(CONFIG, **aligned, **options), scramble=True)
    # Adam divides by the size of the change, so rounding grows where nothing changed.
    assert largest_difference(honest, scrambled) < 1e-3
    assert largest_difference(honest, run(FedAdam(**options), scramble=True)) > 5e-3


@pytest.mark.parametrize("build", [FedRot, AlignedAdam])
def test_updates_and_metrics_are_weighted_by_the_metric_that_is_named(build: Any) -> None:
    base, found = model(), []
    for name in ("num-examples", "rows"):
        strategy = build(
            CONFIG, weighted_by_key=name, alignment=fedrot.AlignmentOptions(anchor="global")
        )
        messages = broadcast(strategy, base)
        answers = [
            reply(m, u, 1, i) for i, (m, u) in enumerate(zip(messages, updates(base), strict=True))
        ]
        for rows, answer in zip((1, 5, 14), answers, strict=True):
            answer.content["metrics"] = MetricRecord({name: rows, "loss": float(rows)})
        arrays, metrics = strategy.aggregate_train(1, answers)
        found.append((arrays, (metrics or {})["loss"]))
    assert largest_difference(found[0][0], found[1][0]) == 0
    assert found[0][1] == found[1][1] == pytest.approx((1 + 25 + 196) / 20)


def test_partial_participation_and_metrics_through_start() -> None:
    base = model()

    def client(index: int) -> Any:
        return lambda m: reply(m, updates(base, 5)[index], 10, index)

    grid = FakeGrid({100 + i: client(i) for i in range(5)})
    strategy = FedRot(CONFIG, fraction_train=0.4, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(base), 2)
    assert [len(nodes) for nodes in grid.asked if nodes] == [2, 2]
    assert "fedrot-share-found" in result.train_metrics_clientapp[2]


def test_a_symmetry_of_another_model_is_refused_before_training() -> None:
    other = {**model(), "classifier.bias": torch.zeros(5)}
    with pytest.raises(fedrot.SymmetryError, match=r"another model: 'classifier\.bias'"):
        broadcast(FedRot(fedrot.symmetry_of(CONFIG, other)), model())


def test_a_model_that_does_not_fit_is_refused_before_training() -> None:
    with pytest.raises(fedrot.SymmetryError, match="not supported"):
        broadcast(FedRot({"model_type": "mamba"}), model())
    with pytest.raises(fedrot.FedrotError, match="Unknown anchor 'median'"):
        FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor="median"))


class Unasked(FakeGrid):
    """A grid that is not to be asked for nodes: Flower would wait until there are enough."""

    def get_node_ids(self) -> Any:
        raise AssertionError("nodes are waited for")


@pytest.mark.parametrize(
    ("rounds", "arguments", "expected"),
    [
        ("3", {}, "num_rounds is '3'; it must be a whole number"),
        (2.0, {}, "num_rounds is 2.0"),
        (-1, {}, "num_rounds is -1"),
        (1, {"min_train_nodes": "2"}, "min_train_nodes is '2'"),
        (1, {"min_evaluate_nodes": 1.0}, "min_evaluate_nodes is 1.0"),
        (1, {"min_available_nodes": "2"}, "min_available_nodes is '2'"),
        (1, {"fraction_train": -0.5}, "fraction_train is -0.5"),
        (1, {"fraction_evaluate": float("nan")}, "fraction_evaluate is nan"),
        (1, {"fraction_train": "0.5"}, "fraction_train is '0.5'; it must be a number from 0 to 1"),
        (1, {"fraction_evaluate": 2.0}, "fraction_evaluate is 2.0"),
    ],
)
def test_numbers_of_a_run_are_checked_before_it_waits(
    rounds: Any, arguments: dict[str, Any], expected: str
) -> None:
    """With a fraction above 1, Flower waits for more nodes than there are."""
    with pytest.raises(fedrot.FedrotError, match=re.escape(expected)):
        FedRot(CONFIG, **arguments).start(Unasked({}), ArrayRecord(model()), rounds)


def test_numbers_of_a_strategy_in_a_wrapper_are_checked_too() -> None:
    class Private(Aligned, DifferentialPrivacyServerSideFixedClipping):
        pass

    strategy = Private(
        CONFIG,
        FedAvg(fraction_train=2.0),
        0.1,
        1.0,
        3,
        alignment=fedrot.AlignmentOptions(anchor="global"),
    )
    with pytest.raises(fedrot.FedrotError, match=r"fraction_train is 2\.0"):
        strategy.start(Unasked({}), ArrayRecord(model()), 1)


@pytest.mark.parametrize(
    ("given", "alignment", "replies"),
    [
        ({}, "attention + ffn to anchor 'running'", "averaged as they arrive"),
        ({"alignment": None}, "off", "held until all have arrived"),
        (
            {"server": Server(deterministic=True)},
            "attention + ffn to anchor 'running'",
            "held until all have arrived, sorted by their contents",
        ),
    ],
)
def test_the_summary_says_how_replies_are_taken(
    given: dict[str, Any], alignment: str, replies: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="flwr"):
        FedRot(CONFIG, **given).summary()
    lines = [record.getMessage().strip("\t├─> ") for record in caplog.records]
    assert lines[:2] == [f"Alignment: {alignment}", f"Replies: {replies}"]


def test_an_adapter_in_place_of_the_model_is_said_to_be_one() -> None:
    with pytest.raises(fedrot.FedrotError, match=r"The tensors are a LoRA adapter's.*FedRotLoRA"):
        check_update({"m.lora_A.weight": torch.ones(1, 2)}, {"m.weight": (2, 2)})
