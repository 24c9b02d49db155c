"""Resumed runs: the same calls as in Flower's loop, and the same end after a stop or a kill."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedYogi,
    Krum,
    QFedAvg,
    Result,
    Strategy,
)

from fedrot.errors import FedrotError
from fedrot.options import AlignmentOptions
from fedrot.strategies import Aligned, FedRot
from fedrot.strategies.resume.checkpoints import Checkpointing
from fedrot.strategies.resume.run import run
from fedrot.strategies.resume.state import RunState
from fedrot.strategies.settings import Reporting as Files
from tests.models import config_of
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import Client, FakeGrid, failure, reply, tensors_of
from tests.strategies.resume.killed_run import METRICS
from tests.strategies.resume.killed_run import ROUNDS as KILLED_ROUNDS
from tests.strategies.runs import Kill, Server

ROUNDS, CLIENTS = 4, 6
CONFIG: Any = config_of(NAME)
#: From a strategy's name to the folder of its checkpoints and the end of its run.
Finished = Callable[[str], tuple[Path, dict[str, Any]]]
COMMON: dict[str, Any] = {"fraction_train": 0.5, "fraction_evaluate": 0.5}
NOISE: dict[str, Any] = {"noise_multiplier": 0.1, "num_sampled_clients": 3}
SMALL = {"weight": torch.linspace(-1, 1, 12).reshape(3, 4), "bias": torch.zeros(3)}


class AlignedAdam(Aligned, FedAdam):
    """Alignment in front of a strategy with state."""


class AlignedPrivacy(Aligned, DifferentialPrivacyServerSideAdaptiveClipping):
    """Alignment in front of a wrapper with state."""


def _private(wrapper: Callable[..., Strategy], inside: type[FedAvg] = FedAvg, **more: Any) -> Strategy:
    return wrapper(inside(**COMMON), **NOISE, **more)


#: Builders of strategies anew for every run, and whether they need a model that can be aligned.
STRATEGIES: dict[str, tuple[Callable[[], Strategy], bool]] = {
    "FedAvg": (lambda: FedAvg(**COMMON), False),
    "FedAvgM": (lambda: FedAvgM(**COMMON, server_learning_rate=0.7, server_momentum=0.9), False),
    "FedAdam": (lambda: FedAdam(**COMMON, eta=0.01), False),
    "FedYogi": (lambda: FedYogi(**COMMON, eta=0.01), False),
    "FedAdagrad": (lambda: FedAdagrad(**COMMON, eta=0.01), False),
    "FedMedian": (lambda: FedMedian(**COMMON), False),
    "Krum": (lambda: Krum(**COMMON, num_malicious_nodes=0), False),
    "Bulyan": (lambda: Bulyan(**COMMON, num_malicious_nodes=0), False),
    "QFedAvg": (lambda: QFedAvg(**COMMON, q=0.5, client_learning_rate=0.5), False),
    "fixed clipping": (
        lambda: _private(DifferentialPrivacyServerSideFixedClipping, clipping_norm=0.2),
        False,
    ),
    "adaptive clipping": (lambda: _private(DifferentialPrivacyServerSideAdaptiveClipping), False),
    "adaptive clipping of FedAvgM": (
        lambda: DifferentialPrivacyServerSideAdaptiveClipping(
            FedAvgM(**COMMON, server_momentum=0.9), **NOISE
        ),
        False,
    ),
    "adaptive clipping at clients": (
        lambda: _private(DifferentialPrivacyClientSideAdaptiveClipping, FedAdam),
        False,
    ),
    "FedRot": (lambda: FedRot(CONFIG, **COMMON), True),
    "aligned FedAdam": (lambda: AlignedAdam(CONFIG, **COMMON, eta=0.01), True),
    "aligned privacy": (
        lambda: AlignedPrivacy(
            CONFIG, FedAvg(**COMMON), **NOISE, alignment=AlignmentOptions(anchor="global")
        ),
        True,
    ),
}


def client(index: int) -> Client:
    """Return a client whose answers follow from what it is sent."""

    def answer(message: Message) -> Message:
        number: Any = message.content.config_records["config"]["server-round"]
        tensors = tensors_of(message.content.array_records["arrays"])
        generator = torch.Generator().manual_seed(100 * number + index)
        moved = {
            k: t + 0.05 * torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
            for k, t in tensors.items()
        }
        total = sum(float(t.double().sum()) for t in tensors.values())
        metrics = {"train_loss": 1.0 + 0.1 * index, "total": total, "norm_bit": index % 2}
        return reply(message, moved, 10 + 3 * index, index, **metrics)

    return answer


def grid() -> FakeGrid:
    return FakeGrid({100 + i: client(i) for i in range(CLIENTS)})


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
    """Return metrics that use up random numbers; in some rounds none."""
    total = sum(float(t.double().sum()) for t in tensors_of(arrays).values())
    drawn = [random.random(), float(np.random.normal()), float(torch.rand(()))]
    return MetricRecord({"total": total, "drawn": drawn}) if number != 2 else None


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def play(
    strategy: Strategy,
    tensors: dict[str, torch.Tensor] | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
    **settings: Any,
) -> Result:
    """Run a strategy on the deterministic clients."""
    seeded(seed)
    arrays = ArrayRecord(SMALL if tensors is None else tensors)
    return run(strategy, grid(), arrays, rounds, **{"evaluate_fn": evaluate, **settings})


def ending(result: Result) -> dict[str, Any]:
    """Return a result in a form that compares bit for bit, and the next random numbers."""
    metrics = {
        kind: repr({number: dict(record) for number, record in getattr(result, kind).items()})
        for kind in METRICS
    }
    arrays = [(k, a.dtype, a.shape, a.stype, a.data) for k, a in result.arrays.items()]
    drawn = (random.random(), float(np.random.normal()), float(torch.rand(())))
    return {**metrics, "arrays": arrays, "drawn": drawn}


# The loop


class Recorded(FedAvg):
    """FedAvg that writes down how it is called, and what it is given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls: list[tuple[Any, ...]] = []

    def summary(self) -> None:
        self.calls.append(("summary",))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        self.calls.append(("configure_train", server_round, arrays.object_id, dict(config)))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        nodes = [reply.metadata.src_node_id for reply in replies]
        self.calls.append(("aggregate_train", server_round, nodes))
        return super().aggregate_train(server_round, replies) if server_round != 2 else (None, None)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        self.calls.append(("configure_evaluate", server_round, arrays.object_id, dict(config)))
        return super().configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        self.calls.append(
            ("aggregate_evaluate", server_round, [r.metadata.src_node_id for r in replies])
        )
        return super().aggregate_evaluate(server_round, replies) if server_round != 3 else None


class TimedGrid(FakeGrid):
    """Writes down the timeouts that it is given."""

    timeouts: list[float | None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        self.timeouts = [*getattr(self, "timeouts", []), timeout]
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize("settings", [{}, {"train_config": {"lr": 0.1}, "evaluate_config": {"b": 1}}])
@pytest.mark.parametrize("evaluated", [True, False])
def test_the_loop_is_flowers(
    caplog: pytest.LogCaptureFixture, warnings: Any, settings: dict[str, Any], evaluated: bool
) -> None:
    caplog.set_level("INFO", "flwr")
    ends, calls, evaluations, timeouts, logs = [], [], [], [], []
    for ours in (True, False):
        seeded(0)
        strategy, clients = Recorded(**COMMON), TimedGrid(grid().nodes)
        seen: list[tuple[int, str]] = []

        def evaluation(number: int, arrays: ArrayRecord, seen: Any = seen) -> MetricRecord | None:
            seen.append((number, arrays.object_id))
            return evaluate(number, arrays)

        start = (lambda *a, s=strategy, **k: run(s, *a, **k)) if ours else strategy.start
        configs = {name: ConfigRecord(config) for name, config in settings.items()}
        given: Any = {"evaluate_fn": evaluation} if evaluated else {}
        caplog.clear()
        result = start(clients, ArrayRecord(SMALL), ROUNDS, 12.5, **configs, **given)
        logs.append([r.getMessage() for r in caplog.records if "finished in" not in r.getMessage()])
        ends.append((ending(result), {name: dict(config) for name, config in configs.items()}))
        calls.append(strategy.calls)
        evaluations.append(seen)
        timeouts.append(clients.timeouts)
    assert ends[0] == ends[1]
    assert calls[0] == calls[1]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == (ROUNDS + 1 if evaluated else 0)
    assert timeouts == [[12.5] * 2 * ROUNDS] * 2
    assert [line for line in logs[0] if "ConfigRecord (" not in line] == [
        line for line in logs[1] if "ConfigRecord (" not in line
    ]


# Resuming


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory,
) -> Finished:
    """Return the checkpoints of all rounds, and the end, of a strategy's run."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}

    def get(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in found:
            build, aligned = STRATEGIES[name]
            folder = tmp_path_factory.mktemp("uninterrupted")
            tensors = state() if aligned else SMALL
            end = ending(play(build(), tensors, checkpoints=Checkpointing(folder, keep=ROUNDS)))
            assert end == ending(play(build(), tensors)), "checkpoints change the run"
            found[name] = folder, end
        return found[name]

    return get


@pytest.mark.parametrize("after", range(1, ROUNDS + 1))
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, uninterrupted: Finished, name: str, after: int
) -> None:
    folder, expected = uninterrupted(name)
    build, aligned = STRATEGIES[name]
    tensors = {k: torch.zeros_like(t) for k, t in (state() if aligned else SMALL).items()}
    shutil.copytree(folder / f"round-{after:06d}", tmp_path / f"round-{after:06d}")
    assert ending(play(build(), tensors, seed=99, resume=tmp_path)) == expected


@pytest.mark.parametrize("name", ["FedAvgM", "FedAdam", "adaptive clipping of FedAvgM"])
def test_the_state_is_what_makes_it_so(
    tmp_path: Path,
    uninterrupted: Finished,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    folder, expected = uninterrupted(name)
    shutil.copytree(folder / "round-000002", tmp_path / "round-000002")
    restore = RunState.restore

    def without_entries(self: RunState, saved: dict[str, Any], arrays: Any) -> None:
        restore(self, {**saved, "entries": []}, arrays)

    monkeypatch.setattr(RunState, "restore", without_entries)
    assert ending(play(STRATEGIES[name][0](), resume=tmp_path))["arrays"] != expected["arrays"]


def test_resuming_again_and_again(tmp_path: Path) -> None:
    """One folder, one round per process: what was restored is saved again."""
    name = "adaptive clipping of FedAvgM"
    build, _ = STRATEGIES[name]
    expected = ending(play(build()))
    for rounds in range(1, ROUNDS + 1):
        result = play(
            build(), rounds=rounds, seed=rounds - 1, checkpoints=Checkpointing(tmp_path), resume=tmp_path
        )
    assert ending(result) == expected


def test_what_changed_once_is_in_the_checkpoints_of_every_later_run(tmp_path: Path) -> None:
    class Calibrated(FedAvg):
        """Keeps what it found in round 1."""

        scale = 0.0

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            if server_round == 1:
                self.scale = 0.5
            return super().aggregate_train(server_round, replies)

    for rounds in (1, 2, 3):
        strategy = Calibrated()
        play(strategy, rounds=rounds, checkpoints=Checkpointing(tmp_path), resume=tmp_path)
        assert strategy.scale == 0.5


def test_a_finished_run_is_returned_as_it_ended(uninterrupted: Finished, warnings: Any) -> None:
    folder, expected = uninterrupted("FedAdam")
    asked = grid()
    strategy = STRATEGIES["FedAdam"][0]()
    for rounds in (ROUNDS, 1):
        found = run(strategy, asked, ArrayRecord(SMALL), rounds, evaluate_fn=evaluate, resume=folder)
        assert ending(found) == expected
        assert (f"holds round {ROUNDS}, and num_rounds is 1: no round" in warnings()) == (rounds == 1)
    assert not any(asked.asked)


def test_a_resumed_run_asks_nobody_in_the_rounds_that_are_finished(tmp_path: Path) -> None:
    whole = Recorded(**COMMON)
    expected = ending(play(whole, checkpoints=Checkpointing(tmp_path, keep=ROUNDS)))
    for after in range(1, ROUNDS + 1):
        folder = tmp_path / f"after {after}"
        shutil.copytree(tmp_path / f"round-{after:06d}", folder / f"round-{after:06d}")
        rest, clients, evaluated = Recorded(**COMMON), grid(), list[int]()

        def evaluation(number: int, arrays: ArrayRecord, seen: Any = evaluated) -> MetricRecord | None:
            seen.append(number)
            return evaluate(number, arrays)

        found = run(rest, clients, ArrayRecord(SMALL), ROUNDS, evaluate_fn=evaluation, resume=folder)
        assert ending(found) == expected
        # Those before are in the checkpoint: the list is state of this strategy.
        saved = 1 + 4 * after
        assert rest.calls == [*whole.calls[:saved], ("summary",), *whole.calls[saved:]]
        assert evaluated == [*range(after + 1, ROUNDS + 1)]
        assert [len(nodes) for nodes in clients.asked] == [0] * 2 * after + [3] * 2 * (ROUNDS - after)


def test_a_run_that_is_not_evaluated_at_the_server_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Its rounds end with the clients' evaluation, and are saved then."""
    expected = ending(play(FedAdam(**COMMON), evaluate_fn=None))
    for rounds in range(1, ROUNDS + 1):
        given: Any = {"checkpoints": Checkpointing(tmp_path), "resume": tmp_path, "evaluate_fn": None}
        result = play(FedAdam(**COMMON), rounds=rounds, seed=rounds - 1, **given)
    assert ending(result) == expected
    assert Checkpointing(tmp_path).rounds() == [ROUNDS - 2, ROUNDS - 1, ROUNDS]


def test_a_round_is_saved_after_the_server_has_evaluated_it(tmp_path: Path) -> None:
    saved: list[list[int]] = []

    def evaluation(number: int, arrays: ArrayRecord) -> None:
        saved.append(Checkpointing(tmp_path).rounds())

    play(FedAvg(), evaluate_fn=evaluation, checkpoints=Checkpointing(tmp_path, keep=ROUNDS))
    assert saved == [[], [], [1], [1, 2], [1, 2, 3]]


def test_what_the_server_has_evaluated_stays_when_it_evaluates_no_more(tmp_path: Path) -> None:
    first = play(FedAvg(**COMMON), rounds=3, checkpoints=Checkpointing(tmp_path))
    rest = play(FedAvg(**COMMON), evaluate_fn=None, checkpoints=Checkpointing(tmp_path), resume=tmp_path)
    assert [*rest.evaluate_metrics_serverapp] == [0, 1, 3]
    assert rest.evaluate_metrics_serverapp == first.evaluate_metrics_serverapp
    assert Checkpointing(tmp_path).newest().result.evaluate_metrics_serverapp.keys() == {0, 1, 3}
    assert Checkpointing(tmp_path).rounds() == [2, 3, 4]


def test_a_failed_round_is_kept_too(tmp_path: Path) -> None:
    failing = FakeGrid(dict.fromkeys(grid().nodes, failure))
    settings: dict[str, Any] = {"checkpoints": Checkpointing(tmp_path), "resume": tmp_path}
    seeded(0)
    for rounds in (1, 2):
        found = run(FedAvg(), failing, ArrayRecord(SMALL), rounds, **settings)
        assert found.arrays == ArrayRecord(SMALL)
    assert Checkpointing(tmp_path).newest().result.arrays == ArrayRecord(SMALL)
    found = run(FedAvg(), grid(), ArrayRecord(SMALL), 3, **settings)
    end = ending(found)
    seeded(0)
    assert ending(run(FedAvg(), _FailingUntil(2), ArrayRecord(SMALL), 3)) == end


def test_clients_keep_their_names_when_a_run_goes_on_and_lose_them_in_a_new_one(tmp_path: Path) -> None:
    def client(index: int, fails_in: int) -> Client:
        def answer(message: Message) -> Message:
            number: Any = message.content.config_records["config"]["server-round"]
            sent = tensors_of(message.content.array_records["arrays"])
            return failure(message) if number == fails_in else reply(message, sent, 10, index)

        return answer

    rows, folder = tmp_path / "rows.jsonl", tmp_path / "checkpoints"

    def aligned(checkpointing: Checkpointing | None = None) -> FedRot:
        settings = {"checkpoints": checkpointing} if checkpointing else {}
        return FedRot(SYMMETRY, fraction_evaluate=0.0, reporting=Files(rows=rows), **settings)

    def failed(strategy: FedRot, rounds: int, fails_in: int) -> list[int]:
        nodes = {100 + index: client(index, fails_in) for index in range(3)}
        nodes[101] = client(1, 0)
        strategy.start(FakeGrid(nodes), ArrayRecord(state()), num_rounds=rounds)
        written = map(json.loads, rows.read_text("utf-8").splitlines())
        return sorted({row["client"] for row in written if "failed" in row})

    for rounds in (1, 2):
        names = failed(aligned(Checkpointing(folder)), rounds, fails_in=2)
    assert names == [0, 2]
    strategy = aligned()
    assert failed(strategy, 2, fails_in=2) == [0, 2]
    assert failed(strategy, 1, fails_in=1) == [100, 102]


class _FailingUntil(FakeGrid):
    def __init__(self, last: int) -> None:
        good = grid().nodes

        def client_of(node: int) -> Client:
            def answer(message: Message) -> Message:
                number: Any = message.content.config_records["config"]["server-round"]
                return failure(message) if number <= last else good[node](message)

            return answer

        super().__init__({node: client_of(node) for node in good})


class Decaying(FedAvg):
    """Halves the clients' learning rate after every round, as Flower's documentation does."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        rate: Any = config["lr"]
        config["lr"] = rate / 2
        return super().configure_train(server_round, arrays, config, grid)


def test_what_a_strategy_changes_in_the_configuration_goes_on(tmp_path: Path) -> None:
    rates = []
    for rounds, given in ((2, {"lr": 1.0, "batch": 8}), (3, {"lr": 1.0, "batch": 16})):
        config = ConfigRecord(given)
        play(
            Decaying(),
            rounds=rounds,
            train_config=config,
            checkpoints=Checkpointing(tmp_path),
            resume=tmp_path,
        )
        rates.append(dict(config))
    # What it did not change is the user's.
    assert rates == [
        {"lr": 0.25, "batch": 8, "server-round": 2},
        {"lr": 0.125, "batch": 16, "server-round": 3},
    ]


class Accountant:
    """Counts, and has its state in Flower's way."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Stateful(FedAvg):
    """State of every kind that checkpoints know, and of some that they do not."""

    not_in_checkpoints = ("private",)

    def __init__(self, accountant: Accountant, generator: np.random.Generator) -> None:
        super().__init__()
        self.accountant, self.generator = accountant, generator
        self.others = random.Random(5)
        self.torch_generator = torch.Generator().manual_seed(5)
        self.legacy = np.random.RandomState(5)
        self.layer = torch.nn.Linear(2, 2)
        self.nodes: dict[int, list[float]] = {}
        self.best: torch.Tensor | None = None
        self.rate, self.private, self.scale = 1.0, 0, 0.5
        self.history: list[object] = []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        self.accountant.count += 1
        self.private += 1
        self.rate *= 0.9
        drawn = [
            float(self.generator.normal()),
            self.others.random(),
            float(torch.rand((), generator=self.torch_generator)),
            float(self.legacy.normal()),
        ]
        self.nodes[server_round] = drawn
        self.best = torch.tensor(drawn)
        with torch.no_grad():
            self.layer.weight.add_(1)
        return super().aggregate_train(server_round, replies)

    def seen(self) -> Any:
        """Return all of it, and what the generators draw next."""
        return (
            *(self.accountant.count, self.rate, self.nodes, self.others.random()),
            *(self.generator.random(), float(torch.rand((), generator=self.torch_generator))),
            *(self.best.tolist() if self.best is not None else (), self.legacy.random()),
            self.layer.weight.tolist(),
        )


def _stateful() -> tuple[Accountant, np.random.Generator, Stateful]:
    torch.manual_seed(0)
    accountant, generator = Accountant(), np.random.default_rng(5)
    return accountant, generator, Stateful(accountant, generator)


def test_state_of_every_kind_goes_on(tmp_path: Path, warnings: Callable[[], str]) -> None:
    *_, whole = _stateful()
    play(whole, rounds=4)
    *_, first = _stateful()
    play(first, rounds=2, checkpoints=Checkpointing(tmp_path))
    accountant, generator, second = _stateful()
    second.scale = 0.7
    play(second, rounds=4, resume=tmp_path)
    assert second.seen() == whole.seen()
    # Objects with state of their own stay the same objects: others may hold them too.
    assert second.accountant is accountant
    assert second.generator is generator
    assert second.private == 2
    assert second.scale == 0.7
    assert warnings() == ""


def test_state_that_cannot_be_saved_is_named_once(tmp_path: Path, warnings: Callable[[], str]) -> None:
    class Odd(FedAvg):
        ours: object = None

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.server, self.fixed = SimpleNamespace(momentum=0.0), SimpleNamespace(rate=0.5)

        def configure_train(self, server_round: int, *args: Any) -> Iterable[Message]:
            self.ours = object()
            self.seen_nodes = Counter({3: server_round})
            self.mixed = {"array": np.zeros(3), "other": object()}
            self.server.momentum = 0.5 * self.server.momentum + 1
            return super().configure_train(server_round, *args)

    strategy = Odd(train_metrics_aggr_fn=lambda records, key: MetricRecord())
    play(strategy, rounds=2, checkpoints=Checkpointing(tmp_path))
    seen = ("ours holds a object", "seen_nodes holds a Counter", "mixed holds a object")
    for attribute in (*seen, "server holds a SimpleNamespace"):
        assert warnings().count(f"strategy.{attribute}") == 1
    assert warnings().count("Not in the checkpoints") == 4
    assert not [name for name in Checkpointing(tmp_path).newest().state_arrays if "mixed" in name]


# What is refused


def test_resume_needs_checkpoints(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FedrotError, match="There is no usable checkpoint in"):
            play(FedAvg(), resume=folder)
    with pytest.raises(FedrotError, match="There is no usable checkpoint in"):
        play(FedAvg(), resume=tmp_path, checkpoints=Checkpointing(tmp_path / "other"))


def test_one_command_starts_and_resumes(tmp_path: Path, caplog: Any, warnings: Any) -> None:
    caplog.set_level("INFO", "flwr")
    folder = tmp_path / "new"
    result = play(FedAvg(), resume=folder / "." / ".." / "new", checkpoints=Checkpointing(folder))
    assert "starting from round 1" in caplog.text
    assert list(result.evaluate_metrics_clientapp) == [1, 2, 3, 4]


def test_a_folder_of_another_run_is_not_written_to(tmp_path: Path) -> None:
    play(FedAvg(), rounds=1, checkpoints=Checkpointing(tmp_path / "old"))
    play(FedAvg(), rounds=1, checkpoints=Checkpointing(tmp_path / "new"))
    for resume in (None, tmp_path / "new"):
        with pytest.raises(
            FedrotError, match=r"already has checkpoints\. Resume from them with resume="
        ):
            play(FedAvg(), checkpoints=Checkpointing(tmp_path / "old"), resume=resume)


def test_a_run_can_go_on_in_another_folder(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    expected = ending(play(FedAdam(**COMMON)))
    play(FedAdam(**COMMON), rounds=2, checkpoints=Checkpointing(old))
    result = play(FedAdam(**COMMON), seed=1, resume=str(old), checkpoints=Checkpointing(new, keep=9))
    assert ending(result) == expected
    assert (Checkpointing(old).rounds(), Checkpointing(new).rounds()) == ([1, 2], [3, 4])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({**SMALL, "more": torch.zeros(1)}, r"'more' is missing there and \(1,\) in initial_arrays"),
        ({"weight": SMALL["weight"]}, r"'bias' is \(3,\) there and missing in"),
        ({**SMALL, "bias": torch.zeros(4)}, r"'bias' is \(3,\) there and \(4,\) in"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, other: dict[str, torch.Tensor], message: str) -> None:
    play(FedAvg(), rounds=1, checkpoints=Checkpointing(tmp_path))
    with pytest.raises(FedrotError, match=message):
        play(FedAvg(), other, resume=tmp_path)


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    play(FedAdam(**COMMON), rounds=1, checkpoints=Checkpointing(tmp_path / "a"))
    with pytest.raises(FedrotError, match="is of a FedAdam, the strategy is a FedAvg"):
        play(FedAvg(), resume=tmp_path / "a")
    wrapped = DifferentialPrivacyServerSideFixedClipping
    *_, inside = _stateful()
    strategy = wrapped(inside, **NOISE, clipping_norm=1.0)
    play(strategy, rounds=1, checkpoints=Checkpointing(tmp_path / "b"))
    with pytest.raises(FedrotError, match=r"has the state of 'strategy\.strategy\.accountant'"):
        play(_private(wrapped, clipping_norm=1.0), resume=tmp_path / "b")


# The report


class Reporting(FedAvg):
    """Writes down after which round it goes on."""

    after: int | None = -1

    def begin(self, after_round: int | None) -> None:
        self.after = after_round


def test_the_strategy_is_told_after_which_round_it_goes_on(tmp_path: Path) -> None:
    for rounds, expected in ((2, None), (3, 2), (3, 3)):
        strategy = Reporting()
        play(strategy, rounds=rounds, checkpoints=Checkpointing(tmp_path / "a"), resume=tmp_path / "a")
        assert strategy.after == expected
    for settings in ({"resume": tmp_path / "a"}, {"checkpoints": Checkpointing(tmp_path / "b")}):
        strategy = Reporting()
        play(strategy, **settings)
        assert strategy.after == (3 if "resume" in settings else None)


def test_a_run_that_was_killed_in_its_first_round_begins_anew(tmp_path: Path) -> None:
    with Checkpointing(tmp_path).writing():
        pass
    strategy = Reporting()
    play(strategy, rounds=1, checkpoints=Checkpointing(tmp_path), resume=tmp_path)
    assert strategy.after == 0


def test_a_run_that_does_not_resume_is_new_though_another_was_killed_in_its_first_round(
    tmp_path: Path,
) -> None:
    with Checkpointing(tmp_path).writing():
        pass
    strategy = Reporting()
    play(strategy, rounds=1, checkpoints=Checkpointing(tmp_path))
    assert strategy.after is None


def test_bytes_of_a_configuration_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flwr")
    config = ConfigRecord({"key": b"secret", "lr": 0.5})
    play(FedAvg(), rounds=1, train_config=config)
    (line,) = (m for r in caplog.records if "ConfigRecord (train)" in (m := r.getMessage()))
    assert "<bytes>" in line
    assert "secret" not in line


def test_strategies_that_know_each_other_are_saved_once() -> None:
    strategy: Any = FedAvg()
    strategy.other = FedAvg()
    strategy.other.owner, strategy.itself, strategy.other.seen = strategy, strategy, 1
    state = RunState(strategy, ConfigRecord(), ConfigRecord())
    strategy.other.seen = 2
    entries = [(where, name) for where, name, _ in state.encoded({})["entries"]]
    assert entries == [("strategy.other", "seen")]


def test_what_a_subclass_leaves_out_is_left_out_beside_what_its_base_does(
    warnings: Callable[[], str],
) -> None:
    class Own(FedRot):
        not_in_checkpoints = ("mine",)

    strategy: Any = Own(CONFIG)
    state = RunState(strategy, ConfigRecord(), ConfigRecord())
    strategy.mine, strategy.ours, strategy._timeout, strategy.alignment = [1], [2], 5.0, [3]
    assert [name for _, name, _ in state.encoded({})["entries"]] == ["ours"]
    assert warnings() == ""


# Kills

#: Kills at moments drawn from the whole run, and aimed ones per stage.
RANDOM_KILLS, AIMED_KILLS = 20, 6


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return how a run ends that nobody kills, when it reaches each mark, and how long it takes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = server.run("play", folder=str(folder))
    assert ended.code == 0, server.log.read_text(encoding="utf-8")[-5000:]
    assert ended.marks[-1] == "finish"
    end = json.loads((folder / "end.json").read_text(encoding="utf-8"))
    return end, dict(zip(ended.marks, ended.times, strict=True))


def finish(server: Server, folder: Path, expected: Any) -> None:
    """Resume a run until it ends, and compare with one that was not killed."""
    ended = server.run("play", folder=str(folder))
    assert ended.code == 0, server.log.read_text(encoding="utf-8")[-5000:]
    found = json.loads((folder / "end.json").read_text(encoding="utf-8"))
    assert found == expected
    left = {p.name for p in (folder / "checkpoints").iterdir()}
    newest = {".lock", *(f"round-{n:06d}" for n in (KILLED_ROUNDS - 1, KILLED_ROUNDS))}
    # Killed between the last checkpoint and the removal of the oldest, a run has nothing left to save.
    assert newest <= left <= newest | {f"round-{KILLED_ROUNDS - 2:06d}"}


@pytest.mark.long
def test_kills_at_random_moments(tmp_path: Path, server: Server, undisturbed: Any) -> None:
    expected, times = undisturbed
    drawn = random.Random(20)
    landed: Counter[str] = Counter()
    for index in range(RANDOM_KILLS):
        folder = tmp_path / str(index)
        folder.mkdir()
        kill = Kill(drawn.random() * times["finish"])
        killed = server.run("play", kill, folder=str(folder), until="finish")
        assert killed.code == -signal.SIGKILL
        landed[(killed.marks or ("fork",))[-1].split()[0]] += 1
        finish(server, folder, expected)
    print("killed after:", dict(landed))


@pytest.mark.parametrize(("begin", "end"), [("aggregate", "aggregated"), ("write", "written")])
def test_kills_inside(tmp_path: Path, server: Server, undisturbed: Any, begin: str, end: str) -> None:
    expected, times = undisturbed
    inside = 0
    for index in range(AIMED_KILLS):
        number = 1 + index % KILLED_ROUNDS
        first, last = f"{begin} {number}", f"{end} {number}"
        delay = index / AIMED_KILLS * 0.8 * (times[last] - times[first])
        for attempt in range(20):  # the undisturbed run may have been slower: then the kill is late
            folder = tmp_path / f"{index}.{attempt}"
            folder.mkdir()
            killed = server.run("play", Kill(delay, first), folder=str(folder), until=last)
            assert killed.code == -signal.SIGKILL
            finish(server, folder, expected)
            if killed.marks[-1] == first:
                inside += 1
                break
            delay /= 2
    print(f"killed inside {begin}:", inside)
    assert inside >= AIMED_KILLS / 2


def test_a_run_that_is_killed_over_and_over(tmp_path: Path, server: Server, undisturbed: Any) -> None:
    """Once in every round, at a moment drawn from the time that one takes."""
    expected, times = undisturbed
    drawn, round_trip = random.Random(21), times["finish"] / KILLED_ROUNDS
    codes = []
    for number in range(1, KILLED_ROUNDS):
        kill = Kill(drawn.random() * round_trip, f"aggregate {number}")
        # No kill comes so late that the next round would be over.
        until = f"aggregate {number + 1}"
        codes.append(server.run("play", kill, folder=str(tmp_path), until=until).code)
    print("killed over and over:", codes)
    assert set(codes) == {-signal.SIGKILL}
    finish(server, tmp_path, expected)
