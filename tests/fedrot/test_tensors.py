"""Updates and anchors that cannot be aligned are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.aggregation import Mean
from fedrot.strategies import to_arrays
from tests.fedrot.pairs import MODULES
from tests.models import (
    CASES,
    FULL,
    State,
    config_of,
    near,
    state_of,
    symmetry_for,
)


def _without(key: str) -> Callable[[State], None]:
    def damage(state: State) -> None:
        del state[key]

    return damage


def _with(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[State], None]:
    def damage(state: State) -> None:
        state[key] = change(state[key])

    return damage


def _extra(state: State) -> None:
    state["adapter.weight"] = torch.ones(2, 2)


def _entry(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        out = tensor.clone()
        out.view(-1)[3] = value
        return out

    return change


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
UP_BIAS = "bert.encoder.layer.0.intermediate.dense.bias"
DAMAGES: list[tuple[Callable[[State], None], str, str]] = [
    (_without(QUERY), QUERY, "missing"),
    (_without("classifier.bias"), "classifier.bias", "missing"),
    (_extra, "adapter.weight", "not part of the model"),
    (_with(QUERY, lambda t: t[:-1]), QUERY, "shape"),
    (_with(QUERY, lambda t: t.reshape(-1)), QUERY, "shape"),
    (_with("classifier.weight", lambda t: t.T), "classifier.weight", "shape"),
    (_with(QUERY, _entry(float("nan"))), QUERY, "NaN or Inf"),
    (_with(QUERY, _entry(float("-inf"))), QUERY, "NaN or Inf"),
    (_with(UP_BIAS, _entry(float("nan"))), UP_BIAS, "NaN or Inf"),
    (_with(UP_BIAS, _entry(float("inf"))), UP_BIAS, "NaN or Inf"),
    (_with(QUERY, lambda t: (100 * t).to(torch.int8)), QUERY, "int8"),
    (_with(UP_BIAS, lambda t: t > 0), UP_BIAS, "bool"),
]
DAMAGE = pytest.mark.parametrize(
    ("damage", "tensor", "message"),
    DAMAGES,
    ids=[
        f"{i}-{tensor.split('.')[-2]}-{message.split()[0]}"
        for i, (_, tensor, message) in enumerate(DAMAGES)
    ],
)


@DAMAGE
@pytest.mark.parametrize("parts", [("attention", "ffn"), FULL], ids=["default", "full"])
def test_a_bad_update_is_refused_by_name(
    damage: Callable[[State], None], tensor: str, message: str, parts: tuple[str, ...]
) -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), near(state_of(name), 0.1), symmetry_for(name)
    damage(update)
    with pytest.raises(fedrot.UpdateError, match=message) as caught:
        fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=parts))
    assert f"'{tensor}'" in str(caught.value)


@DAMAGE
def test_a_bad_anchor_is_refused_by_name(
    damage: Callable[[State], None], tensor: str, message: str
) -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), near(state_of(name), 0.1), symmetry_for(name)
    damage(anchor)
    with pytest.raises(fedrot.UpdateError, match=message) as caught:
        fedrot.align(update, anchor, symmetry)
    assert f"'{tensor}'" in str(caught.value)


@pytest.mark.parametrize("part", FULL)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_every_part_on_its_own_refuses_what_is_not_finite(part: str, value: float) -> None:
    name = "bert-classifier"
    anchor, update, symmetry = state_of(name), near(state_of(name), 0.1), symmetry_for(name)
    key = f"{CASES[name].names.of(0, MODULES[part][0])}.weight"
    update[key] = _entry(value)(update[key])
    with pytest.raises(fedrot.UpdateError, match="NaN or Inf") as caught:
        fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=(part,)))
    assert f"'{key}'" in str(caught.value)


def test_values_that_overflow_float32_are_refused() -> None:
    name = "bert-classifier"
    anchor, symmetry = state_of(name, dtype=torch.float32), symmetry_for(name)
    for part in FULL:
        update = near(anchor, 0.1)
        update[f"{CASES[name].names.of(0, MODULES[part][0])}.weight"].mul_(1e30)
        with pytest.raises(fedrot.UpdateError, match="overflow"):
            fedrot.align(update, anchor, symmetry, fedrot.AlignmentOptions(parts=(part,)))


def test_apply_and_random_equivalent_check_names_and_shapes() -> None:
    name = "bert-classifier"
    state, symmetry = state_of(name), symmetry_for(name)
    alignment = fedrot.align(state_of(name, 1), state, symmetry)
    incomplete = {k: v for k, v in state.items() if k != QUERY}
    for run in (alignment.apply, lambda tensors: fedrot.random_equivalent(tensors, symmetry)):
        with pytest.raises(fedrot.UpdateError, match="missing"):
            run(incomplete)


def test_tensors_on_different_devices_are_refused() -> None:
    name = "bert-classifier"
    state, symmetry = state_of(name), symmetry_for(name)
    update = {k: v.to("meta") for k, v in state.items()}
    with pytest.raises(fedrot.UpdateError, match="device"):
        fedrot.align(update, state, symmetry)


STRANGE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (lambda t: t.to_sparse(), "to_dense"),
    "compressed": (lambda t: t.to_sparse_csr(), "to_dense"),
    "complex": (lambda t: t.to(torch.complex64), "complex64"),
    "without values": (lambda t: t.to("meta"), "device 'meta'"),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize(
    "name", ["bert.pooler.dense.weight", "bert.encoder.layer.0.output.dense.weight"]
)
def test_a_tensor_that_cannot_be_computed_with_is_named(name: str, kind: str) -> None:
    made, says = STRANGE[kind]
    state, symmetry = state_of("bert-classifier"), symmetry_for("bert-classifier")
    strange = {**state, name: made(state[name])}
    calls: list[Callable[[], object]] = [
        lambda: fedrot.align(strange, state, symmetry),
        lambda: fedrot.align(state, strange, symmetry),
        lambda: fedrot.canonical(strange, symmetry),
        lambda: Mean().add(strange, 1),
        lambda: to_arrays(strange),
    ]
    if kind != "without values":  # A symmetry needs shapes alone.
        calls.append(lambda: fedrot.symmetry_of(config_of("bert-classifier"), strange))
    for call in calls:
        with pytest.raises(fedrot.FedrotError, match=re.escape(name)) as caught:
            call()
        assert says in str(caught.value)
