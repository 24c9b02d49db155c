"""Many rounds with clients that fail in every way: nothing leaks or raises, the average
is exact.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from torch import Tensor

import fedrot
from fedrot.strategies import FedRot
from fedrot.strategies.wire import lazy_grid
from tests.models import State, config_of, largest_difference
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import FakeGrid, failure, reply, tensors_of
from tests.strategies.grouped import grouped

#: In ``make test-all`` an update that stayed in every third round is noticed in the
#: process's memory.
ROUNDS = 200 if os.environ.get("FEDROT_TEST_ALL") else 24
CLIENTS, TIMEOUT, QUERY = 8, 60.0, "bert.encoder.layer.0.attention.self.query.weight"
#: Rounds before the first look at memory, and what it may grow by afterwards, in bytes:
#: one update is 78 KB.
WARM_UP, LARGEST_GROWTH = ROUNDS // 2, 4 * 2**20
SILENT, LATE = "No answer before the timeout", "It matches no request of this round"
#: Fault -> what the report says of it.
FAULTS = {
    "late": SILENT,
    "lost": SILENT,
    "crashed": "crashed",
    "duplicated": "Its sender has already answered in this round",
    "NaN": "holds NaN or Inf",
    "missing tensor": "is missing",
    "truncated bytes": "bytes of values instead of",
    "no examples": "The metric 'num-examples' is 0",
}


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
    node: int
    fault: str
    seed: int
    at: float

    @property
    def weight(self) -> int:
        return 0 if self.fault == "no examples" else 1 + self.seed % 50

    def update(self, received: State) -> State:
        """Return the received tensors, each times a positive number: alignment of it
        moves nothing.
        """
        generator = torch.Generator().manual_seed(self.seed)
        return {
            n: t * (0.9 + 0.2 * torch.rand((), generator=generator))
            for n, t in received.items()
        }

    def answer(self, message: Message) -> Message:
        if self.fault == "crashed":
            return failure(message)
        update = self.update(tensors_of(message.content.array_records["arrays"]))
        scrambled = fedrot.random_equivalent(update, SYMMETRY, self.seed)
        answer = reply(message, scrambled, self.weight, self.node, loss=0.5)
        arrays = answer.content.array_records["arrays"]
        array = arrays[QUERY]
        if self.fault == "NaN":
            arrays[QUERY] = Array((scrambled[QUERY] * torch.nan).numpy())
        elif self.fault == "missing tensor":
            del arrays[QUERY]
        elif self.fault == "truncated bytes":
            arrays[QUERY] = Array(
                array.dtype, array.shape, array.stype, array.data[:-5]
            )
        return answer


class FaultyGrid(FakeGrid):
    """Clients that answer at times of their own, and some of them wrongly; it keeps the
    accounts.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(dict.fromkeys(range(100, 100 + CLIENTS), failure))
        self.clock, self.random, self.round, self._start = (
            clock,
            random.Random(0),
            0,
            0.0,
        )
        #: The average of what has to be accepted; and what has to be reported, how
        #: often.
        self.expected: State = {}
        self.faults: Counter[tuple[int, int, str]] = Counter()
        self.accepted: list[int] = []
        self._deck: list[str] = []
        self._plans: dict[str, Plan] = {}
        self._late: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Draw what every client does, and answer for those who were late in the last
        round.
        """
        sent = list(messages)
        if not sent:  # Nobody evaluates.
            return []
        self.round, self._start = self.round + 1, self.clock.now
        late = {i: plan for i, plan in self._plans.items() if plan.fault == "late"}
        self._late = [plan.answer(self._sent[i]) for i, plan in late.items()]
        self.faults.update((self.round, plan.node, LATE) for plan in late.values())
        self._sent.clear()
        ids = super().push_messages(sent)
        # In the order of the nodes: Flower samples them in an order that nothing seeds.
        nodes = sorted((self._sent[i].metadata.dst_node_id, i) for i in ids)
        self._plans = {i: self._plan(node) for node, i in nodes}
        self._account(tensors_of(self._sent[ids[0]].content.array_records["arrays"]))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return what has arrived; the first look of a round also finds the last one's
        late answers.
        """
        answers, self._late = self._late, []
        for message_id in message_ids:
            plan = self._plans[message_id]
            if plan.at <= self.clock.now - self._start:
                answer = plan.answer(self._sent[message_id])
                answers += [answer, answer] if plan.fault == "duplicated" else [answer]
        return answers

    def _plan(self, node: int) -> Plan:
        if not self._deck:  # As many well as with faults.
            self._deck = ["well"] * len(FAULTS) + list(FAULTS)
            self.random.shuffle(self._deck)
        fault, at = self._deck.pop(), self.random.uniform(0.0, 0.9 * TIMEOUT)
        at = math.inf if fault in ("late", "lost") else at
        return Plan(node, fault, self.random.randrange(2**31), at)

    def _account(self, sent: State) -> None:
        """Average in float64 what has to be accepted, and note what has to be
        reported.
        """
        plans = self._plans.values()
        good = [plan for plan in plans if plan.fault in ("well", "duplicated")]
        total, zero = sum(plan.weight for plan in good), torch.zeros(())
        updates = [(plan.weight, plan.update(sent)) for plan in good]
        self.expected = {
            n: sum((w * u[n].double() for w, u in updates), zero) / total for n in sent
        }
        self.accepted.append(len(good))
        self.faults.update(
            (self.round, p.node, FAULTS[p.fault]) for p in plans if p.fault != "well"
        )


def memory() -> tuple[int, Counter[str]]:
    gc.collect()
    kinds = (Message, ArrayRecord, Array, Tensor)
    alive = Counter(type(o).__name__ for o in gc.get_objects() if type(o) in kinds)
    return psutil.Process().memory_info().rss, alive


@pytest.mark.parametrize(("rounds", "deterministic"), [(ROUNDS, False), (6, True)])
def test_rounds_of_faults_leak_nothing_and_average_what_is_good(
    rounds: int,
    deterministic: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, path, warm = (
        Clock(),
        tmp_path / "report.jsonl",
        list[tuple[int, Counter[str]]](),
    )
    monkeypatch.setattr(lazy_grid, "time", clock)
    grid = FaultyGrid(clock)

    def check(number: int, arrays: ArrayRecord) -> MetricRecord:
        error = largest_difference(tensors_of(arrays), grid.expected) if number else 0.0
        assert error < 1e-5, f"round {number}: {error}"
        if number % 4 == 0 and number >= WARM_UP:
            warm.append(memory())
        return MetricRecord({"error": error})

    settings: dict[str, Any] = grouped(rows=path, deterministic=deterministic)
    strategy = FedRot(config_of(NAME), fraction_evaluate=0.0, **settings)
    result = strategy.start(
        grid, ArrayRecord(state()), rounds, timeout=TIMEOUT, evaluate_fn=check
    )
    assert largest_difference(tensors_of(result.arrays), grid.expected) < 1e-5
    counts = [
        m["fedrot-replies-accepted"] for m in result.train_metrics_clientapp.values()
    ]
    assert counts == grid.accepted
    assert len(counts) == rounds
    if not deterministic:
        assert len({tuple(sorted(alive.items())) for _, alive in warm}) == 1
        assert max(resident for resident, _ in warm) - warm[0][0] < LARGEST_GROWTH
    # Every fault is reported once, nothing else is, and of each there is one warning at
    # most.
    rows, kinds = (
        [json.loads(line) for line in path.read_text().splitlines()],
        ("dropped", "failed"),
    )
    reported = [
        (row["round"], row["client"], row[kind])
        for row in rows
        for kind in kinds
        if kind in row
    ]
    reasons = {*FAULTS.values(), LATE}
    found = Counter(
        (n, c, next((w for w in reasons if w in what), what)) for n, c, what in reported
    )
    assert found - grid.faults == grid.faults - found == Counter()
    assert {reason for _, _, reason in found} == reasons
    silent = sum(
        n for (_, _, reason), n in found.items() if reason in (SILENT, "crashed")
    )
    warned = Counter(
        record.msg for record in caplog.records if record.levelname == "WARNING"
    )
    assert warned.pop("Reply of client %d dropped: %s") == found.total() - silent
    assert warned.total() <= 1  # Flower's on fraction_evaluate.
