"""Many rounds with clients that fail in every way: nothing leaks or raises, the average is exact."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from torch import Tensor

import fedrot
from fedrot.strategies import FedRot, lazy_grid
from tests.models import State, config_of, largest_difference
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import FakeGrid, failure, reply, tensors_of
from tests.strategies.grouped import grouped

#: With 200 rounds, which take a minute and a half, an update that stayed in every third round is noticed
#: in the process's memory; with fewer, one that stayed in every round.
ROUNDS = 200 if os.environ.get("FEDROT_TEST_ALL") else 100
CLIENTS, TIMEOUT = 20, 60.0
#: In bytes. One update is 78 KB.
WARM_UP, LARGEST_GROWTH = 45, 4 * 2**20
SILENT, LATE = "No answer before the timeout", "It matches no request of this round"
#: Fault -> what the report says of it, None where there is nothing wrong.
FAULTS: dict[str, str | None] = {
    "late": SILENT,
    "lost": SILENT,
    "crashed": "crashed",
    "duplicated": "Its sender has already answered in this round",
    "NaN": "holds NaN or Inf",
    "Inf": "holds NaN or Inf",
    "wrong shape": "has shape",
    "missing tensor": "is missing",
    "truncated bytes": "bytes of values instead of",
    "wrong header": "no readable npy header",
    "no examples": "The metric 'num-examples' is 0",
}
#: As many well as with faults.
DRAWN = ["well"] * len(FAULTS) + list(FAULTS)
#: One tensor of the attention, one of the FFN, one outside of both.
TARGETS = [
    name for name in state() if name.endswith(("query.weight", "dense.bias", "embeddings.weight"))
]


class Clock:
    """Stands in for ``time``: sleeping takes no time, and the time goes on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Plan:
    """What one client does in one round."""

    node: int
    fault: str
    seed: int
    at: float


def stretched(tensors: State, seed: int) -> State:
    """Return an update whose coordinates are those of ``tensors`` beyond doubt.

    Every tensor is ``tensors``' times a positive number of its own, so that what alignment maximises,
    the trace of a positive definite matrix, is largest where nothing moves: alignment of the update,
    in whatever coordinates, ends exactly here, and the oracle needs no alignment of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    return {n: t * (0.9 + 0.2 * torch.rand((), generator=generator)) for n, t in tensors.items()}


def spoilt(arrays: ArrayRecord, fault: str, seed: int) -> ArrayRecord:
    """Return a record that is no update any more."""
    name = TARGETS[seed % len(TARGETS)]
    array, tensor = arrays[name], torch.from_numpy(arrays[name].numpy()).clone()
    if fault in ("NaN", "Inf"):
        tensor.view(-1)[seed % tensor.numel()] = float(fault)
        arrays[name] = Array(tensor.numpy())
    elif fault == "wrong shape":
        arrays[name] = Array(tensor[..., 1:].contiguous().numpy())
    elif fault == "missing tensor":
        del arrays[name]
    elif fault == "truncated bytes":
        data = array.data[: len(array.data) - 1 - seed % tensor.nbytes]
        arrays[name] = Array(array.dtype, array.shape, array.stype, data)
    elif fault == "wrong header":
        data = array.data[:6] + bytes(reversed(array.data[6:40])) + array.data[40:]
        arrays[name] = Array(array.dtype, array.shape, array.stype, data)
    return arrays


class FaultyGrid(FakeGrid):
    """Clients that answer at times of their own, and some of them wrongly; it keeps the accounts.

    Attributes:
        expected: after a round was played, the average of what has to be accepted.
        faults: what has to be reported, how often: round, client, and part of the reason.
    """

    def __init__(self, clock: Clock, seed: int) -> None:
        super().__init__(dict.fromkeys(range(100, 100 + CLIENTS), failure))
        self.clock = clock
        self.random = random.Random(seed)
        self.round = 0
        self.expected: dict[str, Tensor] = {}
        self.faults: Counter[tuple[int, int, str]] = Counter()
        self.accepted: list[int] = []
        self._plans: dict[str, Plan] = {}
        self._late: list[Message] = []
        self._start = 0.0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Draw what every client does, and answer for those who were late in the last round."""
        sent = list(messages)
        if not sent:  # Nobody evaluates.
            return []
        ended = {i: self._sent[i] for i, plan in self._plans.items() if plan.fault == "late"}
        self._late = [self._answer(self._plans[i], message) for i, message in ended.items()]
        self._sent.clear()
        self.round += 1
        self._start = self.clock.now
        for plan in self._plans.values():
            if plan.fault == "late":
                self.faults[self.round, plan.node, LATE] += 1
        ids = super().push_messages(sent)
        # In the order of the nodes: Flower samples them in an order that nothing seeds.
        nodes = sorted((self._sent[i].metadata.dst_node_id, i) for i in ids)
        self._plans = {i: self._plan(node) for node, i in nodes}
        self._account(tensors_of(self._sent[ids[0]].content.array_records["arrays"]))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return what has arrived; the first look of a round also finds the last one's late answers."""
        answers, self._late = self._late, []
        for message_id in message_ids:
            plan = self._plans[message_id]
            if plan.at <= self.clock.now - self._start:
                answer = self._answer(plan, self._sent[message_id])
                answers += [answer, answer] if plan.fault == "duplicated" else [answer]
        return answers

    def _plan(self, node: int) -> Plan:
        fault = self.random.choice(DRAWN)
        at = self.random.uniform(0.0, 0.9 * TIMEOUT)
        return Plan(
            node, fault, self.random.randrange(2**31), math.inf if fault in ("late", "lost") else at
        )

    def _answer(self, plan: Plan, message: Message) -> Message:
        if plan.fault == "crashed":
            return failure(message)
        update = stretched(tensors_of(message.content.array_records["arrays"]), plan.seed)
        scrambled = fedrot.random_equivalent(update, SYMMETRY, plan.seed)
        examples = 0 if plan.fault == "no examples" else self._weight(plan)
        answer = reply(message, scrambled, examples, plan.node, loss=0.5)
        spoilt(answer.content.array_records["arrays"], plan.fault, plan.seed)
        return answer

    def _account(self, sent: State) -> None:
        """Average in float64 what has to be accepted, and note what has to be reported."""
        good = [plan for plan in self._plans.values() if plan.fault in ("well", "duplicated")]
        updates = [(self._weight(plan), stretched(sent, plan.seed)) for plan in good]
        total = sum(weight for weight, _ in updates)
        self.expected = {
            name: sum((w * u[name].double() for w, u in updates), torch.zeros(())) / total
            for name in sent
        }
        self.accepted.append(len(good))
        for plan in self._plans.values():
            if reason := FAULTS.get(plan.fault):
                self.faults[self.round, plan.node, reason] += 1

    @staticmethod
    def _weight(plan: Plan) -> int:
        return 1 + plan.seed % 50


class Warnings(logging.Handler):
    """Counts what Flower's log warned of, without keeping it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.found[record.levelname, str(record.msg)] += 1


@contextmanager
def warned() -> Iterator[Warnings]:
    """Count warnings in the place of all handlers: pytest's would keep every record, 60 KB a round."""
    logger, handler = logging.getLogger("flwr"), Warnings()
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield handler
    finally:
        logger.handlers, logger.propagate = before


@dataclass
class Memory:
    """What a process holds at the end of a round."""

    round: int
    resident: int
    alive: Counter[str]

    @classmethod
    def now(cls, number: int) -> Memory:
        gc.collect()
        kinds = (Message, ArrayRecord, Array, Tensor)
        alive = Counter(type(o).__name__ for o in gc.get_objects() if type(o) in kinds)
        return cls(number, psutil.Process().memory_info().rss, alive)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def reported(path: Path) -> list[tuple[int, int, str]]:
    """Return what the report says went wrong: round, client, reason."""
    kinds = ("dropped", "failed")
    return [(r["round"], r["client"], r[kind]) for r in rows_of(path) for kind in kinds if kind in r]


def play(
    rounds: int, folder: Path, monkeypatch: pytest.MonkeyPatch, every: int, **settings: Any
) -> tuple[FaultyGrid, list[Memory]]:
    """Play the rounds and check of each that its model is the average of what was to be accepted.

    Returns:
        The grid with its accounts, and the memory after every so many rounds.
    """
    clock = Clock()
    monkeypatch.setattr(lazy_grid, "time", clock)
    grid, memory = FaultyGrid(clock, 0), list[Memory]()

    def check(number: int, arrays: ArrayRecord) -> MetricRecord:
        error = largest_difference(tensors_of(arrays), grid.expected) if number else 0.0
        assert error < 1e-5, f"round {number}: {error}"
        if number % every == 0:
            memory.append(Memory.now(number))
        return MetricRecord({"error": error})

    strategy = FedRot(
        config_of(NAME),
        fraction_evaluate=0.0,
        **grouped(rows=folder / "report.jsonl", **settings),
    )
    result = strategy.start(grid, ArrayRecord(state()), rounds, timeout=TIMEOUT, evaluate_fn=check)
    assert largest_difference(tensors_of(result.arrays), grid.expected) < 1e-5
    counts = [m["fedrot-replies-accepted"] for m in result.train_metrics_clientapp.values()]
    assert counts == grid.accepted
    assert len(counts) == rounds
    return grid, memory


def check_reports(grid: FaultyGrid, path: Path, warnings: Warnings) -> None:
    """Every fault is reported once, nothing else is, and of each there is one warning at most."""
    rows = reported(path)
    reasons = {reason for reason in FAULTS.values() if reason} | {LATE}
    found = Counter((r, c, next((w for w in reasons if w in what), what)) for r, c, what in rows)
    assert found - grid.faults == grid.faults - found == Counter()
    assert {plan_reason for _, _, plan_reason in found} == reasons
    silent = sum(n for (_, _, reason), n in found.items() if reason in (SILENT, "crashed"))
    aside = ("WARNING", "Reply of client %d dropped: %s")
    assert warnings.found.pop(aside) == found.total() - silent
    assert sum(warnings.found.values()) <= 1, warnings.found  # Flower's on fraction_evaluate.


def test_rounds_of_faults_leak_nothing_and_average_what_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warned() as warnings:
        grid, memory = play(ROUNDS, tmp_path, monkeypatch, every=10)
    check_reports(grid, tmp_path / "report.jsonl", warnings)
    # A fault has to be as likely as this for the test to say anything.
    assert min(Counter(reason for _, _, reason in grid.faults.elements()).values()) > ROUNDS / 4
    warm = [m for m in memory if m.round >= WARM_UP]
    assert {tuple(sorted(m.alive.items())) for m in warm} == {tuple(sorted(warm[0].alive.items()))}
    growth = max(m.resident for m in warm) - warm[0].resident
    assert growth < LARGEST_GROWTH, f"{growth} bytes in {ROUNDS - WARM_UP} rounds"
    stages = [
        (row["round"], row["stage"]) for row in rows_of(tmp_path / "report.jsonl") if "stage" in row
    ]
    assert stages == [
        (0, "server"),
        *((n, s) for n in range(1, ROUNDS + 1) for s in ("train", "server")),
    ]


def test_rounds_that_hold_all_updates_average_what_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warned() as warnings:
        grid, _ = play(25, tmp_path, monkeypatch, every=100, deterministic=True)
    check_reports(grid, tmp_path / "report.jsonl", warnings)
