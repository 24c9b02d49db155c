"""Updates that no alignment can be computed from: the round goes on, with every honest client."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAdam
from transformers import GPT2Config, GPT2LMHeadModel

import fedrot
from fedrot.errors import SymmetryError
from fedrot.matching import descent
from fedrot.matching.problem import Match, Problem
from fedrot.simulations.folder import read_rows
from fedrot.strategies import Aligned, FedRot, OtherBasis
from fedrot.strategies.settings import Reporting
from fedrot.symmetry import Group
from fedrot.tensors import LARGEST_NORM
from tests.models import State, near
from tests.strategies.classifier import build, state
from tests.strategies.fakes import arrays_of, broadcast, largest_difference, reply
from tests.strategies.hostile import CONFIG, KINDS, SETUPS, attack, filled, gaussian

HONEST = [near(state(), 0.02, seed) for seed in (1, 2, 3)]
PLACES = (0, 1, 3)


def play(
    strategy: Any,
    sent: Sequence[State],
    weights: Sequence[float] = (10, 11, 12, 13),
    start: State | None = None,
) -> tuple[ArrayRecord | None, MetricRecord]:
    """Play one round in which the clients answer in the order of their ids."""
    messages = broadcast(strategy, start or state(), len(sent))
    messages.sort(key=lambda m: m.metadata.dst_node_id)
    answers = [
        reply(m, u, w, i) for i, (m, u, w) in enumerate(zip(messages, sent, weights, strict=False))
    ]
    arrays, metrics = strategy.aggregate_train(1, answers)
    return arrays, metrics or MetricRecord()


def among(hostile: State, place: int) -> list[State]:
    return [*HONEST[:place], hostile, *HONEST[place:]]


@pytest.mark.parametrize("setup", SETUPS)
def test_a_hostile_update_ends_no_round_and_pushes_no_honest_client_out(
    setup: str, tmp_path: Path
) -> None:
    where = itertools.cycle([(0, 10.0), (3, 10.0), (1, 1e12)])
    for kind, (place, weight) in zip(KINDS, where, strict=False):
        weights = [10.0, 11.0, 12.0, 13.0]
        weights[place] = weight
        strategy = SETUPS[setup]()
        strategy.reporting = Reporting(rows=tmp_path / f"{kind}.jsonl")
        arrays, _ = play(strategy, among(attack(state(), kind), place), weights)
        assert arrays is not None
        for name, array in arrays_of(arrays).items():
            assert torch.isfinite(torch.from_numpy(array)).all(), (kind, name)
        rows = read_rows(tmp_path / f"{kind}.jsonl")
        assert {row["client"] for row in rows if "dropped" in row} <= {place}, kind


@pytest.mark.parametrize("kind", ["0", "constant 1e-42", "squares vanish"])
def test_what_has_no_normal_scale_is_averaged_as_it_is(kind: str) -> None:
    """Nothing is moved to such an anchor, nor such an update to another one."""
    hostile = attack(state(), kind)
    turned = [
        fedrot.random_equivalent(update, fedrot.symmetry_of(CONFIG, update), 3) for update in HONEST
    ]
    found, metrics = play(FedRot(CONFIG), [hostile, *turned])
    assert metrics["fedrot-groups-moved"] == 0
    weights = torch.tensor([10.0, 11.0, 12.0, 13.0], dtype=torch.float64) / 46
    for name, array in arrays_of(found).items():
        mean = sum(w * u[name].double() for w, u in zip(weights, [hostile, *turned], strict=True))
        assert torch.allclose(torch.from_numpy(array).double(), mean, atol=1e-6), name


def test_the_heaviest_model_of_another_basis_is_the_anchor_only_if_models_can_be_aligned_to_it() -> None:
    own = [build_anew(seed) for seed in (5, 6, 7)]
    hostile = filled(own[0], gaussian(1e10))
    strategy = FedRot(CONFIG, other_basis=OtherBasis(build))
    _, metrics = play(strategy, [*own, hostile], (10, 11, 12, 1e12))
    assert metrics["fedrot-replies-dropped"] == 1
    assert metrics["fedrot-replies-accepted"] == 3


def build_anew(seed: int) -> State:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return near(dict(build().state_dict()), 0.05, seed)


@pytest.mark.parametrize("others", [3, 1])
def test_a_broadcast_model_that_cannot_be_matched_is_no_anchor(others: int) -> None:
    """A hostile update can make such a model, where it is averaged."""
    embeddings = {name: t for name, t in state().items() if "embeddings.weight" in name}
    broken = attack(state(), "gaussian 1e10") | embeddings
    sent = [*(build_anew(seed) for seed in range(others)), *HONEST[others:]]
    _, metrics = play(FedRot(CONFIG, other_basis=OtherBasis(build)), sent, start=broken)
    assert metrics["fedrot-replies-accepted"] == 3
    assert metrics["fedrot-groups-moved"] > 0


GPT2 = GPT2Config(
    **{"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0},
)


def build_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2)


def gpt2_clients(scale: float) -> tuple[State, list[State]]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        start = {name: t.clone() for name, t in build_gpt2().state_dict().items()}
    rotated = fedrot.symmetry_of(GPT2, start).rotated
    clients = (fedrot.canonical(near(start, scale, seed), rotated) for seed in range(3))
    whole = fedrot.WHOLE_MODEL
    return start, [fedrot.random_equivalent(c, rotated, i, whole) for i, c in enumerate(clients)]


def overflows_when_folded(update: State) -> State:
    """Return an update that is finite, while a gain in front of its output table takes that too far."""
    hostile = {name: tensor.clone() for name, tensor in update.items()}
    hostile["lm_head.weight"].view(-1)[-1] = -0.99 * LARGEST_NORM
    hostile["transformer.ln_f.weight"][:] = 1.2
    return hostile


class AlignedFedAdam(Aligned, FedAdam):
    pass


def gpt2(strategy: type = FedRot, **settings: Any) -> Callable[[], Any]:
    return lambda: strategy(GPT2, other_basis=OtherBasis(build_gpt2), **settings)


START, TURNED = gpt2_clients(0.02)
TRAINED = [near(START, 0.02, seed) for seed in (7, 8, 9)]
FOLDED = overflows_when_folded(TURNED[0])
OWN = state()
SYMMETRY = fedrot.symmetry_of(CONFIG, OWN)
EQUIVALENT = [fedrot.random_equivalent(update, SYMMETRY, i) for i, update in enumerate(HONEST)]
BIAS = HONEST[0] | {
    name: torch.full_like(tensor, 1e12)
    for name, tensor in HONEST[0].items()
    if name.endswith(("value.bias", "attention.output.dense.weight"))
}
SIGNS = filled(OWN, lambda t: 1e15 * gaussian(1.0)(t).sign(), "layer.0.")

#: By name: a strategy, the model, honest updates, and one that becomes infinite on its way to the mean.
OVERFLOWS: dict[str, tuple[Callable[[], Any], State, Sequence[State], State]] = {
    **{
        kind: (SETUPS["other basis"], OWN, HONEST, attack(OWN, kind))
        for kind in ("gaussian 1e10", "alternating 1e15")
    },
    **{
        anchor: (gpt2(alignment=fedrot.AlignmentOptions(anchor=anchor)), START, TURNED, FOLDED)
        for anchor in fedrot.anchors.ANCHORS
    },
    "one of another basis": (gpt2(), START, TRAINED, FOLDED),
    "FedAdam": (gpt2(AlignedFedAdam), START, TRAINED, FOLDED),
    "a bias": (SETUPS["canonical"], OWN, EQUIVALENT, BIAS),
    "signs": (SETUPS["canonical"], OWN, EQUIVALENT, SIGNS),
    "signs, global": (
        lambda: FedRot(CONFIG, alignment=fedrot.AlignmentOptions(canonical=True, anchor="global")),
        *(OWN, EQUIVALENT, SIGNS),
    ),
}


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_update_that_overflows_is_dropped_as_if_never_sent(name: str, place: int) -> None:
    """It weighs more than all others, and would be their anchor."""
    build, start, honest, hostile = OVERFLOWS[name]
    weights = [10.0, 11.0, 12.0]
    sent = [*honest[:place], hostile, *honest[place:]]
    found, metrics = play(build(), sent, [*weights[:place], 1e12, *weights[place:]], start)
    expected, _ = play(build(), honest, weights, start)
    assert metrics["fedrot-replies-dropped"] == 1
    assert largest_difference(found, expected) == 0


MARK = 12345.0


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fail to match a client whose embeddings are marked, or an anchor, if the list holds True."""
    against_anchors: list[bool] = []
    solve = descent.match_stage

    def match(groups: Sequence[Group], problem: Problem) -> list[Match]:
        side = problem.anchor.tensors if against_anchors else problem.client
        if float(side["bert.embeddings.word_embeddings.weight"][0, 0]) >= MARK / 4:
            raise RuntimeError("no algorithm for this")
        return solve(groups, problem)

    monkeypatch.setattr(descent, "match_stage", match)
    return against_anchors


def marked() -> State:
    hostile = {name: tensor.clone() for name, tensor in HONEST[0].items()}
    hostile["bert.embeddings.word_embeddings.weight"][0, 0] = MARK
    return hostile


@pytest.mark.parametrize("anchor", fedrot.anchors.ANCHORS)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_fails_drops_the_update_and_not_the_round(
    anchor: str, place: int, failing: list[bool]
) -> None:
    found, metrics = play(
        FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor=anchor)), among(marked(), place)
    )
    weights = [w for i, w in enumerate((10, 11, 12, 13)) if i != place]
    expected, _ = play(FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor=anchor)), HONEST, weights)
    assert metrics["fedrot-replies-dropped"] == 1
    assert largest_difference(found, expected) <= 1e-6


@pytest.mark.parametrize("anchor", fedrot.anchors.ANCHORS)
@pytest.mark.parametrize("place", PLACES)
def test_honest_clients_are_not_dropped_where_the_anchor_fails(
    anchor: str, place: int, failing: list[bool]
) -> None:
    failing.append(True)
    _, metrics = play(
        FedRot(CONFIG, alignment=fedrot.AlignmentOptions(anchor=anchor)),
        among(marked(), place),
        [1e12 if i == place else 1 for i in range(4)],
    )
    assert metrics["fedrot-replies-accepted"] == 4


def test_what_no_client_can_cause_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (SymmetryError("no solver"), MemoryError()):

        def match(*given: object, error: Exception = error) -> list[Match]:
            raise error

        monkeypatch.setattr(descent, "match_stage", match)
        with pytest.raises(type(error)):
            play(FedRot(CONFIG), HONEST)
