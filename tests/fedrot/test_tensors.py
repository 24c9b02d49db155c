"""Updates, anchors and arguments that cannot be used are refused by name, with what to
do instead.
"""

import re

import pytest
import torch

from fedrot import (
    AlignmentOptions,
    align,
    align_round,
    canonical,
    collect_activations,
    diagnose,
    random_equivalent,
    symmetry_of,
)
from fedrot.aggregation import Mean
from fedrot.errors import FedrotError, SymmetryError, UpdateError
from fedrot.strategies import to_arrays
from tests.fedrot.pairs import MODULES
from tests.models import (
    CASES,
    EVERYTHING,
    FULL,
    cast,
    config_of,
    fresh_model,
    near,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"
BASE, SYMMETRY = state_of(NAME), symmetry_for(NAME)


def _entry(value):
    def change(tensor):
        out = tensor.clone()
        out.view(-1)[3] = value
        return out

    return change


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
UP_BIAS = "bert.encoder.layer.0.intermediate.dense.bias"
#: A tensor, what becomes of it (None: it is left out), and a word of the error beside
#: its name.
DAMAGES = [
    (QUERY, lambda t: None, "missing"),
    ("classifier.bias", lambda t: None, "missing"),
    ("adapter.weight", lambda t: torch.ones(2, 2), "not part of the model"),
    (QUERY, lambda t: t[:-1], "shape"),
    (QUERY, lambda t: t.reshape(-1), "shape"),
    ("classifier.weight", lambda t: t.T, "shape"),
    (QUERY, _entry(float("-inf")), "NaN or Inf"),
    (UP_BIAS, _entry(float("nan")), "NaN or Inf"),
    (QUERY, lambda t: (100 * t).to(torch.int8), "int8"),
    (UP_BIAS, lambda t: t > 0, "bool"),
]


def refused(name, word, update, anchor, parts=EVERYTHING):
    """Check that a tensor is refused by its name, with a word of the reason."""
    with pytest.raises(UpdateError, match=word) as caught:
        align(update, anchor, SYMMETRY, AlignmentOptions(parts=parts))
    assert f"'{name}'" in str(caught.value)


@pytest.mark.parametrize(("tensor", "change", "word"), DAMAGES)
def test_a_bad_update_or_anchor_is_refused_by_name(tensor, change, word):
    bad = near(BASE, 0.1)
    value = change(bad.pop(tensor, torch.zeros(())))
    if value is not None:
        bad[tensor] = value
    refused(tensor, word, bad, BASE, FULL)
    refused(tensor, word, BASE, bad, ("attention", "ffn"))


#: A value of the update or the anchor, the parts (one if None), and a word of the
#: error.
VALUES = [
    (float("nan"), None, 0, torch.float64, "NaN or Inf"),
    (float("inf"), None, 1, torch.float64, "NaN or Inf"),
    (1e200, EVERYTHING, 0, torch.float64, "overflow"),
    (1e30, None, 0, torch.float32, "overflow"),
    (1e200, None, 1, torch.float64, "overflow"),
]


@pytest.mark.parametrize(
    ("part", "key"),
    [
        *(
            (part, f"{CASES[NAME].names.of(0, MODULES[part][0])}.weight")
            for part in FULL
        ),
        ("residual", "bert.embeddings.word_embeddings.weight"),
        ("residual", "bert.encoder.layer.1.output.LayerNorm.bias"),
        ("residual", "bert.encoder.layer.0.attention.self.key.weight"),
        ("output", "classifier.weight"),
        ("output", "bert.pooler.dense.bias"),
    ],
)
@pytest.mark.parametrize(("value", "parts", "damaged", "dtype", "word"), VALUES)
def test_every_part_refuses_values_that_are_not_finite_or_overflow(
    part, key, value, parts, damaged, dtype, word
):
    states = [cast(near(BASE, scale), dtype) for scale in (0.1, 0)]
    states[damaged][key] = _entry(value)(states[damaged][key])
    refused(key, word, *states, parts or (part,))


STRANGE = {
    "sparse": (lambda t: t.to_sparse(), "to_dense"),
    "compressed": (lambda t: t.to_sparse_csr(), "to_dense"),
    "complex": (lambda t: t.to(torch.complex64), "complex64"),
    "quantised": (
        lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
        "dequantize",
    ),
    "without values": (lambda t: t.to("meta"), "device 'meta'"),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize(
    "name", ["bert.pooler.dense.weight", "bert.encoder.layer.0.output.dense.weight"]
)
def test_a_tensor_that_cannot_be_computed_with_is_named(name, kind):
    made, says = STRANGE[kind]
    strange = {**BASE, name: made(BASE[name])}
    calls = [
        lambda: align(strange, BASE, SYMMETRY),
        lambda: align(BASE, strange, SYMMETRY),
        lambda: canonical(strange, SYMMETRY),
        lambda: Mean().add(strange, 1),
        lambda: to_arrays(strange),
    ]
    if kind != "without values":  # A symmetry needs shapes alone.
        calls.append(lambda: symmetry_of(config_of(NAME), strange))
    for call in calls:
        with pytest.raises(FedrotError, match=re.escape(name)) as caught:
            call()
        assert says in str(caught.value)


def _align(update, anchor, symmetry=None, options=None):
    return align(update, anchor, symmetry or SYMMETRY, options)


#: Calls that a new user makes by mistake with a model and its state, and what the
#: errors say to write.
CALLS = {
    UpdateError: [
        (lambda model, state: _align(model, model), "model.state_dict()"),
        (lambda model, state: _align([*state.values()], state), "is a list"),
        (
            lambda model, state: _align(
                {n: t.numpy() for n, t in state.items()}, state
            ),
            "as_tensor",
        ),
        (
            lambda model, state: random_equivalent(model, SYMMETRY),
            "state_dict()",
        ),
        (
            lambda model, state: random_equivalent({"a": state[QUERY]}, SYMMETRY),
            "is missing",
        ),
        (
            lambda model, state: _align(
                {f"module.{n}": t for n, t in state.items()}, state
            ),
            "'module.bert.embeddings.word_embeddings.weight' instead",
        ),
        (
            lambda model, state: _align(
                {
                    n.replace("query.", "query.modules_to_save.mine."): t
                    for n, t in state.items()
                },
                state,
            ),
            "query.modules_to_save.mine.weight' instead",
        ),
        (
            lambda model, state: _align(
                {str(i): t for i, t in enumerate(state.values())}, state
            ),
            "numbers in place of names",
        ),
    ],
    SymmetryError: [
        (
            lambda model, state: _align(state, state, config_of(NAME)),
            "is a BertConfig; build it first",
        ),
        (
            lambda model, state: random_equivalent(state, model.config),
            "fedrot.symmetry_of",
        ),
        (
            lambda model, state: align_round([], state, model.config),
            "fedrot.symmetry_of",
        ),
        (
            lambda model, state: diagnose(state, [state], {}),
            "fedrot.symmetry_of",
        ),  # type: ignore[arg-type]
        (
            lambda model, state: collect_activations(model, model, [], model.config),
            "fedrot.symmetry_of",
        ),
        (lambda model, state: symmetry_of(model, state), "model.config"),
        (
            lambda model, state: symmetry_of(model.config, model),
            "model.state_dict()",
        ),
    ],
    FedrotError: [
        (
            lambda model, state: _align(state, state, None, ("attention",)),
            "(parts=('attention',))",
        ),
        (
            lambda model, state: collect_activations(state, state, [], SYMMETRY),
            "pass the two models, not their tensors",
        ),
        (
            lambda model, state: align_round(
                [], state, SYMMETRY, AlignmentOptions(anchor="nearest")
            ),
            "'nearest'; choose from global, running",
        ),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "says"),
    [(error, *row) for error, rows in CALLS.items() for row in rows],
)
def test_a_wrong_argument_is_answered_by_what_to_write(error, call, says):
    with pytest.raises(error) as raised:
        call(fresh_model(NAME), state_of(NAME))
    assert says in str(raised.value)
