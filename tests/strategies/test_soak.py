"""Many rounds with clients that fail in every way: nothing leaks or raises, the average
is exact.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from dataclasses import dataclass

import psutil
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from torch import Tensor

import fedrot
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import FedRot
from fedrot.strategies.wire import lazy_grid
from tests.models import largest_difference
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import (
    FakeGrid,
    failure,
    grid_of,
    model_in,
    reply,
    tensors_of,
)
from tests.strategies.grouped import grouped

#: In ``make test-all`` an update that stayed in every third round is noticed in the
#: process's memory.
ROUNDS = 200 if os.environ.get("FEDROT_TEST_ALL") else 24
CLIENTS, TIMEOUT, QUERY = 8, 60.0, "bert.encoder.layer.0.attention.self.query.weight"
#: Rounds before the first look at memory, and what it may grow by afterwards, in bytes:
#: one update is 78 KB.
WARM_UP = ROUNDS // 2
LARGEST_GROWTH = 4 * 2**20
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
REASONS = {*FAULTS.values(), LATE}
#: As many do well as with faults.
DECK = random.Random(0).sample(["well"] * len(FAULTS) + [*FAULTS], 2 * len(FAULTS))


class Clock:
    """Stands in for ``time``: sleeping takes no time, and the time goes on."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@dataclass
class Plan:
    node: int
    fault: str
    seed: int

    @property
    def weight(self):
        return 0 if self.fault == "no examples" else 1 + self.seed % 50

    def update(self, received):
        """Return the received tensors, each times a positive number: alignment of it
        moves nothing.
        """
        generator = torch.Generator().manual_seed(self.seed)
        return {
            name: tensor * (0.9 + 0.2 * torch.rand((), generator=generator))
            for name, tensor in received.items()
        }

    def answer(self, message):
        if self.fault == "crashed":
            return [failure(message)]
        update = self.update(model_in(message))
        scrambled = fedrot.random_equivalent(update, SYMMETRY, self.seed)
        answer = reply(message, scrambled, self.weight, self.node, loss=0.5)
        arrays = answer.content.array_records["arrays"]
        array = arrays[QUERY]
        if self.fault == "NaN":
            arrays[QUERY] = Array((scrambled[QUERY] * torch.nan).numpy())
        elif self.fault == "missing tensor":
            del arrays[QUERY]
        elif self.fault == "truncated bytes":
            cut = array.data[:-5]
            arrays[QUERY] = Array(array.dtype, array.shape, array.stype, cut)
        return [answer] * (1 + (self.fault == "duplicated"))


class FaultyGrid(FakeGrid):
    """Clients of which some answer wrongly, late or never; it keeps the accounts."""

    def __init__(self):
        super().__init__(grid_of([failure] * CLIENTS).nodes)
        self.random = random.Random(0)
        self.round = 0
        #: The average of what has to be accepted; and what has to be reported, how
        #: often.
        self.expected = {}
        self.faults = Counter()
        self.accepted = []
        self._plans = {}
        self._late = []

    def push_messages(self, messages):
        """Decide what every client does, and answer for those who were late in the last
        round.
        """
        sent = list(messages)
        if not sent:  # Nobody evaluates.
            return []
        self.round += 1
        for i, plan in self._plans.items():
            if plan.fault == "late":
                self._late += plan.answer(self._sent[i])
                self.faults[self.round, plan.node, LATE] += 1
        self._sent.clear()
        ids = super().push_messages(sent)
        self._plans = {}
        # In the order of the nodes: Flower samples them in an order that nothing seeds.
        for node, i in sorted((self._sent[i].metadata.dst_node_id, i) for i in ids):
            fault = DECK[(8 * self.round + node + self.round // 2) % len(DECK)]
            self._plans[i] = Plan(node, fault, self.random.randrange(2**31))
            if fault != "well":
                self.faults[self.round, node, FAULTS[fault]] += 1
        self._average(model_in(self._sent[ids[0]]))
        return ids

    def pull_messages(self, message_ids):
        """Return what has arrived; the first look of a round also finds the last one's
        late answers.
        """
        answers = self._late
        self._late = []
        for i in message_ids:
            if self._plans[i].fault not in ("late", "lost"):
                answers += self._plans[i].answer(self._sent[i])
        return answers

    def _average(self, sent):
        """Average in float64 what has to be accepted."""
        plans = self._plans.values()
        good = [plan for plan in plans if plan.fault in ("well", "duplicated")]
        self.accepted.append(len(good))
        total = sum(plan.weight for plan in good)
        self.expected = {n: torch.zeros(t.shape).double() for n, t in sent.items()}
        for plan in good:
            for name, tensor in plan.update(sent).items():
                self.expected[name] += plan.weight / total * tensor.double()


def memory():
    gc.collect()
    kinds = (Message, ArrayRecord, Array, Tensor)
    alive = Counter(type(o).__name__ for o in gc.get_objects() if type(o) in kinds)
    return psutil.Process().memory_info().rss, alive


@pytest.mark.parametrize(("rounds", "deterministic"), [(ROUNDS, False), (6, True)])
def test_rounds_of_faults_leak_nothing_and_average_what_is_good(
    rounds, deterministic, tmp_path, monkeypatch, caplog
):
    path = tmp_path / "report.jsonl"
    warm = []
    monkeypatch.setattr(lazy_grid, "time", Clock())
    grid = FaultyGrid()

    def check(number, arrays):
        error = largest_difference(tensors_of(arrays), grid.expected) if number else 0.0
        assert error < 1e-5, f"round {number}: {error}"
        if number % 4 == 0 and number >= WARM_UP:
            warm.append(memory())
        return MetricRecord({"error": error})

    settings = grouped(rows=path, deterministic=deterministic)
    strategy = FedRot(SYMMETRY, fraction_evaluate=0.0, **settings)
    result = strategy.start(
        grid, ArrayRecord(state()), rounds, timeout=TIMEOUT, evaluate_fn=check
    )
    assert largest_difference(tensors_of(result.arrays), grid.expected) < 1e-5
    metrics = result.train_metrics_clientapp.values()
    assert [m["fedrot-replies-accepted"] for m in metrics] == grid.accepted
    assert len(grid.accepted) == rounds
    if not deterministic:
        sizes, alive = zip(*warm, strict=True)
        assert all(counts == alive[0] for counts in alive)
        assert max(sizes) - sizes[0] < LARGEST_GROWTH
    # Every fault is reported once, nothing else is, and of each there is one warning at
    # most.
    reported = Counter()
    for row in read_rows(path):
        for what in (row[kind] for kind in ("dropped", "failed") if kind in row):
            reason = next((reason for reason in REASONS if reason in what), what)
            reported[row["round"], row["client"], reason] += 1
    assert reported == grid.faults
    reasons = [reason for *_, reason in reported.elements()]
    assert {*reasons} == REASONS
    dropped = [reason for reason in reasons if reason not in (SILENT, "crashed")]
    warned = Counter(r.msg for r in caplog.records if r.levelname == "WARNING")
    assert warned.pop("Reply of client %d dropped: %s") == len(dropped)
    assert warned.total() <= 1  # Flower's on fraction_evaluate.
