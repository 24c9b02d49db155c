"""Optimisers of clients whose factors the server rotated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.lora import adapter_tensors, load_adapter, move_optimizer_state
from fedrot.lora.adapters import pairs_of
from tests.fedrot.lora.test_peft import outputs
from tests.fedrot.lora.test_peft_model import layers

TARGETS = ["wte", "conv1d", "linear", "conv"]


def steps(model: Any, optimizer: torch.optim.Optimizer, number: int = 3) -> None:
    ids = torch.randint(30, (3, 7), generator=torch.Generator().manual_seed(1))
    for _ in range(number):
        optimizer.zero_grad()
        model(input_ids=ids).logits.pow(2).mean().backward()
        optimizer.step()


def trained(target: str, kind: Any, **options: Any) -> tuple[Any, Any]:
    model = layers(target=target)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
    steps(model, optimizer)
    return model, optimizer


def turned(sent: dict[str, Tensor], r: Tensor) -> dict[str, Tensor]:
    """Return an adapter with every pair rotated; the factors of convolutions keep their shapes."""
    found = dict(sent)
    for pair in pairs_of(sent):
        a, b = sent[pair.a], sent[pair.b]
        found[pair.a] = torch.einsum("sr,r...->s...", r, a)
        found[pair.b] = torch.einsum("or...,sr->os...", b, r)
    return found


def a_rotation() -> Tensor:
    drawn = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return torch.linalg.qr(drawn)[0]


def signed_permutation(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)[torch.randperm(size)] * torch.tensor([1.0, -1, -1, 1])


@pytest.mark.parametrize("target", TARGETS)
def test_a_training_goes_on_as_if_nothing_had_been_rotated(target: str) -> None:
    options = {"lr": 0.05, "momentum": 0.9}
    straight, own = trained(target, torch.optim.SGD, **options)
    model, optimizer = trained(target, torch.optim.SGD, **options)
    lost, its_own = trained(target, torch.optim.SGD, **options)
    sent, start = adapter_tensors(model), outputs(model)
    received = turned(sent, a_rotation())
    for each in (model, lost):
        load_adapter(each, received)
    move_optimizer_state(optimizer, model, sent)
    assert torch.allclose(outputs(model), start, atol=1e-12)
    for each, its in ((straight, own), (model, optimizer), (lost, its_own)):
        steps(each, its)
    assert torch.allclose(outputs(model), outputs(straight), atol=1e-12)
    moved = (outputs(straight) - start).abs().max()
    assert (outputs(lost) - outputs(straight)).abs().max() > 0.01 * moved


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_second_moments_follow_permutations_and_signs(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    straight, own = trained("linear", kind, lr=0.02, **options)
    model, optimizer = trained("linear", kind, lr=0.02, **options)
    sent = adapter_tensors(model)
    load_adapter(model, turned(sent, signed_permutation(4)))
    move_optimizer_state(optimizer, model, sent)
    for each, its in ((straight, own), (model, optimizer)):
        steps(each, its)
    assert torch.allclose(outputs(model), outputs(straight), atol=1e-12)


def test_second_moments_stay_positive_and_keep_their_sum() -> None:
    model, optimizer = trained("linear", torch.optim.Adam, lr=0.02)
    sent = adapter_tensors(model)
    before = [state["exp_avg_sq"].sum() for state in optimizer.state.values()]
    load_adapter(model, turned(sent, a_rotation()))
    move_optimizer_state(optimizer, model, sent)
    for state, total in zip(optimizer.state.values(), before, strict=True):
        assert bool((state["exp_avg_sq"] > 0).all())
        assert torch.isclose(state["exp_avg_sq"].sum(), total)


def test_what_cannot_be_moved_is_refused_and_nothing_is_changed() -> None:
    model, optimizer = trained("linear", torch.optim.Rprop, lr=0.02)
    before = [{k: v.clone() for k, v in state.items()} for state in optimizer.state.values()]
    with pytest.raises(FedrotError, match=r"state 'prev' .* AdamW"):
        move_optimizer_state(optimizer, model, adapter_tensors(model))
    for state, kept in zip(optimizer.state.values(), before, strict=True):
        assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_another_adapter_is_refused() -> None:
    model, optimizer = trained("linear", torch.optim.SGD, lr=0.02, momentum=0.9)
    other = adapter_tensors(layers(rank=2))
    with pytest.raises(UpdateError, match=r"lora_A\.weight' that was sent is missing or has another"):
        move_optimizer_state(optimizer, model, other)


def test_an_optimiser_without_state_is_left_as_it_is() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    move_optimizer_state(optimizer, model, adapter_tensors(model))
    assert not optimizer.state
