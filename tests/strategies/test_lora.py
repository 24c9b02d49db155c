"""``FedRotLoRA``: rounds of adapters, and what they say."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedMedian,
)

from fedrot.errors import FedrotError
from fedrot.lora import AdapterOptions, AdapterUpdate, average_adapters, fitted
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import FedRotLoRA, adapter_record
from fedrot.strategies.lora import (
    ERROR,
    ERROR_OF_FACTORS,
    LOST,
    AdapterMean,
    AlignedLoRA,
)
from fedrot.strategies.settings import Reporting
from tests.fedrot.lora.test_averaging import (
    MODULES,
    SETTINGS,
    adapter,
    product,
    truncated,
)
from tests.strategies.fakes import ArrayRecord, FakeGrid, grid_of, reply

CONFIG = {"peft_type": "LORA", "lora_alpha": SETTINGS.alpha}
EVERY = {"fraction_evaluate": 0.0}
EXACT = AdapterOptions("exact")
METHODS = pytest.mark.parametrize(
    "options", [AdapterOptions("mean"), AdapterOptions("exact", "previous")], ids=str
)


def floats(tensors):
    return {name: tensor.float() for name, tensor in tensors.items()}


def client(index):
    def train(message):
        (received,) = message.content.array_records.values()
        start = received.to_torch_state_dict()
        step = floats(adapter(index))
        sent = {n: t + 0.3 * step[n] for n, t in start.items() if n in step}
        return reply(message, sent, 10 + index, index)

    return train


def started(strategy, rounds=1):
    grid = grid_of(map(client, range(3)))
    return strategy.start(grid, ArrayRecord(floats(adapter(9))), rounds)


@METHODS
def test_a_round_is_the_average_of_the_replies_and_says_its_errors(
    options, caplog, tmp_path
):
    rows = tmp_path / "rows.jsonl"
    with caplog.at_level("INFO", logger="flwr"):
        result = started(
            FedRotLoRA(CONFIG, options, reporting=Reporting(rows), **EVERY)
        )
    start = floats(adapter(9))
    sent = [
        {n: t + 0.3 * floats(adapter(i))[n] for n, t in start.items()} for i in range(3)
    ]
    updates = [
        AdapterUpdate(tensors, 10 + i, SETTINGS) for i, tensors in enumerate(sent)
    ]
    expected, report = average_adapters(updates, SETTINGS, options, previous=start)
    found = result.arrays.to_torch_state_dict()
    assert found.keys() == expected.keys()
    assert all(
        torch.allclose(found[name], tensor, atol=1e-5)
        for name, tensor in expected.items()
    )
    metrics = result.train_metrics_clientapp[1]
    assert metrics[ERROR] == pytest.approx(report.mean_error, rel=1e-3, abs=1e-6)
    assert metrics[ERROR_OF_FACTORS] > 0.01
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"Adapters: {options}" in line for line in lines)
    assert not any("Alignment" in line for line in lines)
    said = "Round 1: 3 adapters: this average is "
    assert any(line.startswith(said) for line in lines)
    assert said.split(": ", 1)[1] in rows.read_text()


def test_clients_of_smaller_ranks_cut_what_they_receive():
    sent = {}

    def of_rank(rank):
        def train(message):
            (received,) = message.content.array_records.values()
            start = fitted(received.to_torch_state_dict(), SETTINGS, rank)
            step = floats(adapter(rank, rank))
            sent[rank] = {name: start[name] + 0.3 * step[name] for name in start}
            return reply(message, sent[rank], 10, rank)

        return train

    grid = FakeGrid({100 + rank: of_rank(rank) for rank in (1, 2, 4)})
    start = floats(adapter(9, 4))
    result = FedRotLoRA(CONFIG, EXACT, **EVERY).start(grid, ArrayRecord(start), 2)
    found = result.arrays.to_torch_state_dict()
    assert {name: t.shape for name, t in found.items()} == {
        n: t.shape for n, t in start.items()
    }
    for module in MODULES:
        dense = torch.stack([product(sent[rank], module) for rank in (1, 2, 4)]).mean(0)
        assert torch.allclose(product(found, module), truncated(dense, 4), atol=1e-3)
    assert ERROR_OF_FACTORS not in result.train_metrics_clientapp[2]


@pytest.mark.parametrize(
    ("method", "rank", "needed"),
    [
        ("exact", 5, "has rank 5, .*initial adapter"),
        ("mean", 2, r"has rank 2, .* need AdapterOptions\('exact'\)"),
        (
            "mean",
            5,
            r"need AdapterOptions\('exact'\) and an initial adapter of the largest",
        ),
        ("exact", 0, r"lora_A.weight' has shape \[0, "),
    ],
)
def test_replies_of_other_ranks_are_dropped(method, rank, needed, caplog):
    def other(message):
        return reply(message, floats(adapter(0, rank)), 10, 7)

    grid = FakeGrid({**{100 + i: client(i) for i in range(2)}, 107: other})
    strategy = FedRotLoRA(CONFIG, AdapterOptions(method), **EVERY)
    result = strategy.start(grid, ArrayRecord(floats(adapter(9))), 1)
    assert result.train_metrics_clientapp[1]["fedrot-replies-dropped"] == 1
    said = [
        r.getMessage() for r in caplog.records if "client 7 dropped" in r.getMessage()
    ]
    assert re.search(needed, said[0])


def test_an_adapter_of_other_settings_is_dropped_by_name_and_rows_have_the_settings(
    warnings, tmp_path
):
    """Client 0 says nothing, client 1 the server's settings; client 4 has other
    targets.
    """
    said = {
        1: {},
        2: {"lora_alpha": 2 * SETTINGS.alpha},
        3: {"use_rslora": True},
    }

    def train(index, message):
        made = client(index)(message)
        if index in said:
            made.content["fedrot-adapter"] = adapter_record(CONFIG | said[index])
        if index == 4:
            renamed = {
                n.replace("query", "key"): a
                for n, a in dict(made.content["arrays"]).items()
            }
            made.content["arrays"] = ArrayRecord(renamed)
        return made

    grid = FakeGrid({100 + i: partial(train, i) for i in range(5)})
    reporting = Reporting(tmp_path / "rows.jsonl", hashes=True)
    alpha = SETTINGS.alpha
    FedRotLoRA(CONFIG, reporting=reporting, **EVERY).start(
        grid, ArrayRecord(floats(adapter(9))), 1
    )
    for client_and_setting in (
        f"2 dropped: The adapter's lora_alpha is {2 * alpha}, the server's {alpha}.",
        "3 dropped: The adapter's use_rslora is True, the server's False.",
        "4 dropped: The adapter's targets are classifier, key, the server's "
        "classifier, query.",
    ):
        assert client_and_setting in warnings()
    rows = [row for row in read_rows(tmp_path / "rows.jsonl") if "sha256" in str(row)]
    rows.sort(key=lambda row: row.get("client", 9))
    assert [row["lora_alpha"] for row in rows] == [
        None,
        alpha,
        alpha,
    ]  # the last is the server's
    assert all(
        (row["rank"], row["targets"]) == ([3], ["classifier", "query"]) for row in rows
    )


def test_a_first_model_that_is_no_adapter_is_refused_before_anyone_trains(
    warnings,
):
    grid = grid_of(map(client, range(3)))
    with pytest.raises(FedrotError, match=r"initial_arrays.*no factors"):
        FedRotLoRA(CONFIG).start(
            grid, ArrayRecord({"bert.weight": torch.ones(2, 2)}), 1
        )
    assert grid.asked == []
    for kind, warned in (("bias", False), ("weight", True)):
        whole = floats(adapter(9)) | {f"m.base_layer.{kind}": torch.ones(2)}
        grid = FakeGrid(
            dict.fromkeys((100, 101), lambda message, t=whole: reply(message, t, 10))
        )
        FedRotLoRA(CONFIG, **EVERY).start(grid, ArrayRecord(whole), 1)
        assert ("holds base weights ('m.base_layer.weight')" in warnings()) == warned


@METHODS
def test_a_server_optimiser_takes_the_average(options):
    eta, tau, beta = 0.1, 1e-3, 0.9
    behind = type("AdamLoRA", (AlignedLoRA, FedAdam), {})
    strategy = behind(
        CONFIG, options, eta=eta, tau=tau, beta_1=beta, beta_2=0.99, **EVERY
    )
    found = started(strategy).arrays.to_torch_state_dict()
    average = started(FedRotLoRA(CONFIG, options, **EVERY)).arrays.to_torch_state_dict()
    for name, tensor in floats(adapter(9)).items():
        delta = average[name] - tensor
        # Adam with Flower's correction of the bias, which counts rounds from 2.
        rate = eta * (1 - 0.99**2) ** 0.5 / (1 - beta**2)
        step = rate * (1 - beta) * delta / (0.1 * delta.abs() + tau)
        assert torch.allclose(found[name], tensor + step, atol=1e-4), name


def test_what_does_not_go_together_is_refused_before_training():
    median = type("MedianLoRA", (AlignedLoRA, FedMedian), {})
    with pytest.raises(FedrotError, match=r"MedianLoRA.*FedMedian"):
        median(CONFIG)
    with pytest.raises(FedrotError, match=r"options is 'exact'; pass fedrot\.lora"):
        FedRotLoRA(CONFIG, "exact")  # type: ignore[arg-type]
    with pytest.raises(FedrotError, match="configuration"):
        FedRotLoRA({"hidden_size": 3})
    private = DifferentialPrivacyServerSideFixedClipping(
        FedRotLoRA(CONFIG, **EVERY),
        noise_multiplier=0.1,
        clipping_norm=1.0,
        num_sampled_clients=3,
    )
    with pytest.raises(
        FedrotError, match=r"clips updates before .*class Private\(Aligned, "
    ):
        started(private)


@pytest.mark.parametrize(
    ("of_factors", "lost", "measured"),
    [
        (None, 0.0, {ERROR: 0.1}),
        (0.3, 0.2, {ERROR: 0.1, ERROR_OF_FACTORS: 0.3, LOST: 0.2}),
    ],
)
def test_what_is_not_known_or_not_lost_is_no_metric(of_factors, lost, measured):
    report = SimpleNamespace(
        mean_error=0.1, mean_error_of_factors=of_factors, mean_lost=lost
    )
    average = AdapterMean(SimpleNamespace(result=lambda: ({}, report)))
    average.result()
    assert average.measured == measured
