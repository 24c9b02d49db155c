"""On an accelerator everything stays there, and comes out as on the CPU; proved on a
pretended one.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
import torch

from fedrot import AlignmentOptions, UpdateError, align, tensors
from fedrot.aggregation import Fisher, Mean, RegMean
from fedrot.task_head.fit import fitted_task_heads
from fedrot.task_head.sums import ClassSums
from fedrot.tensors import full_float32, spare_threads
from tests.families import symmetry_for
from tests.fedrot.oracles import seeded
from tests.fedrot.pairs import OPTIONS, beside, movable_options
from tests.fedrot.pretend import DEVICE, Pretend
from tests.models import EAGER, largest_difference

#: How often the host may wait for the device while one layer is aligned to an anchor it
#: is near or far from. A rotation's iterations ask after every step whether they are
#: done, up to 24 times in a batch. The sizes of a layer's groups beside their anchor
#: are four times more, and far from it the sizes of both once more for each group.
READS = {"near": 16, "far": 37}


@pytest.fixture(autouse=True)
def rounding():
    """Allow what a user may allow, so that what has to forbid it is seen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def _fetched(tensors):
    assert {tensor.device for tensor in tensors.values()} == {DEVICE}
    return {name: tensor.cpu() for name, tensor in tensors.items()}


#: Options of families here, beside those of all tests of families.
MORE = {
    "orders": AlignmentOptions(
        parts=("heads", "attention", "ffn"), within_heads="permutation", chance=0
    ),
    "heads": AlignmentOptions(parts=("heads",), chance=0),
    "fisher": AlignmentOptions(parts=("heads", "ffn"), chance=0),
}


MORE |= OPTIONS


@cache
def models(family):
    """Return an anchor, a client near it and one far from it."""
    return beside(family, 0.02, 1.0)


@pytest.mark.parametrize(
    ("family", "which"),
    [
        *(("bert", which) for which in MORE),
        ("mixtral", "eager"),
        ("mixtral", "heads"),
        ("llama", "layers"),
    ],
)
def test_alignment_on_the_device_is_that_on_the_cpu(family, which):
    symmetry = symmetry_for(family)
    anchor, *clients = models(family)
    options = movable_options(MORE[which], family)
    for client in clients:
        wanted = align(client, anchor, symmetry, options)
        moved = wanted.apply(client)
        back = wanted.inverse().apply(moved)
        with Pretend() as device:
            there = device.put(client)
            found = align(there, device.put(anchor), symmetry, options)
            assert {move.element.device for move in found.moves} <= {DEVICE}
            device.uploads = 0
            result = found.apply(there)
            again = found.inverse().apply(result)
            assert device.uploads == 0
            ours = _fetched(result), _fetched(again), found.apply(client)
            with pytest.raises(UpdateError, match="one device"):
                align(there, anchor, symmetry, replace(EAGER, parts=("ffn",)))
        for state, expected in zip(ours, (moved, back, moved), strict=True):
            assert largest_difference(state, expected) <= 1e-6
        reports = found.report, wanted.report
        after, expected = (report.after for report in reports)
        assert after == pytest.approx(expected, rel=1e-6)
        rows, expected = ([row.moved for row in r.groups] for r in reports)
        assert rows == expected


@pytest.mark.parametrize(
    ("family", "which"),
    [
        ("bert", "near"),
        ("bert", "far"),
        ("gpt2", "near"),
        ("llama", "far"),
        ("t5", "near"),
        ("qwen3", "far"),
        ("vit", "near"),
    ],
)
def test_the_host_seldom_waits(family, which):
    symmetry = symmetry_for(family)
    close = which == "near"
    with Pretend() as device:
        anchor, near, far = map(device.put, models(family))
        there = near if close else far
        # Far from the anchor, chance is found by matching null models, for each of
        # which the host waits.
        alignment = align(
            there, anchor, symmetry, OPTIONS["default" if close else "eager"]
        )
        assert 0 < device.reads <= READS[which] * symmetry.layers
        assert not (close and device.uploads)
        device.reads = device.uploads = 0
        alignment.apply(there)
        assert (device.reads, device.uploads) == (0, 0)


def _statistics(client):
    """Return statistics of every kind that aggregators ask for."""
    generator = seeded(3)
    grams = {}
    fisher = {}
    for name, tensor in client.items():
        if name.endswith("output.dense.weight"):
            x = torch.randn(50, tensor.shape[1], generator=generator)
            grams[name] = x.mT @ x
        fisher[name] = torch.rand(tensor.shape, generator=generator)
    rows = torch.arange(len(client["classifier.weight"])) > 0
    trained = {f"classifier.{name}": rows for name in ("weight", "bias")}
    return {"gram": grams, "fisher": fisher, "trained": trained}


AGGREGATORS = {
    "mean": (Mean, ()),
    "mean of trained rows": (Mean, ("trained",)),
    "regmean": (RegMean, ("gram", "trained")),
    "regmean of all inputs": (lambda: RegMean(1.0), ("gram",)),
    "fisher": (Fisher, ("fisher", "trained")),
}


@pytest.mark.parametrize("which", AGGREGATORS)
def test_aggregation_on_the_device_is_that_on_the_cpu(which):
    anchor, *clients = models("bert")
    build, kinds = AGGREGATORS[which]
    options = MORE["fisher" if "fisher" in kinds else "eager"]

    def merged(put):
        aggregator = build()
        for weight, client in enumerate(clients, start=1):
            statistics = _statistics(client)
            there = put(client)
            alignment = align(there, put(anchor), symmetry_for("bert"), options)
            moved = alignment.transport({kind: put(statistics[kind]) for kind in kinds})
            aggregator.add(alignment.apply(there), weight, moved)
        return aggregator.result()

    wanted = merged(dict)
    with Pretend() as device:
        found = _fetched(merged(device.put))
    assert largest_difference(found, wanted) <= 1e-6


PRODUCTS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


@pytest.mark.parametrize(
    "chosen", [("tf32", "none"), ("tf32", "bf16"), ("ieee", "ieee"), ("none", "tf32")]
)
def test_what_a_user_allowed_by_backend_is_forbidden_and_restored(
    chosen,
):
    """With switches that torch's older ones do not know of, and refuse to be read
    beside.
    """
    torch.set_float32_matmul_precision("highest")
    try:
        for backend, value in zip(PRODUCTS, chosen, strict=True):
            backend.fp32_precision = value
        with full_float32():
            assert [backend.fp32_precision for backend in PRODUCTS] == ["ieee", "ieee"]
            assert torch.get_float32_matmul_precision() == "highest"
        assert [backend.fp32_precision for backend in PRODUCTS] == list(chosen)
    finally:
        for backend in PRODUCTS:
            backend.fp32_precision = "none"


def test_what_a_user_allowed_is_forbidden_and_restored():
    with Pretend() as device:
        matrix = device.put({"m": torch.eye(3)})["m"]
        with pytest.raises(RuntimeError, match="TF32"):
            matrix @ matrix
        with full_float32():
            assert not PRODUCTS[0].allow_tf32
            assert torch.equal((matrix @ matrix).cpu(), torch.eye(3))
    assert PRODUCTS[0].allow_tf32
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what runs")
def test_beside_busy_processes_one_thread_computes_and_the_setting_returns():
    loop = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(loop) for _ in range(os.cpu_count())]
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    counts = []
    try:
        deadline = time.monotonic() + 60
        while 1 not in counts and time.monotonic() < deadline:
            with suppress(UpdateError), spare_threads():
                counts.append(torch.get_num_threads())
                raise UpdateError("not finite")
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
        for process in busy:
            process.kill()
            process.wait()
    assert counts[-1] == 1


def test_a_fit_of_task_heads_has_the_bits_of_one_thread_however_many_cores_are_idle(
    monkeypatch,
):
    counts = []
    eigh = torch.linalg.eigh

    def noted(matrix):
        counts.append(torch.get_num_threads())
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", noted)
    monkeypatch.setattr(tensors, "_idle_cores", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        hot, rows = torch.eye(2).repeat(5, 1).double(), torch.randn(10, 3).double()
        sums = ClassSums(hot.sum(0), hot.mT @ rows, rows.mT @ rows)
        fitted_task_heads(sums, [0.5])
        assert counts == [1]
    finally:
        torch.set_num_threads(before)
