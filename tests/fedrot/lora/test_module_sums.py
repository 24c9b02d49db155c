"""The sums of several modules, computed in several threads at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from fedrot.errors import UpdateError
from fedrot.lora import AdapterOptions, average_adapters
from fedrot.lora.module_sums import in_threads
from tests.fedrot.lora.test_averaging import SETTINGS, Adapter, pair, updates

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_items_share_the_threads(two_threads: None) -> None:
    together = threading.Barrier(2, timeout=60)  # Passes only if two items are computed at a time.

    def work(item: int) -> tuple[int, int]:
        together.wait()
        return item, torch.get_num_threads()

    assert in_threads(work, range(4), CPU) == [(item, 1) for item in range(4)]
    assert torch.get_num_threads() == 2
    assert in_threads(lambda _: torch.get_num_threads(), [0], CPU) == [2]
    found = in_threads(lambda _: threading.current_thread(), range(3), torch.device("cuda"))
    assert set(found) == {threading.current_thread()}


def test_the_first_error_is_raised_and_the_threads_are_given_back(two_threads: None) -> None:
    def work(item: int) -> None:
        if item:
            raise UpdateError(f"item {item}")

    with pytest.raises(UpdateError, match="item 1"):
        in_threads(work, range(4), CPU)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("options", [AdapterOptions("exact"), AdapterOptions("mean")], ids=str)
def test_threads_do_not_change_the_average(options: AdapterOptions, two_threads: None) -> None:
    check_threads(options)


def check_threads(options: AdapterOptions) -> None:
    """Compare averages on one thread and on two."""
    start = adapter(0)
    clients = [{name: start[name] + 0.3 * t for name, t in adapter(n).items()} for n in range(1, 13)]
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(average_adapters(updates(clients, range(2, 14)), SETTINGS, options, start))
    (alone, report), (shared, other) = found
    assert list(alone) == list(shared)
    for name, tensor in alone.items():
        torch.testing.assert_close(shared[name], tensor, rtol=1e-9, atol=1e-9)
    assert list(other.error) == list(report.error)
    assert other.mean_error == pytest.approx(report.mean_error, abs=1e-7)


def adapter(seed: int) -> Adapter:
    """Return an adapter of five modules of different sizes, in float64."""
    found: Adapter = {}
    for module in range(5):
        found |= pair(seed + module, 4, 30 + module, 20 + module, f"base_model.model.layers.{module}")
    return found
