"""Anchor rules of users, and that a round checks each update once."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fedrot import AlignmentOptions, align_round
from fedrot.aggregation import Mean
from fedrot.alignment.anchors import ANCHORS, AnchorRule, finder
from fedrot.matching.anchor import Anchor
from fedrot.tensors import Tensors, check_update
from tests.models import near, state_of, symmetry_for

NAME = "bert-classifier"


class Following(AnchorRule):
    """The mean of the updates so far, without the bounds of the running anchor."""

    follows_mean = True
    by_layers = True

    def accept(self, aligned: Tensors, weight: float) -> None:
        super().accept(aligned, weight)
        self.current = Anchor(dict(self.mean.current))


def test_a_rule_that_follows_the_mean_gets_the_shared_one_or_its_own():
    base, symmetry = state_of(NAME), symmetry_for(NAME)
    find = finder(base, symmetry, AlignmentOptions())
    shared = Mean()
    rules = [Following(Anchor(base), find, mean) for mean in (None, shared)]
    for seed in range(3):
        update = near(base, 0.1, seed)
        first, second = (rule.align(update).move(update) for rule in rules)
        assert all((first[name] == second[name]).all() for name in first)
        shared.add(second, 1.0)
        rules[0].accept(first, 1.0)
        # Layer by layer, the aligned tensors are in the mean alone.
        rules[1].accept({}, 1.0)
    assert rules[1].mean is shared
    assert rules[0].mean.weight == shared.weight == 3


def test_what_fedrots_rules_promise():
    promises = {name: (r.follows_mean, r.by_layers) for name, r in ANCHORS.items()}
    assert promises == {"global": (False, True), "running": (True, True)}
    assert (AnchorRule.follows_mean, AnchorRule.by_layers) == (False, False)


@pytest.mark.parametrize("anchor", ["global", "running"])
def test_a_round_checks_each_update_once(anchor, monkeypatch):
    base, symmetry = state_of(NAME), symmetry_for(NAME)
    updates = [near(base, 0.1, seed) for seed in range(3)]
    checked = []

    def counting(update: Any, shapes: Any) -> None:
        checked.append(id(update))
        check_update(update, shapes)

    for name in ("align", "anchors"):
        module = sys.modules[f"fedrot.alignment.{name}"]
        monkeypatch.setattr(module, "check_update", counting)
    options = AlignmentOptions(anchor=anchor)
    pairs = ((update, 1.0) for update in updates)
    list(align_round(pairs, base, symmetry, options))
    assert checked == [id(tensors) for tensors in (base, *updates)]
