"""Every collector leaves a model as it was, also when a batch fails."""

import copy

import pytest
import torch
from torch import Tensor

from fedrot import collect_activations, collect_fisher, collect_gram
from fedrot.task_head.losses import collect_losses
from fedrot.task_head.sums import collect_classes
from tests.models import (
    fresh_model,
    inputs,
    same,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"


def activations(anchor, client, batches):
    return collect_activations(anchor, client, batches, symmetry_for(NAME)).matrices


COLLECTORS = {
    "gram": lambda model, batches: collect_gram(model, batches)["gram"],
    "fisher": lambda model, batches: collect_fisher(model, batches)["fisher"],
    "classes": lambda model, batches: vars(
        collect_classes(model, batches, "classifier")
    ),
    "losses": lambda model, batches: vars(collect_losses(model, batches)),
    "anchor": lambda model, batches: activations(model, fresh_model(NAME), batches),
    "client": lambda model, batches: activations(fresh_model(NAME), model, batches),
}


def facts(model):
    """Return what collectors must leave as it was, beside the weights."""
    return (
        {name: module.training for name, module in model.named_modules()},
        [
            (module._forward_hooks, module._forward_pre_hooks)
            for module in model.modules()
        ],
        [(p.requires_grad, p.grad) for p in model.parameters()],
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("collector", COLLECTORS)
def test_a_model_is_left_as_it_was(collector):
    """Modes, hooks, weights and gradients; dropout is off while statistics are
    collected.
    """
    collect = COLLECTORS[collector]
    model = fresh_model(NAME).train()
    model.bert.encoder.layer[1].eval()
    model.bert.encoder.layer[0].attention.output.requires_grad_(False)
    before = copy.deepcopy(facts(model))
    batch = {**inputs(), "labels": torch.tensor([2, 0])}
    first, second = (
        {k: v for k, v in collect(model, [batch]).items() if isinstance(v, Tensor)}
        for _ in range(2)
    )
    assert first
    assert same(first, second)
    assert not any(value.requires_grad for value in first.values())
    assert facts(model) == before
    assert model(**batch).logits.requires_grad
    with pytest.raises(IndexError):
        collect(model, [{**batch, "input_ids": 10**6 + batch["input_ids"]}])
    assert facts(model) == before
    assert same(model.state_dict(), state_of(NAME))
