"""Token counts of batches."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import fedrot
from fedrot.collect.token_counts import counts_by_order, token_counts


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
    with pytest.raises(fedrot.FedrotError, match=r"no 'input_ids' to count, it has: pixel_values"):
        token_counts([{"pixel_values": torch.ones(1)}], 4)
    for token in (-1, 4):
        with pytest.raises(fedrot.FedrotError, match="not all of a vocabulary of 4"):
            token_counts([{"input_ids": torch.tensor([token])}], 4)


def test_counts_by_order_follow_zipf_and_mandelbrot() -> None:
    counts = counts_by_order(400)
    expected = [(399 + 10) / (token + 10) for token in range(400)]
    assert counts.tolist() == pytest.approx(expected)
    assert counts.dtype == torch.float64
    assert counts_by_order(1).tolist() == [1.0]
    with pytest.raises(fedrot.FedrotError, match="vocabulary is 0"):
        counts_by_order(0)
