"""Fixtures of the strategies' tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from tests.strategies.runs import Server


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Return what Flower's log warned of so far."""
    logging.getLogger("flwr").propagate = True
    return lambda: " ".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a process that forks runs to be killed."""
    process = Server(tmp_path_factory.mktemp("runs") / "log")
    yield process
    process.close()
