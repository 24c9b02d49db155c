"""Environment variables of the commands."""

from __future__ import annotations

import os

import pytest

from fedrot.simulations.environment import prepare_environment


def test_nothing_reports_home_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {
        "RAY_worker_niceness": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    for name in wanted:
        # Set before it is deleted, so that its value is restored.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    prepare_environment()
    assert {name: os.environ.get(name) for name in wanted} == wanted


def test_variables_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    prepare_environment()
    assert (os.environ["TRANSFORMERS_VERBOSITY"], os.environ["TOKENIZERS_PARALLELISM"]) == (
        "info",
        "false",
    )
