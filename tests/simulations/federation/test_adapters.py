"""Cells in which clients train LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import fedrot
from fedrot.lora import (
    AdapterOptions,
    AdapterUpdate,
    LoraSettings,
    adapter_tensors,
    average_adapters,
    load_adapter,
)
from fedrot.simulations.data.encode import bundled_tokenizer
from fedrot.simulations.federation import arms
from fedrot.simulations.federation.arm_strategies import ArmRun, strategy_of
from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.federation.store import CellRows
from fedrot.simulations.models import build_model
from fedrot.simulations.settings import Adapter, Experiment, default_arms
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import task_of
from tests.simulations.commands import options_of
from tests.simulations.in_process import simulated

LORA = "r=3,targets=query+value,alpha=6"
SMALL: dict[str, Any] = {
    "train_limit": 64,
    "test_limit": 20,
    "max_length": 16,
    "clients": 2,
    "holdout": 0.0,
    "rounds": 2,
    "seeds": 1,
    "lr": 0.01,
    "local_epochs": 2,
}
ARMS = (
    "plain",
    "lora-exact(gauge=previous)",
    "joined",
)


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved encoder with its tokenizer."""
    folder = tmp_path_factory.mktemp("pretrained")
    config = Experiment(layers=1, width=16, heads=2, max_length=16)
    build_model(config, task_of(config.to_json()).data, 0).save_pretrained(folder)  # type: ignore[operator]
    PreTrainedTokenizerFast(tokenizer_object=bundled_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def run(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def simulate(*names: str, **changes: Any) -> Path:
        settings = {**SMALL, "model": pretrained, "lora": LORA, "arms": ",".join(names), **changes}
        options = options_of(settings)
        out = tmp_path_factory.mktemp("runs") / "run"
        simulated(out, "simulate", *options)
        return out

    return simulate


@pytest.fixture(scope="session")
def all_arms(run: Callable[..., Path]) -> Path:
    return run(*ARMS)


def test_without_arms_those_of_adapters_are_run(pretrained: Path, tmp_path: Path) -> None:
    options = options_of(SMALL)
    given = ("--model", pretrained, "--lora", LORA, "--dry-run")
    printed = simulated(tmp_path / "run", "simulate", *options, *given)
    assert f"{len(default_arms(LORA))} cells" in printed


def values(path: Path, metric: str, scope: str) -> dict[tuple[str, int], float]:
    found = (r for r in read_rows(path) if r["metric"] == metric and r["scope"] == scope)
    return {(row["arm"], row["round"]): row["value"] for row in found}


def config_of(path: Path, pretrained: Path, **changes: Any) -> Experiment:
    return Experiment.from_flat({**SMALL, "model": str(pretrained), "lora": LORA, **changes})


def test_plain_is_the_mean_of_the_factors(all_arms: Path, pretrained: Path) -> None:
    """The first round again, by hand."""
    config = config_of(all_arms, pretrained)
    task = task_of(config.to_json())
    start = adapter_tensors(build_model(config, task.data, 0))
    sent = []
    for client in range(2):
        model = build_model(config, task.data, seed=99)
        load_adapter(model, start)
        rows, _ = task.client_rows(0, client)
        training.train(model, task, rows, (0 * 1_000 + 1) * 1_000 + client)
        sent.append((len(rows), adapter_tensors(model)))
    total = sum(weight for weight, _ in sent)
    mean = {n: sum((w / total * tensors[n] for w, tensors in sent), torch.zeros(())) for n in start}
    model = build_model(config, task.data, seed=99)
    load_adapter(model, mean)
    expected = training.evaluate(model, task, task.test, np.arange(20))["loss"]
    assert values(all_arms, "loss", "central")["plain", 1] == pytest.approx(expected, abs=1e-5)
    first = values(all_arms, "loss", "central")
    assert len({first[arm, 0] for arm in ARMS}) == 1
    assert first["plain", 2] < first["plain", 0]


def test_errors_of_the_averages_are_recorded(all_arms: Path) -> None:
    error = values(all_arms, "fedrot-adapter-error", "alignment")
    assert {arm for arm, _ in error} == {*ARMS[:2]}
    for server_round in (1, 2):
        assert error["plain", server_round] > 0.001
    # Of the same updates no factors have a smaller one; later rounds start from different adapters.
    assert error["lora-exact(gauge=previous)", 1] < error["plain", 1]


def test_bytes_are_those_of_what_travels(all_arms: Path, pretrained: Path) -> None:
    config = config_of(all_arms, pretrained)
    tensors = adapter_tensors(build_model(config, task_of(config.to_json()).data, 0))
    size = 4 * sum(tensor.numel() for tensor in tensors.values())
    sent, received = values(all_arms, "broadcast", "bytes"), values(all_arms, "bytes", "client:1")
    for arm in ARMS[:2]:
        assert received[arm, 2] == size == sent[arm, 1] == sent[arm, 2]


def test_the_same_run_twice_has_the_same_rows(run: Callable[..., Path], all_arms: Path) -> None:
    def rows(path: Path) -> list[dict[str, Any]]:
        return [row for row in read_rows(path) if "seconds" not in row["metric"]]

    assert rows(run(*ARMS)) == rows(all_arms)


def test_clients_of_several_ranks(run: Callable[..., Path]) -> None:
    names = ("lora-exact", "lora-exact(gauge=none)")
    path = run(*names, lora="r=2+4,targets=query,alpha=6", holdout=0.2)
    sizes = [values(path, "bytes", f"client:{client}") for client in range(2)]
    for arm in names:
        # Two factors of 16 x rank in float32.
        assert sizes[1][arm, 1] - sizes[0][arm, 1] == 2 * 16 * 2 * 4
    loss = values(path, "loss", "central")
    assert loss[names[0], 2] != loss[names[1], 2]
    assert max(loss.values()) < 3


def test_regressed_products_come_from_the_clients_inputs(
    run: Callable[..., Path], pretrained: Path
) -> None:
    """The first round again, by hand."""
    names = ("lora-exact", "lora-regmean", "lora-regmean(regmean_alpha=0.1;gauge=previous)")
    ranks = "r=2+4,targets=query+value,alpha=6"
    path = run(*names, lora=ranks)
    config = config_of(path, pretrained, lora=ranks)
    task = task_of(config.to_json())
    shell = build_model(config, task.data, 0)
    start, updates = adapter_tensors(shell), []
    for client in range(2):
        model: Any = build_model(config, task.data, seed=99, rank=(2, 4)[client])
        load_adapter(model, start)
        rows, _ = task.client_rows(0, client)
        training.train(model, task, rows, (0 * 1_000 + 1) * 1_000 + client)
        # Every row is read, in batches of another size than those of the arm.
        read = training.step_batches(task, model, rows, len(rows), 7, 1)
        grams = fedrot.collect_gram(model, read, max_batches=None)
        settings = LoraSettings.of(model.peft_config["default"])
        updates.append(AdapterUpdate(adapter_tensors(model), len(rows), settings, grams))
    loss = values(path, "loss", "central")
    for name, options in zip(
        names,
        (AdapterOptions("exact"), AdapterOptions("regmean"), AdapterOptions("regmean", "previous", 0.1)),
        strict=True,
    ):
        server = LoraSettings.of(shell.peft_config["default"])  # type: ignore[attr-defined]
        merged, _ = average_adapters(updates, server, options, previous=start)
        model = build_model(config, task.data, seed=99)
        load_adapter(model, merged)
        expected = training.evaluate(model, task, task.test, np.arange(20))["loss"]
        assert loss[name, 1] == pytest.approx(expected, abs=1e-5)
    assert len({loss[name, 1] for name in names}) == 3
    seconds = values(path, "seconds-statistics", "client:1")
    assert seconds[names[1], 2] > 0
    assert (names[0], 2) not in seconds


@pytest.mark.parametrize("server", ["adam", "yogi"])
def test_server_optimisers_move_the_average(run: Callable[..., Path], server: str) -> None:
    path = run("plain", "lora-exact", server=server, server_lr=0.02)
    loss = values(path, "loss", "central")
    plain = values(run("plain"), "loss", "central")
    assert loss["plain", 0] == plain["plain", 0]
    assert len({loss["plain", 1], loss["lora-exact", 1], plain["plain", 1]}) == 3


@pytest.mark.parametrize("server", ["adam", "yogi"])
def test_the_server_s_rate_is_that_of_its_optimiser(server: str, pretrained: Path) -> None:
    config = config_of(pretrained, pretrained, server=server, server_lr=0.02, arms="lora-exact")
    task, (arm,) = task_of(config.to_json()), [arm for _, _, arm in config.cells()]
    cell = ArmRun(task, 0, "same", arm, CellRows(), {}, Path("unused.txt"))
    strategy: Any = strategy_of(cell, cell.model(), Path("unused.jsonl"))
    assert strategy.eta == 0.02


def test_joined_steps_are_those_of_one_client(pretrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: list[float] = []
    monkeypatch.setattr(arms.training, "train", lambda *given: epochs.append(given[4]))
    config = config_of(pretrained, pretrained, arms=("joined", "joined-steps"))
    task = task_of(config.to_json())
    model = build_model(config, task.data, 0)
    for _, _, arm in config.cells():
        arms.train_joined(task, arm, 0, model, 1)
    assert epochs == [2.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": "r=3"}, "lora needs targets; write lora as r=8,targets=query"),
        ({"lora": "r=3,targets=q,rank=2"}, "lora has no key 'rank'; its keys are r, targets, alpha"),
        ({"lora": "r=0,targets=q"}, "ranks are at least 1"),
        ({"lora": "r=4+0,targets=q"}, "ranks are at least 1"),
        ({"lora": "r=2++4,targets=q"}, "r is '2++4'; write r=8"),
        ({"lora": "r=2,targets=+"}, "a target has no name"),
        ({"lora": "r=2,targets=q,alpha=inf"}, "alpha is above 0"),
        ({"lora": "r=2,targets=q,alpha=0"}, "alpha is above 0"),
        ({"lora": "r=2,targets=q,dropout=-0.1"}, "dropout from 0 to below 1"),
        ({"lora": "r=,targets=q"}, "lora needs r; write lora as"),
        ({"lora": "targets=q"}, "lora needs r; write lora as"),
        ({"lora": "r=2,targets="}, "lora needs targets; write lora as"),
        ({"task": "mlm"}, "lora needs task classification, ner, clm"),
        ({"task": "image", "data": "digits"}, "lora needs task classification, ner, clm"),
        ({"arms": "plain/regmean"}, "arm 'plain/regmean' is not for adapters; write plain"),
        ({"arms": "regmean"}, "arm 'regmean' is not for adapters; write plain"),
        ({"arms": "plain+task-head", "holdout": 0.1}, "arm 'plain+task-head' is not for adapters"),
        (
            {"lora": "r=2+4,targets=q", "arms": "lora-exact,lora-mean"},
            "arm 'lora-mean': factors of different ranks have no mean",
        ),
        ({"lora": "r=3,targets=q,dora=yes"}, "'yes' is neither 0 nor 1"),
        ({"model": None}, "lora needs a pretrained model; give model"),
        ({"lora": "r=3,targets=q,dropout=1"}, "dropout from 0 to below 1"),
        ({"starts": "different"}, "lora needs start 'same'"),
        ({"starts": "same,different"}, "lora needs start 'same'"),
        ({"data": "goemotions_ekman,digits"}, "lora needs one data set"),
        ({"arms": "whole"}, "arm 'whole' is not for adapters; write plain"),
        ({"arms": "aligned"}, "arm 'aligned' is not for adapters; write plain"),
        ({"arms": "lora-mean@global"}, "it averages adapters; write lora-METHOD"),
        ({"arms": "lora-best"}, "Unknown method 'best' of adapters"),
        # The laboratory adds options, if another test has loaded it.
        ({"arms": "lora-exact(ridge=1)"}, "unknown option 'ridge'; one of gauge, "),
        ({"arms": "lora-exact(regmean_alpha=1)"}, "regmean_alpha is an option of 'regmean'"),
        (
            {"lora": "r=3,targets=q,dora=1", "arms": "lora-regmean"},
            "arm 'lora-regmean': method 'regmean' is not for adapters with dora=1",
        ),
        (
            {"lora": "r=2+4,targets=q", "arms": "plain"},
            "arm 'plain': factors of different ranks have no mean",
        ),
        ({"lora": "", "arms": "lora-exact"}, "arm 'lora-exact' is for adapters; give lora"),
        ({"lora": "", "server": "adam"}, "server 'adam' is for adapters; give lora"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(changes: dict[str, Any], said: str) -> None:
    settings = {**SMALL, "model": "some/model", "lora": LORA, **changes}
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace("+", r"\+")):
        Experiment.from_flat(settings)


def test_arms_of_adapters_unless_they_are_named() -> None:
    given = {name: value for name, value in SMALL.items() if name != "arms"}
    one, several = (
        Experiment.from_flat({**given, "model": "some/model", "lora": f"r={ranks},targets=q"})
        for ranks in ("4", "2+4")
    )
    assert one.arms == ("plain", "lora-exact")
    assert several.arms == ("lora-exact", "lora-exact(gauge=previous)")


def test_joined_training_goes_with_clients_of_several_ranks() -> None:
    """It trains one adapter, of the largest rank."""
    named = ("lora-exact", "joined", "joined-steps")
    settings = {**SMALL, "model": "some/model", "lora": "r=2+4,targets=q", "arms": ",".join(named)}
    assert Experiment.from_flat(settings).arms == named


def test_modules_that_are_not_there_are_named(pretrained: Path) -> None:
    config = config_of(pretrained, pretrained, lora="r=2,targets=c_attn")
    with pytest.raises(ValueError, match="PEFT cannot adapt this BertForSequenceClassification"):
        build_model(config, task_of(config.to_json()).data, 0)


def test_equal_ranks_in_turns_are_one_rank() -> None:
    assert default_arms("r=8+8,targets=query") == default_arms("r=8,targets=query")
    assert "plain" in default_arms("r=8+8,targets=query")
    config = Experiment.from_flat(
        {**SMALL, "model": "some/model", "lora": "r=8+8,targets=query", "arms": "plain,lora-mean"}
    )
    assert config.adapter == Adapter(ranks=(8, 8), targets=("query",))


@pytest.mark.parametrize("task", ["classification", "ner", "clm"])
def test_tasks_of_adapters(task: str) -> None:
    settings = {**SMALL, "task": task, "data": "mine", "model": "some/model", "lora": LORA}
    assert Experiment.from_flat(settings).arms == ("plain", "lora-exact")


def test_an_adapter_is_read_from_its_text() -> None:
    text = " r = 4+2, targets=query+value,alpha=6,dropout=0.5,rslora=1,dora=0"
    adapter = Adapter.parse(text)
    assert adapter == Adapter(
        ranks=(4, 2), targets=("query", "value"), alpha=6, dropout=0.5, rslora=True, dora=False
    )
    assert adapter.rank == 4
    assert [adapter.rank_of(client) for client in range(5)] == [4, 2, 4, 2, 4]
    plain = Adapter.parse("r=8,targets=all-linear,rslora=0,dora=1,dropout=0")
    assert plain == Adapter(ranks=(8,), targets=("all-linear",), dora=True)
    assert (plain.alpha, plain.dropout, plain.rslora) == (16, 0, False)
