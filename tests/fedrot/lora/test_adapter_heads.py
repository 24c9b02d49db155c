"""Task heads that are trained beside a PEFT adapter, against the merged model."""

import copy

import peft
import pytest
import torch

from fedrot.errors import FedrotError
from fedrot.lora.peft_model import adapter_tensors, load_adapter
from fedrot.task_head.fit import fitted_task_head, with_task_head
from fedrot.task_head.losses import TaskHeads, collect_losses, compare_losses
from fedrot.task_head.names import adapter_task_head_of, task_head_of
from fedrot.task_head.sums import collect_classes
from tests.fedrot.collect.tiny import batch_of, tiny_classifier
from tests.fedrot.task_head.test_sums import assert_close
from tests.models import randomise


def adapted(kind, **settings):
    """Return a float64 PEFT model whose trained copies differ from the layers that they
    replace.
    """
    targets = {"gpt2": "c_attn", "distilbert": "q_lin"}.get(kind, "query")
    lora = peft.LoraConfig(
        r=2, target_modules=[targets], fan_in_fan_out=kind == "gpt2", **settings
    )
    return (
        randomise(peft.get_peft_model(tiny_classifier(kind, num_labels=3), lora))
        .double()
        .train()
    )


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("bert", "classifier", {"task_type": "SEQ_CLS"}),
        ("bert", "classifier", {"modules_to_save": ["classifier"]}),
        ("roberta", "classifier.out_proj", {"task_type": "SEQ_CLS"}),
        ("distilbert", "classifier", {"task_type": "SEQ_CLS"}),  # with pre_classifier
        ("gpt2", "score", {"task_type": "SEQ_CLS"}),
    ],
)
def test_the_head_beside_an_adapter_is_that_of_the_merged_model(kind, name, settings):
    model = adapted(kind, **settings)
    batches = [
        {**batch_of(seed, rows=9), "labels": torch.arange(9) % 3} for seed in (1, 2)
    ]
    merged = copy.deepcopy(model).merge_and_unload()
    head = adapter_task_head_of(adapter_tensors(model))
    assert (head, task_head_of(merged.config, merged.state_dict())) == (
        f"base_model.model.{name}",
        name,
    )
    found = collect_classes(model, batches, head)
    assert_close(found, collect_classes(merged, batches, name))
    weight, bias = fitted_task_head(found, bias=name != "score")
    load_adapter(model, with_task_head(adapter_tensors(model), head, weight, bias))
    merged.load_state_dict(with_task_head(merged.state_dict(), name, weight, bias))
    expected = collect_losses(merged, batches).losses
    torch.testing.assert_close(collect_losses(model, batches).losses, expected)
    heads = TaskHeads(weight[None], bias[None], torch.tensor([-1]))
    torch.testing.assert_close(
        compare_losses([model], batches, head, [heads]).losses, expected
    )


def test_adapters_without_one_task_head_are_refused():
    with pytest.raises(FedrotError, match="classifier, score"):
        adapter_task_head_of(adapter_tensors(adapted("bert")))
    with pytest.raises(FedrotError, match="has 2 layers"):
        adapter_task_head_of(
            {
                f"base_model.model.{name}.weight": (3, 8)
                for name in ("score", "classifier")
            }
        )
