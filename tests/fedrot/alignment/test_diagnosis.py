"""Diagnosis: noise, clients that turned, other bases, the rule, and what is refused."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from fedrot import (
    WHOLE_MODEL,
    AlignmentOptions,
    FedrotError,
    SymmetryError,
    UpdateError,
    align,
    diagnose,
    random_equivalent,
)
from fedrot.alignment.anchors import SAME_BASIS
from fedrot.alignment.diagnosis import (
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
from tests.models import (
    LAYERS,
    near,
    squared_distance,
    state_of,
    symmetry_for,
)

NAME = "bert-classifier"
BASE = state_of(NAME)
SYMMETRY = symmetry_for(NAME)


def trained(base, count=3):
    """Models near the base, each with noise of its own."""
    return [near(base, 0.1, seed) for seed in range(1, count + 1)]


def turned(base, parts=("attention", "ffn"), count=3):
    """Models near the base that were moved to random equivalent ones."""
    updates = trained(base, count)
    return [random_equivalent(u, SYMMETRY, i, parts) for i, u in enumerate(updates)]


def diagnosis(base, updates):
    return diagnose(base, updates, SYMMETRY)


def line(found, chance, part="attention", **counts):
    return Evidence(
        100.0, found, found, chance, **{"groups": 20, **counts}, part=part, layer=0
    )


# What is found


@pytest.mark.parametrize("count", [1, 3])
def test_noise_is_averaged_as_it_is(count):
    updates = trained(BASE, count)
    before = copy.deepcopy([BASE, *updates])
    found = diagnosis(BASE, updates)
    assert found.choice == PLAIN
    assert len(found.cosines) == count
    assert all(cosine > 0.9 for cosine in found.cosines)
    rotation = summed(found.base, "attention")
    assert rotation.groups == 2 * LAYERS * count
    assert rotation.moved == rotation.beyond == 0
    assert rotation.share == pytest.approx(rotation.chance_share, rel=0.15)
    assert summed(found.clients, "attention").groups == 2 * LAYERS * (count - 1)
    assert found.whole == ()
    shown = summed(found.clients or found.base, "attention")
    assert str(found).startswith("Nothing beyond chance")
    assert f"{100 * shown.share:.1f} % of the distance" in str(found)
    assert f"chance {100 * (shown.chance_share or 0):.1f} %" in str(found)
    # Nothing is changed, the same is found again, and plain data is JSON.
    assert all(
        squared_distance(*pair) == 0
        for pair in zip(before, [BASE, *updates], strict=True)
    )
    assert diagnosis(BASE, updates) == found
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (read["choice"], read["sentence"]) == (PLAIN, str(found))
    assert read["cosines"] == list(found.cosines)
    assert [row["found"] for row in read["base"]] == [row.found for row in found.base]


def test_clients_that_turned_against_each_other_are_named():
    found = diagnosis(BASE, turned(BASE))
    assert found.choice == ALIGNED
    for lines in (found.clients, found.base):
        assert (summed(lines).beyond, summed(lines).moved) == (
            summed(lines).groups,
        ) * 2
        assert summed(lines, "attention").share > 0.9
    assert [(each.part, each.layer) for each in found.clients] == [
        (part, layer) for layer in range(LAYERS) for part in ("attention", "ffn")
    ]
    assert str(found).startswith("Clients are in different coordinates")
    assert f"{6 * LAYERS} of {6 * LAYERS} groups exceed 1.5 times" in str(found)


def test_towards_the_base_gain_a_first_client_and_clients_that_agree():
    first = [*turned(BASE, count=1), *trained(BASE)[1:]]
    # All clients moved by one element: their mean needs no alignment, but the base's
    # coordinates do.
    same = [random_equivalent(update, SYMMETRY, 7) for update in trained(BASE)]
    for updates, beyond in ((first, 3 * LAYERS), (same, 9 * LAYERS)):
        found = diagnosis(BASE, updates)
        assert found.choice == ALIGNED
        assert summed(found.base).beyond == beyond
        assert (summed(found.clients).beyond == 0) == (updates is first)


def test_an_update_from_another_basis_is_matched_as_a_whole():
    (moved,) = turned(BASE, WHOLE_MODEL, count=1)
    found = diagnosis(BASE, [*trained(BASE, 2), moved])
    assert found.choice == WHOLE
    assert [cosine < SAME_BASIS for cosine in found.cosines] == [False, False, True]
    assert len(found.base) == len(found.clients) == 2 * LAYERS
    together = summed(found.whole, TOGETHER)
    assert together.share > 0.9
    assert together.ratio > 2
    assert {each.part for each in found.whole} == {*WHOLE_MODEL, TOGETHER}
    assert {each.layer for each in found.whole} == {None, *range(LAYERS)}
    assert str(found).startswith("1 of 3 updates come from another basis than the base")
    assert f"removes {100 * together.share:.1f} % of the distance, chance " in str(
        found
    )


def test_unrelated_models_lose_no_more_than_chance():
    found = diagnosis(BASE, [state_of(NAME, seed) for seed in (5, 6, 7)])
    assert found.choice == WHOLE
    together = summed(found.whole, TOGETHER)
    # The first is the others' anchor.
    assert together.groups == 2
    assert together.ratio == pytest.approx(1, abs=0.1)


def test_clients_are_compared_with_each_other_if_the_base_is_the_wrong_one():
    for updates, expected in ((trained(BASE), PLAIN), (turned(BASE), ALIGNED)):
        found = diagnosis(state_of(NAME, 9), updates)
        assert found.choice == expected
        assert (found.base, found.whole) == ((), ())
        assert summed(found.clients, "attention").groups == 2 * LAYERS * 2
        assert "3 of 3 updates come from another basis than the base" in str(found)
        assert "and share one; " in str(found)


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
def test_the_rule(clients, expected):
    lines = tuple(clients)
    assert (
        Diagnosis((), lines, (), ()).choice
        == Diagnosis((), (), lines, ()).choice
        == expected
    )
    assert Diagnosis((), lines, (), (line(0.0, None),)).choice == WHOLE


def test_the_sentence_shows_the_evidence_that_decides():
    found = Diagnosis(
        (0.9, 0.9), (line(3.5, 6.1),), (line(12.7, 6.1, moved=9, beyond=9),), ()
    )
    for shown in ("rotation 12.7 %", "chance 6.1 %", "9 of 20 groups"):
        assert shown in str(found)
    for share, said in ((6.0, True), (12.7, False)):
        found = Diagnosis((0.0, 0.12), (), (), (line(share, 6.1, TOGETHER),))
        assert ("The weights give no evidence" in str(found)) == said
        assert "(cosine of the embeddings 0.00 to 0.12)" in str(found)
    assert "nothing was rotated" in str(Diagnosis((), (line(1.0, 2.0, "ffn"),), (), ()))


# Rows of a run


def rows_of(update, client, **options):
    report = align(update, BASE, SYMMETRY, AlignmentOptions(**options)).report
    return [{"round": 1, "client": client, **row} for row in report.rows()]


def test_rows_of_a_run_give_the_same_evidence():
    update = turned(BASE, count=1)[0]
    rows = rows_of(update, 3)
    found = diagnosis_of(rows)
    assert found.clients == evidence(rows) == diagnosis(BASE, [update]).base
    assert found.choice == ALIGNED
    whole = rows_of(state_of(NAME, 3), 3, parts=WHOLE_MODEL)
    near_by = rows_of(trained(BASE, 1)[0], 4)
    found = diagnosis_of([*whole, *near_by])
    assert found.choice == WHOLE
    assert all(each.chance is None for each in found.whole)
    assert found.clients == evidence(near_by)
    assert "chance is not known" in str(found)


def test_a_run_that_moves_everything_is_not_taken_for_evidence():
    rows = rows_of(near(BASE, 0.02), 3, chance=0)
    assert sum(row["moved"] > 0 for row in rows) == 2 * LAYERS
    assert diagnosis_of(rows).choice == PLAIN


# What is refused


def test_what_cannot_be_diagnosed_is_refused():
    with pytest.raises(FedrotError, match="no updates to diagnose"):
        diagnosis(BASE, [])
    with pytest.raises(UpdateError, match="missing"):
        diagnosis(BASE, [state_of("distilbert-mlm")])
    with pytest.raises(UpdateError, match="has shape"):
        diagnosis({**BASE, "classifier.weight": torch.zeros(2, 2)}, [BASE])
    fixed = replace(SYMMETRY, refused={"residual": "fixed positions"})
    with pytest.raises(SymmetryError, match=r"'residual'.*fixed positions"):
        diagnose(BASE, [state_of(NAME, 2)], fixed)
