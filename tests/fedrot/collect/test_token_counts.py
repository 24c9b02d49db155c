"""Token counts: of batches, assumed, and what tables count by them against copies of their rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import fedrot
from fedrot.collect.token_counts import by_frequency, counts_by_order, token_counts
from tests.families import VOCABULARY, outputs, state_of, symmetry_for
from tests.fedrot.oracles import seeded

NAMES = ["bert", "t5", "gpt2", "llama"]
WHOLE = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL)


def test_tokens_are_counted_where_the_mask_is_one() -> None:
    generator = torch.Generator().manual_seed(0)
    batches, expected = [], Counter[int]()
    for rows in (3, 5):
        ids = torch.randint(7, (rows, 4), generator=generator)
        mask = torch.randint(2, (rows, 4), generator=generator)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
        pairs = zip(ids.flatten().tolist(), mask.flatten().tolist(), strict=True)
        expected.update(token for token, seen in pairs if seen)
    counts = token_counts(batches, 9)
    assert counts.tolist() == [expected[token] for token in range(9)]


def test_without_a_mask_every_token_counts() -> None:
    batches = [{"input_ids": torch.tensor([[1, 1, 3]])}]
    assert token_counts(batches, 4).tolist() == [0, 2, 0, 1]
    assert token_counts([], 2).tolist() == [0, 0]


def test_other_inputs_are_refused() -> None:
    with pytest.raises(fedrot.FedrotError, match=r"no 'input_ids' to count, only: pixel_values"):
        token_counts([{"pixel_values": torch.ones(1)}], 4)
    for token in (-1, 4):
        with pytest.raises(fedrot.FedrotError, match="but the vocabulary has 4"):
            token_counts([{"input_ids": torch.tensor([token])}], 4)


def test_counts_by_order_follow_zipf_and_mandelbrot() -> None:
    counts = counts_by_order(400)
    expected = [(399 + 10) / (token + 10) for token in range(400)]
    assert counts.tolist() == pytest.approx(expected)
    assert counts.dtype == torch.float64
    assert counts_by_order(1).tolist() == [1.0]
    with pytest.raises(fedrot.FedrotError, match="vocabulary is 0"):
        counts_by_order(0)


def counts(seed: int = 0) -> Tensor:
    """Return counts of tokens, some of which never occur."""
    return torch.randint(0, 6, (VOCABULARY,), generator=seeded(seed))


def tables(name: str) -> set[str]:
    """Return the tables of a member, by hand: every tensor with an axis as long as the vocabulary."""
    shapes = symmetry_for(name).shapes
    return {key for key, shape in shapes.items() if VOCABULARY in shape and len(shape) == 2}


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_scaled_and_nothing_else(name: str) -> None:
    symmetry, state, given = symmetry_for(name), state_of(name), counts()
    found = by_frequency(state, symmetry, given)
    changed = {key for key in state if found[key] is not state[key]}
    assert changed == tables(name)
    assert changed
    for key in changed:
        # A row that occurs n times counts like n rows; the counts' mean is 1.
        expected = state[key].repeat_interleave(given, 0).square().sum() / given.double().mean()
        assert torch.allclose(found[key].square().sum(), expected)


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_moved_model_is_found_and_keeps_its_function(name: str, canonical: bool) -> None:
    symmetry, anchor = symmetry_for(name), state_of(name)
    options = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL, canonical=canonical)
    start = fedrot.canonical(anchor, symmetry) if canonical else anchor
    moved = fedrot.random_equivalent(
        start, symmetry.rotated if canonical else symmetry, 2, fedrot.WHOLE_MODEL
    )
    found = fedrot.align(moved, anchor, symmetry, options, token_counts=counts()).apply(moved)
    assert max(float((found[key] - start[key]).abs().max()) for key in start) <= 1e-8
    update = state_of(name, 1)
    aligned = fedrot.align(update, anchor, symmetry, options, token_counts=counts()).apply(update)
    expected = outputs(name, update)
    assert (outputs(name, aligned) - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_equal_counts_change_nothing_and_others_do(name: str) -> None:
    symmetry, anchor, update = symmetry_for(name), state_of(name), state_of(name, 1)
    plain = fedrot.align(update, anchor, symmetry, WHOLE)
    same, other = (
        fedrot.align(update, anchor, symmetry, WHOLE, token_counts=given)
        for given in (torch.full((VOCABULARY,), 3), counts())
    )
    assert all(torch.equal(a.element, b.element) for a, b in zip(plain.moves, same.moves, strict=True))
    assert any(
        not torch.equal(a.element, b.element) for a, b in zip(plain.moves, other.moves, strict=False)
    )


def test_frequent_tokens_decide() -> None:
    """The rows of two tokens ask for two different orders of the stream; the frequent one gets its."""
    symmetry, anchor = symmetry_for("gpt2"), state_of("gpt2")
    update = {key: 1e-3 * value for key, value in state_of("gpt2", 1).items()}
    table, rng = "transformer.wte.weight", seeded(3)
    orders = [torch.randperm(24, generator=rng) for _ in range(2)]
    for token, order in enumerate(orders):
        update[table][token] = 1e3 * anchor[table][token][order.argsort()]
    for token, order in enumerate(orders):
        given = torch.zeros(VOCABULARY)
        given[token] = 1
        options = fedrot.AlignmentOptions(("residual",), canonical=False)
        (move,) = fedrot.align(update, anchor, symmetry, options, token_counts=given).moves
        assert torch.equal(move.element, order)


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(VOCABULARY),
        torch.full((VOCABULARY,), -1.0),
        torch.full((VOCABULARY,), float("nan")),
        torch.ones(VOCABULARY, 1),
        torch.ones(0),
        torch.ones(VOCABULARY - 1),
    ],
    ids=["zeros", "negative", "NaN", "matrix", "none", "too few"],
)
def test_what_is_no_count_is_refused(given: Tensor) -> None:
    symmetry, anchor = symmetry_for("gpt2"), state_of("gpt2")
    with pytest.raises(fedrot.FedrotError, match=r"[Cc]ounts|no table on the residual stream"):
        fedrot.align(state_of("gpt2", 1), anchor, symmetry, WHOLE, token_counts=given)
