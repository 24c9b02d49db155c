"""Gram matrices of PEFT models: the inputs of the active LoRA adapter, by the names that are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import fedrot
from fedrot.errors import FedrotError
from fedrot.lora import adapter_tensors
from tests.fedrot.collect.tiny import rows_of
from tests.fedrot.lora.test_peft import bert, gpt2

TARGETS = ["query", "value", "output.dense"]


def adapted(base: Callable[[], nn.Module] = bert, adapter: str = "default", **options: Any) -> Any:
    """Return a PEFT model with random factors, in training mode with dropout."""
    torch.manual_seed(0)
    given = {"r": 3, "target_modules": TARGETS, "lora_dropout": 0.5, **options}
    found = peft.get_peft_model(base(), peft.LoraConfig(**given), adapter_name=adapter)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return found.train()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(30, (2, 3, 7), generator=generator)
    mask = torch.ones(2, 3, 7, dtype=torch.long)
    mask[0, 1, 4:] = mask[1, 2, 2:] = 0
    return [
        {"input_ids": i, "attention_mask": m, "labels": torch.zeros(3, dtype=torch.long)}
        for i, m in zip(ids, mask, strict=True)
    ]


@pytest.mark.parametrize("adapter", ["default", "mine"])
def test_matrices_are_of_the_inputs_of_every_adapted_layer(adapter: str) -> None:
    model = adapted(adapter=adapter)
    found = fedrot.collect_gram(model, batches())
    assert all(module.training for module in model.modules())
    names = [name for name in adapter_tensors(model, adapter) if "lora_A" in name]
    assert found.keys() == {"gram"}
    assert found["gram"].keys() == {*names}
    assert len(names) == 2 * 4
    unlabelled = [{k: v for k, v in batch.items() if k != "labels"} for batch in batches()]
    rows = rows_of(model, unlabelled)
    for name, gram in found["gram"].items():
        seen, _ = rows[f"{name.removesuffix('.lora_A.weight')}.base_layer"]
        torch.testing.assert_close(gram.double(), seen.mT @ seen / len(seen), atol=1e-5, rtol=1e-4)
    first = "base_model.model.bert.encoder.layer.0.attention.self"
    query, value = (found["gram"][f"{first}.{name}.lora_A.weight"] for name in ("query", "value"))
    assert query is value
    assert len({id(gram) for gram in found["gram"].values()}) == 2 * 3


def test_conv1d_layers_have_factors_of_linear_layers_and_embeddings_none() -> None:
    model = adapted(gpt2, target_modules=["c_attn", "wte"], fan_in_fan_out=True)
    found = fedrot.collect_gram(model, [{"input_ids": torch.randint(30, (3, 7))}])
    assert found.keys() == {"gram"}
    assert {name.split(".")[-3] for name in found["gram"]} == {"c_attn"}
    assert len(found["gram"]) == 2


def test_the_matrices_of_the_active_adapter_are_collected() -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["key"]))
    model.set_adapter("other")
    found = fedrot.collect_gram(model, batches())["gram"]
    assert {name.split(".")[-3] for name in found} == {"key"}
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(FedrotError, match=r"active adapters are default, other. Call model.set_adapter"):
        fedrot.collect_gram(model, batches())


def merged() -> Any:
    model = adapted()
    model.merge_adapter()
    return model


def of_another_kind() -> Any:
    return peft.get_peft_model(bert(), peft.IA3Config(target_modules=["key"], feedforward_modules=[]))


def disabled() -> Any:
    model = adapted()
    model.base_model.disable_adapter_layers()
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: adapted(use_dora=True), "is adapted by DoRA, whose outputs are no product"),
        (merged, r"is merged into the weights or disabled.* model.unmerge_adapter\(\)"),
        (disabled, "is merged into the weights or disabled"),
        (lambda: adapted(gpt2, target_modules=["wte"]), "has no LoRA factors of linear layers"),
        (of_another_kind, "'default' has no LoRA factors of linear layers"),
    ],
)
def test_adapters_without_inputs_of_a_product_are_refused(build: Callable[[], Any], said: str) -> None:
    with pytest.raises(FedrotError, match=said):
        fedrot.collect_gram(build(), batches())
