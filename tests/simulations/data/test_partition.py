"""Partitions: complete, disjoint, repeatable, and what their names promise."""

import numpy as np
import pytest

from fedrot.simulations.data.partition import (
    PartitionError,
    held_out_rows,
    parse_partition,
    partition_keys,
    split_clients,
)
from fedrot.simulations.data.read import DataError

LABELS = np.random.default_rng(0).choice(5, 2000, p=[0.3, 0.25, 0.2, 0.15, 0.1])
COLUMNS = {"source": [f"s{i % 7}" if i % 3 else "big" for i in range(2000)]}
#: Sums over the rows of each client.
BITS = {
    "iid": [196544, 200596, 192196, 197482, 199155],
    "dirichlet:0.5": [115502, 152964, 256431, 259615, 201622],
    "pathological:3": [165565, 398883, 177078, 130317, 119408],
    "column:source": [333853, 185591, 186988, 90010, 187577],
}
#: What gives three rows of three classes to three clients.
FEW = {"dirichlet:0.5": "iid", "pathological:3": "pathological:1"}


def split(spec, clients=5, seed=0, labels=LABELS):
    return split_clients(labels, COLUMNS, spec, clients, seed)


def counts(spec, clients=5, labels=LABELS):
    """Return the numbers of rows per client and class."""
    parts = split(spec, clients, labels=labels)
    classes = np.arange(labels.max() + 1)
    return np.stack([(labels[part][:, None] == classes).sum(0) for part in parts])


@pytest.mark.parametrize("spec", BITS)
def test_parts_are_sorted_disjoint_complete_and_those_that_they_were(spec):
    parts = split(spec)
    other = split(spec, seed=1)
    assert len(parts) == 5
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert np.sort(np.concatenate(parts)).tolist() == list(range(2000))
    assert [(part * np.arange(len(part)) % 997).sum() for part in parts] == BITS[spec]
    assert all(map(np.array_equal, parts, other)) == spec.startswith("column")
    columns = {"source": ["a", "b", "c"]}
    few = split_clients(np.arange(3), columns, FEW.get(spec, spec), 3, 0)
    assert sorted(map(list, few)) == [[0], [1], [2]]


def test_pathological_clients_hold_exactly_k_classes():
    assert ((counts("pathological:2") > 0).sum(axis=1) == 2).all()
    assert (
        counts("pathological:2", 2).sum() < 2000
    )  # documented: classes without a holder are dropped
    assert (counts("pathological:5", 3) > 0).all()


@pytest.mark.parametrize(
    ("values", "clients", "expected"),
    [
        ([3, 1, 3, 1], 2, [[1, 3], [0, 2]]),
        ([9, 10, 9], 2, [[1], [0, 2]]),  # the order of texts
        ([3, 1, 3, 1], 0, [[1, 3], [0, 2]]),
        (["b", "a ", "b", "a"], 0, [[1, 3], [0, 2]]),
        # By hand: a | b, then c to b's (6 < 7), d to a's (7 < 11), e: 11 and 11, the
        # first.
        (
            list("aaaaaaabbbbbbcccccddddee"),
            2,
            [[*range(7), *range(18, 24)], [*range(7, 18)]],
        ),
    ],
)
def test_values_of_a_column_are_clients_or_grouped_and_never_cut(
    values, clients, expected
):
    parts = split_clients(
        np.zeros(len(values), dtype=int), {"x": values}, "column:x", clients, 0
    )
    assert [part.tolist() for part in parts] == expected


@pytest.mark.parametrize("share", [0, 0.1, 0.2, 0.5, 0.9])
def test_each_class_with_two_rows_is_on_both_sides(share):
    labels = np.repeat(np.arange(46), [1] * 5 + [2] * 40 + [20])
    several = np.zeros((len(labels), 46), dtype=np.float32)
    several[np.arange(len(labels)), labels] = 1
    several[:5, 45] = 1  # a second label, of more rows
    for found in (labels, several):
        mask = held_out_rows(found, share, np.random.default_rng(0))
        sizes = np.bincount(labels[mask], minlength=46)
        assert sizes[:5].tolist() == [0] * 5
        assert sizes[5:45].tolist() == [int(share > 0)] * 40
        assert sizes[45] == 20 * share
    for found in (np.arange(20), np.arange(20) / 3, np.zeros(20, dtype=int)):
        mask = held_out_rows(found, share, np.random.default_rng(0))
        assert mask.sum() == 20 * share


NAN = np.nan


@pytest.mark.parametrize(
    ("labels", "keys", "names"),
    [
        ([0, 1, 0], [0, 1, 0], "abc"),
        (
            [[0, 1, 1], [1, 0, 1], [0, 0, 0], [0, 0, 1]],
            [1, 0, 3, 2],
            [*"abc", "none"],
        ),
        ([[NAN, 1, 0], [0, NAN, 1], [NAN, 0, 0]], [1, 2, 3], [*"abc", "none"]),
        ([0.2, 4.6, 2.5, 1.4], [0, 5, 2, 1], range(6)),
        ([-2.0, 1.0], [0, 3], range(-2, 2)),
        ([0.0, 999.6], [0, 1000], range(1001)),
        ([-500.0, 500.0], [0, 1000], range(-500, 501)),
        # Of a wide range, in ten intervals.
        (
            [0.0, 2000.0, 250.0],
            [0, 9, 1],
            [f"{low} to {low + 200}" for low in range(0, 2000, 200)],
        ),
    ],
)
def test_rows_count_under_one_class(labels, keys, names):
    found, known = partition_keys(np.array(labels), ("a", "b", "c"))
    assert (found.tolist(), found.dtype) == (keys, np.int64)
    assert known == tuple(map(str, names))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("pathological:2.0", ("pathological", 2)),
        ("column:a:b", ("column", "a:b")),
        *((spec, None) for spec in ("random", "iid:3", "column")),
        *((f"dirichlet:{value}", None) for value in ("lots", 0, "inf")),
        *((f"pathological:{value}", None) for value in (0, 1.5)),
    ],
)
def test_a_specification_is_read_or_refused(spec, expected):
    if expected is None:
        with pytest.raises(PartitionError, match=r"choose from iid, dirichlet:ALPHA"):
            parse_partition(spec)
    else:
        found = parse_partition(spec)
        assert (found, type(found[1])) == (expected, type(expected[1]))


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("iid", 0, "2000 rows cannot be divided among 0 clients"),
        ("iid", 2001, "2000 rows cannot be divided among 2001 clients"),
        ("pathological:6", 4, "pathological:6, 4 clients: .* Use fewer clients"),
        *(
            ("column:author", clients, "no such column .* one of source, or another")
            for clients in (0, 2)
        ),
        ("column:source", 9, "8 values for 9 clients: big, s0,.* leave the number"),
        ("dirichlet:0.001", 200, "dirichlet:0.001, 200 clients: "),
    ],
)
def test_an_impossible_division_is_refused(spec, clients, message):
    with pytest.raises(PartitionError, match=message):
        split(spec, clients)
    for missing in (None, NAN, " "):
        columns = {"x": ["a", missing]}
        with pytest.raises(DataError, match=r"column:x has no value .*row\(s\) 2,"):
            split_clients(np.zeros(2, dtype=int), columns, "column:x", 1, 0)
