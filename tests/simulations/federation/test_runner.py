"""Checks of configurations before a run."""

from __future__ import annotations

import re
from typing import Any

import pytest

import reproductions.arms  # noqa: F401
from fedrot.errors import FedrotError
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation import runner

SMALL: dict[str, Any] = {
    "train_limit": 16,
    "test_limit": 8,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "max_length": 16,
    "clients": 4,
    "seeds": 1,
}


@pytest.mark.parametrize("arm", ["greedy", "aligned:loss", "plain+task-head"])
def test_arms_that_choose_need_held_out_rows_of_some_client(arm: str) -> None:
    config = SimulationConfig.from_flat({**SMALL, "arms": f"plain,{arm}"})
    with pytest.raises(
        FedrotError, match=rf"arm '{re.escape(arm)}' needs clients' held-out rows, but holdout"
    ):
        runner.check([config])
    runner.check([config.model_copy(update={"holdout": 0.5})])
    runner.check([config.model_copy(update={"arms": ("plain", "aligned")})])


def test_an_arm_of_some_clients_needs_held_out_rows_of_theirs() -> None:
    """Of four clients, 1 and 3 have too few rows to hold one out."""
    settings = {**SMALL, "train_limit": 60, "partition": "dirichlet:0.1", "holdout": 0.1}
    config = SimulationConfig.from_flat({**settings, "arms": "aligned:loss,aligned:loss#1+2"})
    runner.check([config])
    with pytest.raises(FedrotError, match=r"arm 'aligned:loss#1\+3' needs clients' held-out rows, .* with seed 0"):
        runner.check([config.model_copy(update={"arms": ("aligned:loss#1+3",)})])


def test_a_guard_has_a_metric_of_the_task() -> None:
    config = SimulationConfig.from_flat({**SMALL, "holdout": 0.5, "arms": "plain,aligned:perplexity"})
    said = r"arm 'aligned:perplexity': unknown metric 'perplexity'; one of accuracy, .*loss$"
    with pytest.raises(FedrotError, match=said):
        runner.check([config])
