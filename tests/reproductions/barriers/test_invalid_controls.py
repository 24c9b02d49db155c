"""Controls that are no symmetry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from fedrot.errors import FedrotError
from fedrot.symmetry import symmetry_of
from reproductions.barriers.invalid_controls import ignore_heads
from reproductions.barriers.methods import METHODS, match
from tests.simulations.tensors import equal

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
}
CONFIG = BertConfig(
    **SIZES, num_attention_heads=3, max_position_embeddings=16, initializer_range=0.3
)


def built(seed):
    torch.manual_seed(seed)
    return BertForMaskedLM(CONFIG).eval()


def batches():
    ids = torch.randint(1, 50, (16, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[:, 9:] = 0
    return [{"input_ids": ids, "attention_mask": mask, "labels": ids}]


def units(model, layer):
    """Return the outputs of all heads at the tokens that count, by hand."""
    found = []
    dense = model.get_submodule(f"bert.encoder.layer.{layer}.attention.output.dense")
    handle = dense.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        for batch in batches():
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    handle.remove()
    return torch.cat([x[:, :9].reshape(-1, 24) for x in found]).double().numpy()


ANCHOR, CLIENT = built(0), built(1)
SYMMETRY = symmetry_of(CONFIG, CLIENT.state_dict())


def matched(method, rows):
    return match(METHODS[method], ANCHOR, CLIENT, SYMMETRY, rows)


def test_units_are_assigned_by_correlation_whatever_their_heads():
    found = ignore_heads(ANCHOR, CLIENT, SYMMETRY, batches())
    before = CLIENT.state_dict()
    for layer in range(2):
        both = np.corrcoef(units(ANCHOR, layer).T, units(CLIENT, layer).T)[:24, 24:]
        _, order = linear_sum_assignment(-both)
        attention = f"bert.encoder.layer.{layer}.attention"
        for name in ("query.weight", "key.weight", "value.weight", "value.bias"):
            full = f"{attention}.self.{name}"
            assert torch.equal(found[full], before[full][order])
        out = f"{attention}.output.dense.weight"
        assert torch.equal(found[out], before[out][:, order])
        assert (np.abs(order // 8 - np.arange(24) // 8) > 0).any(), (
            "units change their heads"
        )
    others = {
        name: tensor
        for name, tensor in before.items()
        if "attention.self" not in name and "output.dense" not in name
    }
    assert equal(found, others)


def test_it_changes_the_function_and_head_permutations_do_not():
    inputs = {name: value for name, value in batches()[0].items() if name != "labels"}

    def change(method):
        moved = built(2)
        moved.load_state_dict(matched(method, batches()))
        with torch.no_grad():
            return float((moved(**inputs).logits - CLIENT(**inputs).logits).abs().max())

    assert all(
        change(f"verma-{name}") < 1e-3 for name in ("heads", "monotonic", "stream-all")
    )
    assert change("verma-ignore-heads") > 0.1


def test_fewer_rows_are_the_first_ones():
    full = [{k: v.repeat(8, 1) for k, v in batches()[0].items()}] * 2
    cut = [{k: v[:64] for k, v in full[0].items()}]
    assert equal(matched("verma-heads@64", full), matched("verma-heads", cut))


def test_grouped_queries_have_no_such_control():
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config)
    symmetry = symmetry_of(config, model.state_dict())
    with pytest.raises(FedrotError, match="keys and values"):
        ignore_heads(model, model, symmetry, batches())
