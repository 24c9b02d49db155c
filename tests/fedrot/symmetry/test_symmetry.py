"""``symmetry_of``: names from wrappers, models and parts that are refused, and tied
tensors.
"""

import re
from dataclasses import replace

import pytest
import torch

from fedrot import (
    AlignmentOptions,
    SymmetryError,
    align,
    random_equivalent,
    supported,
    symmetry_of,
)
from fedrot.symmetry import DEFAULT_PARTS, NO_LAYER
from tests import families, models
from tests.fedrot.oracles import gap
from tests.models import (
    EVERYTHING,
    WIDTH,
    config_of,
    largest_difference,
    state_of,
    symmetry_for,
    tensors_of,
)

LAYER = "bert.encoder.layer.1."
QUERY, KEY = (
    f"bert.encoder.layer.0.attention.self.{side}" for side in ("query", "key")
)
POSITIONS = "bert.embeddings.position_embeddings.weight"


# Names and forms of the same model


def inserted(piece, after):
    """Return a function that puts a piece of a wrapper behind the first match in a
    name.
    """
    return lambda name: re.sub(after, rf"\g<0>{piece}", name, count=1)


RENAMED = {
    **{
        prefix: inserted(prefix, "^")
        for prefix in (
            "module.",
            "_orig_mod.",
            "_fsdp_wrapped_module.",
            "base_model.model.",
            "model.",
            "a.b.",
            "module._orig_mod.",
            "_orig_mod.module.",
            "model.module.",
            "module.base_model.model.",
        )
    },
    "model inside": inserted("module.", r"^(distil)?bert\."),
    "all layers": inserted("_orig_mod.", r"layer\."),
    "each layer": inserted("_fsdp_wrapped_module.", r"layer\.\d+\."),
    "adapted": lambda name: inserted("base_layer.", r"(query|q_lin)\.")(
        f"base_model.model.{name}"
    ),
}


@pytest.mark.parametrize("change", RENAMED.values(), ids=RENAMED)
@pytest.mark.parametrize("name", models.FEW)
def test_wrapped_models_are_described_like_their_own(name, change):
    plain = symmetry_for(name)
    state = {change(key): t for key, t in state_of(name).items()}
    assert len(state) == len(plain.shapes)
    symmetry = symmetry_of(config_of(name), state)
    assert list(symmetry.groups) == [
        replace(g, slots=tuple(replace(s, tensor=change(s.tensor)) for s in g.slots))
        for g in plain.groups
    ]
    assert symmetry.refused == {}
    assert symmetry.shapes == {
        change(key): shape for key, shape in plain.shapes.items()
    }
    moved = random_equivalent(state, symmetry, 3, EVERYTHING)
    expected = random_equivalent(state_of(name), plain, 3, EVERYTHING)
    assert (
        largest_difference(moved, {change(key): t for key, t in expected.items()}) == 0
    )


@pytest.mark.parametrize("name", models.EVERY)
def test_shapes_alone_and_dictionaries_give_the_same_groups(name):
    state, config, full = state_of(name), config_of(name), symmetry_for(name)
    assert symmetry_of(config.to_dict(), state) == full
    meta = {key: tensor.to("meta") for key, tensor in state.items()}
    for tensors in ({key: list(tensor.shape) for key, tensor in state.items()}, meta):
        assert symmetry_of(config, tensors) == replace(full, tied=())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_floats_and_integers_that_are_no_weights_are_fine(
    dtype,
):
    state = state_of(models.FEW[0], dtype=dtype) | {
        "bert.embeddings.position_ids": torch.arange(40)[None]
    }
    assert symmetry_of(config_of(models.FEW[0]), state).refused == {}


def test_the_rotary_share_of_older_configurations_is_read():
    """GPT-NeoX called it ``rotary_pct`` before transformers 5."""
    config = families.config_of("gpt-neox").to_dict()
    share = config.pop("rope_parameters")["partial_rotary_factor"]
    assert 0 < share < 1
    config.pop("partial_rotary_factor", None)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in families.state_of("gpt-neox").items()
    }
    expected = symmetry_of(families.config_of("gpt-neox"), shapes)
    for other in (share, 1.0):
        found = symmetry_of({**config, "rotary_pct": other}, shapes)
        assert (found.groups == expected.groups) == (other == share)


# Models that are refused, each with words of the error


def setting(**values):
    return lambda config, state: config.update(values)


def tensor(name, value):
    return lambda config, state: state.update({name: value})


def tied(name, other):
    """Give a tensor the storage of another one, which may be as long along its first
    axis alone.
    """
    return lambda config, state: state.update({name: state[other]})


def missing(name):
    return lambda config, state: state.pop(name)


def cut(name):
    return lambda config, state: state.update({name: state[name][: models.DIM // 2]})


def cast(name, dtype):
    return lambda config, state: state.update({name: state[name].to(dtype)})


def copies(*prefixes):
    """Store the model once under each prefix."""

    def change(config, state):
        both = {prefix + key: t for prefix in prefixes for key, t in state.items()}
        state.clear()
        state.update(both)

    return change


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


BERT, DISTILBERT = "bert-classifier", "distilbert-mlm"
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
MODULES = ("query", "key", "value", "output", "up", "down")
UP = "intermediate.dense.weight"
FIRST = next(iter(state_of(BERT)))
ADAPTER = f"{QUERY}.lora_A.default.weight"

#: The model, what is changed, and words of the error.
REFUSED = {
    **{
        f"architecture {action}": (
            BERT,
            setting(model_type=action),
            (str(action), FIRST, *supported()),
        )
        for action in ("xlnet", "gemma3", None)
    },
    **{f"no {key}": (BERT, lambda c, s, key=key: c.pop(key), (key,)) for key in SIZES},
    **{
        f"{key} {value}": (BERT, setting(**{key: value}), ())
        for key in SIZES[:3]
        for value in (None, "many", [2], {}, 1.5, float("nan"))
    },
    "no heads": (
        BERT,
        setting(num_attention_heads=0),
        ("does not describe", "family 'bert'"),
    ),
    "heads that do not divide": (BERT, setting(num_attention_heads=5), ("shape",)),
    "twice the width": (BERT, setting(hidden_size=2 * WIDTH), ("shape",)),
    "half the neurons": (
        BERT,
        setting(intermediate_size=models.NEURONS // 2),
        ("shape",),
    ),
    "more layers": (BERT, setting(num_hidden_layers=1), ("encoder.layer.1.",)),
    "fewer layers": (
        BERT,
        setting(num_hidden_layers=3),
        ("bert.encoder.layer.2.", "missing"),
    ),
    **{
        f"unknown {name}": (
            BERT,
            tensor(LAYER + name, ones(2, 2)),
            (f"'{LAYER}{name}'", "gpt2"),
        )
        for name in (
            "crossattention.self.query.weight",
            "attention.self.distance_embedding.weight",
            "adapter.down.weight",
            "intermediate.dense_gate.weight",
        )
    },
    **{
        f"{name} without {key}": (name, missing(key), ("missing", key))
        for name in (BERT, DISTILBERT)
        for key in (
            f"{models.CASES[name].names.of(1, module)}.weight" for module in MODULES
        )
    },
    **{
        f"short {key}": (BERT, cut(key), ("shape", f"'{key}'"))
        for module in ("query", "value", "up")
        for key in (
            f"{models.CASES[BERT].names.of(0, module)}.{leaf}"
            for leaf in ("weight", "bias")
        )
    },
    "another family": (
        BERT,
        setting(**config_of(DISTILBERT).to_dict()),
        (f"'{FIRST}'", "distilbert"),
    ),
    "no tensors": (BERT, copies(), ("no tensors",)),
    "two encoders": (
        BERT,
        copies("left.", "right."),
        ("Several", "left.bert.", "right.bert."),
    ),
    "with and without a wrapper": (
        BERT,
        copies("", "module."),
        ("differ only in a wrapper",),
    ),
    "layers share": (
        BERT,
        tied(f"{LAYER}{UP}", f"{LAYER[:-2]}0.{UP}"),
        ("share storage", LAYER + UP),
    ),
    "query and key share": (
        BERT,
        tied(f"{KEY}.weight", f"{QUERY}.weight"),
        ("share storage",),
    ),
    "a head shares": (
        BERT,
        tied("bert.pooler.dense.weight", f"{QUERY}.weight"),
        ("share storage",),
    ),
    "a norm shares": (
        "bert-bare",
        tied(
            "encoder.layer.1.output.LayerNorm.bias",
            "encoder.layer.0.attention.self.query.bias",
        ),
        ("share storage",),
    ),
    "a table shares with hidden units": (
        BERT,
        lambda c, s: s.update(
            dict.fromkeys((POSITIONS, "classifier.weight"), ones(3, WIDTH))
        ),
        ("share storage",),
    ),
    **{
        f"adapter {name}": (
            BERT,
            tensor(f"{QUERY}.{name}", ones(2, 2)),
            (name, "merge_and_unload"),
        )
        for name in (
            "lora_A.default.weight",
            "lora_B.client7.weight",
            "lora_A.weight",
            "lora_embedding_A.default",
            "lora_magnitude_vector.default.weight",
            "ia3_l.default",
        )
    },
    "an adapter alone": (
        BERT,
        lambda c, s: (s.clear(), s.update({f"base_model.model.{ADAPTER}": ones(2, 2)})),
        (ADAPTER, "merge_and_unload", "base"),
    ),
    **{
        f"prompt {name}": (BERT, tensor(name, ones(3, 4)), ("adapter",))
        for name in (
            "prompt_encoder.default.embedding.weight",
            "base_model.model.x.adaption_prompt",
        )
    },
    **{
        f"in {dtype}": (
            BERT,
            cast(FIRST, dtype),
            (f"'{FIRST}'", str(dtype), "quantised"),
        )
        for dtype in (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn)
    },
    # Two weights in a byte, in a column: not a matter of a wrong shape.
    "packed": (
        BERT,
        tensor(f"{QUERY}.weight", torch.zeros(WIDTH**2 // 2, 1, dtype=torch.uint8)),
        ("uint8", "quantised"),
    ),
}


@pytest.mark.parametrize(("name", "change", "words"), REFUSED.values(), ids=REFUSED)
def test_models_are_refused_in_words(name, change, words):
    config = config_of(name).to_dict()
    state = state_of(name)
    change(config, state)
    with pytest.raises(SymmetryError) as caught:
        symmetry_of(config, state)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("config", ["bert", 3, None, [("model_type", "bert")]])
def test_a_config_of_another_type_is_refused(config):
    with pytest.raises(SymmetryError, match="config"):
        symmetry_of(config, state_of(BERT))


# Parts that are refused, and all others that move


def nothing(config, state):
    """Leave the model as it is."""


RESIDUAL = ("residual",)
ACROSS = ("residual", "output")
NARROW = "bert.encoder.layer.0.output.LayerNorm.weight"

#: The model, what is changed, the parts that are refused then, and a word of the
#: reason.
PARTS = {
    **{name: (name, nothing, RESIDUAL, "no task head") for name in models.BARE},
    **{
        name: (BERT, tensor(name, ones(3, WIDTH)), ACROSS, name)
        for name in ("my_head.weight", "my_head.dense.bias", "bert.adapter.weight")
    },
    # ELECTRA's multiple-choice head summarises with a module that the family does not
    # list.
    "not guessed": (
        "electra-tokens",
        tensor("sequence_summary.summary.weight", ones(WIDTH, WIDTH)),
        ACROSS,
        "sequence_summary",
    ),
    **{
        f"{name} without {key}": (name, missing(key), RESIDUAL, "missing")
        for name, key in (
            (BERT, "bert.embeddings.LayerNorm.weight"),
            (DISTILBERT, "distilbert.embeddings.position_embeddings.weight"),
            ("roberta-qa", "roberta.encoder.layer.1.output.LayerNorm.weight"),
        )
    },
    # Nothing shows that the transform's output ends in the vocabulary.
    "no tied decoder": (
        "bert-mlm",
        missing("cls.predictions.decoder.weight"),
        RESIDUAL,
        "task head",
    ),
    **{
        f"{name} {key} {shape}": (name, tensor(key, ones(*shape)), ACROSS, f"'{key}'")
        for name in (BERT, "bert-tokens")
        for key, shape in (
            ("pooler.dense.weight", (WIDTH, WIDTH)),
            ("classifier.weight", (3, 2 * WIDTH)),
            ("classifier.weight", (3 * WIDTH,)),
            (POSITIONS, (40, 2 * WIDTH)),
            (NARROW, (WIDTH // 2,)),
        )
    },
}


@pytest.mark.parametrize(("name", "change", "parts", "word"), PARTS.values(), ids=PARTS)
def test_parts_are_refused_and_all_others_move(name, change, parts, word):
    state = state_of(name)
    change({}, state)
    symmetry = symmetry_of(config_of(name), state)
    assert set(symmetry.refused) == {*parts}
    for part in parts:
        told = rf"'{part}'[^$]*{re.escape(word)}"
        asked = (*DEFAULT_PARTS, part)
        with pytest.raises(SymmetryError, match=told):
            random_equivalent(state, symmetry, 1, asked)
        with pytest.raises(SymmetryError, match=told):
            align(state, state, symmetry, AlignmentOptions(parts=asked))
    rest = tuple(part for part in EVERYTHING if part not in parts)
    assert {g for g in symmetry.groups if g.layer != NO_LAYER} <= {
        *symmetry.select(rest)
    }
    moved = random_equivalent(state, symmetry, 1, rest)
    changed = {key for key in state if not torch.equal(moved[key], state[key])}
    assert changed == tensors_of(symmetry.select(rest))
    shapes = {key: t.shape for key, t in state_of(name).items()}
    known = {key: t for key, t in moved.items() if shapes.get(key) == t.shape}
    if known.keys() == shapes.keys():
        assert (
            gap(models.logits(name, known), models.logits(name, state_of(name)))
            <= 1e-10
        )


def test_a_head_that_reads_the_stream_may_be_tied_to_a_table_on_it():
    shared = dict.fromkeys((POSITIONS, "classifier.weight"), ones(3, WIDTH))
    symmetry = symmetry_of(config_of("bert-tokens"), state_of("bert-tokens") | shared)
    assert symmetry.tied == ((POSITIONS, "classifier.weight"),)
    assert not symmetry.refused
