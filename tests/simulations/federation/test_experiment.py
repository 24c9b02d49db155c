"""The cells of a configuration on a grid in this process: who trains on what, and what is recorded."""

from __future__ import annotations

import gc
import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict

import reproductions.arms  # noqa: F401
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation import arm_strategies, client_app, experiment
from fedrot.simulations.federation.experiment import run_cells
from fedrot.simulations.federation.grid_run import run_job
from fedrot.simulations.federation.ordered_grid import OrderedGrid
from fedrot.simulations.federation.run_folder import read_alignment, read_rows
from fedrot.simulations.federation.store import RunFolder, cells_of
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from tests.strategies.fakes import Client, FakeGrid, failure

SMALL: dict[str, Any] = {
    "train_limit": 60,
    "test_limit": 17,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "max_length": 16,
    "clients": 2,
    "holdout": 0.2,
    "rounds": 2,
    "seeds": (0,),
    "partition": "dirichlet:1",
}


GUARD = ("plain", "aligned", "kept-aligned")


@dataclass(frozen=True)
class Trained:
    """One training: rows, seed and epochs."""

    rows: tuple[int, ...]
    seed: int
    epochs: float


@dataclass
class Run:
    """What a run did and left behind."""

    config: SimulationConfig
    path: Path
    trained: list[Trained] = field(default_factory=list)
    evaluated: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    progress: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def task(self) -> Task:
        return task_of(self.config.to_json())

    def rows(self, seed: int = 0) -> list[tuple[int, ...]]:
        """Return every client's training rows."""
        clients = range(self.config.clients)
        return [tuple(self.task.client_rows(seed, c)[0].tolist()) for c in clients]

    def values(self, metric: str, **chosen: Any) -> dict[tuple[Any, ...], float]:
        """Return a metric by arm, scope, seed and round, of the rows that are asked for."""
        return {
            (row["arm"], row["scope"], row["seed"], row["round"]): row["value"]
            for row in read_rows(self.path)
            if row["metric"] == metric and all(row[key] == value for key, value in chosen.items())
        }


def node(partition: int) -> Client:
    """Return a node with the simulations' own app."""
    context = Context(1, 1, {"partition-id": partition}, RecordDict(), {})
    return lambda message: client_app.app(message, context)


Play = Callable[..., Run]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return a function that runs all cells; training adds a hundredth per row to the head's bias."""

    def played(
        nodes: Callable[[int], Client] = node,
        shared_cache: bool = True,
        **settings: Any,
    ) -> Run:
        config = SimulationConfig(**{**SMALL, **settings})
        run = Run(config, tmp_path / "run")

        def train(model: Any, task: Task, rows: np.ndarray, seed: int, epochs: float, *_: Any) -> float:
            run.trained.append(Trained(tuple(rows.tolist()), seed, epochs))
            with torch.no_grad():
                model.classifier.bias += len(rows) / 100
            return len(rows) / 10

        def evaluate(model: Any, task: Task, split: Any, rows: np.ndarray) -> dict[str, float]:
            name = "test" if split is task.test else "train"
            run.evaluated.append((name, tuple(rows.tolist())))
            models = getattr(model, "models", [model])
            biases = [float(one.classifier.bias[0].detach()) for one in models]
            drawn = float(models[0].classifier.weight[0, 0].detach())
            accuracy = sum(biases) / len(biases)
            return {"accuracy": accuracy, "macro_f1": drawn, "loss": float(len(biases))}

        monkeypatch.setattr(training, "train", train)
        monkeypatch.setattr(training, "evaluate", evaluate)

        def progress(level: int, text: str, description: str, server_round: int, rounds: int) -> None:
            assert (text % (description, server_round, rounds)).endswith(f"{server_round}/{rounds}")
            run.progress.append((description, server_round, rounds))
            told = text % (description, server_round, rounds)
            assert (scratch / experiment.PROGRESS).read_text() == told

        monkeypatch.setattr(arm_strategies, "log", progress)
        store = RunFolder(run.path, [config], "test")
        # Ids of nodes say nothing about their partitions.
        grid = FakeGrid({900 - 7 * c: nodes(c) for c in range(config.clients)})
        ordered, scratch = OrderedGrid(grid, config.clients), tmp_path / "scratch"
        scratch.mkdir()
        for cell, rows, error in run_cells(
            cells_of([config]), ordered, scratch, shared_cache=shared_cache
        ):
            if error is not None:
                raise error
            store.add(cell, rows)
        store.close(True)
        return run

    return played


def mean(sizes: list[int]) -> float:
    """Return what one round adds to the head: the clients' hundredths, weighted by their rows."""
    return sum(n * n / 100 for n in sizes) / sum(sizes)


def test_every_round_averages_the_clients_by_their_rows(play: Play) -> None:
    run = play(arms=("plain", "aligned", "joined", "ensemble"), first_epochs=2.5)
    sizes = [len(rows) for rows in run.rows()]
    assert len(set(sizes)) == 2
    found = run.values("accuracy", scope="central")
    start = found["plain", "central", 0, 0]
    expected = {"plain": mean(sizes), "aligned": mean(sizes), "joined": sum(sizes) / 100}
    for arm, gain in expected.items():
        values = [found[arm, "central", 0, number] - start for number in range(3)]
        assert values == pytest.approx([0, gain, 2 * gain], abs=1e-5)
    # An ensemble is of the last round's clients, who go on from the mean; each counts alike.
    together = [found["ensemble", "central", 0, number] - start for number in range(3)]
    alike = sum(sizes) / 200
    assert together == pytest.approx([0, alike, mean(sizes) + alike], abs=1e-5)
    assert run.values("loss", scope="central", arm="ensemble", round=2) == {
        ("ensemble", "central", 0, 2): 2.0
    }
    assert len(found) == 4 * 3


def test_a_client_trains_on_its_own_rows_with_seeds_of_its_own(play: Play) -> None:
    run = play(seeds=(0, 1), arms=("plain",), rounds=3, first_epochs=2.5, local_epochs=0.5)
    assert len(run.trained) == 2 * 3 * 2
    # Clients answer in any order.
    by_round = [run.trained[i : i + 2] for i in range(0, 12, 2)]
    for (seed, number), trained in zip(itertools.product((0, 1), (1, 2, 3)), by_round, strict=True):
        assert {t.rows for t in trained} == set(run.rows(seed))
        assert {t.epochs for t in trained} == {2.5 if number == 1 else 0.5}
    assert len({t.seed for t in run.trained}) == len(run.trained)


def test_arms_and_starts_train_with_the_same_seeds(play: Play) -> None:
    settings = {"arms": ("plain", "aligned"), "starts": ("same", "scrambled"), "rounds": 2}
    run = play(shared_cache=False, **settings)
    seeds = [t.seed for t in run.trained]
    assert len(seeds) == 4 * 4
    assert seeds == seeds[:4] * 4
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_the_same_in_two_arms_is_trained_once_if_they_share_files(
    play: Play, shared: bool
) -> None:
    run = play(arms=("plain", "aligned"), shared_cache=shared)
    assert len(run.trained) == (4 if shared else 8)
    # The initial model is evaluated once, that of a round in each arm, clients alone in the last round.
    tested = run.evaluated.count(("test", tuple(range(17))))
    assert tested == 1 + 2 * 2 + (2 if shared else 4)
    values = run.values("accuracy", scope="central")
    assert values["plain", "central", 0, 2] == pytest.approx(values["aligned", "central", 0, 2])


def test_models_are_evaluated_on_what_they_were_not_trained_on(play: Play) -> None:
    run = play(arms=("plain",))
    test = ("test", tuple(range(17)))
    held = [("train", tuple(run.task.client_rows(0, c)[1].tolist())) for c in range(2)]
    assert all(rows and not {*rows} & {*own} for (_, rows), own in zip(held, run.rows(), strict=True))
    # The initial model; after each round clients and server, in the last one also clients alone.
    expected = [[test], held, [test], [test] * 2, held, [test]]
    assert len(run.evaluated) == sum(map(len, expected))
    found = iter(run.evaluated)
    for those in expected:
        assert sorted(itertools.islice(found, len(those))) == sorted(those)


def test_a_guard_chooses_by_rows_that_no_table_reports(play: Play) -> None:
    run = play(arms=("aligned*0:accuracy",), starts=("scrambled",))
    held = tuple(row for c in range(2) for row in run.task.client_rows(0, c)[1].tolist())
    # Two means per round. The test split is for the tables: at the start, after every round, and in the
    # last one for the two clients alone.
    assert run.evaluated.count(("train", held)) == 2 * 2
    assert run.evaluated.count(("test", tuple(range(17)))) == 3 + 2
    values = {name: run.values(f"fedrot-guard-{name}", scope="alignment") for name in GUARD}
    # Rotations of heads leave the bias, which this accuracy is: of equal means the plain one is kept.
    assert list(values["plain"].values()) == list(values["aligned"].values())
    assert list(values["kept-aligned"].values()) == [0, 0]


def test_what_is_recorded_of_clients(play: Play) -> None:
    run = play(arms=("plain",))
    sizes = [len(rows) for rows in run.rows()]
    expected = {
        ("plain", f"client:{c}", 0, number): sizes[c] / 10 for c in range(2) for number in (1, 2)
    }
    assert run.values("train-loss") == pytest.approx(expected)
    assert run.values("seconds-training").keys() == expected.keys()
    central = run.values("accuracy", scope="central")
    start = central["plain", "central", 0, 0]
    # Clients evaluate the new model, and their own one before averaging in the last round.
    for client in range(2):
        mine = run.values("accuracy", scope=f"client:{client}")
        assert mine == pytest.approx(
            {("plain", f"client:{client}", 0, n): start + n * mean(sizes) for n in (1, 2)}
        )
        alone = run.values("accuracy", scope=f"alone:{client}")
        assert alone == pytest.approx(
            {("plain", f"alone:{client}", 0, 2): start + mean(sizes) + sizes[client] / 100}
        )


def test_progress_is_told_after_every_round_of_every_cell(play: Play) -> None:
    run = play(arms=("plain", "joined"), seeds=(0, 1))
    assert [(number, of) for _, number, of in run.progress] == [(n, 2) for n in (0, 1, 2)] * 4
    assert len({description for description, *_ in run.progress}) == 4
    # Both arms start from one and the same model, which depends on the seed.
    drawn = run.values("macro_f1", scope="central", round=0)
    assert len(drawn) == 4
    for seed in (0, 1):
        assert drawn["plain", "central", seed, 0] == drawn["joined", "central", seed, 0]
    assert drawn["plain", "central", 0, 0] != drawn["plain", "central", 1, 0]


def test_who_takes_part_is_the_same_in_every_arm_and_not_in_every_round(play: Play) -> None:
    settings = {"clients": 4, "fraction_train": 0.5, "partition": "iid", "rounds": 3}
    run = play(arms=("plain", "aligned"), seeds=(0, 1), **settings)
    took: dict[str, list[tuple[int, int, str]]] = {"plain": [], "aligned": []}
    for arm, scope, seed, number in run.values("train-loss"):
        took[arm].append((seed, number, scope))
    # Replies arrive in the order of the sample, and are recorded in that of the clients.
    assert took["plain"] == took["aligned"] == sorted(took["plain"])
    scored = [place for place in run.values("accuracy", arm="plain") if place[1].startswith("client")]
    assert len(scored) == 2 * 3 * 4
    assert scored == sorted(scored, key=lambda place: (place[2], place[3], place[1]))
    groups = {
        (seed, number): {scope for s, n, scope in took["plain"] if (s, n) == (seed, number)}
        for seed, number, _ in took["plain"]
    }
    assert [len(group) for group in groups.values()] == [2] * 6
    assert len({frozenset(group) for group in groups.values()}) > 2
    by_seed = [[groups[seed, number] for number in (1, 2, 3)] for seed in (0, 1)]
    assert by_seed[0] != by_seed[1]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_round_without_an_update_ends_the_run_and_says_which(play: Play, lost: int) -> None:
    def failing(partition: int) -> Client:
        honest = node(partition)

        def answer(message: Message) -> Message | None:
            numbers = [c["server-round"] for c in message.content.config_records.values()]
            fails = numbers == [lost] and message.metadata.message_type == "train"
            return failure(message) if fails else honest(message)

        return answer

    with pytest.raises(RuntimeError, match=rf"round {lost} of arm 'aligned', seed 3\..*none"):
        play(failing, arms=("aligned",), seeds=(3,), rounds=3)


def test_a_round_without_an_update_says_why_replies_were_dropped(play: Play) -> None:
    def lost(partition: int) -> Client:
        honest = node(partition)

        def answer(message: Message) -> Message | None:
            found = honest(message)
            numbers = [c["server-round"] for c in message.content.config_records.values()]
            if found is not None and (message.metadata.message_type, numbers) == ("train", [2]):
                tensors = found.content.array_records["arrays"].to_torch_state_dict()
                name, value = "classifier.bias", float("nan")
                tensors[name] = torch.full_like(tensors[name], value)
                found.content["arrays"] = ArrayRecord(tensors)
            return found

        return answer

    said = (
        r"round 2 of arm 'plain', seed 0\. Dropped: \[.*'classifier.bias' holds NaN or Inf.*\]; failed"
    )
    with pytest.raises(RuntimeError, match=said):
        play(lost, arms=("plain",))


def test_nodes_that_are_not_the_clients_are_refused(play: Play) -> None:
    with pytest.raises(RuntimeError, match=r"partition ids \[0, 0\].*2 clients"):
        play(lambda partition: node(0), arms=("plain",))


def test_a_cell_that_fails_does_not_stop_those_behind_it(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no room for the joined model")

    config = SimulationConfig(**{**SMALL, "arms": ("joined", "plain")})
    monkeypatch.setattr(experiment, "train_joined", broken)
    grid = OrderedGrid(FakeGrid({c: node(c) for c in range(2)}), 2)
    found = [*run_cells(cells_of([config]), grid, tmp_path, shared_cache=True)]
    assert [(cell.arm.name, str(error)) for cell, _, error in found] == [
        ("joined", "no room for the joined model"),
        ("plain", "None"),
    ]
    assert {row["round"] for row in found[1][1].rows} == {0, 1, 2}


#: What clients are told beside the round, by arm.
TOLD: dict[str, dict[str, Any]] = {
    "plain": {},
    "aligned*0.25": {"chance": 0.25},
    "aligned*0.5/fisher(batches=3)": {"chance": 0.5, "batches": 3, "align": "attention+ffn"},
    "aligned~learned": {},
}


@pytest.mark.parametrize("arm", TOLD)
def test_clients_are_told_what_the_arm_needs(arm: str, play: Play) -> None:
    told: list[dict[str, Any]] = []

    def listening(partition: int) -> Client:
        honest = node(partition)

        def answer(message: Message) -> Message | None:
            if message.metadata.message_type == "train":
                (config,) = message.content.config_records.values()
                told.append({**config})
            return honest(message)

        return answer

    run = play(listening, arms=(arm,), rounds=1)
    default = {"align": "", "chance": Arm.parse("plain").chance, "batches": 0}
    known = {"seed": 0, "start": "same", "last-round": 1, "simulation": run.config.to_json()}
    expected = {**known, **default, **TOLD[arm]}
    assert len(told) == 2
    assert [{name: config[name] for name in expected} for config in told] == [expected] * 2


def test_an_arm_of_some_clients_asks_no_others(play: Play) -> None:
    asked: set[int] = set()

    def listening(partition: int) -> Client:
        honest = node(partition)

        def answer(message: Message) -> Message | None:
            if message.metadata.message_type != "query":
                asked.add(partition)
            return honest(message)

        return answer

    run = play(listening, arms=("plain#0+2",), clients=4, partition="iid")
    assert asked == {0, 2}
    scopes = {row["scope"] for row in read_rows(run.path)} - {"alignment"}
    assert scopes == {"central", "client:0", "client:2", "alone:0", "alone:2"}


def test_clients_without_held_out_rows_are_not_asked_for_scores(play: Play) -> None:
    run = play(arms=("plain",), holdout=0.0, rounds=1)
    assert not run.values("accuracy", scope="client:0")
    assert {name for name, _ in run.evaluated} == {"test"}


def test_rows_of_the_alignment_name_their_cell_and_are_there_once(play: Play) -> None:
    run = play(arms=("aligned*0", "attention*0"), starts=("scrambled",), seeds=(0, 1))
    rows = read_alignment(run.path)
    found = [
        (row["arm"], row["seed"], row["round"], row["client"], row["group"])
        for row in rows
        if "before" in row
    ]
    assert len(found) == len(set(found)) > 0
    assert {cell[:3] for cell in found} == set(
        itertools.product(("aligned*0", "attention*0"), (0, 1), (1, 2))
    )
    assert not any("stage" in row for row in rows)
    about = {(row["setting"], row["start"]) for row in rows}
    assert about == {(run.config.setting, "scrambled")}


def test_only_the_pretrained_start_is_pretrained(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretrain(model: Any, config: SimulationConfig) -> None:
        with torch.no_grad():
            model.classifier.bias.fill_(5)

    monkeypatch.setattr(arm_strategies, "load_pretrained", pretrain)
    starts = ("same", "pretrained")
    run = play(arms=("plain", "joined"), starts=starts, pretrain_data="goemotions_ekman", rounds=1)
    for start, bias in (("same", 0), ("pretrained", 5)):
        first = run.values("accuracy", scope="central", round=0, start=start)
        assert first == {(arm, "central", 0, 0): bias for arm in ("plain", "joined")}


def test_a_client_without_held_out_rows_has_no_score(play: Play) -> None:
    run = play(arms=("plain",), holdout=0.03)
    held = [len(run.task.client_rows(0, client)[1]) for client in range(2)]
    assert sorted(map(bool, held)) == [False, True]
    for client, rows in enumerate(held):
        assert bool(run.values("accuracy", scope=f"client:{client}")) == bool(rows)


def test_cells_leave_no_model_behind() -> None:
    """A long grid would run out of memory."""
    config = SimulationConfig(**{**SMALL, "rounds": 1})
    told = [(config.to_json(), 0, "same", arm) for arm in ("plain", "aligned", "plain/regmean") * 2]
    held = []
    logger = logging.getLogger("flwr")
    handlers, propagate = [*logger.handlers], logger.propagate
    for (*_, arm), (_, _, log, why) in zip(
        told, run_job(told, Path("nowhere"), "of no folder here"), strict=True
    ):
        assert not why
        # Flower's log of this cell, and of no other.
        assert re.findall(r" · (\S+): round (\d)/1$", log, re.MULTILINE) == [(arm, "0"), (arm, "1")]
        held.append(sum(o.numel() for o in gc.get_objects() if isinstance(o, torch.Tensor)))
    assert (logger.handlers, logger.propagate) == (handlers, propagate)
    model = build_model(config, task_of(config.to_json()).data, seed=0)
    assert max(held) - held[0] < sum(parameter.numel() for parameter in model.parameters()) / 2
