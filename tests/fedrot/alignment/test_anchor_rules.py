"""Anchor rules of users, and that a round checks each update once."""

import sys

import pytest
import torch

from fedrot import AlignmentOptions, align_round
from fedrot.aggregation import Mean
from fedrot.alignment.anchors import ANCHORS, AnchorRule, RunningAnchor, finder
from fedrot.matching.anchor import Anchor
from fedrot.symmetry.groups import Move, apply_moves
from fedrot.tensors import check_update
from tests.models import copied, near, state_of, symmetry_for

NAME = "bert-classifier"


class Following(AnchorRule):
    """The mean of the updates so far, without the bounds of the running anchor."""

    follows_mean = True
    by_layers = True

    def accept(self, aligned, weight):
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


def test_an_anchor_that_moved_towards_an_update_of_another_order_certifies_nothing():
    """The mean of two orders of neurons has equal neurons, two and two."""
    base, symmetry = state_of(NAME), symmetry_for(NAME)
    options = AlignmentOptions(parts=("ffn",), chance=0)
    rule = RunningAnchor(Anchor(base), finder(base, symmetry, options))
    first = near(base, 1e-2, 1)
    rule.accept(rule.align(first).move(first), 1.0)
    groups = [group for group in symmetry.groups if group.part == "ffn"]
    pairs = torch.arange(groups[0].action.n).view(-1, 2).flip(1).flatten()
    swaps = [Move(group, pairs) for group in groups]
    rule.include(apply_moves(base, swaps), 1.0)
    # A client that has the mean's neurons in the other order.
    moves = rule.align(apply_moves(copied(dict(rule.mean.current)), swaps)).moves
    assert {move.group.name for move in moves} == {group.name for group in groups}
    for move in moves:
        assert (move.element == pairs).all()


def test_what_fedrots_rules_promise():
    promises = {name: (r.follows_mean, r.by_layers) for name, r in ANCHORS.items()}
    assert promises == {"global": (False, True), "running": (True, True)}
    assert (AnchorRule.follows_mean, AnchorRule.by_layers) == (False, False)


@pytest.mark.parametrize("anchor", ["global", "running"])
def test_a_round_checks_each_update_once(anchor, monkeypatch):
    base, symmetry = state_of(NAME), symmetry_for(NAME)
    updates = [near(base, 0.1, seed) for seed in range(3)]
    checked = []

    def counting(update, shapes):
        checked.append(id(update))
        check_update(update, shapes)

    for name in ("align", "anchors"):
        module = sys.modules[f"fedrot.alignment.{name}"]
        monkeypatch.setattr(module, "check_update", counting)
    options = AlignmentOptions(anchor=anchor)
    pairs = ((update, 1.0) for update in updates)
    list(align_round(pairs, base, symmetry, options))
    assert checked == [id(tensors) for tensors in (base, *updates)]
