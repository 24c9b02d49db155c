"""The model, and what every client's training makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Partition ids: who does what. The last one is killed while it trains in the second
#: round.
HONEST, SCRAMBLED, BROKEN, DYING = CLIENTS = range(4)
ROUNDS = 2
#: The dying client leaves this file in the folder of results once it trains in the
#: second round.
TRAINING = "the-dying-client-trains"


def build_model() -> nn.Module:
    """Return a small classifier that has not a single zero, the same one in every
    process.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=16,
            num_labels=3,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def examples(client: int) -> int:
    """Return how much a client's update weighs."""
    return 10 * (client + 1)


def trained(
    tensors: dict[str, Tensor], client: int, server_round: int
) -> dict[str, Tensor]:
    """Return the update: every tensor longer or shorter by a factor of its own.

    Positive factors turn no head and change no neuron's nearest neighbour (a group's
    cross matrix with the anchor stays symmetric and positive definite), so that
    alignment has nothing to move in an honest update, and the round's result is the
    plain weighted mean.
    """
    import torch

    generator = torch.Generator().manual_seed(100 * server_round + client)
    factors = 0.7 + 0.6 * torch.rand(
        len(tensors), generator=generator, dtype=torch.float64
    )
    return {
        name: tensors[name] * factor
        for name, factor in zip(sorted(tensors), factors, strict=True)
    }
