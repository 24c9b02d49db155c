"""Cells on nodes in this process: who trains on what, what is recorded, and how cells
fail.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from flwr.app import ArrayRecord

from fedrot.aggregation import Fisher, Mean
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.cell_run import CellRun
from fedrot.simulations.federation.cells import run_cell, strategy_of
from fedrot.simulations.federation.client_app import app
from fedrot.simulations.federation.grids import OrderedGrid
from fedrot.simulations.models import build_model
from fedrot.simulations.run_folder import FIELDS, cells_of
from fedrot.simulations.simulate import CellResult, run_job
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import task_of
from tests.simulations.commands import Rows
from tests.simulations.tasks.cases import SMALL
from tests.strategies.fakes import (
    FakeGrid,
    failure,
    model_in,
    node_of,
    wire_bytes,
)

CELL = {
    **SMALL,
    "test_limit": 17,
    "holdout": 0.2,
    "rounds": 2,
    "seeds": [0],
    "partition": "dirichlet:1",
    "strategies": "fedavg",
}
TEST = ("test", tuple(range(17)))


def of(**fields):
    return Experiment.from_flat({**CELL, **fields})


def shell_of(experiment):
    return build_model(experiment, task_of(experiment.to_json()).data, seed=0)


class Trained(NamedTuple):
    rows: tuple[int, ...]
    seed: int
    epochs: float
    lr: float


@dataclass
class Played:
    """What cells did, and what they recorded."""

    experiment: Experiment
    trained: list[Trained] = field(default_factory=list)
    evaluated: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    rows: Rows = field(default_factory=list)
    alignment: Rows = field(default_factory=list)

    def clients(self, held_out=False, seed=0):
        """Return the rows that each client trains on, or holds out."""
        task = task_of(self.experiment.to_json())
        numbers = range(self.experiment.clients)
        return [tuple(task.client_rows(seed, c)[held_out].tolist()) for c in numbers]

    def values(self, metric, **chosen):
        """Return a metric by strategy, scope, seed and round, of the rows that are
        asked for.
        """
        chosen["metric"] = metric
        return {
            (row["strategy"], row["scope"], row["seed"], row["round"]): row["value"]
            for row in self.rows
            if row.items() >= chosen.items()
        }


def node(partition):
    """Return a node with the harness's own app."""
    return node_of(app, **{"partition-id": partition})


def listening(heard, **changes):
    """Nodes that note who is told what, and are told changes of it."""

    def of_client(partition):
        def answer(message):
            for told in message.content.config_records.values():
                heard.append((partition, dict(told)))
                told.update(changes)
            return node(partition)(message)

        return answer

    return of_client


#: Nodes on another machine, without the folder of shared trainings.
elsewhere = listening([], cache="/nowhere")


def run_all(experiment, scratch, nodes, played):
    """Run all cells; ids of nodes say nothing about their partitions."""
    grid = FakeGrid(
        {900 - 7 * client: nodes(client) for client in range(experiment.clients)}
    )
    ordered = OrderedGrid(grid, experiment.clients)
    for cell in cells_of([experiment]):
        run = run_cell(cell, ordered, scratch)
        played.rows += run.rows
        played.alignment += run.alignment
    return played


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Return a function that runs all cells; training adds a hundredth per row to the
    head's bias.
    """

    def run(*, nodes=node, **fields):
        experiment = of(**fields)
        played = Played(experiment)

        def train(model, task, rows, seed, epochs, lr):
            played.trained.append(Trained(tuple(rows.tolist()), seed, epochs, lr))
            with torch.no_grad():
                model.classifier.bias += len(rows) / 100
            return len(rows) / 10

        def evaluate(model, task, split, rows):
            name = "test" if split is task.test else "train"
            played.evaluated.append((name, tuple(rows.tolist())))
            bias = model.classifier.bias[0].detach()
            weight = model.classifier.weight[0, 0].detach()
            return {"accuracy": float(bias), "macro_f1": float(weight), "loss": 1.0}

        monkeypatch.setattr(training, "train", train)
        monkeypatch.setattr(training, "evaluate", evaluate)
        return run_all(experiment, tmp_path, nodes, played)

    return run


def mean(sizes):
    """Return what one round adds to the head: the clients' hundredths, weighted by
    their rows.
    """
    return sum(n * n / 100 for n in sizes) / sum(sizes)


def test_every_round_averages_the_clients_by_their_rows(play):
    played = play(strategies="fedavg,aligned")
    sizes = [len(rows) for rows in played.clients()]
    assert len(set(sizes)) == 2
    plain, aligned = (
        [*played.values("accuracy", scope="central", strategy=name).values()]
        for name in ("fedavg", "aligned")
    )
    expected = [plain[0] + n * mean(sizes) for n in range(3)]
    assert plain == pytest.approx(expected, abs=1e-5)
    # Whatever moves nothing has the same bits.
    assert aligned == plain


def test_a_client_trains_on_its_own_rows_with_seeds_of_its_own(play):
    played = play(seeds=[0, 1], rounds=3, first_epochs=2.5, local_epochs=0.5, lr=0.25)
    rounds = itertools.product((0, 1), (2.5, 0.5, 0.5))
    expected = [
        {(rows, epochs, 0.25) for rows in played.clients(seed=seed)}
        for seed, epochs in rounds
    ]
    trained = [(t.rows, t.epochs, t.lr) for t in played.trained]
    assert [{*trained[i : i + 2]} for i in range(0, len(trained), 2)] == expected
    assert len({t.seed for t in played.trained}) == len(trained)


@pytest.mark.parametrize(
    ("nodes", "start"), [(node, "same"), (node, "scrambled"), (elsewhere, "different")]
)
def test_what_is_the_same_in_two_strategies_is_trained_once_if_they_share_files(
    play, nodes, start
):
    seeds = [
        t.seed
        for t in play(nodes=nodes, strategies="fedavg,aligned", start=start).trained
    ]
    assert sorted(seeds[:4]) == [1_000, 1_001, 2_000, 2_001]
    if nodes is elsewhere:
        assert seeds[4:] == seeds[:4]
    else:
        assert len(seeds) == (4 if start == "same" else 6)


def test_a_guard_chooses_by_held_out_rows_that_no_table_reports(play):
    guarded = {"name": "guarded", "alignment": {"chance": 0.0}, "guard": "accuracy"}
    played = play(strategies=[guarded], start="scrambled")
    held = tuple(itertools.chain(*played.clients(held_out=True)))
    assert played.evaluated.count(("train", held)) == 2 * 2  # two means per round
    assert played.evaluated.count(TEST) == 3
    # The head's bias, which this accuracy is, does not move: of equal means the plain
    # one is kept.
    assert [*played.values("fedrot-guard-kept-aligned", scope="round").values()] == [
        0,
        0,
    ]


def test_a_strategy_of_some_clients_tells_them_what_it_needs_and_chooses_by_their_rows(
    play,
):
    heard = []
    some = {
        "name": "some",
        "guard": "loss",
        "clients": [0, 2],
        "alignment": {"chance": 0.0},
        "aggregation": "regmean",
        "batches": 2,
        "learning_rate": 0.5,
    }
    played = play(
        nodes=listening(heard),
        strategies=[some],
        clients=4,
        partition="iid",
        start="scrambled",
        rounds=1,
    )
    expected = {"seed": 0, "lr": 0.5, "batches": 2}
    expected["experiment"] = played.experiment.to_json()
    # Then each fits a head of its own, and nobody else is asked.
    assert sorted(client for client, _ in heard[:2]) == [0, 2]
    assert {client for client, _ in heard} == {0, 2}
    assert all(told.items() >= expected.items() for _, told in heard[:2])
    scopes = {row["scope"] for row in played.rows if "client" in row["scope"]}
    assert scopes == {"client:0", "client:2"}
    held = played.clients(held_out=True)
    assert ("train", held[0] + held[2]) in played.evaluated


def test_what_is_recorded(play):
    played = play(strategies="fedavg,aligned", start="scrambled")
    held = played.clients(held_out=True)
    assert all(
        {*rows}.isdisjoint(trained)
        for rows, trained in zip(held, played.clients(), strict=True)
    )
    # The initial model and that of each round.
    assert played.evaluated == [TEST] * 3 * 2
    sizes = [len(rows) for rows in played.clients()]
    found = played.values
    scopes = {"central", "messages", "round", "client:0", "client:1"}
    assert {row["scope"] for row in played.rows} == scopes | {"site:0", "site:1"}
    assert all(row.keys() == {*FIELDS} for row in played.rows)
    for client, size in enumerate(sizes):
        of_client = {"strategy": "fedavg", "scope": f"client:{client}"}
        losses = [*found("train-loss", **of_client).values()]
        assert losses == pytest.approx([size / 10] * 2)
    first = [
        row["metric"]
        for row in played.rows
        if (row["scope"], row["round"]) == ("central", 0)
    ]
    assert first == ["accuracy", "macro_f1", "loss"] * 2
    # Clients are asked once in a round, and answer with a model. What was sent counts
    # up.
    size = wire_bytes(ArrayRecord(shell_of(played.experiment).state_dict()))
    for metric, each in (
        ("requests", 1),
        ("bytes-sent", size),
        ("bytes-received", size),
    ):
        assert [*found(metric, strategy="fedavg").values()] == [2 * each, 4 * each]
    # The alignment's rows name their cell, and are there once.
    aligned = [row for row in played.alignment if "before" in row]
    cell = {"experiment": played.experiment.name, "strategy": "aligned", "seed": 0}
    assert all(row.items() >= cell.items() for row in aligned)
    names = ("round", "client", "part", "layer", "group")
    places = [tuple(row[name] for name in names) for row in aligned]
    assert len(places) == len({*places}) > 0
    assert not any("stage" in row for row in played.alignment)


def test_who_takes_part_is_the_same_in_every_strategy_and_not_in_every_round(play):
    everybody = {"name": "all", "alignment": False, "fraction_train": 1.0}
    played = play(
        strategies=["fedavg", "aligned", everybody],
        clients=4,
        fraction_train=0.5,
        partition="iid",
        rounds=3,
        seeds=[0, 1],
    )
    first, second, whole = (
        [place[1:] for place in played.values("train-loss", strategy=name)]
        for name in ("fedavg", "aligned", "all")
    )
    # Replies arrive in the order of the sample, and are recorded in that of the
    # clients.
    assert first == second == sorted(first, key=lambda place: (*place[1:], place[0]))
    assert len(whole) == 2 * len(first) == 2 * 3 * 4
    scopes = [scope for scope, *_ in first]
    pairs = [tuple(scopes[place : place + 2]) for place in range(0, 12, 2)]
    assert len({*pairs}) > 2
    assert pairs[:3] != pairs[3:]
    # All are scored after the last round, whoever trained.
    of_site = {"strategy": "fedavg", "scope": "site:3"}
    assert len(played.values("global-accuracy", **of_site)) == 2


@pytest.mark.parametrize(("lost", "with_nan"), [(1, True), (3, False)])
def test_a_round_without_an_update_fails(play, lost, with_nan):
    """All nodes fail, or one of two fails and the other one sends NaN."""

    def losing(partition):
        def answer(message):
            found = node(partition)(message)
            told = message.content.config_records.get("config", {})
            if found is None or told.get("server-round") != lost:
                return found
            if not with_nan or partition:
                return failure(message)
            tensors = model_in(found)
            tensors["classifier.bias"].fill_(float("nan"))
            found.content["arrays"] = ArrayRecord(tensors)
            return found

        return answer

    with pytest.raises(
        (RuntimeError, ValueError), match=f"round {lost} of .* seed 3 · aligned|NaN"
    ):
        play(nodes=losing, strategies="aligned", seeds=[3], rounds=3)


def test_arguments_of_a_table_reach_the_aggregation_and_the_server():
    table = {
        "name": "mine",
        "aggregation": {"name": "regmean", "alpha": 0.25},
        "server": {"min_replies": 2},
    }
    experiment = of(strategies=[table, "regmean", "fisher", "fedavg"])
    shell = shell_of(experiment)
    mine, *others = (
        strategy_of(CellRun(experiment, 0, strategy), shell)
        for strategy in experiment.strategies
    )
    assert (mine.server.min_replies, mine.server.deterministic) == (2, True)
    first, second, third, last = (each.aggregation() for each in (mine, *others))
    assert (first.alpha, second.alpha) == (0.25, 0.9)
    assert type(first) is type(second)
    assert (type(third), type(last)) == (Fisher, Mean)


IMAGES = {
    "task": "image",
    "train_limit": 400,
    "test_limit": 60,
    "width": 32,
    "batch_size": 16,
    "holdout": 0.3,
    "lr": 0.01,
    "partition": "dirichlet:0.3",
    "strategies": "fedavg,fedavg_head,head_only,fit_head",
}


def test_heads_are_fitted_at_the_end_at_the_start_or_in_rounds(tmp_path):
    experiment = of(**IMAGES)
    played = run_all(experiment, tmp_path, node, Played(experiment))
    plain, head, only, rounds = (
        {
            (r["scope"], r["round"], r["metric"]): r["value"]
            for r in played.rows
            if r["strategy"] == strategy.name and not r["scope"].startswith("site:")
        }
        for strategy in experiment.strategies
    )
    # At the end: only the last round differs.
    assert {key[:2] for key in head.keys() - plain.keys()} == {("round", 2)}
    assert head["round", 2, "fedrot-head-failed"] == 0
    changed = {key[:2] for key in plain if plain[key] != head[key]}
    assert changed == {("central", 2), ("messages", 2)}
    assert head["central", 2, "accuracy"] > plain["central", 2, "accuracy"]
    # At the start: nobody trains, and there is one model, that after the last round.
    assert {(key[1], key[2] == "train-loss") for key in only} == {(2, False)}
    assert only["central", 2, "accuracy"] > plain["central", 0, "accuracy"]
    assert 0 < only["messages", 2, "bytes-sent"] < plain["messages", 2, "bytes-sent"]
    # In rounds: clients train from another model from the first round on.
    assert rounds["central", 2, "loss"] < plain["central", 2, "loss"]
    assert rounds["client:0", 1, "train-loss"] != plain["client:0", 1, "train-loss"]


def test_cells_leave_no_model_behind(tmp_path):
    """A long run would run out of memory."""
    experiment = of(rounds=1, strategies="fedavg,aligned,regmean")
    told = cells_of([experiment]) * 2
    held = []

    def numbers():
        tensors = (o for o in gc.get_objects() if isinstance(o, torch.Tensor))
        return sum(map(torch.numel, tensors))

    def tell(message):
        if isinstance(message, CellResult):
            # Flower's log of a cell, and of no other.
            assert message.log.count("[ROUND 1/1]") == 1
            assert not message.failure
            held.append(numbers())

    run_job(told, [1.0] * len(told), tmp_path / "nowhere", tell)
    size = sum(map(torch.numel, shell_of(experiment).parameters()))
    assert len(held) == 6
    assert max(held[3:]) - held[2] < size / 2
