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


def expected(model: Any, module: str) -> Tensor:
    """Return the mean of ``x x^T`` over the tokens that an adapted module reads, one by one."""
    rows: list[Tensor] = []
    mask: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        (x,) = args
        there = mask[-1].bool() if x.ndim == 3 else torch.ones(len(x), dtype=torch.bool)
        rows.extend(x[there].double())

    was_training = model.training
    handle = model.eval().get_submodule(module).register_forward_pre_hook(keep)
    with torch.no_grad():
        for batch in batches():
            mask.append(batch["attention_mask"])
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    handle.remove()
    model.train(was_training)
    return torch.stack([torch.outer(row, row) for row in rows]).mean(0)


@pytest.mark.parametrize("adapter", ["default", "mine"])
def test_matrices_are_of_the_inputs_of_every_adapted_layer(adapter: str) -> None:
    model = adapted(adapter=adapter)
    found = fedrot.collect_gram(model, batches())
    assert model.training
    assert all(module.training for module in model.modules())
    names = [name for name in adapter_tensors(model, adapter) if "lora_A" in name]
    assert found.keys() == {"gram", "input_mean"}
    assert found["gram"].keys() == {*names}
    assert len(names) == 2 * 4
    for name, gram in found["gram"].items():
        wanted = expected(model, name.removesuffix(".lora_A.weight"))
        torch.testing.assert_close(gram.double(), wanted, atol=1e-5, rtol=1e-4)


def test_layers_with_one_input_share_a_matrix() -> None:
    found = fedrot.collect_gram(adapted(), batches())["gram"]
    first = "base_model.model.bert.encoder.layer.0.attention"
    query, value, output = (
        found[f"{first}.{name}.lora_A.weight"] for name in ("self.query", "self.value", "output.dense")
    )
    assert query is value
    assert output is not query
    assert len({id(gram) for gram in found.values()}) == 2 * 3


def test_conv1d_layers_have_factors_of_linear_layers_and_embeddings_none() -> None:
    model = adapted(gpt2, target_modules=["c_attn", "wte"], fan_in_fan_out=True)
    found = fedrot.collect_gram(model, [{"input_ids": torch.randint(30, (3, 7))}])
    assert found.keys() == {"gram", "input_mean"}
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
    ],
)
def test_adapters_without_inputs_of_a_product_are_refused(build: Callable[[], Any], said: str) -> None:
    with pytest.raises(FedrotError, match=said):
        fedrot.collect_gram(build(), batches())


def test_an_adapter_of_another_kind_is_refused() -> None:
    model = peft.get_peft_model(bert(), peft.IA3Config(target_modules=["key"], feedforward_modules=[]))
    with pytest.raises(FedrotError, match="'default' has no LoRA factors of linear layers"):
        fedrot.collect_gram(model, batches())
