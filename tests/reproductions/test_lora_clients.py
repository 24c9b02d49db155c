"""What clients of rival averages do with PEFT models: residuals in base weights, frozen
factors.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedrot.errors import FedrotError
from fedrot.lora import adapter_tensors
from fedrot.lora.adapters import LoraSettings, factors, pairs_of
from reproductions.lora_clients import FOLDS, TRAIN, load_folded, train_only
from reproductions.lora_rivals import residual_name
from tests.fedrot.lora.test_peft import bert, outputs
from tests.fedrot.lora.test_peft_model import Layers, adapted, layers
from tests.simulations.tensors import equal


@pytest.mark.parametrize("target", ["wte", "conv1d", "linear", "conv"])
def test_a_residual_is_as_good_as_the_adapter(target):
    """The product goes into the base weights, and factors of product 0 take its
    place.
    """
    model = layers(target=target)
    before = outputs(model)
    own = adapter_tensors(model)
    settings = LoraSettings.of(model.peft_config["default"])
    (pair,) = pairs_of(own)
    a, b = factors(own, pair)
    residual = settings.scale(pair.module, len(a)) * b @ a
    empty = {**own, pair.b: torch.zeros_like(own[pair.b])}
    load_folded(model, {**empty, residual_name(pair): residual})
    assert torch.allclose(outputs(model), before, atol=1e-10)
    # Residuals are sums over the rounds: they do not add up at the client.
    load_folded(model, {**empty, residual_name(pair): residual})
    assert torch.allclose(outputs(model), before, atol=1e-10)
    load_folded(model, own)
    assert torch.allclose(outputs(model), before, atol=1e-12)
    load_folded(model, empty)
    assert not torch.allclose(outputs(model), before, atol=1e-3)


def test_quantised_weights_take_no_residual():
    model = layers()
    own = adapter_tensors(model)
    (pair,) = pairs_of(own)
    layer = model.get_submodule(pair.module).get_base_layer()
    layer.weight = nn.Parameter(
        torch.zeros(6, 6, dtype=torch.int8), requires_grad=False
    )
    changed = {name: tensor + 1 for name, tensor in own.items()}
    with pytest.raises(
        FedrotError, match=r"'base_model.model.linear' are quantised.*residual='drop'"
    ):
        load_folded(model, {**changed, residual_name(pair): torch.ones(6, 6)})
    assert equal(adapter_tensors(model), own)


def test_half_precision_is_told_that_it_loses_a_residual():
    model = layers().bfloat16()
    own = adapter_tensors(model)
    (pair,) = pairs_of(own)
    with pytest.warns(
        UserWarning, match=r"torch.bfloat16, which rounds most of a residual away"
    ):
        load_folded(model, {**own, residual_name(pair): torch.ones(6, 6)})


def test_a_client_says_before_it_trains_that_it_cannot_take_a_residual():
    tied = Layers()
    tied.head = nn.Linear(6, 30, bias=False)
    tied.head.weight = tied.wte.weight
    shared = adapted(tied, target_modules=["wte"])
    train_only(shared, {TRAIN: "both"})
    own = adapter_tensors(shared)
    (pair,) = pairs_of(own)
    for refused in (
        lambda: train_only(shared, {TRAIN: "both", FOLDS: True}),
        lambda: load_folded(shared, {**own, residual_name(pair): torch.ones(6, 30)}),
    ):
        with pytest.raises(FedrotError, match="another module"):
            refused()
    load_folded(shared, own)
    conditional = adapted(Layers(), target_modules=["linear"])
    train_only(conditional, {FOLDS: True})
    conditional.peft_config["default"].alora_invocation_tokens = [3]
    with pytest.raises(FedrotError, match="invocation"):
        train_only(conditional, {FOLDS: True})
    with pytest.raises(FedrotError, match="factors is 'None'"):
        train_only(shared, {TRAIN: "None"})


def training(model):
    """Return which factor is trained or not."""
    return {
        (name.split("lora_")[1][0], parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


@pytest.mark.parametrize(("said", "trained"), [("A", "A"), ("B", "B"), ("both", "AB")])
def test_the_configuration_says_what_trains(said, trained):
    model = adapted(bert(), task_type="SEQ_CLS", target_modules=["query"])
    train_only(model, {TRAIN: said})
    assert training(model) == {(factor, factor in trained) for factor in "AB"}
    train_only(model, {})
    assert training(model) == {("A", True), ("B", True)}
