"""Our public methods take what the installed Flower's take; ``should_stop``; Flower's own tests."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from inspect import Parameter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    Result,
    Strategy,
)

from fedrot.errors import FedrotError
from fedrot.simulations.federation.grids import LocalGrid, OrderedGrid
from fedrot.strategies import Aligned, AlignedLoRA, Checkpointing, FedRot, FedRotLoRA, Server
from fedrot.strategies.flower_compat import outside_of_the_engine
from fedrot.strategies.lazy_grid import LazyGrid
from fedrot.strategies.resume.run import run
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import FakeGrid, failure, in_front_of, reply, tensors_of
from tests.strategies.test_lora import CONFIG as LORA
from tests.strategies.test_lora import adapter, floats

# Signatures


#: Arguments that a later Flower has renamed: the old name is given by keyword, or by place.
RENAMED = {"message_ids": "reply_to_message_ids"}


def missing(theirs: Callable[..., Any], ours: Callable[..., Any]) -> list[str]:
    """Return what callers may give to a function of Flower's and not to ours, or in another place."""
    own = inspect.signature(ours).parameters
    kinds = {parameter.kind for parameter in own.values()}
    if {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= kinds and len(own) <= 3:
        return []  # It passes everything on.
    found, places = [], [*own]
    for place, (name, parameter) in enumerate(inspect.signature(theirs).parameters.items()):
        given = own.get(name)
        if given is None:
            found.append(name)
        elif parameter.default is not parameter.empty and given.default != parameter.default:
            found.append(f"{name}={given.default}")
        elif parameter.kind is Parameter.POSITIONAL_OR_KEYWORD and "model_config" not in own:
            if places[place : place + 1] != [RENAMED.get(name, name)]:
                found.append(f"place of {name}")
        elif parameter.kind is Parameter.KEYWORD_ONLY and given.kind is Parameter.POSITIONAL_ONLY:
            found.append(f"place of {name}")
    return found


def public(cls: type) -> Iterator[str]:
    for name, _ in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_") or name == "__init__":
            yield name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *((FedAvg, FedRot), (FedAvg, FedRotLoRA), (Strategy, Aligned), (Strategy, AlignedLoRA)),
        *((Grid, LazyGrid), (Grid, LocalGrid), (Grid, OrderedGrid)),
    ],
)
def test_every_public_method_takes_what_flowers_takes(theirs: type, ours: type) -> None:
    given = inspect.signature(getattr(ours, "__init__")).parameters.values()  # noqa: B009
    passes_on = any(p.kind is Parameter.VAR_KEYWORD for p in given)
    names = [
        n for n in public(theirs) if n != "__init__" or (issubclass(theirs, Strategy) and not passes_on)
    ]
    assert {"start", "push_messages"} & {*names}
    wrong = {name: missing(getattr(theirs, name), getattr(ours, name)) for name in names}
    assert {name: parameters for name, parameters in wrong.items() if parameters} == {}


def test_the_loop_of_checkpoints_takes_what_flowers_start_takes() -> None:
    def start(strategy: Strategy, *args: Any) -> None:
        """Stand for ``Strategy.start``, whose first argument is named ``self``."""

    parameters = [*inspect.signature(Strategy.start).parameters.values()][1:]
    first = [*inspect.signature(start).parameters.values()][:1]
    start.__signature__ = inspect.Signature(first + parameters)  # type: ignore[attr-defined]
    assert missing(start, run) == []


# should_stop


HAS_IT = "should_stop" in inspect.signature(Strategy.start).parameters


class _StoppedError(Exception):
    """A run has ended early."""


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give an older ``Strategy.start`` what Flower 1.43 has: ``should_stop``, and a first result."""
    older: Any = Strategy.start

    def start(
        self: Strategy,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *args: Any,
        should_stop: Any = None,
        **kwargs: Any,
    ) -> Result:
        result = Result(arrays=initial_arrays)
        hooks = ("summary", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
        asking = SimpleNamespace(**{name: getattr(self, name) for name in hooks})

        def stop_after(number: int) -> None:
            if number > 0 and should_stop is not None and should_stop(number, result):
                raise _StoppedError

        def configure_train(number: int, *given: Any) -> Any:
            stop_after(number - 1)
            return self.configure_train(number, *given)

        asking.configure_train = configure_train
        with monkeypatch.context() as patch, suppress(_StoppedError):
            patch.setattr("flwr.serverapp.strategy.strategy.Result", lambda: result)
            older(asking, grid, initial_arrays, num_rounds, *args, **kwargs)
            stop_after(num_rounds)
        return result

    if not HAS_IT:
        monkeypatch.setattr(Strategy, "start", start)


def moved(message: Message) -> Message:
    node = message.metadata.dst_node_id
    received = tensors_of(message.content.array_records["arrays"])
    floating = {n: t + 0.01 * node if t.is_floating_point() else t for n, t in received.items()}
    return reply(message, floating, 10, node)


AlignedAdam, AdamLoRA = in_front_of(FedAdam), type("AdamLoRA", (AlignedLoRA, FedAdam), {})
MOVED, ARRAYS = {1: moved, 2: moved}, ArrayRecord(state())

STRATEGIES: dict[str, tuple[Callable[..., Any], ArrayRecord]] = {
    "FedRot": (lambda **k: FedRot(SYMMETRY, **k), ARRAYS),
    "not aligned": (lambda **k: FedRot(alignment=None, **k), ARRAYS),
    "FedAdam": (lambda **k: AlignedAdam(SYMMETRY, **k), ARRAYS),
    "adapters": (lambda **k: AdamLoRA(LORA, **k), ArrayRecord(floats(adapter(9)))),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.usefixtures("newest")
def test_a_run_ends_when_should_stop_says_so(name: str, checkpoints: bool, tmp_path: Path) -> None:
    build, arrays = STRATEGIES[name]
    asked: list[tuple[int, str]] = []

    def should_stop(number: int, result: Result) -> bool:
        assert sorted(result.train_metrics_clientapp) == [*range(1, number + 1)]
        asked.append((number, result.arrays.object_id))
        return number == 2

    def play(rounds: int, folder: str, **given: Any) -> Any:
        kept = Checkpointing(tmp_path / folder) if checkpoints else None
        random.seed(0)
        strategy = build(fraction_evaluate=0.0, server=Server(deterministic=True), checkpoints=kept)
        return strategy.start(FakeGrid(MOVED), arrays, rounds, **given)

    stopped = play(5, "stopped", should_stop=should_stop)
    whole = play(2, "whole")
    assert [number for number, _ in asked] == [1, 2]
    assert asked[-1][1] == stopped.arrays.object_id == whole.arrays.object_id
    if checkpoints:
        assert Checkpointing(tmp_path / "stopped").rounds() == [1, 2]
        again = play(5, "stopped", should_stop=should_stop)
        assert [number for number, _ in asked] == [1, 2, 2]
        assert again.arrays.object_id == stopped.arrays.object_id


@pytest.mark.usefixtures("newest")
def test_should_stop_of_a_resumed_run_is_asked_where_the_whole_run_asked_it(tmp_path: Path) -> None:
    """With the same random numbers, and the same result so far."""
    asked: list[tuple[int, float, list[int], str]] = []

    def should_stop(number: int, result: Result) -> bool:
        trained = sorted(result.train_metrics_clientapp)
        asked.append((number, random.random(), trained, result.arrays.object_id))
        return False

    def play(rounds: int, seed: int, **given: Any) -> list[tuple[int, float, list[int], str]]:
        random.seed(seed)
        asked.clear()
        strategy, grid = FedAdam(fraction_evaluate=0.0), FakeGrid(MOVED)
        run(strategy, grid, ArrayRecord([np.ones(3)]), rounds, should_stop=should_stop, **given)
        return asked.copy()

    whole = play(4, seed=0)
    assert play(2, seed=0, checkpoints=Checkpointing(tmp_path)) == whole[:2]
    assert play(2, seed=9, resume=tmp_path) == whole[1:2]
    assert play(4, seed=9, resume=tmp_path) == whole[1:]


@pytest.mark.skipif(HAS_IT, reason="the installed Flower has should_stop")
@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_older_flower_refuses_should_stop_before_any_client_trains(
    checkpoints: bool, tmp_path: Path
) -> None:
    kept, grid = Checkpointing(tmp_path) if checkpoints else None, FakeGrid(MOVED)
    with pytest.raises(TypeError, match="should_stop"):
        FedRot(SYMMETRY, checkpoints=kept).start(grid, ARRAYS, 1, should_stop=lambda n, r: True)
    assert grid.asked == []


def test_an_argument_that_is_unknown_is_refused_or_passed_on(tmp_path: Path) -> None:
    class Later(FedAvg):
        def start(self, *args: Any, colour: str = "", **kwargs: Any) -> Any:
            self.colour = colour
            return super().start(*args, **kwargs)

    strategy = in_front_of(Later)(alignment=None, fraction_evaluate=0.0)
    strategy.start(FakeGrid(MOVED), ARRAYS, 1, colour="red")
    assert strategy.colour == "red"
    kept = in_front_of(Later)(alignment=None, checkpoints=Checkpointing(tmp_path))
    for refusing in (FedRot(alignment=None), kept):
        with pytest.raises(TypeError, match="colour"):
            refusing.start(FakeGrid(MOVED), ARRAYS, 1, colour="red")


@pytest.mark.usefixtures("newest")
def test_should_stop_of_the_loop_needs_no_checkpoints() -> None:
    arrays, strategy = ArrayRecord([np.ones(3)]), FedAvg(fraction_evaluate=0.0)
    result = run(strategy, FakeGrid(MOVED), arrays, 4, should_stop=lambda n, r: n == 3)
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]


# Flower's own tests of its strategies, over ours without alignment


def replies(given: Iterable[tuple[Any, float]]) -> list[Message]:
    """Return replies that nobody has asked for, each with arrays and a number of examples."""
    made = []
    for node, (arrays, examples) in enumerate(given, start=1):
        with outside_of_the_engine():
            asked = Message(RecordDict(), node, "train")
        metrics = MetricRecord({"num-examples": examples})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        made.append(Message(content, reply_to=asked))
    return made


def over(base: Any, *args: Any, **kwargs: Any) -> Any:
    return in_front_of(base)(None, *args, alignment=None, **kwargs)


def scalars(*values: float) -> list[Any]:
    return [([np.array(value)], weight) for weight, value in enumerate(values, start=1)]


def fours(*values: float) -> list[Any]:
    return [([np.full(4, value)], 5) for value in values]


TWO = [
    [np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32), np.array([7, 8, 9, 10], dtype=np.float32)],
    [np.array([[29, 23, 19], [17, 13, 11]], dtype=np.float32), np.array([7, 5, 3, 2], dtype=np.float32)],
]
SENT_TWO = list(zip(TWO, (1, 2), strict=True))
OF_TWO = [(one + 2 * other) / 3 for one, other in zip(*TWO, strict=True)]
ROWS = [
    ([np.array([0.5, 0.5, 0.5, 0.5])], 1),
    ([np.array([1.0, 0.2, 0.5, 1.0])], 5),
    ([np.array([0.2, 0.5, 1.0, 0.2])], 2),
    ([np.array([0.5, 1.0, 0.2, 0.5])], 9),
]
NEAR_1 = 1.0 + 1e-9

#: A strategy, what clients send in each round, and the model.
FLOWERS: dict[str, tuple[Callable[[], Any], list[Any], list[Any]]] = {
    "FedRot": (lambda: FedRot(alignment=None), SENT_TWO, OF_TWO),
    "FedRot, scalars": (lambda: FedRot(alignment=None), scalars(1, 3), [np.array(7 / 3)]),
    "FedAvg": (lambda: over(FedAvg), SENT_TWO, OF_TWO),
    "FedAvg, scalars": (lambda: over(FedAvg), scalars(1, 3), [np.array(7 / 3)]),
    "FedAvgM": (lambda: over(FedAvgM, server_learning_rate=NEAR_1), SENT_TWO, OF_TWO),
    "FedAvgM, momentum": (
        lambda: over(FedAvgM, server_learning_rate=NEAR_1, server_momentum=1e-9),
        *(SENT_TWO, OF_TWO),
    ),
    "FedMedian": (lambda: over(FedMedian), ROWS[1:], [np.full(4, 0.5)]),
    "FedMedian, scalars": (lambda: over(FedMedian), scalars(1, 3, 2), [np.array(2.0)]),
    "FedTrimmedAvg": (lambda: over(FedTrimmedAvg, beta=0.25), ROWS, [np.full(4, 0.5)]),
    "FedTrimmedAvg, scalars": (
        lambda: over(FedTrimmedAvg, beta=0.25),
        *(scalars(0.5, 1, 2, 100), [np.array(1.5)]),
    ),
    "Krum": (lambda: over(Krum, num_malicious_nodes=1), fours(0.2, 0.7, 1.0), [np.full(4, 0.7)]),
    "MultiKrum": (
        lambda: over(MultiKrum, num_malicious_nodes=1, num_nodes_to_select=2),
        *(fours(0.2, 0.5, 1.0), [np.full(4, 0.35)]),
    ),
}


@pytest.mark.parametrize("name", FLOWERS)
def test_flowers_own_examples_give_what_flower_expects(name: str) -> None:
    build, sent, expected = FLOWERS[name]
    strategy = build()
    if "FedAvgM" in name:
        strategy.current_arrays = ArrayRecord([np.zeros_like(one) for one in OF_TWO])
    for number in (1, 2) if "momentum" in name else (1,):
        arrays, _ = strategy.aggregate_train(number, replies(sent))
    for found, wanted in zip(arrays.to_numpy_ndarrays(), expected, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5 if "FedAvgM" in name else 0)


@pytest.mark.parametrize("base", [FedAdagrad, FedAdam, FedYogi])
def test_adaptive_strategies_take_scalars(base: Any) -> None:
    strategy = over(base)
    strategy.current_arrays = {"0": np.array(0.0)}
    arrays, _ = strategy.aggregate_train(1, replies(scalars(1, 3)))
    (found,) = arrays.to_numpy_ndarrays()
    assert found.shape == ()
    assert np.isfinite(found)


def test_replies_to_nothing_known_need_no_alignment() -> None:
    with pytest.raises(FedrotError, match="configure_train"):
        FedRot(SYMMETRY).aggregate_train(1, replies(SENT_TWO))


def test_evaluations_are_weighted_whoever_has_asked_for_them() -> None:
    """``configure_evaluate`` of a subclass, and a loop of its own, tell us nothing."""
    metrics = [MetricRecord({"num-examples": n, "score": s}) for n, s in ((1, 0.0), (3, 1.0))]
    with outside_of_the_engine():
        asked = [Message(RecordDict(), node, "evaluate") for node in (1, 2)]
    given = [Message(RecordDict({"m": m}), reply_to=a) for m, a in zip(metrics, asked, strict=True)]
    found = FedRot(SYMMETRY).aggregate_evaluate(1, [*given, given[0], failure(asked[0])])
    assert found is not None
    assert found["score"] == 0.75
