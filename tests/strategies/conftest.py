"""Fixtures of the strategies' tests."""

import logging

import pytest


@pytest.fixture
def warnings(caplog):
    """Return what Flower's log warned of so far."""
    logging.getLogger("flwr").propagate = True
    return lambda: " ".join(
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING
    )
