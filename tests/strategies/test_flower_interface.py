"""Our public methods take what the installed Flower's take; and ``should_stop``."""

import inspect
import random
from contextlib import suppress
from functools import partial
from inspect import Parameter
from types import SimpleNamespace

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
from fedrot.strategies import (
    Aligned,
    AlignedLoRA,
    Checkpointing,
    FedRot,
    FedRotLoRA,
    Server,
)
from fedrot.strategies.resume.run import run
from fedrot.strategies.wire.flower_compat import outside_of_the_engine
from fedrot.strategies.wire.lazy_grid import LazyGrid
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import FakeGrid, failure, in_front_of, model_in, reply
from tests.strategies.test_lora import CONFIG as LORA
from tests.strategies.test_lora import adapter, floats

# Signatures


#: Arguments that a later Flower has renamed: the old name is given by keyword, or by
#: place.
RENAMED = {"message_ids": "reply_to_message_ids"}


def missing(theirs, ours):
    """Return what callers may give to a function of Flower's and not to ours, or in
    another place.
    """
    own = inspect.signature(ours).parameters
    kinds = {parameter.kind for parameter in own.values()}
    if {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= kinds and len(own) <= 3:
        return []  # It passes everything on.
    found = []
    places = [*own]
    for place, (name, parameter) in enumerate(
        inspect.signature(theirs).parameters.items()
    ):
        given = own.get(name)
        if given is None:
            found.append(name)
        elif (
            parameter.default is not parameter.empty
            and given.default != parameter.default
        ):
            found.append(f"{name}={given.default}")
        elif (
            parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
            and "model_config" not in own
        ):
            if places[place : place + 1] != [RENAMED.get(name, name)]:
                found.append(f"place of {name}")
        elif (
            parameter.kind is Parameter.KEYWORD_ONLY
            and given.kind is Parameter.POSITIONAL_ONLY
        ):
            found.append(f"place of {name}")
    return found


def public(cls):
    for name, _ in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_") or name == "__init__":
            yield name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (FedAvg, FedRot),
        (FedAvg, FedRotLoRA),
        (Strategy, Aligned),
        (Strategy, AlignedLoRA),
        (Grid, LazyGrid),
        (Grid, LocalGrid),
        (Grid, OrderedGrid),
    ],
)
def test_every_public_method_takes_what_flowers_takes(theirs, ours):
    given = inspect.signature(getattr(ours, "__init__")).parameters.values()  # noqa: B009
    passes_on = any(p.kind is Parameter.VAR_KEYWORD for p in given)
    names = [
        n
        for n in public(theirs)
        if n != "__init__" or (issubclass(theirs, Strategy) and not passes_on)
    ]
    assert {"start", "push_messages"} & {*names}
    wrong = {
        name: missing(getattr(theirs, name), getattr(ours, name)) for name in names
    }
    assert {name: parameters for name, parameters in wrong.items() if parameters} == {}


def test_the_loop_of_checkpoints_takes_what_flowers_start_takes():
    def start(strategy, *args):
        """Stand for ``Strategy.start``, whose first argument is named ``self``."""

    parameters = [*inspect.signature(Strategy.start).parameters.values()][1:]
    first = [*inspect.signature(start).parameters.values()][:1]
    start.__signature__ = inspect.Signature(first + parameters)  # type: ignore[attr-defined]
    assert missing(start, run) == []


HAS_IT = "should_stop" in inspect.signature(Strategy.start).parameters


@pytest.fixture
def newest(monkeypatch):
    """Give an older ``Strategy.start`` what Flower 1.43 has: ``should_stop``, and a
    first result.
    """
    older = Strategy.start

    def start(
        self,
        grid,
        initial_arrays,
        num_rounds=3,
        *args,
        should_stop=None,
        **kwargs,
    ):
        result = Result(arrays=initial_arrays)
        hooks = (
            "summary",
            "aggregate_train",
            "configure_evaluate",
            "aggregate_evaluate",
        )
        asking = SimpleNamespace(**{name: getattr(self, name) for name in hooks})

        def stop_after(number):
            if number > 0 and should_stop is not None and should_stop(number, result):
                raise StopIteration

        def configure_train(number, *given):
            stop_after(number - 1)
            return self.configure_train(number, *given)

        asking.configure_train = configure_train
        with monkeypatch.context() as patch, suppress(StopIteration):
            patch.setattr("flwr.serverapp.strategy.strategy.Result", lambda: result)
            older(asking, grid, initial_arrays, num_rounds, *args, **kwargs)
            stop_after(num_rounds)
        return result

    if not HAS_IT:
        monkeypatch.setattr(Strategy, "start", start)


def moved(message):
    node = message.metadata.dst_node_id
    received = model_in(message)
    floating = {
        n: t + 0.01 * node if t.is_floating_point() else t for n, t in received.items()
    }
    return reply(message, floating, 10, node)


AlignedAdam = in_front_of(FedAdam)
AdamLoRA = type("AdamLoRA", (AlignedLoRA, FedAdam), {})
MOVED = {1: moved, 2: moved}
ARRAYS = ArrayRecord(state())

STRATEGIES = {
    "FedRot": (lambda **k: FedRot(SYMMETRY, **k), ARRAYS),
    "not aligned": (lambda **k: FedRot(alignment=None, **k), ARRAYS),
    "FedAdam": (lambda **k: AlignedAdam(SYMMETRY, **k), ARRAYS),
    "adapters": (lambda **k: AdamLoRA(LORA, **k), ArrayRecord(floats(adapter(9)))),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.usefixtures("newest")
def test_a_run_ends_when_should_stop_says_so(name, checkpoints, tmp_path):
    build, arrays = STRATEGIES[name]
    asked = []

    def should_stop(number, result):
        assert sorted(result.train_metrics_clientapp) == [*range(1, number + 1)]
        asked.append((number, result.arrays.object_id))
        return number == 2

    def play(rounds, folder, **given):
        kept = Checkpointing(tmp_path / folder) if checkpoints else None
        random.seed(0)
        strategy = build(
            fraction_evaluate=0.0, server=Server(deterministic=True), checkpoints=kept
        )
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
def test_should_stop_of_a_resumed_run_is_asked_where_the_whole_run_asked_it(
    tmp_path,
):
    """With the same random numbers, and the same result so far."""
    asked = []

    def should_stop(number, result):
        trained = sorted(result.train_metrics_clientapp)
        asked.append((number, random.random(), trained, result.arrays.object_id))
        return False

    def play(rounds, seed, **given):
        random.seed(seed)
        asked.clear()
        strategy = FedAdam(fraction_evaluate=0.0)
        grid = FakeGrid(MOVED)
        start = partial(run, strategy) if given else strategy.start
        start(grid, ArrayRecord([np.ones(3)]), rounds, should_stop=should_stop, **given)
        return asked.copy()

    whole = play(4, seed=0)
    assert play(2, seed=0, checkpoints=Checkpointing(tmp_path)) == whole[:2]
    assert play(2, seed=9, checkpoints=Checkpointing(tmp_path)) == whole[1:2]
    assert play(4, seed=9, checkpoints=Checkpointing(tmp_path)) == whole[1:]


@pytest.mark.skipif(HAS_IT, reason="the installed Flower has should_stop")
@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_older_flower_refuses_should_stop_before_any_client_trains(
    checkpoints, tmp_path
):
    kept = Checkpointing(tmp_path) if checkpoints else None
    grid = FakeGrid(MOVED)
    with pytest.raises(TypeError, match="should_stop"):
        FedRot(SYMMETRY, checkpoints=kept).start(
            grid, ARRAYS, 1, should_stop=lambda n, r: True
        )
    assert grid.asked == []


def test_an_argument_that_is_unknown_is_refused_or_passed_on(tmp_path):
    class Later(FedAvg):
        def start(self, *args, colour="", **kwargs):
            self.colour = colour
            return super().start(*args, **kwargs)

    strategy = in_front_of(Later)(alignment=None, fraction_evaluate=0.0)
    strategy.start(FakeGrid(MOVED), ARRAYS, 1, colour="red")
    assert strategy.colour == "red"
    kept = in_front_of(Later)(alignment=None, checkpoints=Checkpointing(tmp_path))
    for refusing in (FedRot(alignment=None), kept):
        with pytest.raises(TypeError, match="colour"):
            refusing.start(FakeGrid(MOVED), ARRAYS, 1, colour="red")


# Replies that nobody has asked for


def replies(given):
    made = []
    for node, (arrays, examples) in enumerate(given, start=1):
        with outside_of_the_engine():
            asked = Message(RecordDict(), node, "train")
        metrics = MetricRecord({"num-examples": examples})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        made.append(Message(content, reply_to=asked))
    return made


#: Arrays and numbers of examples that clients send.
SENT = {
    "two arrays": [
        ([np.full((2, 3), i, np.float32), np.arange(4.0) + i], i) for i in (1, 2, 3, 7)
    ],
    "scalars": [
        ([np.array(value)], weight)
        for weight, value in enumerate((0.5, 1, 2, 100), start=1)
    ],
}
#: Strategies of Flower, and their arguments.
FLOWERS = [
    (FedAvg, {}),
    (FedAvgM, {"server_learning_rate": 0.5, "server_momentum": 0.5}),
    (FedMedian, {}),
    (FedTrimmedAvg, {"beta": 0.25}),
    (Krum, {"num_malicious_nodes": 1}),
    (MultiKrum, {"num_malicious_nodes": 1, "num_nodes_to_select": 2}),
    *((base, {}) for base in (FedAdagrad, FedAdam, FedYogi)),
]


@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize(("base", "given"), FLOWERS)
def test_replies_that_nobody_asked_for_are_aggregated_as_by_flowers_strategy(
    base, given, sent
):
    strategies = [base(**given), in_front_of(base)(alignment=None, **given)]
    results = []
    for strategy in (
        [*strategies, FedRot(alignment=None)] if base is FedAvg else strategies
    ):
        zeros = {str(n): np.zeros_like(one) for n, one in enumerate(SENT[sent][0][0])}
        strategy.current_arrays = (
            ArrayRecord([*zeros.values()]) if base is FedAvgM else zeros
        )
        rounds = [
            strategy.aggregate_train(number, replies(SENT[sent]))[0]
            for number in (1, 2)
        ]
        results.append([one for arrays in rounds for one in arrays.to_numpy_ndarrays()])
    for theirs, *ours in zip(*results, strict=True):
        for found in ours:
            assert found.shape == theirs.shape
            assert np.array_equal(found, theirs)


def test_replies_to_nothing_known_need_no_alignment():
    with pytest.raises(FedrotError, match="configure_train"):
        FedRot(SYMMETRY).aggregate_train(1, replies(SENT["scalars"]))


def test_evaluations_are_weighted_whoever_has_asked_for_them():
    """``configure_evaluate`` of a subclass, and a loop of its own, tell us nothing."""
    metrics = [
        MetricRecord({"num-examples": n, "score": s}) for n, s in ((1, 0.0), (3, 1.0))
    ]
    with outside_of_the_engine():
        asked = [Message(RecordDict(), node, "evaluate") for node in (1, 2)]
    given = [
        Message(RecordDict({"m": m}), reply_to=a)
        for m, a in zip(metrics, asked, strict=True)
    ]
    found = FedRot(SYMMETRY).aggregate_evaluate(
        1, [*given, given[0], failure(asked[0])]
    )
    assert found["score"] == 0.75
