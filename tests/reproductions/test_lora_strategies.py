"""``RivalLoRA``: rounds of adapters by rivals, what clients are told, and residuals."""

from __future__ import annotations

import pytest
import torch
from flwr.serverapp.strategy import FedAdam

from fedrot.errors import FedrotError
from fedrot.lora import AdapterUpdate, average_adapters
from fedrot.strategies.lora import ERROR
from fedrot.strategies.settings import Checkpointing, Server
from reproductions.lora_clients import TRAIN
from reproductions.lora_rivals import RivalOptions
from reproductions.lora_strategies import FedAvgRivalLoRA, RivalLoRA
from tests.fedrot.lora.test_averaging import (
    MODULES,
    SETTINGS,
    adapter,
    product,
)
from tests.simulations.tensors import close, equal
from tests.strategies.fakes import ArrayRecord, grid_of, reply
from tests.strategies.templates import own_messages
from tests.strategies.test_lora import CONFIG, EVERY, client, floats, started


class RivalAdam(RivalLoRA, FedAdam):
    """FedAdam behind an average of adapters."""


def of_the_schedule(index, seen, back=False):
    """Return a client that trains the factors that it is told to, and may send
    residuals back.
    """

    def train(message):
        (config,) = message.content.config_records.values()
        seen.append(str(config[TRAIN]))
        (received,) = message.content.array_records.values()
        start = received.to_torch_state_dict()
        step = floats(adapter(index))
        own = {n: t for n, t in start.items() if back or "residual" not in n}
        for name in own.keys() & step.keys():
            if "lora_" not in name or seen[-1] in (
                name[name.index("lora_") + 5],
                "both",
            ):
                own[name] = own[name] + 0.3 * step[name]
        return reply(message, own, 10, index)

    return train


FOLD = RivalOptions("mean", residual="fold")
START = floats(adapter(9))


def stepped(start, index):
    """Return what a client sends that trains both factors."""
    step = floats(adapter(index))
    return {name: tensor + 0.3 * step[name] for name, tensor in start.items()}


def played(
    strategy,
    start,
    seen,
    back=False,
    rounds=2,
):
    """Return the result of a run of two clients of the schedule."""
    grid = grid_of(of_the_schedule(i, seen, back) for i in range(2))
    return strategy.start(grid, ArrayRecord(start), rounds)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [("freeze-a", "BBB"), ("alternate", "BAB"), ("both", ["both"] * 3)],
)
def test_clients_are_told_what_they_train(schedule, said):
    seen = []
    options = RivalOptions("mean", schedule=schedule)
    strategy = FedAvgRivalLoRA(CONFIG, options, **EVERY)
    result = played(strategy, START, seen, rounds=3)
    assert seen[::2] == list(said)
    errors = [result.train_metrics_clientapp[n][ERROR] for n in (1, 2, 3)]
    assert max(errors) < 1e-6 if schedule != "both" else min(errors) > 0.01


@pytest.mark.parametrize("back", [False, True])
def test_residuals_travel_to_the_clients_who_may_send_them_back(back):
    start = START
    found = played(FedAvgRivalLoRA(CONFIG, FOLD, **EVERY), start, [], back)
    tensors = found.arrays.to_torch_state_dict()
    assert tensors.keys() - start.keys() == {f"{module}.residual" for module in MODULES}
    metrics = found.train_metrics_clientapp
    assert metrics[2][ERROR] == 0
    assert not any("fedrot-replies-dropped" in metrics[number] for number in (1, 2))
    # Both clients add the same in every round, so that the mean product is known.
    rest = dict.fromkeys(MODULES, torch.zeros(()))
    for _ in range(2):
        sent = [stepped(start, i) for i in range(2)]
        mean = {n: (sent[0][n] + sent[1][n]) / 2 for n in start}
        for module in MODULES:
            dense = (product(sent[0], module) + product(sent[1], module)) / 2
            rest[module] = rest[module] + dense - product(mean, module)
        start = mean
    for module in MODULES:
        assert torch.allclose(tensors[f"{module}.residual"], rest[module], atol=1e-4)


def test_a_run_goes_on_from_the_result_of_another():
    """A residual stays where the next run adds none."""
    folded = started(FedAvgRivalLoRA(CONFIG, FOLD, **EVERY)).arrays
    residuals = {
        n: t for n, t in folded.to_torch_state_dict().items() if "residual" in n
    }
    for strategy in (
        FedAvgRivalLoRA(CONFIG, **EVERY),
        RivalAdam(CONFIG, eta=0.01, **EVERY),
    ):
        grid = grid_of(map(client, range(3)))
        found = strategy.start(grid, folded, 1).arrays.to_torch_state_dict()
        assert equal(found, residuals)


def test_small_frozen_factors_survive_half_precision_on_the_wire():
    strategy = FedAvgRivalLoRA(
        CONFIG,
        RivalOptions("mean", schedule="alternate"),
        server=Server(wire=torch.float16),
        **EVERY,
    )
    start = {n: 1e-6 * t if "_B" in n else t for n, t in START.items()}
    result = played(strategy, start, [], rounds=3)
    assert set(result.train_metrics_clientapp) == {1, 2, 3}


def test_a_round_is_the_average_of_the_replies():
    options = RivalOptions("rotate")
    found = started(FedAvgRivalLoRA(CONFIG, options, **EVERY))
    given = [AdapterUpdate(stepped(START, i), 10 + i, SETTINGS) for i in range(3)]
    expected, _ = average_adapters(given, SETTINGS, options, START)
    assert close(found.arrays.to_torch_state_dict(), expected, atol=1e-5)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    options = RivalOptions("stack", residual="fold")

    def strategy(**more):
        execution = Server(deterministic=True)
        return FedAvgRivalLoRA(CONFIG, options, server=execution, **EVERY, **more)

    whole = started(strategy(), 3).arrays.to_torch_state_dict()
    started(strategy(checkpoints=Checkpointing(tmp_path)), 2)
    rest = strategy(checkpoints=Checkpointing(tmp_path))
    resumed = started(rest, 3).arrays.to_torch_state_dict()
    assert equal(resumed, whole)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(FedrotError, match=r"FedAdam"):
        RivalAdam(CONFIG, FOLD)
    with pytest.raises(FedrotError, match=r"options is 'exact'; pass fedrot\.lora"):
        FedAvgRivalLoRA(CONFIG, "exact")  # type: ignore[arg-type]
    table = {
        "m.lora_embedding_A": torch.zeros(2, 5),
        "m.lora_embedding_B": torch.ones(3, 2),
    }
    strategy = FedAvgRivalLoRA(
        CONFIG, RivalOptions("mean", schedule="freeze-a"), **EVERY
    )
    grid = grid_of(map(client, range(3)))
    with pytest.raises(FedrotError, match="embeddings"):
        strategy.start(grid, ArrayRecord(table), 1)


def test_messages_that_do_not_say_what_to_train_are_refused():
    strategy = own_messages(FedAvgRivalLoRA)(CONFIG, RivalOptions(schedule="alternate"))
    with pytest.raises(FedrotError, match=r"super\(\)\.configure_train"):
        started(strategy)
