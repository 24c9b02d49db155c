"""The model itself is asked whether it has the symmetry that its names promise."""

import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from fedrot import SymmetryError, check_function, symmetry_of
from fedrot.check import Float64, output_change
from tests.models import (
    BARE,
    CASES,
    DIM,
    EVERY,
    EVERYTHING,
    FEW,
    WIDTH,
    bert_config,
    config_of,
    copied,
    fresh_model,
    inputs,
    symmetry_for,
    tensors_of,
)

NAME = "bert-classifier"


def _check(name, model, **given):
    if name.endswith("-choice"):
        given.setdefault("batch", inputs(name))
    return check_function(model, config_of(name).to_dict(), symmetry_for(name), **given)


@pytest.mark.parametrize("name", EVERY)
def test_every_architecture_has_its_symmetry(name):
    assert _check(name, EVERY[name].build("eager")) <= 1e-10


@pytest.mark.parametrize("name", FEW)
def test_attention_may_be_fused_and_the_model_stays(name):
    assert _check(name, CASES[name].build("sdpa")) <= 1e-10
    model = fresh_model(name)
    before = copied(model.state_dict())
    first, again, other = (_check(name, model, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert max(first, other) <= 1e-10
    assert all(
        torch.equal(value, before[key]) for key, value in model.state_dict().items()
    )
    change = output_change(model, config_of(name), symmetry_for(name), EVERYTHING, 1)
    assert change(lambda group: True) == change(lambda group: True) == first


def test_what_cannot_be_checked_is_refused():
    choice = EVERY["bert-choice"].build("eager")
    bare = BARE["bert-bare"].build("eager")
    with pytest.raises(SymmetryError, match="batch of your own"):
        check_function(
            choice, config_of("bert-choice").to_dict(), symmetry_for("bert-choice")
        )
    with pytest.raises(SymmetryError, match="'residual'"):
        _check("bert-bare", bare)
    assert _check("bert-bare", bare, parts=("heads", "attention", "ffn")) <= 1e-10
    tied = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=50))
    symmetry = symmetry_of(tied.config, tied.state_dict()).rotated
    with pytest.raises(SymmetryError, match="are tied, so"):
        check_function(tied, tied.config, symmetry)


class _Wrapped(nn.Module):
    """A classifier that answers what a test says; ``seen`` is the last output of one of
    its modules.
    """

    def __init__(self, answer, place="", model=None):
        super().__init__()
        self.inner = fresh_model(NAME) if model is None else model
        self.answer, self.seen, self.use_cache = answer, torch.zeros(0), None
        if place:
            self.inner.get_submodule(place).register_forward_hook(self._look)

    def _look(self, module, args, out):
        self.seen = out

    def state_dict(self, *args, **kwargs):
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, *args, **kwargs):
        return self.inner.load_state_dict(state_dict, *args, **kwargs)

    def forward(self, use_cache=None, **batch):
        self.use_cache = use_cache
        found = self.inner(**batch, output_hidden_states=True)
        return self.answer(self, found.logits, found.hidden_states[-1])


def _heads(seen):
    return seen.flatten(0, -2)[:3].unflatten(-1, (-1, DIM))


NAMES = CASES[NAME].names
#: A module, and a number that depends on one part's coordinates in it and on no
#: other's.
READ = {
    "residual": (NAMES.of(0, "down"), lambda seen: seen.flatten(0, -2)[:3]),
    "output": ("bert.pooler.dense", lambda seen: seen[:3]),
    # The same whatever the heads' rotations.
    "heads": (NAMES.of(1, "query"), lambda seen: _heads(seen)[1].norm(dim=-1)),
    # The same whatever the heads' order.
    "attention": (
        NAMES.of(1, "value"),
        lambda seen: _heads(seen)[..., 0].square().sum(-1),
    ),
    "ffn": (NAMES.of(0, "up"), lambda seen: seen.flatten(0, -2)[:3]),
}


def _reading(part, seen_in="", factor=1.0):
    """Return a model whose output also depends on what one module computes, unit by
    unit.
    """
    number = READ[part][1]
    return _Wrapped(
        lambda model, logits, hidden: (logits, factor * number(model.seen)),
        READ[seen_in or part][0],
    )


@pytest.mark.parametrize("part", EVERYTHING)
def test_a_wrong_head_is_caught_and_the_part_is_named_if_it_is_asked_for(
    part,
):
    with pytest.raises(SymmetryError) as caught:
        _check(NAME, _reading(part))
    message = str(caught.value)
    assert f"Moving {part} changes this model's outputs" in message
    group = message.split("Look at group '")[1].split("'")[0]
    found = next(g for g in symmetry_for(NAME).groups if g.name == group)
    place = f"{READ[part][0]}.weight"
    assert found.part == part
    assert place in tensors_of([found])
    many = len(tensors_of([found])) - 8
    assert (f"and {many} more tensors" in message) == (many > 0)
    assert many > 0 or f"'{place}'" in message
    others = tuple(p for p in EVERYTHING if p != part)
    assert _check(NAME, _reading(part), parts=others) <= 1e-10
    with pytest.raises(SymmetryError, match=part):
        _check(NAME, _reading(part), parts=(part,), seed=1)


def test_several_guilty_parts_are_named_together_and_nan_proves_nothing():
    # The units of a query as they are: heads move them, and rotations.
    with pytest.raises(SymmetryError, match="heads and attention"):
        _check(NAME, _reading("residual", "heads"))
    with pytest.raises(SymmetryError):
        _check(NAME, _reading("residual", factor=float("nan")))


def test_unit_gains_hide_nothing():
    model = CASES[NAME].build("eager")
    gain = model.bert.embeddings.LayerNorm.weight
    assert torch.equal(gain, torch.ones_like(gain))

    def answer(model, logits, hidden):
        gain = model.inner.bert.embeddings.LayerNorm.weight[:3]
        return logits, gain * torch.arange(1.0, 4.0).to(gain)

    with pytest.raises(SymmetryError, match="Moving residual changes"):
        _check(NAME, _Wrapped(answer, model=model))


def test_two_heads_are_moved_whatever_the_seed():
    """A random order of them may well be the one they have."""
    config = bert_config()
    config.num_hidden_layers, config.num_attention_heads = 1, 2

    class First(BertForSequenceClassification):
        """Looks at the attention of the first head."""

        def forward(self, *args, **kwargs):
            out = super().forward(*args, output_attentions=True, **kwargs)
            return out.logits, out.attentions[0][:, 0]

    symmetry = symmetry_of(config, First(config).state_dict())
    for seed in range(6):
        with pytest.raises(SymmetryError, match="Moving heads changes"):
            check_function(First(config), config.to_dict(), symmetry, seed=seed)


# What is compared, and how groups are selected

#: What a model returns, and the largest change; or a word of the error.
ANSWERS = {
    "a cache": (lambda m, z, h: {"logits": z, "past_key_values": h}, 1e-10),
    "an encoder's states": (
        lambda m, z, h: {"logits": z, "encoder_last_hidden_state": h},
        1e-10,
    ),
    "nested": (lambda m, z, h: {"logits": z, "hidden_states": (h,)}, 1e-10),
    "of a tower": (lambda m, z, h: {"logits": z, "a": {"last_hidden_state": h}}, 1e-10),
    "beside projected": (
        lambda m, z, h: {"text_embeds": z, "last_hidden_state": h},
        1e-10,
    ),
    "by itself": (
        lambda m, z, h: {"logits": z, "last_hidden_state": h},
        "Moving residual changes",
    ),
    "no tensor": (
        lambda m, z, h: {"hidden_states": (z,)},
        "returns a dict without a tensor",
    ),
    # As RMSNorms and rotary positions do.
    "rounded to float32": (
        lambda m, z, h: (
            z.to(torch.float32).softmax(-1, dtype=torch.float32)
            * torch.arange(z.shape[-1]).float()
        ),
        1e-13,
    ),
}


@pytest.mark.parametrize("which", ANSWERS)
def test_what_the_model_goes_on_computing_with_is_no_output(which):
    answer, expected = ANSWERS[which]
    if isinstance(expected, float):
        assert _check(NAME, _Wrapped(answer)) <= expected
        return
    with pytest.raises(SymmetryError, match=expected):
        _check(NAME, _Wrapped(answer))


def test_caches_are_not_filled_unless_the_batch_says_so():
    seen = []
    model = _Wrapped(lambda m, z, h: (seen.append(m.use_cache), z)[1])
    assert _check(NAME, model) <= 1e-10
    assert set(seen) == {False}
    _check(NAME, model, batch={**inputs(), "use_cache": True})
    assert seen[-1] is True


def test_numbers_in_a_batch_are_taken_in_float64():
    batch = {
        "inputs_embeds": torch.randn(2, 5, WIDTH),
        "attention_mask": torch.ones(2, 5),
    }
    assert (
        _check(NAME, fresh_model(NAME), parts=("attention", "ffn"), batch=batch)
        <= 1e-10
    )


def test_the_change_is_measured_for_any_selection():
    change = output_change(
        _reading("heads"), config_of(NAME), symmetry_for(NAME), EVERYTHING
    )
    assert change(lambda group: False) == 0
    assert change(lambda group: group.part != "heads") <= 1e-10
    assert change(lambda group: group.part == "heads" and group.layer == 0) <= 1e-10
    broken = change(lambda group: group.part == "heads" and group.layer == 1)
    assert broken > 1e-4
    assert change(lambda group: group.part == "heads") == pytest.approx(
        broken, rel=1e-6
    )


def test_numbers_beyond_float32_can_be_made_in_float64():
    smallest = torch.finfo(torch.float64).min
    with Float64():
        assert (
            torch.full((), smallest).item()
            == torch.full((), fill_value=smallest).item()
            == smallest
        )
        assert torch.full((), 1).dtype is torch.int64
