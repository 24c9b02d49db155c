"""An aggregation with a statistic of its own, in rounds (docs/how-to/aggregation.md)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedrot.aggregation import registry
from fedrot.collect import statistics
from fedrot.strategies import FedRot
from tests.models import EAGER, State, config_of
from tests.models import largest_difference as difference
from tests.strategies.aggregating import Client, batches, honest, loaded, mean, merged, play, scrambled
from tests.strategies.classifier import NAME
from tests.strategies.fakes import tensors_of

PAGE = Path(__file__).parents[3] / "docs/how-to/aggregation.md"
EMBEDDING = "bert.embeddings.word_embeddings.weight"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Register the page's kind and aggregation for one test, and return the names of its script."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.setattr(statistics, "STATISTIC_KINDS", dict(statistics.STATISTIC_KINDS))
    text = PAGE.read_text(encoding="utf-8")
    kind, aggregation, _ = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(kind + aggregation, "aggregation.md", "exec"), scope)
    return scope


def counted(page: dict[str, Any]) -> Callable[[State, int], dict[str, dict[str, Tensor]]]:
    def collect(tensors: State, seed: int) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = page["collect"](loaded(tensors), batches(seed))
        return found

    return collect


def clients_of(page: dict[str, Any]) -> list[Client]:
    collect = counted(page)
    return [replace(c, statistics=collect(c.update, i)) for i, c in enumerate(honest())]


def test_rounds_use_it_by_its_name(page: dict[str, Any]) -> None:
    clients = clients_of(page)
    strategy = FedRot(config_of(NAME), aggregation="by-tokens", alignment=None)
    found = tensors_of(play(strategy, clients)[0])
    expected = merged(page["ByTokens"](), clients)
    assert difference(found, expected) <= 1e-6
    assert difference({EMBEDDING: mean(clients)[EMBEDDING]}, {EMBEDDING: found[EMBEDDING]}) > 1e-4


def test_its_statistics_move_with_aligned_updates(page: dict[str, Any]) -> None:
    collect, clients = counted(page), clients_of(page)
    plain, moved = (
        tensors_of(play(FedRot(config_of(NAME), alignment=EAGER, aggregation="by-tokens"), given)[0])
        for given in (clients, scrambled(clients, collect))
    )
    assert difference(plain, moved) <= 1e-4


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({}, "has no statistics 'token_counts'"),
        ({"token_counts": {EMBEDDING: torch.ones(2)}}, "are not one count per row"),
        ({"token_counts": {"nowhere": torch.ones(2)}}, "belong to no tensor"),
    ],
)
def test_replies_that_do_not_fit_are_dropped(
    page: dict[str, Any], statistics: dict[str, Any], message: str, warnings: Callable[[], str]
) -> None:
    first, *others = clients_of(page)
    strategy = FedRot(config_of(NAME), aggregation="by-tokens", alignment=None)
    found = tensors_of(play(strategy, [replace(first, statistics=statistics), *others])[0])
    assert message in warnings()
    assert difference(found, merged(page["ByTokens"](), others)) <= 1e-6
