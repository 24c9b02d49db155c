"""One reply keeps the server busy for a bounded time, takes bounded memory, and writes one line."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from torch import Tensor

import fedrot
from fedrot.aggregation import RegMean
from fedrot.collect.gram_sketch import sketched
from fedrot.errors import UpdateError
from fedrot.strategies import Aligned
from fedrot.strategies.flower_compat import NUMPY
from fedrot.strategies.round.evaluations import readable_evaluations
from fedrot.strategies.round.inbox import Asked, Inbox, Schema
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.settings import OtherBasis
from fedrot.strategies.wire import records
from fedrot.strategies.wire.arrays import STATISTICS, TIED, encode, to_arrays, without_arrays
from fedrot.strategies.wire.sketches import SKETCH, encode_sketch
from fedrot.strategies.wire.statistics import read_statistics
from tests.models import near
from tests.strategies.classifier import SYMMETRY, WHOLE, permuted, state
from tests.strategies.fakes import FakeGrid, arrays_of, broadcast, failure, play, reply

MIB = 2**20
BASE = {"w": torch.ones(4, 3), "v": torch.ones(2, 3), "b": torch.zeros(3)}
GOOD = to_arrays(BASE)
METRICS = MetricRecord({"num-examples": 1})
FORGED = "first\n\x1b[31msecond " * 50_000
(ASKED,) = broadcast(FedAvg(min_train_nodes=1, min_available_nodes=1), BASE, 1)


def one(tensor: Tensor) -> Array:
    return encode("x", tensor)


def content(arrays: Any = GOOD, **more: Any) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord(dict(arrays)), "metrics": METRICS, **more})


def with_statistics(arrays: dict[str, Array]) -> RecordDict:
    return content(**{STATISTICS: ArrayRecord(arrays)})


def with_array(stype: str = NUMPY, data: bytes = GOOD["w"].data, dtype: str = "float32") -> RecordDict:
    return content({**GOOD, "w": Array(dtype, (4, 3), stype, data)})


LARGE = one(torch.zeros(MIB // 4))
SKETCHED = encode_sketch(sketched(torch.eye(3), 1))
#: Contents of about 1 MB on the wire each; arrays that are equal travel once.
BOMBS: dict[str, Callable[[], RecordDict]] = {
    "arrays": lambda: content({**GOOD, **{f"x{i}": one(torch.zeros(1)) for i in range(5000)}}),
    "array records": lambda: content(**{f"x{i}": ArrayRecord({}) for i in range(10_000)}),
    "metric records": lambda: content(**{f"x{i}": METRICS for i in range(10_000)}),
    "config records": lambda: content(**{f"x{i}": ConfigRecord({"a": 1}) for i in range(10_000)}),
    "config list": lambda: content(x=ConfigRecord({"a": [1] * 100_000})),
    "metric keys": lambda: content(
        metrics=MetricRecord({"num-examples": 1, **{f"x{i}": 1.0 for i in range(60_000)}})
    ),
    "metric lists": lambda: content(
        metrics=MetricRecord({"num-examples": 1, **{f"x{i}": [] for i in range(60_000)}})
    ),
    "name": lambda: content({**GOOD, "x" * MIB: one(torch.zeros(1))}),
    "dtype": lambda: with_array(dtype="f" * MIB),
    "stype": lambda: with_array("f" * MIB),
    "tied to a long name": lambda: with_array(TIED, b"x" * MIB),
    "axes": lambda: content({**GOOD, "w": Array("float32", (1,) * 200_000, NUMPY, b"")}),
    "statistics": lambda: with_statistics({f"gram/x{i}": one(torch.ones(1)) for i in range(5000)}),
    "one large array": lambda: with_statistics({f"gram/x{i}": LARGE for i in range(10_000)}),
    "one name": lambda: with_statistics({"gram/" + "|".join("w" * 300_000): one(torch.eye(3))}),
    "names": lambda: with_statistics({"gram/" + "|".join(map(str, range(150_000))): LARGE}),
    "same statistics": lambda: with_statistics(
        {f"gram/{'|'.join('w' * i)}": one(torch.eye(3)) for i in range(1, 1000)}
    ),
    "sketches": lambda: with_statistics({f"gram/{'|'.join('w' * i)}": SKETCHED for i in range(1, 1000)}),
    "a huge sketch": lambda: with_statistics(
        {"gram/w": Array("float16", (MIB // 4, 0), SKETCH, bytes(MIB))}
    ),
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_reply_of_a_megabyte_takes_bounded_time_and_memory(name: str) -> None:
    message = Message(BOMBS[name](), reply_to=ASKED)
    inbox = Inbox(Asked([ASKED.metadata]), Schema(BASE), RoundRecord(1), copy=True)
    start = time.process_time()
    inbox.read(message)
    # A fifth of a second on the slowest machine we know.
    assert time.process_time() - start < 5
    tracemalloc.start()
    inbox = Inbox(Asked([ASKED.metadata]), Schema(BASE), RoundRecord(1), copy=True)
    inbox.read(message)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 * MIB
    assert all(len(reason) <= 500 and reason.isprintable() for _, reason in inbox.record.dropped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_array_under_many_names_is_decoded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's memory is not traced: each decoded array of bfloat16 takes twice its bytes."""
    decoded: list[str] = []
    decode = records.decode
    monkeypatch.setattr(records, "decode", lambda name, a: decoded.append(name) or decode(name, a))
    large = one(torch.zeros(1000, dtype=dtype))
    given = ArrayRecord({f"{kind}/{name}": large for kind in ("gram", "fisher") for name in BASE})
    with pytest.raises(UpdateError, match="shape"):
        read_statistics(RecordDict({STATISTICS: given}), {n: tuple(t.shape) for n, t in BASE.items()})
    assert len(decoded) == 1


def test_configurations_that_are_kept_have_a_bound_together() -> None:
    many = {f"x{i}": ConfigRecord({"a": "x" * 30_000}) for i in range(10)}
    assert len(without_arrays(RecordDict({"metrics": METRICS, **many})).config_records) == 2


# Lines of the log


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    return [line for line in found if "first" in line]


def test_the_reason_of_a_failed_evaluation_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    strategy = type("Tried", (Aligned, FedAvg), {})(None, alignment=None)
    grid = FakeGrid({100 + i: failure for i in range(2)})
    asked = list(strategy.configure_evaluate(1, ArrayRecord(BASE), ConfigRecord(), grid))
    good = Message(RecordDict({"metrics": METRICS}), reply_to=asked[1])
    with caplog.at_level("INFO", logger="flwr"):
        replies = [Message(Error(1, FORGED), reply_to=asked[0])] * 3 + [good]
        assert strategy.aggregate_evaluate(1, replies) is not None
    (line,) = lines(caplog)
    assert line.strip().isprintable()
    assert len(line) < 1000


@pytest.mark.parametrize("fault", ["error", "name"])
def test_an_answer_to_a_request_for_matching_is_one_line(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(message: Message) -> Message:
        if fault == "error":
            return Message(Error(1, FORGED), reply_to=message)
        elements = ArrayRecord({FORGED: one(torch.eye(3))})
        return Message(RecordDict({"fedrot-elements": elements}), reply_to=message)

    other_basis = OtherBasis(options=WHOLE, at_clients=True)
    strategy = fedrot.strategies.FedRot(SYMMETRY, other_basis=other_basis, fraction_evaluate=0.0)
    updates = [permuted(near(state(), 0.01, seed), seed) for seed in (1, 2)]
    with caplog.at_level("INFO", logger="flwr"):
        play(strategy, state(), updates, [answer, answer])
    found = lines(caplog)
    assert found
    assert all(line.isprintable() and len(line) < 1000 for line in found)


def test_an_evaluation_without_content_is_dropped() -> None:
    empty = Message(RecordDict({"metrics": METRICS}), reply_to=ASKED)
    empty.__dict__["_content"] = None
    assert readable_evaluations([empty], Asked([ASKED.metadata]), "num-examples") == []


# What the aggregations and Flower's strategies divide by


@pytest.mark.parametrize("smallest", [-60, -25, -8])
@pytest.mark.parametrize("place", [0, 2])
def test_a_gram_matrix_beside_which_no_other_is_seen_gives_the_mean(smallest: int, place: int) -> None:
    """Its columns differ by many orders of magnitude; its client's weights are ordinary."""
    generator = torch.Generator().manual_seed(0)
    root = torch.logspace(smallest, 14.9, 16, dtype=torch.float64)
    inputs = torch.randn(32, 16, generator=generator, dtype=torch.float64)
    clients = [(torch.randn(3, 16, generator=generator), 10.0, inputs.T @ inputs) for _ in range(2)]
    clients.insert(place, (torch.zeros(3, 16), 1e12, torch.outer(root, root)))
    merge = RegMean(alpha=1.0)
    for update, weight, gram in clients:
        merge.add({"w": update}, weight, {"gram": {"w": gram}})
    largest = max(float(torch.linalg.vector_norm(update)) for update, _, _ in clients)
    assert float(torch.linalg.vector_norm(merge.result()["w"])) <= 1e4 * largest


PRIVACY: dict[type, dict[str, Any]] = {
    DifferentialPrivacyServerSideFixedClipping: {"clipping_norm": 1.0},
    DifferentialPrivacyServerSideAdaptiveClipping: {},
}


@pytest.mark.parametrize("wrapper", PRIVACY)
@pytest.mark.parametrize("change", [0.0, 1e-30])
def test_an_update_that_changes_nothing_can_be_clipped(wrapper: type, change: float) -> None:
    base = {"w": torch.zeros(2, 3)}
    settings = {"noise_multiplier": 0.0, "num_sampled_clients": 2, **PRIVACY[wrapper]}
    strategy: Any = type("Private", (Aligned, wrapper), {})(None, FedAvg(), alignment=None, **settings)
    grid = FakeGrid({100 + i: failure for i in range(2)})
    asked = list(strategy.configure_train(1, ArrayRecord(base), ConfigRecord(), grid))
    sent = [base["w"] + change, base["w"] + 0.01]
    replies = [reply(m, {"w": w}, 1, i) for i, (m, w) in enumerate(zip(asked, sent, strict=True))]
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays_of(arrays)["w"] == pytest.approx(0.005)
