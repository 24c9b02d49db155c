"""Every collector leaves a model as it was, also when a batch fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fedrot import collect_activations, collect_fisher, collect_gram
from fedrot.task_head.losses import collect_losses
from fedrot.task_head.sums import collect_classes
from tests.models import fresh_model, inputs, largest_difference, state_of, symmetry_for

NAME = "bert-classifier"


def activations(model: Any, batches: Iterable[Any]) -> Mapping[str, Tensor]:
    seen = collect_activations(model, fresh_model(NAME), batches, symmetry_for(NAME))
    return seen.matrices


COLLECTORS = {
    "gram": lambda model, batches: collect_gram(model, batches)["gram"],
    "fisher": lambda model, batches: collect_fisher(model, batches)["fisher"],
    "classes": lambda model, batches: vars(
        collect_classes(model, batches, "classifier")
    ),
    "losses": lambda model, batches: vars(collect_losses(model, batches)),
    "anchor's activations": activations,
    "client's activations": lambda model, batches: (
        collect_activations(
            fresh_model(NAME), model, batches, symmetry_for(NAME)
        ).matrices
    ),
}


@pytest.mark.parametrize("collector", COLLECTORS)
def test_a_model_is_left_as_it_was(collector: str) -> None:
    """Modes, hooks, weights and gradients; dropout is off while statistics are
    collected.
    """
    collect = COLLECTORS[collector]
    model = fresh_model(NAME).train()
    model.bert.encoder.layer[1].eval()
    model.bert.encoder.layer[0].attention.output.requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    assert len(set(modes.values())) == 2

    def as_it_was() -> None:
        assert {
            name: module.training for name, module in model.named_modules()
        } == modes
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        assert largest_difference(model.state_dict(), state_of(NAME)) == 0
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not model.bert.encoder.layer[
            0
        ].attention.output.dense.weight.requires_grad
        assert model.classifier.weight.requires_grad
        assert torch.is_grad_enabled()

    batch = {**inputs(), "labels": torch.tensor([2, 0])}
    first, second = (collect(model, [batch]) for _ in range(2))
    assert first.keys() == second.keys()
    tensors = [key for key, value in first.items() if isinstance(value, Tensor)]
    assert tensors
    assert all(torch.equal(first[key], second[key]) for key in tensors)
    assert not any(first[key].requires_grad for key in tensors)
    as_it_was()
    assert model(**batch).logits.requires_grad
    with pytest.raises(IndexError):
        collect(model, [{**batch, "input_ids": 10**6 + batch["input_ids"]}])
    as_it_was()
