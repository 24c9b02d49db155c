"""Rows that a client has not trained, and heads that it does not have, stay out of the average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.aggregation import RegMean
from fedrot.collect.statistics import TRAINED
from fedrot.strategies import FedRot
from tests.models import EAGER, WIDTH, config_of
from tests.strategies.aggregating import (
    HEAD,
    Client,
    headless,
    honest,
    play,
)
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import (
    largest_difference,
    tensors_of,
)

#: The rows of the head that each of three clients has trained; nobody has trained row 2.
ROWS: tuple[tuple[int, ...] | None, ...] = ((0, 1), None, (1,))


def expected_head(clients: Sequence[Client], name: str) -> Tensor:
    """Return the head's rows over the clients that trained them, row by row."""
    found = []
    for row in range(3):
        trained = [c for c, rows in zip(clients, ROWS, strict=True) if rows and row in rows]
        some = trained or clients
        total = sum(c.weight for c in some)
        found.append(sum(c.weight * c.update[name][row].double() for c in some) / total)
    return torch.stack([torch.as_tensor(row) for row in found])


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("aggregation", [None, RegMean])
def test_rows_of_the_head_are_averaged_over_whoever_trained_them(aggregation: Any, align: bool) -> None:
    # The heads' norms differ enough for a wrong average to show.
    clients = [
        headless(
            replace(
                client,
                update={n: t * (1 + i) if n in HEAD else t for n, t in client.update.items()},
                statistics=client.statistics if aggregation else {},
            ),
            rows,
        )
        for i, (client, rows) in enumerate(zip(honest(), ROWS, strict=True))
    ]
    strategy = FedRot(
        config_of(NAME),
        alignment=fedrot.AlignmentOptions(anchor="global") if align else None,
        aggregation=aggregation,
    )
    result, metrics = play(strategy, clients)
    assert metrics.get("fedrot-replies-dropped", 0) == 0
    found = tensors_of(result)
    bias = expected_head(clients, HEAD[1])
    torch.testing.assert_close(found[HEAD[1]].double(), bias, atol=1e-5, rtol=0)
    # Nobody has trained row 2: it is what everybody received.
    torch.testing.assert_close(found[HEAD[0]][2], state()[HEAD[0]][2], atol=1e-5, rtol=0)
    # Row 0 is the first client's alone, by least squares or otherwise.
    torch.testing.assert_close(found[HEAD[0]][0], clients[0].update[HEAD[0]][0], atol=1e-5, rtol=0)
    if aggregation is None:
        weight = expected_head(clients, HEAD[0])
        torch.testing.assert_close(found[HEAD[0]].double(), weight, atol=1e-5, rtol=0)
    whole = [
        Client(c.update, c.weight, {k: v for k, v in c.statistics.items() if k != TRAINED})
        for c in clients
    ]
    others, _ = play(strategy, whole)
    for name, tensor in tensors_of(others).items():
        if name not in HEAD:
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("align", [True, False])
def test_a_client_that_trained_every_row_marks_none(align: bool) -> None:
    """One client's marks are enough for the rows to be averaged over the others."""
    bare = [replace(client, statistics={}) for client in honest()]
    clients = [headless(bare[0], (0, 1)), *bare[1:]]
    result, _ = play(
        FedRot(config_of(NAME), alignment=fedrot.AlignmentOptions(anchor="global") if align else None),
        clients,
    )
    for name in HEAD:
        others = [client.weight * client.update[name][2] for client in clients[1:]]
        expected = torch.stack(others).sum(0) / sum(client.weight for client in clients[1:])
        torch.testing.assert_close(tensors_of(result)[name][2], expected, atol=1e-5, rtol=0)


def test_a_client_without_a_head_has_no_inputs_of_it_either() -> None:
    """Its Gram matrices are those of the layers that it has."""
    bare = headless(honest()[1], None)
    left = {name: gram for name, gram in bare.statistics["gram"].items() if name not in HEAD}
    without_head = replace(bare, statistics={**bare.statistics, "gram": left})
    strategy = FedRot(
        config_of(NAME), alignment=fedrot.AlignmentOptions(anchor="global"), aggregation=RegMean
    )
    _, metrics = play(strategy, [honest()[0], without_head, honest()[2]])
    assert metrics["fedrot-replies-dropped"] == 0


def test_scrambled_clients_keep_their_marks() -> None:
    clients = [headless(c, rows) for c, rows in zip(honest(), ROWS, strict=True)]
    marks = [{TRAINED: c.statistics[TRAINED]} for c in clients]
    bare = [replace(c, statistics=m) for c, m in zip(clients, marks, strict=True)]
    moved = [
        replace(c, update=fedrot.random_equivalent(c.update, SYMMETRY, i)) for i, c in enumerate(bare)
    ]
    strategy = FedRot(config_of(NAME), alignment=EAGER)
    assert largest_difference(play(strategy, moved)[0], play(strategy, bare)[0]) <= 1e-5


def test_what_is_completed_is_what_was_received() -> None:
    base, update = state(), honest()[0].update
    given = {name: tensor for name, tensor in update.items() if name not in HEAD}
    full, marked = fedrot.completed(given, base)
    assert list(full) == list(base)
    assert all(torch.equal(full[name], base[name]) for name in HEAD)
    assert len(given) == len(base) - len(HEAD)
    assert all(full[name] is update[name] for name in given)
    assert {name: bool(mask) for name, mask in marked[TRAINED].items()} == dict.fromkeys(HEAD, False)
    full, marked = fedrot.completed(update, base, {HEAD[0]: [2, 0]})
    assert marked[TRAINED][HEAD[0]].tolist() == [True, False, True]
    assert torch.equal(full[HEAD[0]][1], base[HEAD[0]][1])
    assert torch.equal(full[HEAD[0]][::2], update[HEAD[0]][::2])
    assert fedrot.completed(update, base) == (full | update, {})


def test_a_client_that_lacks_the_head_has_not_trained_its_rows() -> None:
    given = {name: tensor for name, tensor in honest()[0].update.items() if name not in HEAD}
    _, marked = fedrot.completed(given, state(), {HEAD[0]: []})
    assert not marked[TRAINED][HEAD[0]].any()
    with pytest.raises(fedrot.UpdateError):
        fedrot.completed(given, state(), {HEAD[0]: [1]})


def test_what_cannot_be_completed_is_refused() -> None:
    base, update = state(), honest()[0].update
    with pytest.raises(fedrot.UpdateError, match="'more' is not part of the received model"):
        fedrot.completed({**update, "more": torch.ones(2)}, base)
    with pytest.raises(fedrot.UpdateError, match="'nowhere' is not part of the received model"):
        fedrot.completed(update, base, {"nowhere": [0]})
    for rows in ([3], [-1], [0, 7]):
        with pytest.raises(fedrot.UpdateError, match=r"'classifier\.bias' has 3 rows"):
            fedrot.completed(update, base, {HEAD[1]: rows})
    with pytest.raises(fedrot.UpdateError, match=r"classifier\.weight"):
        fedrot.completed({**update, HEAD[0]: torch.ones(4, WIDTH)}, base, {HEAD[0]: [0]})
