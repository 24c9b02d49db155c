"""Diagnosis: noise, clients that turned, other bases, the rule, and what is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

import fedrot
from fedrot.anchors import SAME_BASIS
from fedrot.diagnosis import (
    ALIGNED,
    GROUPS_BEYOND,
    PLAIN,
    TIMES_CHANCE,
    TOGETHER,
    WHOLE,
    Diagnosis,
    Evidence,
    diagnosis_of,
    evidence,
    summed,
)
from fedrot.matching.chance import null_model
from tests.models import LAYERS, State, near, squared_distance, state_of, symmetry_for

NAME = "bert-classifier"


def trained(base: State, count: int = 3) -> list[State]:
    """Models near the base, each with noise of its own."""
    return [near(base, 0.1, seed) for seed in range(1, count + 1)]


def turned(base: State, parts: tuple[str, ...] = ("attention", "ffn"), count: int = 3) -> list[State]:
    """Models near the base that were moved to random equivalent ones."""
    symmetry = symmetry_for(NAME)
    updates = trained(base, count)
    return [fedrot.random_equivalent(u, symmetry, i, parts) for i, u in enumerate(updates)]


def diagnosis(base: State, updates: list[State]) -> Diagnosis:
    return fedrot.diagnose(base, updates, symmetry_for(NAME))


def line(found: float, chance: float | None, part: str = "attention", **counts: int) -> Evidence:
    return Evidence(100.0, found, found, chance, **{"groups": 20, **counts}, part=part, layer=0)


# What is found


@pytest.mark.parametrize("count", [1, 2, 4])
def test_noise_is_averaged_as_it_is(count: int) -> None:
    base = state_of(NAME)
    found = diagnosis(base, trained(base, count))
    assert found.choice == PLAIN
    assert all(cosine > 0.9 for cosine in found.cosines)
    assert len(found.cosines) == count
    rotation = summed(found.base, "attention")
    assert rotation.groups == 2 * LAYERS * count
    assert rotation.moved == rotation.beyond == 0
    assert rotation.share == pytest.approx(rotation.chance_share, rel=0.15)
    assert summed(found.clients, "attention").groups == 2 * LAYERS * (count - 1)
    assert found.whole == ()
    shown = summed(found.clients or found.base, "attention")
    assert str(found) == (
        f"Nothing beyond chance: average as they are; rotation {100 * shown.share:.1f} % of the "
        f"distance, chance {100 * (shown.chance_share or 0):.1f} %."
    )


def test_clients_that_turned_against_each_other_are_named() -> None:
    base = state_of(NAME)
    found = diagnosis(base, turned(base))
    assert found.choice == ALIGNED
    for lines in (found.clients, found.base):
        assert (summed(lines).beyond, summed(lines).moved) == (summed(lines).groups,) * 2
        assert summed(lines, "attention").share > 0.9
    assert [(each.part, each.layer) for each in found.clients] == [
        (part, layer) for layer in range(LAYERS) for part in ("attention", "ffn")
    ]
    assert str(found).startswith("Clients are in different coordinates: average with FedRot, anchor ")
    assert str(found).endswith(f", and {6 * LAYERS} of {6 * LAYERS} groups exceed 1.5 times it.")


def test_a_first_client_that_turned_is_named_although_the_others_did_not() -> None:
    base = state_of(NAME)
    found = diagnosis(base, [*turned(base, count=1), *trained(base)[1:]])
    assert found.choice == ALIGNED
    assert summed(found.clients).beyond == 0
    assert summed(found.base).beyond == 3 * LAYERS


def test_clients_that_agree_in_what_they_turned_gain_towards_the_base_alone() -> None:
    """All clients moved by one element: their mean needs no alignment, but the base's coordinates do."""
    base, symmetry = state_of(NAME), symmetry_for(NAME)
    found = diagnosis(base, [fedrot.random_equivalent(u, symmetry, 7) for u in trained(base)])
    assert summed(found.base).beyond == summed(found.base).groups
    assert found.choice == ALIGNED


def test_an_update_from_another_basis_is_matched_as_a_whole() -> None:
    base = state_of(NAME)
    (moved,) = turned(base, fedrot.WHOLE_MODEL, count=1)
    found = diagnosis(base, [*trained(base, 2), moved])
    assert found.choice == WHOLE
    assert [cosine < SAME_BASIS for cosine in found.cosines] == [False, False, True]
    assert len(found.base) == len(found.clients) == 2 * LAYERS
    together = summed(found.whole, TOGETHER)
    assert together.share > 0.9
    assert together.ratio > 2
    assert {each.part for each in found.whole} == {*fedrot.WHOLE_MODEL, TOGETHER}
    assert {each.layer for each in found.whole} == {None, *range(LAYERS)}
    assert str(found).startswith("1 of 3 updates come from another basis than the base (cosine of the ")
    assert f"matching removes {100 * together.share:.1f} % of the distance, chance " in str(found)


def test_unrelated_models_lose_no_more_than_chance() -> None:
    found = diagnosis(state_of(NAME), [state_of(NAME, seed) for seed in (5, 6, 7)])
    assert found.choice == WHOLE
    together = summed(found.whole, TOGETHER)
    # The first is the others' anchor.
    assert together.groups == 2
    assert together.ratio == pytest.approx(1, abs=0.1)


def test_clients_of_one_basis_are_compared_with_each_other_if_the_base_is_the_wrong_one() -> None:
    base = state_of(NAME)
    for updates, expected in ((trained(base), PLAIN), (turned(base), ALIGNED)):
        found = diagnosis(state_of(NAME, 9), updates)
        assert found.choice == expected
        assert (found.base, found.whole) == ((), ())
        assert summed(found.clients, "attention").groups == 2 * LAYERS * 2
        assert "3 of 3 updates come from another basis than the base" in str(found)
        assert "and share one; " in str(found)


def test_nothing_is_changed_and_the_same_is_found_again() -> None:
    base = state_of(NAME)
    updates = [*trained(base, 2), *turned(base, fedrot.WHOLE_MODEL, count=1)]
    before = copy.deepcopy([base, *updates])
    assert diagnosis(base, updates) == diagnosis(base, updates)
    for one, other in zip(before, [base, *updates], strict=True):
        assert squared_distance(one, other) == 0


def test_plain_data_is_json() -> None:
    base = state_of(NAME)
    found = diagnosis(base, trained(base, 2))
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (read["choice"], read["sentence"]) == (PLAIN, str(found))
    assert read["cosines"] == list(found.cosines)
    assert read["clients"][0]["found"] == found.clients[0].found


def test_updates_in_half_precision_give_the_same_advice() -> None:
    base = {name: t.bfloat16() for name, t in state_of(NAME).items() if t.is_floating_point()}
    full = state_of(NAME)
    kept = {name: t for name, t in full.items() if name not in base}
    halves = [{**u, **kept} for u in ({n: t.bfloat16() for n, t in u.items()} for u in turned(full))]
    assert diagnosis({**base, **kept}, halves).choice == ALIGNED


# The rule


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        ([line(12.7, 6.1)], ALIGNED),
        ([line(3.5, 6.1)], PLAIN),
        ([line(TIMES_CHANCE * 6, 6.0)], PLAIN),
        ([line(12.7, None)], PLAIN),
        ([line(12.7, 6.1, "ffn")], PLAIN),
        ([line(3.5, 6.1, moved=20)], PLAIN),
        ([line(3.5, 6.1, moved=2, beyond=int(20 * GROUPS_BEYOND))], ALIGNED),
        ([line(3.5, 6.1, moved=1, beyond=1)], PLAIN),
        ([line(3.5, 6.1), line(9.0, 1.0, "ffn", groups=2, moved=2, beyond=2)], PLAIN),
        ([line(3.5, 6.1), line(9.0, 1.0, "ffn", groups=5, moved=3, beyond=3)], ALIGNED),
        ([], PLAIN),
    ],
)
def test_the_rule(clients: list[Evidence], expected: str) -> None:
    lines = tuple(clients)
    assert Diagnosis((), lines, (), ()).choice == Diagnosis((), (), lines, ()).choice == expected
    assert Diagnosis((), lines, (), (line(0.0, None),)).choice == WHOLE


def test_models_that_match_no_better_than_chance_need_data() -> None:
    for share, said in (
        (6.0, "The weights give no evidence; match on data."),
        (12.7, "%."),
    ):
        found = Diagnosis((0.0, 0.0), (), (), (line(share, 6.1, TOGETHER),))
        assert found.choice == WHOLE
        assert str(found).endswith(said)


def test_the_sentence_shows_the_evidence_that_decides() -> None:
    found = Diagnosis((0.9, 0.9), (line(3.5, 6.1),), (line(12.7, 6.1, moved=9, beyond=9),), ())
    assert str(found) == (
        "Clients are in different coordinates: average with FedRot, anchor 'running'; rotation 12.7 % "
        "of the distance, chance 6.1 %, and 9 of 20 groups exceed 1.5 times it."
    )


# Rows of a run


def rows_of(base: State, update: State, options: fedrot.AlignmentOptions) -> list[dict[str, Any]]:
    report = fedrot.align(update, base, symmetry_for(NAME), options).report
    return [{"round": 1, "client": 3, **row} for row in report.rows()]


def test_rows_of_a_run_give_the_same_evidence() -> None:
    base = state_of(NAME)
    update = turned(base, count=1)[0]
    rows = rows_of(base, update, fedrot.AlignmentOptions())
    found = diagnosis_of(rows)
    assert found.clients == evidence(rows) == diagnosis(base, [update]).base
    assert found.choice == ALIGNED


def test_rows_of_updates_that_were_matched_as_whole_models() -> None:
    base = state_of(NAME)
    whole = rows_of(base, state_of(NAME, 3), fedrot.AlignmentOptions(fedrot.WHOLE_MODEL))
    near_by = rows_of(base, trained(base, 1)[0], fedrot.AlignmentOptions())
    found = diagnosis_of([*whole, *({**row, "client": 4} for row in near_by)])
    assert found.choice == WHOLE
    assert all(each.chance is None for each in found.whole)
    assert found.clients == evidence(near_by)
    assert str(found) == (
        "Match the whole models, FedRot(other_basis=OtherBasis(...)); chance is not known."
    )


def test_a_run_that_moves_everything_is_not_taken_for_evidence() -> None:
    base = state_of(NAME)
    rows = rows_of(base, near(base, 0.02), fedrot.AlignmentOptions(chance=0))
    assert sum(row["moved"] > 0 for row in rows) == 2 * LAYERS
    assert diagnosis_of(rows).choice == PLAIN


# The null model of a whole model


def test_the_null_model_has_the_size_of_the_client_and_keeps_ties() -> None:
    name = "bert-mlm"
    symmetry = symmetry_for(name)
    anchor, client = state_of(name), state_of(name, 4)
    tied = [n for n in client if n.endswith(("word_embeddings.weight", "predictions.decoder.weight"))]
    client[tied[0]] = client[tied[1]]
    null = null_model(anchor, client, symmetry.groups)
    assert null[tied[0]] is null[tied[1]]
    assert null.keys() == client.keys()
    assert squared_distance(anchor, null) == pytest.approx(squared_distance(anchor, client), rel=0.05)
    again = null_model(anchor, client, symmetry.groups)
    assert squared_distance(null, again) == 0
    assert squared_distance(null, client) > squared_distance(anchor, client) / 2


# What is refused


def test_no_update_is_refused() -> None:
    with pytest.raises(fedrot.FedrotError, match="no updates to diagnose"):
        diagnosis(state_of(NAME), [])


def test_another_architecture_is_refused() -> None:
    base = state_of(NAME)
    with pytest.raises(fedrot.UpdateError, match="missing"):
        diagnosis(base, [state_of("distilbert-mlm")])
    with pytest.raises(fedrot.UpdateError, match="has shape"):
        diagnosis(base, [{**base, "classifier.weight": torch.zeros(2, 2)}])
    with pytest.raises(fedrot.SymmetryError):
        fedrot.diagnose(base, [base], {})  # type: ignore[arg-type]


def test_a_basis_that_cannot_be_matched_is_refused() -> None:
    name, symmetry = NAME, symmetry_for(NAME)
    fixed = fedrot.Symmetry(
        symmetry.family,
        symmetry.layers,
        symmetry.groups,
        symmetry.shapes,
        symmetry.tied,
        {"residual": "fixed positions"},
    )
    with pytest.raises(fedrot.SymmetryError, match="'residual' cannot be moved: fixed positions"):
        fedrot.diagnose(state_of(name), [state_of(name, 2)], fixed)
