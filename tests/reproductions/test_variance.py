"""Unit statistics, how they move, and the repair of collapsed units."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.interpolation import interpolate
from reproductions.variance import (
    UnitStatistics,
    average_statistics,
    repair,
    unit_statistics,
    variance_ratio,
)
from tests import families
from tests.models import (
    EVERYTHING,
    fresh_model,
    inputs,
    largest_difference,
    logits,
    state_of,
    symmetry_for,
)

NAMES = ("bert-classifier", "bert-mlm", "electra-mlm", "roberta-classifier", "distilbert-classifier")


def _model(name: str, tensors: dict[str, Tensor]) -> Any:
    model = fresh_model(name).double().eval()
    model.load_state_dict(tensors)
    return model


def _batches(name: str) -> list[dict[str, Tensor]]:
    batch = inputs(name)
    return [batch, {key: value.flip(0) for key, value in batch.items()}]


def _statistics(name: str, tensors: dict[str, Tensor]) -> UnitStatistics:
    return unit_statistics(_model(name, tensors), _batches(name), symmetry_for(name))


def test_statistics_are_those_of_the_hidden_states_without_padding() -> None:
    model = _model("bert-classifier", state_of("bert-classifier"))
    batches = _batches("bert-classifier")
    found = unit_statistics(model, batches, symmetry_for("bert-classifier"))
    rows = []
    for batch in batches:
        with torch.no_grad():
            hidden = model(**batch, output_hidden_states=True).hidden_states[1]
        rows += [
            hidden[row, token]
            for row in range(hidden.shape[0])
            for token in range(hidden.shape[1])
            if "attention_mask" not in batch or batch["attention_mask"][row, token]
        ]
    stacked = torch.stack(rows)
    name = "bert.encoder.layer.0.output.LayerNorm"
    torch.testing.assert_close(found.mean[name], stacked.mean(0))
    torch.testing.assert_close(found.std[name], stacked.std(0, correction=0))


@pytest.mark.parametrize("name", NAMES)
def test_statistics_move_like_the_model(name: str) -> None:
    state, symmetry = state_of(name), symmetry_for(name)
    other = fedrot.random_equivalent(state, symmetry, seed=3, parts=EVERYTHING)
    options = fedrot.AlignmentOptions(parts=fedrot.WHOLE_MODEL)
    alignment = fedrot.align(other, state, symmetry, options)
    moved = _statistics(name, other).moved(alignment)
    measured = _statistics(name, alignment.apply(other))
    for module in measured.mean:
        torch.testing.assert_close(moved.mean[module], measured.mean[module])
        torch.testing.assert_close(moved.std[module], measured.std[module])


@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_the_right_statistics_stays_as_it_is(name: str) -> None:
    state = state_of(name)
    model = _model(name, state)
    repaired = repair(model, _statistics(name, state), _batches(name), symmetry_for(name))
    torch.testing.assert_close(logits(name, repaired), logits(name, state))


def test_a_collapsed_average_gets_its_statistics_back() -> None:
    name = "bert-classifier"
    symmetry, batches = symmetry_for(name), _batches(name)
    ends = [state_of(name, seed) for seed in (0, 1)]
    target = average_statistics([_statistics(name, end) for end in ends], [1.0, 3.0])
    merged = _model(name, interpolate(ends[0], ends[1], 0.75))
    before = copy.deepcopy(merged.state_dict())
    collapsed = variance_ratio(unit_statistics(merged, batches, symmetry), target)
    assert min(collapsed.values()) < 0.8
    repaired = _model(name, repair(merged, target, batches, symmetry))
    found = unit_statistics(repaired, batches, symmetry)
    for module, mean in target.mean.items():
        torch.testing.assert_close(found.mean[module], mean)
        torch.testing.assert_close(found.std[module], target.std[module])
    ratios = variance_ratio(found, target)
    assert all(ratio == pytest.approx(1) for ratio in ratios.values())
    for key, value in merged.state_dict().items():
        assert torch.equal(value, before[key]), "the merged model itself stays as it is"


def test_constant_units_are_shifted_but_not_blown_up() -> None:
    name = "bert-classifier"
    state = state_of(name)
    target = _statistics(name, state)
    dead = dict(state)
    dead["bert.encoder.layer.0.intermediate.dense.weight"] = state[
        "bert.encoder.layer.0.intermediate.dense.weight"
    ].clone()
    dead["bert.encoder.layer.0.intermediate.dense.weight"][0] = 0
    repaired = repair(_model(name, dead), target, _batches(name), symmetry_for(name))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in repaired.values())
    assert float(repaired["bert.encoder.layer.0.intermediate.dense.weight"][0].abs().max()) == 0


def test_no_batches_are_an_error() -> None:
    name = "bert-classifier"
    with pytest.raises(fedrot.FedrotError, match="at least one batch"):
        unit_statistics(_model(name, state_of(name)), [], symmetry_for(name))


def test_models_whose_units_cannot_be_rescaled_alone_stay_as_they_are() -> None:
    """RMSNorms and linear layers without bias can take no mean."""
    name = "llama"
    model, symmetry = families.model_of(name), families.symmetry_for(name)
    batches = [families.inputs(name)]
    target = unit_statistics(model, batches, symmetry)
    assert target.mean == {}
    repaired = repair(model, target, batches, symmetry)
    assert largest_difference(repaired, families.state_of(name)) == 0
