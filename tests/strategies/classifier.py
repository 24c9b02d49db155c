"""The small classifier that rounds with replies in another basis are played with."""

import torch
from flwr.app import ArrayRecord

import fedrot
from tests.models import CASES, logits, state_of, symmetry_for
from tests.strategies.fakes import tensors_of

NAME = "bert-classifier"
SYMMETRY = symmetry_for(NAME)
WHOLE = fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL)


def build():
    return CASES[NAME].build("eager")


def state(seed=0):
    """Return a float32 state dict; another seed is an unrelated model."""
    return state_of(NAME, seed, torch.float32)


def permuted(tensors, seed):
    """Return the same function in other coordinates, those of the residual stream
    included.
    """
    return fedrot.random_equivalent(tensors, SYMMETRY, seed, fedrot.WHOLE_MODEL)


def error(tensors, expected):
    """Return how far the logits of a model are from the expected ones."""
    found = tensors_of(tensors) if isinstance(tensors, ArrayRecord) else tensors
    return float((logits(NAME, found) - logits(NAME, expected)).abs().max())
