"""``FedRotLoRA``: rounds of adapters, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
)

from fedrot.errors import FedrotError
from fedrot.lora import AdapterOptions, AdapterUpdate, average_adapters, fitted
from fedrot.simulations.report.pages import write_strategy_report
from fedrot.strategies import FedRotLoRA
from fedrot.strategies.lora import ERROR, ERROR_OF_FACTORS, LOST, AdapterMean, AlignedLoRA
from fedrot.strategies.settings import Checkpointing, Reporting, Server
from tests.fedrot.lora.test_averaging import (
    MODULES,
    SETTINGS,
    Adapter,
    adapter,
    product,
    truncated,
)
from tests.strategies.fakes import ArrayRecord, FakeGrid, Message, reply

CONFIG = {"peft_type": "LORA", "lora_alpha": SETTINGS.alpha}
EVERY: dict[str, Any] = {"fraction_evaluate": 0.0}


def floats(tensors: Adapter) -> Adapter:
    return {name: tensor.float() for name, tensor in tensors.items()}


def client(index: int) -> Callable[[Message], Message]:
    def train(message: Message) -> Message:
        (received,) = message.content.array_records.values()
        start = received.to_torch_state_dict()
        step = floats(adapter(index))
        sent = {n: t + 0.3 * step[n] for n, t in start.items() if n in step}
        return reply(message, sent, 10 + index, index)

    return train


def started(strategy: FedAvg, rounds: int = 1) -> Any:
    grid = FakeGrid({100 + i: client(i) for i in range(3)})
    return strategy.start(grid, ArrayRecord(floats(adapter(9))), rounds)


@pytest.mark.parametrize("method", ["mean", "exact"])
def test_a_round_is_the_average_of_the_replies(method: str) -> None:
    options = AdapterOptions(method)
    result = started(FedRotLoRA(CONFIG, options, **EVERY))
    start = floats(adapter(9))
    sent = [{n: t + 0.3 * floats(adapter(i))[n] for n, t in start.items()} for i in range(3)]
    updates = [AdapterUpdate(tensors, 10 + i, SETTINGS) for i, tensors in enumerate(sent)]
    expected, report = average_adapters(updates, SETTINGS, options, previous=start)
    found = result.arrays.to_torch_state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=1e-5)
    metrics = result.train_metrics_clientapp[1]
    assert metrics[ERROR] == pytest.approx(sum(report.error.values()) / 2, rel=1e-3, abs=1e-6)
    assert metrics[ERROR_OF_FACTORS] > 0.01


def test_the_mean_is_that_of_fedavg() -> None:
    ours, theirs = (started(s(**EVERY), 3) for s in (lambda **k: FedRotLoRA(CONFIG, **k), FedAvg))
    tensors = theirs.arrays.to_torch_state_dict()
    for name, tensor in ours.arrays.to_torch_state_dict().items():
        assert torch.allclose(tensor, tensors[name], atol=1e-5)


def test_the_log_says_how_far_the_averages_are(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="flwr"):
        started(FedRotLoRA(CONFIG, AdapterOptions("exact"), **EVERY), 2)
    lines = [record.getMessage() for record in caplog.records]
    assert any("Adapters: exact, gauge 'keep-a'" in line for line in lines)
    said = [line for line in lines if line.startswith("Round 2: 3 adapters: this average is ")]
    assert len(said) == 2  # At the round's end and at the run's.
    assert not any("was off" in line or "is off" in line for line in lines)


def test_clients_of_smaller_ranks_cut_what_they_receive() -> None:
    sent: dict[int, Adapter] = {}

    def of_rank(rank: int) -> Callable[[Message], Message]:
        def train(message: Message) -> Message:
            (received,) = message.content.array_records.values()
            start = fitted(received.to_torch_state_dict(), SETTINGS, rank)
            step = floats(adapter(rank, rank))
            sent[rank] = {name: start[name] + 0.3 * step[name] for name in start}
            return reply(message, sent[rank], 10, rank)

        return train

    strategy = FedRotLoRA(CONFIG, AdapterOptions("exact"), **EVERY)
    grid = FakeGrid({100 + rank: of_rank(rank) for rank in (1, 2, 4)})
    start = floats(adapter(9, 4))
    result = strategy.start(grid, ArrayRecord(start), 2)
    found = result.arrays.to_torch_state_dict()
    assert {name: t.shape for name, t in found.items()} == {n: t.shape for n, t in start.items()}
    for module in MODULES:
        dense = torch.stack([product(sent[rank], module) for rank in (1, 2, 4)]).mean(0)
        assert torch.allclose(product(found, module), truncated(dense, 4), atol=1e-3)
    assert ERROR_OF_FACTORS not in result.train_metrics_clientapp[2]


@pytest.mark.parametrize(
    ("method", "rank", "needed"),
    [
        ("exact", 5, "need an initial adapter of the largest rank"),
        ("mean", 2, r"need AdapterOptions\('exact'\)\."),
        ("mean", 5, r"need AdapterOptions\('exact'\) and an initial adapter of the largest rank"),
    ],
)
def test_other_ranks_are_refused(method: str, rank: int, needed: str) -> None:
    def train(message: Message) -> Message:
        return reply(message, floats(adapter(0, rank)), 1, 0)

    strategy = FedRotLoRA(
        CONFIG, AdapterOptions(method), min_train_nodes=1, min_available_nodes=1, **EVERY
    )
    said = rf"query.lora_A.weight' has rank {rank}, the broadcast factor 3\. Clients .* {needed}"
    with pytest.raises(FedrotError, match=said):
        strategy.start(FakeGrid({100: train}), ArrayRecord(floats(adapter(9))), 1)


def test_a_first_model_that_is_no_adapter_is_refused_before_anyone_trains(
    warnings: Callable[[], str],
) -> None:
    model = ArrayRecord({"bert.weight": torch.ones(2, 2)})
    grid = FakeGrid({100 + i: client(i) for i in range(3)})
    with pytest.raises(FedrotError, match="initial_arrays is not a LoRA adapter: There are no factors"):
        FedRotLoRA(CONFIG).start(grid, model, 1)
    assert grid.asked == []
    whole = floats(adapter(9)) | {"m.base_layer.weight": torch.ones(2, 2)}
    with pytest.raises(FedrotError, match="base_layer"):  # these clients send the adapter alone
        FedRotLoRA(CONFIG, **EVERY).start(grid, ArrayRecord(whole), 1)
    assert "holds base weights ('m.base_layer.weight')" in warnings()


def test_biases_that_an_adapter_trains_are_no_base_weights(warnings: Callable[[], str]) -> None:
    trained = floats(adapter(9)) | {"m.base_layer.bias": torch.ones(2)}
    grid = FakeGrid(dict.fromkeys((100, 101), lambda message: reply(message, trained, 10)))
    FedRotLoRA(CONFIG, **EVERY).start(grid, ArrayRecord(trained), 1)
    assert "base weights" not in warnings()


def test_arguments_of_alignment_are_refused() -> None:
    for name, value in {"guard": "accuracy", "alignment": None, "other_basis": None}.items():
        given: Any = {name: value}
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            FedRotLoRA(CONFIG, **given)


def test_a_run_has_rows_for_a_page(tmp_path: Any) -> None:
    rows = Reporting(tmp_path / "rows.jsonl")
    started(FedRotLoRA(CONFIG, AdapterOptions("exact"), reporting=rows, **EVERY), 2)
    page = write_strategy_report(tmp_path / "rows.jsonl").read_text()
    assert "Round 2: 3 adapters: this average is " in page
    assert "Metrics by round" in page


def test_settings_are_checked_before_anything_runs() -> None:
    with pytest.raises(FedrotError, match="no configuration of a LoRA adapter"):
        FedRotLoRA({"hidden_size": 3})


@pytest.mark.parametrize(
    "options",
    [AdapterOptions("exact", "previous"), AdapterOptions("mean")],
    ids=str,
)
def test_a_resumed_run_ends_with_the_same_bits(options: AdapterOptions, tmp_path: Any) -> None:
    def strategy(**more: Any) -> FedRotLoRA:
        execution = Server(deterministic=True)
        return FedRotLoRA(CONFIG, options, server=execution, **EVERY, **more)

    whole = started(strategy(), 3).arrays.to_torch_state_dict()
    started(strategy(checkpoints=Checkpointing(tmp_path)), 2)
    rest = strategy(checkpoints=Checkpointing(tmp_path))
    resumed = started(rest, 3).arrays.to_torch_state_dict()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


class AdamLoRA(AlignedLoRA, FedAdam):
    """FedAdam behind an average of adapters."""


@pytest.mark.parametrize(
    "options", [AdapterOptions("mean"), AdapterOptions("exact", "previous")], ids=str
)
def test_a_server_optimiser_takes_the_average(options: AdapterOptions) -> None:
    eta, tau, beta = 0.1, 1e-3, 0.9
    strategy = AdamLoRA(CONFIG, options, eta=eta, tau=tau, beta_1=beta, beta_2=0.99, **EVERY)
    found = started(strategy).arrays.to_torch_state_dict()
    average = started(FedRotLoRA(CONFIG, options, **EVERY)).arrays.to_torch_state_dict()
    start = floats(adapter(9))
    for name, tensor in start.items():
        delta = average[name] - tensor
        # Adam with Flower's correction of the bias, which counts rounds from 2.
        rate = eta * (1 - 0.99**2) ** 0.5 / (1 - beta**2)
        step = rate * (1 - beta) * delta / (0.1 * delta.abs() + tau)
        assert torch.allclose(found[name], tensor + step, atol=1e-4), name
    if options.method == "mean":
        plain = FedAdam(eta=eta, tau=tau, beta_1=beta, beta_2=0.99, **EVERY)
        theirs = floats(started(plain).arrays.to_torch_state_dict())
        assert all(torch.allclose(found[name], theirs[name], atol=1e-4) for name in start)


def test_what_cannot_stand_behind_is_refused() -> None:
    median = type("MedianLoRA", (AlignedLoRA, FedMedian), {})
    with pytest.raises(FedrotError, match=r"MedianLoRA passes only the average on, but FedMedian needs"):
        median(CONFIG)


def test_more_that_does_not_go_together_is_refused() -> None:
    with pytest.raises(FedrotError, match=r"options is 'exact'; pass fedrot\.lora"):
        FedRotLoRA(CONFIG, "exact")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (AdapterOptions("mean"), "Adapters: mean"),
        (AdapterOptions("exact", "previous"), "Adapters: exact, gauge 'previous'"),
    ],
)
def test_the_summary_says_what_is_not_the_default(
    options: AdapterOptions, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="flwr"):
        FedRotLoRA(CONFIG, options).summary()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.strip("\t├─> ") for line in lines if "Adapters" in line] == [said]
    assert not any("Alignment" in line for line in lines)


def test_an_adapter_of_rank_0_is_dropped_for_its_shape(warnings: Callable[[], str]) -> None:
    def empty(message: Message) -> Message:
        own = floats(adapter(0)).items()
        sent = {n: t[:0] if "_A" in n else t[:, :0] if "_B" in n else t for n, t in own}
        return reply(message, sent, 10, 7)

    strategy = FedRotLoRA(CONFIG, AdapterOptions("exact"), **EVERY)
    grid = FakeGrid({**{100 + i: client(i) for i in range(2)}, 107: empty})
    result = strategy.start(grid, ArrayRecord(floats(adapter(9))), 1)
    assert result.train_metrics_clientapp[1]["fedrot-replies-dropped"] == 1
    assert "Reply of client 7 dropped: " in warnings()
    assert "lora_A.weight' has shape [0, " in warnings()


@pytest.mark.parametrize(
    ("of_factors", "lost", "measured"),
    [(None, 0.0, {ERROR: 0.1}), (0.3, 0.2, {ERROR: 0.1, ERROR_OF_FACTORS: 0.3, LOST: 0.2})],
)
def test_what_is_not_known_or_not_lost_is_no_metric(
    of_factors: float | None, lost: float, measured: dict[str, float]
) -> None:
    report = SimpleNamespace(
        mean_error=0.1, mean_error_of_factors=of_factors, mean_lost=lost, notes={"m": "why"}
    )
    average = AdapterMean(cast(Any, SimpleNamespace(result=lambda: ({}, report), needs=())))
    average.result()
    assert average.measured == measured
    assert average.notes == {"m": "why"}


def test_a_privacy_wrapper_around_adapters_is_refused_before_training() -> None:
    given: Any = {"noise_multiplier": 0.1, "clipping_norm": 1.0, "num_sampled_clients": 3}
    strategy = DifferentialPrivacyServerSideFixedClipping(FedRotLoRA(CONFIG, **EVERY), **given)
    with pytest.raises(FedrotError, match=r"clips updates before .*class Private\(Aligned, "):
        started(strategy)  # type: ignore[arg-type]
