"""Rounds of ``FedRot(fit_head=True)`` in which a quarter of the clients lie.

Updates are honest; liars send other sums, other losses, and other numbers of rows. A
test of one exchange cannot see what a lie of one round does to the next.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.functional import cross_entropy

from fedrot.strategies import (
    FedRot,
    LabelledRows,
    answer_with_sums,
    from_arrays,
)
from tests.strategies.fakes import grid_of, node_of, reply
from tests.strategies.fitting.classifiers import ALL_ROWS, edited
from tests.strategies.fitting.test_liars import lie

CLASSES, CLUSTERS, INPUTS, WIDTH, ROUNDS = 3, 4, 10, 12, 3
EVEN, FIRST, SECOND, THIRD = (
    [1.0, 1.0, 1.0],
    [0.6, 0.2, 0.2],
    [0.2, 0.6, 0.2],
    [0.2, 0.2, 0.6],
)
#: The priors of the clients; the first quarter of them lies.
SETUPS = {
    "one of four": [EVEN] * 4,
    "two of eight": [EVEN] * 8,
    "one of four, labels differ": [FIRST, SECOND, THIRD, FIRST],
}
#: What describes the network to the server: tanh bounds the features by 1.
CONFIG = {"model_type": "bert", "num_labels": CLASSES}


class Network(nn.Module):
    """One layer with tanh before a task head."""

    def __init__(self):
        super().__init__()
        self.config = CONFIG
        self.pooler = nn.Linear(INPUTS, WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs, labels=None):
        return SimpleNamespace(logits=self.classifier(self.pooler(inputs).tanh()))


CENTRES = torch.randn(
    CLASSES, CLUSTERS, INPUTS, generator=torch.Generator().manual_seed(3)
)


def drawn(seed, count, priors):
    """Return rows of classes with four clusters each, which no straight line parts."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor(priors)
    labels = torch.multinomial(weights, count, replacement=True, generator=generator)
    cluster = torch.randint(CLUSTERS, (count,), generator=generator)
    noise = 0.5 * torch.randn(count, INPUTS, generator=generator)
    return {"inputs": CENTRES[labels, cluster] + noise, "labels": labels}


def trained(message, rows, seed):
    """Answer with a model that was trained honestly."""
    network = Network()
    network.load_state_dict(from_arrays(message.content["arrays"]))
    optimizer = torch.optim.Adam(network.parameters(), 0.03)
    for _ in range(20):
        optimizer.zero_grad()
        logits = network(rows["inputs"]).logits
        cross_entropy(logits, rows["labels"]).backward()
        optimizer.step()
    return reply(message, network.state_dict(), len(rows["labels"]), seed)


def client(seed, priors, told):
    """Return a client that trains honestly, and may lie about its sums."""
    rows, held_out = drawn(seed, 60, priors), drawn(1000 + seed, 40, priors)
    app = ClientApp()
    app.train()(lambda message, context: trained(message, rows, seed))
    data = LabelledRows(Network, lambda: [rows], lambda: [held_out])
    answer_with_sums(app, lambda message, context: data, privacy=ALL_ROWS)
    node = node_of(app)
    return node if told is None else edited(node, told)


def accuracy(setup, told=None, rounds=ROUNDS):
    """Return the accuracy after some rounds, on rows of nobody; after 0, untrained."""
    priors = SETUPS[setup]
    liars = len(priors) // 4
    grid = grid_of(
        client(seed, shares, told if seed < liars else None)
        for seed, shares in enumerate(priors)
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        start = ArrayRecord(Network().state_dict())
    strategy = FedRot(CONFIG, alignment=None, fit_head=True, fraction_evaluate=0.0)
    if rounds:
        arrays = strategy.start(grid, start, num_rounds=rounds, timeout=1).arrays
    else:
        arrays = strategy.prepared(grid, start, ConfigRecord())
    network = Network()
    network.load_state_dict(from_arrays(arrays))
    rows = drawn(9999, 3000, EVEN)
    right = network(rows["inputs"]).logits.argmax(1) == rows["labels"]
    return float(right.double().mean())


#: Sums, losses and multiples of the rows that liars send.
LIES = [
    (sums, losses, 10)
    for sums in ("labels turned", "means of others", "one mean")
    for losses in ("for the old head", "for the own sums", "inverted")
]


@pytest.mark.parametrize("setup", SETUPS)
def test_a_quarter_of_liars_does_not_stop_a_run(setup):
    """Accuracy stays above that without training, and near that of honest rounds."""
    untrained, honest = accuracy(setup, rounds=0), accuracy(setup)
    assert untrained + 0.05 < honest
    for told in LIES:
        reached = accuracy(setup, lie(*told))
        assert reached > untrained, told
        assert reached > honest - 0.05, told
