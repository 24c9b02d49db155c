"""A classifier of drawn features, whose body is one number: how clear features show
their class.
"""

import math
from types import SimpleNamespace

import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.functional import cross_entropy

from fedrot.strategies import LabelledRows, answer_with_sums
from tests.strategies.fakes import model_in, reply

CLASSES, WIDTH = 3, 6
CENTRES = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(3))
HEAD = "classifier"


def clearness(body):
    """Return how clear features are; best at a body of 1."""
    return math.exp(-abs(body - 1))


class Toy(nn.Module):
    """Adds its rows' centres, as clear as the body says, to their noise."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_labels=CLASSES, problem_type=None)
        self.body = nn.Parameter(torch.zeros(1))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, noise, centres):
        features = noise + centres * clearness(float(self.body))
        return SimpleNamespace(logits=self.classifier(features))


def rows(seed, count):
    """Return rows; all classes are equally frequent."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    noise = torch.randn(count, WIDTH, generator=generator)
    return {"noise": noise, "centres": CENTRES[labels], "labels": labels}


def state(body):
    weight = torch.zeros(CLASSES, WIDTH)
    bias = torch.zeros(CLASSES)
    return {
        "body": torch.tensor([body]),
        f"{HEAD}.weight": weight,
        f"{HEAD}.bias": bias,
    }


def client(seed, folder=None, to=lambda body: body, count=90):
    app = ClientApp()
    training = [rows(seed, count)]
    held_out = [rows(1000 + seed, count)]
    answer_with_sums(
        app,
        lambda message, context: LabelledRows(Toy, lambda: training, lambda: held_out),
        folder,
    )

    def node(message):
        if message.metadata.message_type != "train":
            return app(message, Context(7, 1, {}, RecordDict(), {}))
        received = model_in(message)
        body = torch.tensor([to(float(received["body"]))])
        noise = torch.randn(
            CLASSES, WIDTH, generator=torch.Generator().manual_seed(seed)
        )
        return reply(
            message, {**received, "body": body, f"{HEAD}.weight": noise}, 10, seed
        )

    return node


def row_losses(tensors, clients, count=90):
    """Return the losses of the clients' held-out rows, ``[clients, count]``."""
    model = Toy()
    model.load_state_dict(tensors)
    found = []
    for seed in range(clients):
        own = rows(1000 + seed, count)
        with torch.no_grad():
            logits = model(own["noise"], own["centres"]).logits.double()
        found.append(cross_entropy(logits, own["labels"], reduction="none"))
    return torch.stack(found)


def loss(tensors, clients):
    return float(row_losses(tensors, clients).mean())
