"""Every division of rows is one, or the documented error."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fedrot.simulations.data.partition import (
    PartitionError,
    partition_keys,
    split_clients,
)
from tests.fuzz.cases import fuzzed, misspelt

KINDS = ("iid", "dirichlet", "pathological", "keyclass", "column")
numbers = st.floats().map(str) | st.integers(-3, 12).map(str) | st.sampled_from(("1e-9", "0.5", "1e300"))
letters = st.text(string.printable, max_size=12)
whole = st.builds("{}:{}".format, st.sampled_from(KINDS), numbers | st.sampled_from(("source", "none")))
specs = st.just("iid") | whole | whole.flatmap(misspelt) | letters


@st.composite
def labels(draw: st.DrawFn) -> np.ndarray:
    """Draw labels of a split: classes, several of them, or scores."""
    rows, classes = draw(st.integers(0, 60)), draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    match draw(st.integers(0, 2)):
        case 0:
            skewed = random.dirichlet(np.full(classes, draw(st.sampled_from((0.05, 1.0, 100.0)))))
            return random.choice(classes, rows, p=skewed)
        case 1:
            return random.random((rows, classes)) < draw(st.sampled_from((0.0, 0.2, 1.0)))
        case _:
            return random.normal(0, draw(st.sampled_from((0.1, 3.0))), rows)


@fuzzed(14, split=labels(), spec=specs, clients=st.integers(-1, 12), seed=st.integers(0, 2**40))
def test_every_row_has_one_client_or_the_error_says_why(
    split: np.ndarray, spec: str, clients: int, seed: int
) -> bool:
    columns: dict[str, Any] = {
        "source": [f"s{i % 5}" for i in range(len(split))],
        "none": [None] * len(split),
    }
    try:
        parts = split_clients(split, columns, spec, clients, seed)
    except PartitionError:
        return False
    assert len(parts) == clients
    assert all(len(part) and (np.diff(part) > 0).all() for part in parts)
    together = np.sort(np.concatenate(parts))
    assert (np.diff(together) > 0).all()
    assert together[0] >= 0
    assert together[-1] < len(split)
    if not spec.strip().startswith("pathological"):
        assert len(together) == len(split)
    keys, names = partition_keys(split, ["c"] * (split.shape[1] if split.ndim == 2 else 12))
    assert 0 <= keys.min() <= keys.max() < len(names)
    return True
