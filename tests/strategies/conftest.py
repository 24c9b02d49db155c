"""Fixtures of the strategies' tests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def warnings(caplog: Any) -> Callable[[], str]:
    """Return what Flower's log warned of so far."""
    logging.getLogger("flwr").propagate = True
    return lambda: " ".join(
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING
    )
