"""Rounds without evidence are averaged as they are; rounds with evidence are aligned."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import fedrot
from fedrot.aggregation import Mean
from fedrot.simulations.folder import read_rows
from fedrot.strategies import FedRot, Reporting, Server
from tests.strategies.fakes import arrays_of, broadcast, reply
from tests.strategies.test_fedrot import CONFIG, model, updates


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("anchor", sorted(fedrot.anchors.ANCHORS))
def test_without_evidence_the_model_is_the_plain_mean_to_the_last_bit(
    anchor: str, deterministic: bool, tmp_path: Path
) -> None:
    base, weights = model(), [10, 20, 30]
    given = updates(base, scale=1e-3)
    # Deterministic rounds take updates in an order that their contents give.
    orders = list(itertools.permutations(range(3))) if deterministic else [(0, 1, 2)]
    means = []
    for order in orders:
        means.append(Mean())
        for client in order:
            means[-1].add(given[client], weights[client])
    strategy = FedRot(
        CONFIG,
        alignment=fedrot.AlignmentOptions(anchor=anchor),
        server=Server(deterministic=deterministic),
        reporting=Reporting(rows=tmp_path / "alignment.jsonl"),
    )
    messages = broadcast(strategy, base)
    replies = [
        reply(m, u, w, i) for i, (m, u, w) in enumerate(zip(messages, given, weights, strict=True))
    ]
    result, _ = strategy.aggregate_train(1, replies)
    plain = [mean.result() for mean in means]
    found = {name: torch.from_numpy(array) for name, array in arrays_of(result).items()}
    assert any(all(torch.equal(found[name], mean[name]) for name in found) for mean in plain)
    rows = [row for row in read_rows(tmp_path / "alignment.jsonl") if "stage" not in row]
    assert len(rows) == 3 * 6
    for row in rows:
        assert not row["moved"]
        assert row["found"] <= 3 * row["chance"] or row["part"] == "ffn"


def test_one_turned_client_is_brought_back_and_the_others_stay(tmp_path: Path) -> None:
    base = model()
    symmetry = fedrot.symmetry_of(CONFIG, base)
    given = updates(base, scale=1e-3)
    sent = [*given[:2], fedrot.random_equivalent(given[2], symmetry, 1)]
    strategy = FedRot(CONFIG, reporting=Reporting(rows=tmp_path / "alignment.jsonl"))
    messages = broadcast(strategy, base)
    result, _ = strategy.aggregate_train(
        1, [reply(m, u, 10, i) for i, (m, u) in enumerate(zip(messages, sent, strict=True))]
    )
    moved = {
        (row["client"], row["group"])
        for row in read_rows(tmp_path / "alignment.jsonl")
        if row.get("moved")
    }
    assert moved == {(2, group.name) for group in symmetry.groups if group.part in ("attention", "ffn")}
    plain = Mean()
    for update in given:
        plain.add(update, 10)
    for name, array in arrays_of(result).items():
        torch.testing.assert_close(torch.from_numpy(array), plain.result()[name], atol=2e-3, rtol=0)
