"""Arguments that a new user passes by mistake: each error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fedrot
from tests.models import config_of, fresh_model, state_of, symmetry_for

NAME = "bert-classifier"

Call = Callable[..., Any]


def _align(update: Any, anchor: Any, symmetry: Any = None, options: Any = None) -> Any:
    return fedrot.align(update, anchor, symmetry or symmetry_for(NAME), options)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda model, state: _align(model, model), fedrot.UpdateError, "model.state_dict()"),
        (lambda model, state: _align(state, model), fedrot.UpdateError, "model.state_dict()"),
        (
            lambda model, state: _align([*state.values()], state),
            fedrot.UpdateError,
            "is a list, not tensors by name",
        ),
        (
            lambda model, state: _align({n: t.numpy() for n, t in state.items()}, state),
            fedrot.UpdateError,
            "torch.as_tensor",
        ),
        (
            lambda model, state: _align(state, state, config_of(NAME)),
            fedrot.SymmetryError,
            "The symmetry is a BertConfig; build it first with fedrot.symmetry_of(model.config,",
        ),
        (lambda model, state: _align(state, state, model), fedrot.SymmetryError, "fedrot.symmetry_of"),
        (
            lambda model, state: _align(state, state, None, ("attention",)),
            fedrot.FedrotError,
            "AlignmentOptions(parts=('attention',))",
        ),
        (
            lambda model, state: fedrot.random_equivalent(state, model.config),
            fedrot.SymmetryError,
            "fedrot.symmetry_of",
        ),
        (
            lambda model, state: fedrot.random_equivalent(model, symmetry_for(NAME)),
            fedrot.UpdateError,
            "model.state_dict()",
        ),
        (
            lambda model, state: fedrot.align_round([(state, 1.0)], state, model.config),
            fedrot.SymmetryError,
            "fedrot.symmetry_of",
        ),
        (
            lambda model, state: fedrot.collect_activations(state, state, [], symmetry_for(NAME)),
            fedrot.FedrotError,
            "pass the two models, not their tensors",
        ),
        (
            lambda model, state: fedrot.collect_activations(model, model, [], model.config),
            fedrot.SymmetryError,
            "fedrot.symmetry_of",
        ),
        (lambda model, state: fedrot.symmetry_of(model, state), fedrot.SymmetryError, "model.config"),
        (
            lambda model, state: fedrot.symmetry_of(model.config, model),
            fedrot.SymmetryError,
            "model.state_dict()",
        ),
        *(
            (
                lambda model, state, parts=parts: fedrot.AlignmentOptions(parts=parts),
                fedrot.FedrotError,
                f"write parts={says}",
            )
            for parts, says in (
                ("attention", "('attention',)"),
                ("attention+ffn", "('attention', 'ffn')"),
                ("whole+rescale", "a tuple of some of"),
                ("atention", "a tuple of some of ('residual', "),
            )
        ),
        (
            lambda model, state: _align({f"module.{n}": t for n, t in state.items()}, state),
            fedrot.UpdateError,
            "'module.bert.embeddings.word_embeddings.weight' instead",
        ),
        (
            lambda model, state: _align(
                {n.replace("query.", "query.default."): t for n, t in state.items()}, state
            ),
            fedrot.UpdateError,
            "query.default.weight' instead",
        ),
        (
            lambda model, state: _align({str(i): t for i, t in enumerate(state.values())}, state),
            fedrot.UpdateError,
            "numbers in place of names",
        ),
        (lambda model, state: fedrot.AlignmentOptions(layers="last"), fedrot.FedrotError, "'last:N'"),
        # It would be empty the second time it is read.
        (
            lambda model, state: fedrot.AlignmentOptions(layers=iter([1])),
            fedrot.FedrotError,
            "give a list of indices",
        ),
        (
            lambda model, state: _align(state, state, None, fedrot.AlignmentOptions(layers=1)),  # type: ignore[arg-type]
            fedrot.FedrotError,
            "[1]",
        ),
    ],
)
def test_a_wrong_argument_is_answered_by_what_to_write(
    call: Call, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as raised:
        call(fresh_model(NAME), state_of(NAME))
    assert says in str(raised.value)


@pytest.mark.parametrize("layers", [{1}, range(1, 2), np.array([1]), (1,)])
def test_layers_may_be_anything_that_lists_indices(layers: Any) -> None:
    options = fedrot.AlignmentOptions(layers=layers)
    report = fedrot.align(state_of(NAME, 1), state_of(NAME), symmetry_for(NAME), options).report
    assert {group.layer for group in report.groups} == {1}


def test_an_alignment_prints_a_summary_of_a_few_lines() -> None:
    anchor, symmetry = state_of(NAME), symmetry_for(NAME)
    update = fedrot.random_equivalent(anchor, symmetry, 1)
    alignment = fedrot.align(update, anchor, symmetry)
    first, second, *parts = str(alignment).splitlines()
    assert first == "Alignment of a bert model of 2 layers"
    assert second.startswith(f"squared distance to the anchor {alignment.report.before:.4g} -> ")
    assert "100.0% removed" in second
    removed = alignment.report.share("attention")
    assert parts[0] == f"  attention: {removed:.1%} removed, 4 of 4 groups moved"
    assert parts[1].startswith("  ffn: ")
    assert len(parts) == 2
    nothing = str(fedrot.align(anchor, anchor, symmetry))
    assert "attention: 0.0% removed, 0 of 4 groups moved" in nothing
    assert "ffn: 0.0% removed, 0 of 2 groups moved, 2 already in the best order" in nothing
    assert len(repr(alignment)) < 300
