"""The guard keeps the better of the plain and the aligned mean, each to the last
bit.
"""

import json
import math
from functools import cache

import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
)

import fedrot
from fedrot.aggregation import Fisher, Mean, RegMean
from fedrot.errors import FedrotError
from fedrot.strategies import Checkpointing, FedRot, Guard, Reporting, Server
from tests.models import near
from tests.strategies.aggregating import (
    PERMUTATIONS,
    apart,
    fishers,
    grams,
    honest,
    merged,
    play,
    scrambled,
)
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import (
    grid_of,
    in_front_of,
    model_in,
    reply,
    round_of,
    tensors_of,
)

ROUNDS, CLIENTS = 2, 3
#: Nothing removes so much more than chance: the plain mean.
UNMOVED = fedrot.AlignmentOptions(chance=1e12)
GLOBAL = fedrot.AlignmentOptions(anchor="global")
BOTH = pytest.mark.parametrize("better", ["plain", "aligned"])
KEPT = "fedrot-guard-kept-aligned"


AlignedAdam = in_front_of(FedAdam)


def scrambling(index):
    """Return a client that trains a little, and answers in coordinates of its own."""

    def trained(message):
        number = round_of(message)
        update = near(model_in(message), 0.05, 10 * number + index)
        sent = fedrot.random_equivalent(update, SYMMETRY, 10 * number + index)
        return reply(message, sent, 10 + index, index)

    return trained


class Points:
    """An evaluation that likes the mean of one kind best: it is told which mean comes
    when.

    Without a guard's two calls per round it returns points of the ordinary evaluation.
    """

    def __init__(self, metric, plain, aligned):
        self.metric = metric
        self.values = (plain, aligned)
        self.calls = []

    def __call__(self, number, arrays):
        seen = self.calls.count(number)
        self.calls.append(number)
        return MetricRecord({self.metric: self.values[seen] if seen < 2 else 0.5})


def points(better):
    """Return an evaluation whose accuracy is higher for one of the means."""
    return Points("accuracy", *((0.75, 0.5) if better == "plain" else (0.5, 0.75)))


def new_grid():
    return grid_of(map(scrambling, range(CLIENTS)))


def run(
    build=FedRot,
    evaluate=None,
    rounds=ROUNDS,
    grid=None,
    **given,
):
    """Play rounds in the order of the clients' ids."""
    given.setdefault("server", Server(deterministic=True))
    strategy = build(SYMMETRY, fraction_evaluate=0.0, **given)
    return strategy.start(
        grid or new_grid(), ArrayRecord(state()), rounds, evaluate_fn=evaluate
    )


def bits(result):
    return [(name, array.data) for name, array in result.arrays.items()]


def kept(result):
    return [metrics[KEPT] for metrics in result.train_metrics_clientapp.values()]


@cache
def unguarded(better, build=FedRot, **given):
    if better == "plain":
        given["alignment"] = UNMOVED
    return run(build, **given)


# --- which mean is kept
# ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "guard",
    ["macro_f1", "eval-loss", Guard("points", True), Guard("f1", False)],
    ids=str,
)
def test_the_better_mean_is_kept_to_the_last_bit(guard, better):
    metric = guard if isinstance(guard, str) else guard.metric
    higher = guard.higher_is_better if isinstance(guard, Guard) else guard == "macro_f1"
    plain, aligned = (2.0, 1.0) if (better == "plain") == higher else (1.0, 2.0)
    rounds = ROUNDS if isinstance(guard, str) else 1
    result = run(evaluate=Points(metric, plain, aligned), rounds=rounds, guard=guard)
    assert bits(result) == bits(unguarded(better, rounds=rounds))
    worse = {"plain": "aligned", "aligned": "plain"}[better]
    assert bits(result) != bits(unguarded(worse, rounds=rounds))
    assert kept(result) == [int(better == "aligned")] * rounds
    for metrics in result.train_metrics_clientapp.values():
        found = (metrics["fedrot-guard-plain"], metrics["fedrot-guard-aligned"])
        assert found == (plain, aligned)


@pytest.mark.parametrize(
    ("plain", "aligned", "better"),
    [
        (0.5, 0.5, "plain"),
        (math.nan, math.nan, "plain"),
        (0.5, math.nan, "plain"),
        (math.nan, 0.5, "aligned"),
    ],
)
def test_ties_keep_the_plain_mean_and_nan_is_worst(plain, aligned, better):
    result = run(evaluate=Points("loss", plain, aligned), rounds=1, guard="loss")
    assert bits(result) == bits(unguarded(better, rounds=1))


def test_a_mean_that_was_kept_is_evaluated_once(tmp_path):
    evaluate = points("aligned")
    file = tmp_path / "rows.jsonl"
    result = run(evaluate=evaluate, guard="accuracy", reporting=Reporting(file))
    assert evaluate.calls == [0, 1, 1, 2, 2]
    found = {
        number: m["accuracy"] for number, m in result.evaluate_metrics_serverapp.items()
    }
    assert found == {0: 0.5, 1: 0.75, 2: 0.75}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    server = {
        row["round"]: row["metrics"]["accuracy"]
        for row in rows
        if row.get("stage") == "server"
    }
    assert server == found
    own = [row for row in rows if KEPT in row]
    figures = {"fedrot-guard-plain": 0.5, "fedrot-guard-aligned": 0.75, KEPT: 1}
    assert own == [{"round": number, **figures} for number in (1, 2)]


def test_a_guard_may_evaluate_on_data_of_its_own():
    reported = points("plain")
    chosen = points("plain")
    result = run(evaluate=reported, guard=Guard("accuracy", evaluate=chosen))
    assert (reported.calls, chosen.calls) == ([0, 1, 2], [1, 1, 2, 2])
    assert bits(result) == bits(unguarded("plain"))
    assert bits(run(guard=Guard("accuracy", evaluate=points("aligned")))) == bits(
        unguarded("aligned")
    )


def test_what_is_evaluated_are_the_two_means():
    seen = []

    def evaluate(number, arrays):
        seen.append(arrays)
        return MetricRecord({"loss": float(len(seen))})

    run(evaluate=evaluate, rounds=1, guard="loss")
    _, plain, aligned = (
        [(name, a.data) for name, a in arrays.items()] for arrays in seen
    )
    assert plain == bits(unguarded("plain", rounds=1))
    assert aligned == bits(unguarded("aligned", rounds=1))


def test_where_nothing_is_moved_nothing_is_evaluated():
    evaluate = points("aligned")
    result = run(evaluate=evaluate, guard="accuracy", alignment=UNMOVED)
    assert evaluate.calls == [0, 1, 2]
    assert bits(result) == bits(unguarded("plain"))
    assert kept(result) == [0, 0]
    assert "fedrot-guard-plain" not in result.train_metrics_clientapp[1]


@pytest.mark.parametrize(
    ("build", "given"), [(FedRot, {}), (AlignedAdam, {"eta": 0.01})]
)
def test_biases_that_become_0_are_compared_where_no_group_is_moved(build, given):
    """From a plain mean that is kept an optimiser goes back to the model that was
    sent.
    """
    evaluate = points("plain")
    canonical = fedrot.AlignmentOptions(chance=1e12, canonical=True)
    result = run(
        build, evaluate, rounds=1, guard="accuracy", alignment=canonical, **given
    )
    assert bits(result) == bits(unguarded("plain", build, rounds=1, **given))
    assert evaluate.calls[:3] == [0, 1, 1]


# --- with everything else
# ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("build", "given"),
    [
        (AlignedAdam, {"eta": 0.01}),
        (in_front_of(FedAvgM), {"server_learning_rate": 0.7, "server_momentum": 0.9}),
    ],
)
def test_an_optimiser_sees_the_kept_mean_only(build, given, better):
    evaluate = points(better)
    result = run(build, evaluate, guard="accuracy", **given)
    assert bits(result) == bits(unguarded(better, build, **given))
    # The new model is a step from the mean, so it is evaluated by itself.
    assert evaluate.calls == [0, 1, 1, 1, 2, 2, 2]


@BOTH
@pytest.mark.parametrize(
    ("aggregation", "collect", "options"),
    [
        (RegMean, grams, fedrot.AlignmentOptions(chance=0)),
        (Fisher, fishers, PERMUTATIONS),
    ],
)
def test_statistics_go_with_their_updates(
    aggregation,
    collect,
    options,
    better,
):
    clients = scrambled(honest(collect), collect, options.parts)
    given = {"aggregation": aggregation, "alignment": options}
    guard = Guard("accuracy", evaluate=points(better))
    found, metrics = play(FedRot(SYMMETRY, guard=guard, **given), clients)
    if better == "plain":
        wanted = merged(Mean(), clients)
    else:
        wanted = tensors_of(play(FedRot(SYMMETRY, **given), clients)[0])
    assert apart(found, wanted) <= 1e-6
    assert metrics[KEPT] == int(better == "aligned")


def test_both_means_are_of_the_same_clients():
    """A client whose statistics are of another form is in neither."""
    clients = scrambled(honest(grams), grams)
    odd = {
        name: gram.diagonal().clone()
        for name, gram in clients[0].statistics["gram"].items()
    }
    clients[0] = type(clients[0])(clients[0].update, clients[0].weight, {"gram": odd})
    guard = Guard("accuracy", evaluate=points("plain"))
    found, metrics = play(FedRot(SYMMETRY, guard=guard, aggregation=RegMean), clients)
    assert metrics["fedrot-replies-dropped"] == 1
    assert apart(found, merged(Mean(), clients[1:])) <= 1e-6


@BOTH
def test_an_aggregation_is_compared_with_the_plain_mean_without_alignment_too(
    better,
):
    clients = honest(grams)
    guard = Guard("accuracy", evaluate=points(better))
    found, metrics = play(
        FedRot(guard=guard, aggregation=RegMean, alignment=None), clients
    )
    assert (
        apart(found, merged(RegMean() if better == "aligned" else Mean(), clients))
        <= 1e-6
    )
    assert metrics[KEPT] == int(better == "aligned")
    assert apart(merged(RegMean(), clients), merged(Mean(), clients)) > 1e-3


@pytest.mark.parametrize("after", [1, 2])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, after):
    """The aligned mean is the better one in odd rounds."""

    def evaluate(number, arrays):
        calls.append(number)
        return MetricRecord(
            {"loss": float(-calls.count(number) if number % 2 else calls.count(number))}
        )

    calls = []
    whole = run(AlignedAdam, evaluate, rounds=3, guard="loss", eta=0.01)
    calls = []
    for rounds in (after, 3):
        resumed = run(
            AlignedAdam,
            evaluate,
            rounds=rounds,
            guard="loss",
            eta=0.01,
            checkpoints=Checkpointing(tmp_path),
        )
    assert kept(whole) == kept(resumed) == [1, 0, 1]
    assert bits(resumed) == bits(whole)
    assert dict(resumed.train_metrics_clientapp) == dict(whole.train_metrics_clientapp)
    assert resumed.evaluate_metrics_serverapp == whole.evaluate_metrics_serverapp


# --- names, and what is refused
# ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "higher"),
    [
        ("Accuracy", True),
        ("macro_f1", True),
        ("Top-1 ACC", True),
        ("eval/Loss", False),
        ("wer", False),
    ],
)
def test_a_name_says_what_is_better_however_it_is_written(metric, higher):
    assert Guard(metric).higher_is_better is higher


def private(symmetry, fraction_evaluate, **given):
    strategy = in_front_of(DifferentialPrivacyServerSideFixedClipping)
    return strategy(
        symmetry,
        FedAvg(),
        noise_multiplier=0.1,
        clipping_norm=1.0,
        num_sampled_clients=CLIENTS,
        alignment=GLOBAL,
        **given,
    )


def without_start(grid):
    return play(
        FedRot(SYMMETRY, guard="accuracy"),
        [type(c)(c.update, 1.0, {}) for c in scrambled(honest())],
    )


def returning(metrics):
    return lambda grid: run(
        evaluate=lambda n, _: metrics if n else None, grid=grid, guard="loss"
    )


#: What is refused, a part of the reason, and how many rounds of training there are
#: before.
REFUSED = {
    "alignment": (
        lambda grid: FedRot(guard="accuracy", alignment=None),
        "alignment=None",
        0,
    ),
    "a number": (lambda grid: FedRot(SYMMETRY, guard=0.5), "guard is a float", 0),  # type: ignore[arg-type]
    "points": (
        lambda grid: Guard("points"),
        r"'points' does not show.*higher_is_better=True",
        0,
    ),
    "both": (
        lambda grid: Guard("loss_of_accuracy"),
        "'loss_of_accuracy' does not show",
        0,
    ),
    "no name": (lambda grid: Guard(""), "name of a metric", 0),
    "a dictionary": (
        lambda grid: Guard("loss", None, {}),
        "evaluate of Guard is a dict",
        0,
    ),  # type: ignore[arg-type]
    "medians": (
        lambda grid: run(
            in_front_of(FedMedian), points("plain"), grid=grid, guard="accuracy"
        ),
        "needs every update",
        0,
    ),
    "privacy": (
        lambda grid: run(private, points("plain"), grid=grid, guard="accuracy"),
        "needs every update",
        0,
    ),
    "no evaluation": (
        lambda grid: run(grid=grid, guard="accuracy"),
        "'accuracy' at the server.*evaluate_fn=",
        0,
    ),
    "no start": (without_start, "call this strategy's start with evaluate_fn", 0),
    "another metric": (
        lambda grid: run(
            evaluate=Points("macro_f1", 0.5, 0.75), grid=grid, guard="accuracy"
        ),
        "round 0 has no metric 'accuracy'.*macro_f1",
        0,
    ),
    "nothing": (returning(None), "round 1 has no metric .*it has: nothing", 1),
    "no metrics": (
        returning(MetricRecord()),
        "has no metric 'loss'.*it has: nothing",
        1,
    ),
    "a list": (
        returning(MetricRecord({"loss": [1.0]})),
        "returns a list for metric 'loss'",
        1,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused_before_clients_train(name):
    build, message, rounds = REFUSED[name]
    grid = new_grid()
    with pytest.raises(FedrotError, match=message):
        build(grid)
    assert len([nodes for nodes in grid.asked if nodes]) == rounds
