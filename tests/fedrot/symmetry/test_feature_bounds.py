"""What families say about the bounds of the features that a task head reads."""

from dataclasses import fields

import pytest
import torch

from fedrot.errors import SymmetryError
from fedrot.symmetry import FAMILIES, Family, supported
from fedrot.symmetry.describe.task_heads import AfterNorm, AfterTanh, Unbounded
from fedrot.task_head.bounds import largest_inputs

#: The layer before the task head of every model type whose features have a bound.
TANH = {
    "bert": "bert.pooler.dense",
    "albert": "albert.pooler",
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "mpnet"), "classifier.dense"
    ),
    **dict.fromkeys(("bart", "t5"), "classification_head.dense"),
}
NORMS = {
    "vit": "vit.layernorm",
    "gpt2": "transformer.ln_f",
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3"), "model.norm"),
}
#: Every layer above, and some that are in front of no task head with a bound.
LAYERS = sorted(
    {*TANH.values(), *NORMS.values(), "norm", "layers.1.ln_f", "module.model.norm"}
)


def state_after(layer):
    """Return a task head of four inputs, and the layer before it."""
    return {
        f"{layer}.weight": torch.tensor([1.0, -2.0, 0.5, 3.0]),
        f"{layer}.bias": torch.tensor([0.0, -1.0, 2.0, 0.5]),
        "head.weight": torch.zeros(2, 4),
    }


@pytest.mark.parametrize("model_type", supported())
def test_every_model_type_has_a_bound_or_the_reason_why_not(model_type):
    (family,) = (family for family in FAMILIES if model_type in family.model_types)
    match family.features_of(model_type):
        case Unbounded(reason):
            assert len(reason.split()) > 3
            assert model_type not in TANH | NORMS
        case AfterTanh(layer):
            assert TANH[model_type].endswith(layer)
        case AfterNorm(norm):
            assert NORMS[model_type] == norm


@pytest.mark.parametrize("model_type", [*supported(), "unknown"])
@pytest.mark.parametrize("layer", LAYERS)
def test_bounds_are_1_after_tanh_and_gain_and_bias_after_a_norm(model_type, layer):
    largest = largest_inputs({"model_type": model_type}, state_after(layer), "head")
    if TANH.get(model_type) == layer:
        assert largest is not None
        assert (largest.dtype, largest.tolist()) == (torch.float64, [1, 1, 1, 1])
    elif NORMS.get(model_type) == layer:
        assert largest is not None
        assert (largest.dtype, largest.tolist()) == (torch.float64, [2, 5, 3, 6.5])
    else:
        assert largest is None


def test_a_norm_without_bias_is_bounded_by_its_gain():
    state = state_after("model.norm")
    del state["model.norm.bias"]
    largest = largest_inputs({"model_type": "llama"}, state, "head")
    assert largest is not None
    assert largest.tolist() == [2, 4, 1, 6]


def test_a_family_that_says_nothing_about_its_features_is_refused():
    sentence = {
        field.name: getattr(FAMILIES[0], field.name) for field in fields(Family)
    }
    del sentence["features"]
    with pytest.raises(TypeError, match="features"):
        Family(**sentence)
    bound = AfterTanh("pooler")
    with pytest.raises(SymmetryError, match="features of 'b'"):
        Family(**{**sentence, "model_types": ("a", "b"), "features": {"a": bound}})
    both = Family(**{**sentence, "model_types": ("a", "b"), "features": bound})
    assert both.features_of("b") == bound
