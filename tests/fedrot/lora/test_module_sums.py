"""The sums of several modules, computed in several threads at a time."""

import threading

import pytest
import torch

from fedrot.errors import UpdateError
from fedrot.lora.module_sums import in_threads

CPU = torch.device("cpu")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_items_share_the_threads(two_threads):
    together = threading.Barrier(
        2, timeout=60
    )  # Passes only if two items are computed at a time.

    def work(item):
        together.wait()
        return item, torch.get_num_threads()

    assert in_threads(work, range(4), CPU) == [(item, 1) for item in range(4)]
    assert torch.get_num_threads() == 2
    assert in_threads(lambda _: torch.get_num_threads(), [0], CPU) == [2]
    found = in_threads(
        lambda _: threading.current_thread(), range(3), torch.device("cuda")
    )
    assert set(found) == {threading.current_thread()}


def test_the_first_error_is_raised_and_the_threads_are_given_back(
    two_threads,
):
    def work(item):
        if item:
            raise UpdateError(f"item {item}")

    with pytest.raises(UpdateError, match="item 1"):
        in_threads(work, range(4), CPU)
    assert torch.get_num_threads() == 2
