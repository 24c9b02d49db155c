"""Rows that a client has not trained, and heads that it does not have, stay out of the
average.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedrot
from fedrot.aggregation import RegMean
from fedrot.collect.statistics import TRAINED
from fedrot.lora import AdapterOptions
from fedrot.strategies import FedRot
from fedrot.strategies.lora import AdapterMean
from tests.models import EAGER, config_of
from tests.strategies.aggregating import HEAD, headless, honest, play
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import largest_difference, tensors_of
from tests.strategies.test_lora import SETTINGS, adapter

BASE = state()
#: Rows of the head that each of three clients has trained; the second has no head.
#: Nobody has trained row 2, or all but the first client have trained all rows and do
#: not mark them.
ROWS = {
    "all mark": ((0, 1), None, (1,)),
    "one marks": ((0, 1), (0, 1, 2), (0, 1, 2)),
}


def marking(clients, rows):
    """Return clients that mark what they have trained, unless that is everything."""
    pairs = zip(clients, rows, strict=True)
    return [c if trained == (0, 1, 2) else headless(c, trained) for c, trained in pairs]


def expected_head(clients, rows, name):
    """Return the head's rows over the clients that trained them, row by row."""
    found = []
    for row in range(3):
        some = [c for c, own in zip(clients, rows, strict=True) if own and row in own]
        if not some:
            found.append(BASE[name][row].double())
            continue
        total = sum(client.weight for client in some)
        found.append(sum(c.weight * c.update[name][row].double() for c in some) / total)
    return torch.stack(found)


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("aggregation", [None, RegMean])
@pytest.mark.parametrize("case", ROWS)
def test_rows_of_the_head_are_averaged_over_whoever_trained_them(
    case, aggregation, align
):
    rows = ROWS[case]
    clients = []
    for i, client in enumerate(honest()):
        # The heads' norms differ enough for a wrong average to show.
        update = {n: t * (1 + i) if n in HEAD else t for n, t in client.update.items()}
        statistics = client.statistics if aggregation else {}
        clients.append(replace(client, update=update, statistics=statistics))
    sent = marking(clients, rows)
    alignment = fedrot.AlignmentOptions(anchor="global") if align else None
    strategy = FedRot(config_of(NAME), alignment=alignment, aggregation=aggregation)
    result, metrics = play(strategy, sent)
    assert metrics.get("fedrot-replies-dropped", 0) == 0
    found = tensors_of(result)
    weight, bias = (expected_head(clients, rows, name) for name in HEAD)
    torch.testing.assert_close(found[HEAD[1]].double(), bias, atol=1e-5, rtol=0)
    # Row 2 is everybody's, or that of the others; by least squares row 0 is too if it
    # is one client's.
    alone = slice(None) if aggregation is None else [0, 2] if case == "all mark" else []
    torch.testing.assert_close(
        found[HEAD[0]][alone].double(), weight[alone], atol=1e-5, rtol=0
    )
    whole = [
        replace(c, statistics={k: v for k, v in c.statistics.items() if k != TRAINED})
        for c in sent
    ]
    others = tensors_of(play(strategy, whole)[0])
    for name in others.keys() - set(HEAD):
        torch.testing.assert_close(found[name], others[name], atol=1e-6, rtol=0)


def test_scrambled_clients_keep_their_marks():
    clients = [replace(c, statistics={}) for c in honest()]
    bare = marking(clients, ROWS["all mark"])
    moved = [
        replace(c, update=fedrot.random_equivalent(c.update, SYMMETRY, i))
        for i, c in enumerate(bare)
    ]
    strategy = FedRot(config_of(NAME), alignment=EAGER)
    assert largest_difference(play(strategy, moved)[0], play(strategy, bare)[0]) <= 1e-5


def test_an_average_of_adapters_receives_the_marks_of_untrained_rows():
    base = adapter(0)
    head = "base_model.model.head.bias"
    mean = AdapterMean(AdapterOptions().average(SETTINGS, base, 1))
    mean.add(
        base,
        1.0,
        {TRAINED: {head: torch.tensor([True, True, False, False])}, "gram": {}},
    )
    other = {**base, head: base[head] + 8}
    mean.add(other, 3.0, {TRAINED: {head: torch.tensor([True, False, True, False])}})
    torch.testing.assert_close(
        mean.result()[head] - base[head], torch.tensor([6.0, 0, 8, 6]).double()
    )
