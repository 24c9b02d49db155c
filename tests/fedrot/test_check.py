"""The model itself is asked whether it has the symmetry that its names promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification

import fedrot
from fedrot.check import output_change
from fedrot.precision import Float64
from tests.models import (
    BARE,
    CASES,
    DIM,
    EVERY,
    EVERYTHING,
    FEW,
    WIDTH,
    Names,
    bert_config,
    config_of,
    fresh_model,
    inputs,
    symmetry_for,
)


def _check(name: str, model: nn.Module, **given: Any) -> float:
    if name.endswith("-choice"):
        given.setdefault("batch", inputs(name))
    return fedrot.check_function(model, config_of(name).to_dict(), symmetry_for(name), **given)


@pytest.mark.parametrize("built", [True, False], ids=["as-built", "random"])
@pytest.mark.parametrize("name", EVERY)
def test_every_architecture_has_its_symmetry(name: str, built: bool) -> None:
    model = EVERY[name].build("eager") if built else fresh_model(name)
    assert _check(name, model) <= 1e-10


def test_a_model_that_does_not_run_on_rows_of_tokens_is_not_certified() -> None:
    model = EVERY["bert-choice"].build("eager")
    with pytest.raises(fedrot.SymmetryError, match="batch of your own"):
        fedrot.check_function(model, config_of("bert-choice").to_dict(), symmetry_for("bert-choice"))


def test_the_model_itself_stays_as_it_is() -> None:
    model = fresh_model(FEW[0])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    _check(FEW[0], model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FEW)
def test_scales_can_be_asked_for_and_attention_may_be_fused(name: str, attention: str) -> None:
    assert _check(name, CASES[name].build(attention), parts=EVERYTHING) <= 1e-10


def _where(part: str, names: Names) -> str:
    return {
        "residual": names.of(0, "down"),
        "output": "bert.pooler.dense",
        "heads": names.of(1, "query"),
        "attention": names.of(1, "value"),
        "rescale": names.of(1, "key"),
        "ffn": names.of(0, "up"),
    }[part]


def _number(part: str, seen: Tensor) -> Tensor:
    """Return what depends on one part's coordinates and on no other's."""
    rows = seen.flatten(0, -2)[:3]
    heads = rows.unflatten(-1, (-1, DIM))
    if part == "heads":
        # The same whatever the heads' rotations and scales.
        return heads[1].norm(dim=-1) / heads[0].norm(dim=-1)
    if part == "attention":
        # The same whatever the heads' order and scales.
        return (heads[..., 0] / heads.norm(dim=-1)).square().sum(-1)
    return rows.norm(dim=-1) if part == "rescale" else rows


class _Reading(nn.Module):
    """A model whose output also depends on what one module computes, unit by unit."""

    def __init__(self, name: str, part: str) -> None:
        super().__init__()
        self.inner = fresh_model(name)
        self.part = part
        self.seen = torch.zeros(0)
        module = self.inner.get_submodule(_where(part, EVERY[name].names))
        module.register_forward_hook(self._look)

    def _look(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.seen = out

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return self.inner.load_state_dict(state_dict, *args, **kwargs)

    def forward(self, **batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.inner(**batch).logits
        return logits, _number(self.part, self.seen)


@pytest.mark.parametrize("part", EVERYTHING)
def test_a_wrong_head_is_caught_and_the_part_is_named(part: str) -> None:
    name = "bert-classifier"
    with pytest.raises(fedrot.SymmetryError) as caught:
        _check(name, _Reading(name, part), parts=EVERYTHING)
    message = str(caught.value)
    assert f"Moving {part} changes this model's outputs" in message
    assert "The description of family 'bert' is wrong for this model" in message
    group = message.split("Look at group '")[1].split("'")[0]
    found = next(g for g in symmetry_for(name).groups if g.name == group)
    place = f"{_where(part, EVERY[name].names)}.weight"
    assert found.part == part
    assert place in {slot.tensor for slot in found.slots}
    many = len({slot.tensor for slot in found.slots}) > 8
    assert ("more tensors" in message) == many
    assert many or f"'{place}'" in message


@pytest.mark.parametrize("part", EVERYTHING)
def test_parts_that_are_not_asked_for_may_be_broken(part: str) -> None:
    name = "bert-classifier"
    others = tuple(p for p in EVERYTHING if p != part)
    assert _check(name, _Reading(name, part), parts=others) <= 1e-10
    with pytest.raises(fedrot.SymmetryError, match=part):
        _check(name, _Reading(name, part), parts=(part,))


def test_several_guilty_parts_are_named_together() -> None:
    name = "bert-classifier"
    model = _Reading(name, "heads")
    model.part = "residual"  # the units of a query as they are: heads move them, and rotations
    with pytest.raises(fedrot.SymmetryError, match="Moving heads and attention changes"):
        _check(name, model)


class _Gains(_Reading):
    """A model whose output also depends on the first gains of a norm, all of them 1 as built."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "residual")
        self.inner = CASES[name].build("eager")
        self.gain = self.inner.bert.embeddings.LayerNorm.weight

    def forward(self, **batch: Any) -> tuple[Tensor, Tensor]:
        return self.inner(**batch).logits, self.gain[:3] * torch.arange(1.0, 4.0).to(self.gain)


def test_unit_gains_hide_nothing() -> None:
    model = _Gains("bert-classifier")
    assert torch.equal(model.gain, torch.ones_like(model.gain))
    with pytest.raises(fedrot.SymmetryError, match="Moving residual changes"):
        _check("bert-classifier", model)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("part", EVERYTHING)
def test_a_wrong_head_is_caught_whatever_the_seed(part: str, seed: int) -> None:
    """One layer has few heads: a random order of them may well be the one they have."""
    name = "bert-classifier"
    with pytest.raises(fedrot.SymmetryError, match=part):
        _check(name, _Reading(name, part), parts=(part,), seed=seed)


def test_two_heads_are_moved_whatever_the_seed() -> None:
    config = bert_config()
    config.num_hidden_layers, config.num_attention_heads = 1, 2

    class First(BertForSequenceClassification):
        """Looks at the attention of the first head."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, output_attentions=True, **kwargs)
            return out.logits, out.attentions[0][:, 0]

    symmetry = fedrot.symmetry_of(config, First(config).state_dict())
    for seed in range(8):
        with pytest.raises(fedrot.SymmetryError, match="Moving heads changes"):
            fedrot.check_function(First(config), config.to_dict(), symmetry, seed=seed)


class _Broken(_Reading):
    def forward(self, **batch: Any) -> tuple[Tensor, Tensor]:
        logits, seen = super().forward(**batch)
        return logits, float("nan") * seen


def test_outputs_that_are_nan_prove_nothing() -> None:
    with pytest.raises(fedrot.SymmetryError):
        _check("bert-classifier", _Broken("bert-classifier", "residual"))


def test_a_part_that_is_refused_cannot_be_checked() -> None:
    name = "bert-bare"
    with pytest.raises(fedrot.SymmetryError, match="Part 'residual' cannot be moved"):
        _check(name, BARE[name].build("eager"))
    assert _check(name, BARE[name].build("eager"), parts=("heads", "attention", "ffn")) <= 1e-10


def test_the_answer_is_the_same_for_the_same_seed() -> None:
    name = "bert-classifier"
    first, again, other = (_check(name, fresh_model(name), seed=seed) for seed in (1, 1, 2))
    assert first == again != other


# What is compared, and how groups are selected


class _Returning(nn.Module):
    """A classifier that also returns what lies in coordinates of its own."""

    def __init__(self, also: str) -> None:
        super().__init__()
        self.inner = fresh_model("bert-classifier")
        self.also = also

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return self.inner.load_state_dict(state_dict, *args, **kwargs)

    def forward(self, **batch: Any) -> dict[str, Any]:
        out = self.inner(**batch, output_hidden_states=True)
        hidden = out.hidden_states[-1]
        inside = {
            "past_key_values": hidden,
            "encoder_last_hidden_state": hidden,
            "hidden_states": (hidden,),
            "text_model_output": {"last_hidden_state": hidden},
        }
        return {"logits": out.logits, self.also: inside.get(self.also, hidden)}


@pytest.mark.parametrize(
    "also", ["past_key_values", "encoder_last_hidden_state", "hidden_states", "text_model_output"]
)
def test_what_the_model_goes_on_computing_with_is_no_output(also: str) -> None:
    assert _check("bert-classifier", _Returning(also)) <= 1e-10


class _Projecting(_Returning):
    def forward(self, **batch: Any) -> dict[str, Any]:
        logits, hidden = super().forward(**batch).values()
        return {"text_embeds": logits, "last_hidden_state": hidden}


def test_hidden_states_beside_projected_embeddings_are_no_output() -> None:
    assert _check("bert-classifier", _Projecting("last_hidden_state")) <= 1e-10


class _Rounding(_Returning):
    """Does part of its work in float32, as RMSNorms and rotary positions do."""

    def forward(self, **batch: Any) -> Any:
        logits = self.inner(**batch).logits
        places = torch.arange(logits.shape[-1]).float()
        return logits.to(torch.float32).softmax(-1, dtype=torch.float32) * places


def test_what_models_round_to_float32_is_not_rounded() -> None:
    assert _check("bert-classifier", _Rounding("")) <= 1e-13


def test_what_it_returns_under_any_other_name_is_one() -> None:
    with pytest.raises(fedrot.SymmetryError, match="Moving residual changes"):
        _check("bert-classifier", _Returning("last_hidden_state"))


class _Answering(_Returning):
    def forward(self, **batch: Any) -> Any:
        return {"hidden_states": (super().forward(**batch)["logits"],)}


def test_a_model_that_returns_no_tensor_proves_nothing() -> None:
    with pytest.raises(fedrot.SymmetryError, match="returns a dict without a tensor at its top level"):
        _check("bert-classifier", _Answering("nothing"))


class _Caching(_Returning):
    seen: list[Any]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: Any = None) -> Any:
        type(self).seen.append(use_cache)
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits


def test_caches_are_not_filled_unless_the_batch_says_so() -> None:
    _Caching.seen = []
    assert _check("bert-classifier", _Caching("")) <= 1e-10
    assert set(_Caching.seen) == {False}
    _check("bert-classifier", _Caching(""), batch={**inputs(), "use_cache": True})
    assert _Caching.seen[-1] is True


def test_numbers_in_a_batch_are_taken_in_float64() -> None:
    name = "bert-classifier"
    batch = {"inputs_embeds": torch.randn(2, 5, WIDTH), "attention_mask": torch.ones(2, 5)}
    assert _check(name, fresh_model(name), parts=("attention", "ffn"), batch=batch) <= 1e-10


def test_the_change_is_measured_for_any_selection() -> None:
    name = "bert-classifier"
    model, symmetry = _Reading(name, "heads"), symmetry_for(name)
    change = output_change(model, config_of(name), symmetry, EVERYTHING)
    assert change(lambda group: False) == 0
    assert change(lambda group: group.part != "heads") <= 1e-10
    assert change(lambda group: group.part == "heads" and group.layer == 0) <= 1e-10
    broken = change(lambda group: group.part == "heads" and group.layer == 1)
    assert broken > 1e-4
    assert change(lambda group: group.part == "heads") == pytest.approx(broken, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_change_is_that_of_the_check(seed: int) -> None:
    name = "distilbert-mlm"
    model, symmetry = fresh_model(name), symmetry_for(name)
    change = output_change(model, config_of(name), symmetry, EVERYTHING, seed)
    found = change(lambda group: True)
    assert found == change(lambda group: True)
    assert found == _check(name, model, parts=EVERYTHING, seed=seed)


def test_numbers_beyond_float32_can_be_made_in_float64() -> None:
    smallest = torch.finfo(torch.float64).min
    with Float64():
        assert torch.full((), smallest).item() == torch.full((), fill_value=smallest).item() == smallest
        assert torch.full((), 1).dtype is torch.int64
