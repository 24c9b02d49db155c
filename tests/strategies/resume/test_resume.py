"""Resumed runs: the same calls as in Flower's loop, and the same end after a stop or a
kill.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping as ClippingAtClients,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping as AdaptiveClipping,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping as FixedClipping,
)
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
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
from fedrot.strategies.resume.values import decode
from fedrot.strategies.round.guard import Guard
from fedrot.strategies.settings import Reporting as Files
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import Client, FakeGrid, failure, reply, tensors_of
from tests.strategies.resume.children import CLIENTS, client, ending
from tests.strategies.resume.children import evaluate as evaluated

ROUNDS = 3
COMMON: dict[str, Any] = {"fraction_train": 0.5, "fraction_evaluate": 0.5}
NOISE: dict[str, Any] = {"noise_multiplier": 0.1, "num_sampled_clients": 2}
SMALL = {"weight": torch.linspace(-1, 1, 12).reshape(3, 4), "bias": torch.zeros(3)}


class AlignedAdam(Aligned, FedAdam):
    """Alignment in front of a strategy with state."""


class AlignedPrivacy(Aligned, AdaptiveClipping):
    """Alignment in front of a wrapper with state."""


def _private(
    wrapper: Callable[..., Strategy], inside: type[FedAvg] = FedAvg, **more: Any
) -> Strategy:
    return wrapper(inside(**COMMON), **NOISE, **more)


#: Builders of strategies, anew for every run.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(**COMMON),
    "FedAvgM": lambda: FedAvgM(**COMMON, server_learning_rate=0.7, server_momentum=0.9),
    "FedAdam": lambda: FedAdam(**COMMON, eta=0.01),
    "FedYogi": lambda: FedYogi(**COMMON, eta=0.01),
    "FedAdagrad": lambda: FedAdagrad(**COMMON, eta=0.01),
    "Krum": lambda: Krum(**COMMON, num_malicious_nodes=0),
    "QFedAvg": lambda: QFedAvg(**COMMON, q=0.5, client_learning_rate=0.5),
    "fixed clipping": lambda: _private(FixedClipping, clipping_norm=0.2),
    "adaptive clipping": lambda: _private(AdaptiveClipping),
    "adaptive clipping of FedAvgM": lambda: AdaptiveClipping(
        FedAvgM(**COMMON, server_momentum=0.9), **NOISE
    ),
    "adaptive clipping at clients": lambda: _private(ClippingAtClients, FedAdam),
    "FedRot": lambda: FedRot(SYMMETRY, **COMMON),
    "aligned FedAdam": lambda: AlignedAdam(SYMMETRY, **COMMON, eta=0.01),
    "aligned privacy": lambda: AlignedPrivacy(
        SYMMETRY, FedAvg(**COMMON), **NOISE, alignment=AlignmentOptions(anchor="global")
    ),
}


def grid(fails_until: int = 0) -> FakeGrid:
    """Return the clients, which fail up to a round."""

    def client_of(index: int) -> Client:
        def answer(message: Message) -> Message | None:
            number: Any = message.content.config_records["config"]["server-round"]
            return failure(message) if number <= fails_until else client(index)(message)

        return answer

    return FakeGrid({100 + index: client_of(index) for index in range(CLIENTS)})


def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
    """Return metrics that use up random numbers; in some rounds none."""
    return evaluated(number, arrays) if number != 2 else None


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def play(
    strategy: Strategy,
    tensors: dict[str, torch.Tensor] | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
    checkpoints: Checkpointing | None = None,
    **settings: Any,
) -> Result:
    """CheckpointedRun a strategy on the deterministic clients."""
    seeded(seed)
    arrays = ArrayRecord(SMALL if tensors is None else tensors)
    given = {"evaluate_fn": evaluate, **settings}
    if checkpoints is None:
        return strategy.start(grid(), arrays, num_rounds=rounds, **given)
    return run(strategy, grid(), arrays, rounds, checkpoints=checkpoints, **given)


def resumable(
    strategy: Strategy, checkpoints: Checkpointing, *args: Any, **settings: Any
) -> Result:
    """CheckpointedRun a strategy with checkpoints, with the arguments of its own
    ``start``.
    """
    return run(strategy, *args, checkpoints=checkpoints, **settings)


def both(folder: Path) -> dict[str, Any]:
    """Return the argument to resume from a folder, and to write to it."""
    return {"checkpoints": Checkpointing(folder)}


# The loop


class Recorded(FedAvg):
    """FedAvg that writes down how it is called, and what it is given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls: list[tuple[Any, ...]] = []

    def _asked(
        self,
        hook: str,
        number: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Any,
    ) -> Any:
        self.calls.append((hook, number, arrays.object_id, dict(config)))
        return getattr(super(), hook)(number, arrays, config, grid)

    def _answered(self, hook: str, number: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        self.calls.append(
            (hook, number, [reply.metadata.src_node_id for reply in replies])
        )
        return getattr(super(), hook)(number, replies)

    def summary(self) -> None:
        self.calls.append(("summary",))

    def configure_train(self, *given: Any) -> Iterable[Message]:
        return self._asked("configure_train", *given)

    def aggregate_train(self, *given: Any) -> Any:
        found = self._answered("aggregate_train", *given)
        return found if given[0] != 2 else (None, None)

    def configure_evaluate(self, *given: Any) -> Iterable[Message]:
        return self._asked("configure_evaluate", *given)

    def aggregate_evaluate(self, *given: Any) -> Any:
        found = self._answered("aggregate_evaluate", *given)
        return found if given[0] != 3 else None


class TimedGrid(FakeGrid):
    """Writes down the timeouts that it is given."""

    timeouts: tuple[float | None, ...] = ()

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        self.timeouts += (timeout,)
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize(
    ("settings", "evaluated"),
    [({}, True), ({"train_config": {"lr": 0.1}, "evaluate_config": {"b": 1}}, False)],
)
def test_the_loop_is_flowers(
    caplog: pytest.LogCaptureFixture,
    warnings: Any,
    tmp_path: Path,
    settings: dict[str, Any],
    evaluated: bool,
) -> None:
    caplog.set_level("INFO", "flwr")
    ends, calls, evaluations, timeouts, logs = [], [], [], [], []
    for ours in (True, False):
        seeded(0)
        strategy, clients = Recorded(**COMMON), TimedGrid(grid().nodes)
        seen: list[tuple[int, str]] = []

        def evaluation(
            number: int, arrays: ArrayRecord, seen: Any = seen
        ) -> MetricRecord | None:
            seen.append((number, arrays.object_id))
            return evaluate(number, arrays)

        start: Any = strategy.start
        if ours:
            start = partial(resumable, strategy, Checkpointing(tmp_path))
        configs = {name: ConfigRecord(config) for name, config in settings.items()}
        given: Any = {"evaluate_fn": evaluation} if evaluated else {}
        caplog.clear()
        result = start(clients, ArrayRecord(SMALL), ROUNDS, 12.5, **configs, **given)
        logs.append(
            [
                r.getMessage()
                for r in caplog.records
                if "finished in" not in r.getMessage()
                and "heckpoint" not in r.getMessage()
            ]
        )
        ends.append(
            (ending(result), {name: dict(config) for name, config in configs.items()})
        )
        calls.append(strategy.calls)
        evaluations.append(seen)
        timeouts.append(clients.timeouts)
    assert ends[0] == ends[1]
    assert calls[0] == calls[1]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == (ROUNDS + 1 if evaluated else 0)
    assert timeouts == [(12.5,) * 2 * ROUNDS] * 2
    assert [line for line in logs[0] if "ConfigRecord (" not in line] == [
        line for line in logs[1] if "ConfigRecord (" not in line
    ]


# Resuming


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    """One folder, one round a process: what was restored is saved again."""
    build = STRATEGIES[name]
    tensors = state() if isinstance(build(), Aligned) else SMALL
    expected = ending(play(build(), tensors))
    for done in range(ROUNDS + 1):
        rounds = min(done + 1, ROUNDS)
        result = play(build(), tensors, rounds=rounds, seed=99 * done, **both(tmp_path))
        tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert ending(result) == expected


def test_what_changed_once_is_in_the_checkpoints_of_every_later_run(
    tmp_path: Path,
) -> None:
    class Calibrated(FedAvg):
        """Keeps what it found in round 1."""

        scale = 0.0

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            if server_round == 1:
                self.scale = 0.5
            return super().aggregate_train(server_round, replies)

    for rounds in (1, 2, 3):
        strategy = Calibrated()
        play(strategy, rounds=rounds, **both(tmp_path))
        assert strategy.scale == 0.5


def test_a_resumed_run_asks_nobody_in_the_rounds_that_are_finished(
    tmp_path: Path, warnings: Any
) -> None:
    whole = Recorded(**COMMON)
    expected = ending(play(whole))
    play(Recorded(**COMMON), rounds=2, **both(tmp_path))
    for rounds, after in ((ROUNDS, 2), (ROUNDS, ROUNDS), (1, ROUNDS)):
        rest, clients, seen = Recorded(**COMMON), grid(), list[int]()

        def evaluation(
            number: int, arrays: ArrayRecord, seen: Any = seen
        ) -> MetricRecord | None:
            seen.append(number)
            return evaluate(number, arrays)

        found = run(
            rest,
            clients,
            ArrayRecord(SMALL),
            rounds,
            evaluate_fn=evaluation,
            checkpoints=Checkpointing(tmp_path),
        )
        assert ending(found) == expected
        # Those before are in the checkpoint: the list is state of this strategy.
        assert [call for call in rest.calls if len(call) > 1] == whole.calls[1:]
        assert rest.calls[-1 if after == ROUNDS else 9] == ("summary",)
        assert seen == [*range(after + 1, ROUNDS + 1)]
        assert [len(n) for n in clients.asked][2 * after :] == [2] * 2 * (
            ROUNDS - after
        )
        assert not any(clients.asked[: 2 * after])
        assert (
            f"holds round {ROUNDS}, and num_rounds is 1: no round" in warnings()
        ) == (rounds == 1)


def test_a_run_that_is_not_evaluated_at_the_server_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    """Its rounds end with the clients' evaluation, and are saved then."""
    expected = ending(play(FedAdam(**COMMON), evaluate_fn=None))
    for rounds in range(1, ROUNDS + 1):
        result = play(
            FedAdam(**COMMON),
            rounds=rounds,
            seed=rounds - 1,
            evaluate_fn=None,
            **both(tmp_path),
        )
    assert ending(result) == expected
    assert Checkpointing(tmp_path).rounds() == [1, 2, 3]


def test_a_failed_round_is_kept_too(tmp_path: Path) -> None:
    seeded(0)
    expected = ending(FedAvg().start(grid(2), ArrayRecord(SMALL), 3))
    seeded(0)
    for rounds in (1, 2, 3):
        found = run(
            FedAvg(),
            grid(2),
            ArrayRecord(SMALL),
            rounds,
            checkpoints=Checkpointing(tmp_path),
        )
        assert (found.arrays == ArrayRecord(SMALL)) == (rounds < 3)
        assert Checkpointing(tmp_path).newest().result.arrays == found.arrays
    assert ending(found) == expected


def test_clients_keep_their_names_when_a_run_goes_on_and_lose_them_in_a_new_one(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.jsonl"

    def failed(fails_in: int, rounds: int, strategy: FedRot | None = None) -> list[int]:
        def client_of(index: int) -> Client:
            def answer(message: Message) -> Message:
                number: Any = message.content.config_records["config"]["server-round"]
                sent = tensors_of(message.content.array_records["arrays"])
                fails = number == fails_in and index != 1
                return failure(message) if fails else reply(message, sent, 10, index)

            return answer

        nodes = FakeGrid({100 + index: client_of(index) for index in range(3)})
        (strategy or aligned()).start(nodes, ArrayRecord(state()), num_rounds=rounds)
        written = map(json.loads, rows.read_text("utf-8").splitlines())
        return sorted({row["client"] for row in written if "failed" in row})

    def aligned(**settings: Any) -> FedRot:
        return FedRot(
            SYMMETRY, fraction_evaluate=0.0, reporting=Files(rows=rows), **settings
        )

    for rounds in (1, 2):
        names = failed(
            2, rounds, aligned(checkpoints=Checkpointing(tmp_path / "checkpoints"))
        )
    assert names == [0, 2]
    strategy = aligned()
    assert failed(2, 2, strategy) == [0, 2]
    assert failed(1, 1, strategy) == [100, 102]


class Decaying(FedAvg):
    """Halves the clients' learning rate after every round, as Flower's documentation
    does.
    """

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
        play(Decaying(), rounds=rounds, train_config=config, **both(tmp_path))
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

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "private"}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def seen(self) -> Any:
        """Return all of it, and what the generators draw next."""
        return (
            *(self.accountant.count, self.rate, self.nodes, self.others.random()),
            *(
                self.generator.random(),
                float(torch.rand((), generator=self.torch_generator)),
            ),
            *(
                self.best.tolist() if self.best is not None else (),
                self.legacy.random(),
            ),
            self.layer.weight.tolist(),
        )


def _stateful() -> tuple[Accountant, np.random.Generator, Stateful]:
    torch.manual_seed(0)
    accountant, generator = Accountant(), np.random.default_rng(5)
    return accountant, generator, Stateful(accountant, generator)


def test_state_of_every_kind_goes_on(
    tmp_path: Path, warnings: Callable[[], str]
) -> None:
    *_, whole = _stateful()
    play(whole, rounds=4)
    *_, first = _stateful()
    play(first, rounds=2, checkpoints=Checkpointing(tmp_path))
    accountant, generator, second = _stateful()
    second.scale = 0.7
    play(second, rounds=4, checkpoints=Checkpointing(tmp_path))
    assert second.seen() == whole.seen()
    # Objects with state of their own stay the same objects: others may hold them too.
    assert second.accountant is accountant
    assert second.generator is generator
    assert second.private == 2
    assert second.scale == 0.7
    assert warnings() == ""


def test_state_that_cannot_be_saved_is_named_once(
    tmp_path: Path, warnings: Callable[[], str]
) -> None:
    class Odd(FedAvg):
        ours: object = None

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.seen_nodes = Counter[int]()
            self.server, self.fixed = (
                SimpleNamespace(momentum=0.0),
                SimpleNamespace(rate=0.5),
            )

        def configure_train(self, server_round: int, *args: Any) -> Iterable[Message]:
            self.ours = object()
            self.seen_nodes[3] += 1
            self.mixed = {"array": np.zeros(3), "other": object()}
            self.server.momentum = 0.5 * self.server.momentum + 1
            return super().configure_train(server_round, *args)

    strategy = Odd(train_metrics_aggr_fn=lambda records, key: MetricRecord())
    play(strategy, rounds=2, checkpoints=Checkpointing(tmp_path))
    seen = ("ours holds a object", "seen_nodes holds a Counter", "mixed holds a object")
    for attribute in (*seen, "server holds a SimpleNamespace"):
        assert warnings().count(f"strategy.{attribute}") == 1
    assert warnings().count("Not in the checkpoints") == 4
    assert not [
        name
        for name in Checkpointing(tmp_path).newest().state_arrays
        if "mixed" in name
    ]


# What is refused


@pytest.mark.parametrize(
    ("strategy", "model", "message"),
    [
        (
            FedAdam,
            {**SMALL, "more": torch.zeros(1)},
            r"'more' is missing there and \(1,\) in",
        ),
        (
            FedAdam,
            {"weight": SMALL["weight"]},
            r"'bias' is \(3,\) there and missing in",
        ),
        (
            FedAdam,
            {**SMALL, "bias": torch.zeros(4)},
            r"'bias' is \(3,\) there and \(4,\) in",
        ),
        (FedAvg, SMALL, "is of a FedAdam, the strategy is a FedAvg"),
    ],
)
def test_another_model_or_strategy_is_refused(
    tmp_path: Path, strategy: type[FedAvg], model: dict[str, torch.Tensor], message: str
) -> None:
    play(FedAdam(), rounds=1, checkpoints=Checkpointing(tmp_path))
    with pytest.raises(FedrotError, match=message):
        play(strategy(), model, checkpoints=Checkpointing(tmp_path))


def test_another_wrapped_strategy_is_refused(tmp_path: Path) -> None:
    strategy = FixedClipping(_stateful()[-1], **NOISE, clipping_norm=1.0)
    play(strategy, rounds=1, checkpoints=Checkpointing(tmp_path))
    with pytest.raises(
        FedrotError, match=r"has the state of 'strategy\.strategy\.accountant'"
    ):
        play(
            _private(FixedClipping, clipping_norm=1.0),
            checkpoints=Checkpointing(tmp_path),
        )


# What a strategy is told, and what of it is state


class Told(FedAvg):
    """Writes down after which round it goes on."""

    after: int | None = -1

    def begin(self, after_round: int | None) -> None:
        self.after = after_round


#: The rounds before a run, -1 if it was killed in the first one; and after which round
#: it goes on.
AFTER = {
    "a new run": (0, None),
    "a resumed run": (2, 2),
    "a finished run": (ROUNDS, ROUNDS),
    "a run that was killed in its first round": (-1, 0),
}


@pytest.mark.parametrize("name", AFTER)
def test_the_strategy_is_told_after_which_round_it_goes_on(
    tmp_path: Path, name: str
) -> None:
    before, expected = AFTER[name]
    if before > 0:
        play(Told(), rounds=before, **both(tmp_path))
    elif before < 0:
        with Checkpointing(tmp_path).writing():
            pass
    strategy = Told()
    play(strategy, **both(tmp_path))
    assert strategy.after == expected


def test_strategies_that_know_each_other_are_saved_once() -> None:
    strategy: Any = FedAvg()
    strategy.other = FedAvg()
    strategy.other.owner, strategy.itself, strategy.other.seen = strategy, strategy, 1
    state = RunState(strategy, ConfigRecord(), ConfigRecord())
    strategy.other.seen = 2
    entries = [(where, name) for where, name, *_ in state.encoded({})["entries"]]
    assert entries == [("strategy.other", "seen")]


def test_a_checkpoint_has_what_outlives_a_round_and_attributes_of_a_subclass(
    tmp_path: Path, warnings: Callable[[], str]
) -> None:
    class Own(FedRot):
        def state(self) -> dict[str, Any]:
            return {
                name: value for name, value in super().state().items() if name != "mine"
            }

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            vars(self).update(mine=[server_round], ours={"seen": server_round})
            return super().aggregate_train(server_round, replies)

    strategy = Own(
        SYMMETRY,
        **COMMON,
        checkpoints=Checkpointing(tmp_path),
        guard=Guard("norm", False),
    )
    strategy.start(grid(), ArrayRecord(state()), 3, evaluate_fn=evaluated)
    found = Checkpointing(tmp_path).newest()
    assert {
        name for where, name, *_ in found.state["entries"] if where == "strategy"
    } == {*("_clients", "_verdicts", "ours")}
    (verdicts,) = (
        coded for _, name, _, coded in found.state["entries"] if name == "_verdicts"
    )
    assert decode(verdicts, {}).keys() == {1, 3}, (
        "those of all rounds would make checkpoints grow"
    )
    assert warnings() == ""
