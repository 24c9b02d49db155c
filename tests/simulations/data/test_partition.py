"""Partitions: complete, disjoint, repeatable, and what their names promise."""

from __future__ import annotations

import numpy as np
import pytest

from fedrot.simulations.data.partition import (
    Partition,
    PartitionError,
    histogram,
    key_names,
    parse_partition,
    partition_keys,
    split_clients,
)

LABELS = np.random.default_rng(0).choice(5, 2000, p=[0.3, 0.25, 0.2, 0.15, 0.1])
COLUMNS = {"source": [f"s{i % 7}" if i % 3 else "big" for i in range(2000)]}
SPECS = ("iid", "dirichlet:0.5", "pathological:3", "keyclass:0.8", "column:source")


def split(spec: str, clients: int = 5, seed: int = 0, labels: np.ndarray = LABELS) -> list[np.ndarray]:
    return split_clients(labels, COLUMNS, parse_partition(spec), clients, seed)


@pytest.mark.parametrize("spec", SPECS)
def test_parts_are_sorted_disjoint_complete_and_repeatable(spec: str) -> None:
    parts, again = split(spec), split(spec)
    assert len(parts) == 5
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert np.sort(np.concatenate(parts)).tolist() == list(range(2000))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("spec", SPECS[:-1])
def test_another_seed_gives_another_division(spec: str) -> None:
    pairs = zip(split(spec, seed=0), split(spec, seed=1), strict=True)
    assert not all(np.array_equal(a, b) for a, b in pairs)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for spec in SPECS:
        split(spec)
    assert capfd.readouterr() == ("", "")


def test_iid_is_equal_and_mixed() -> None:
    parts = split("iid", 3, labels=np.sort(LABELS))
    assert sorted(map(len, parts)) == [666, 667, 667]
    shares = histogram(np.sort(LABELS), parts, 5) / [[len(part)] for part in parts]
    assert np.abs(shares - np.bincount(LABELS) / 2000).max() < 0.06


def test_dirichlet_is_more_even_with_a_large_alpha() -> None:
    def spread(spec: str) -> float:
        return float(histogram(LABELS, split(spec), 5).std())

    assert spread("dirichlet:0.1") > spread("dirichlet:1") > spread("dirichlet:1000")


def test_pathological_clients_hold_exactly_k_classes() -> None:
    counts = histogram(LABELS, split("pathological:2"), 5)
    assert ((counts > 0).sum(axis=1) == 2).all()
    few = split("pathological:2", 2)
    assert sum(map(len, few)) < 2000  # documented: classes without a holder are dropped


@pytest.mark.parametrize("clients", [2, 3, 5, 8])
def test_key_class_sizes_and_shares(clients: int) -> None:
    balanced = np.repeat(np.arange(5), 400)
    parts = split("keyclass:0.8", clients, labels=balanced)
    counts = histogram(balanced, parts, 5)
    assert np.ptp(counts.sum(axis=1)) <= 1
    for c in range(min(5, clients)):
        holders = np.arange(clients) % 5 == c
        held = counts[holders, c]
        if 0.8 * 400 / holders.sum() <= 2000 // clients:
            assert held.sum() == 320
            assert np.ptp(held) <= 1


def test_key_class_of_two_balanced_classes_is_regmeans_split() -> None:
    labels = np.tile([0, 1], 500)
    counts = histogram(labels, split("keyclass:0.8", 2, labels=labels), 2)
    assert counts.tolist() == [[400, 100], [100, 400]]


def test_key_class_share_is_cut_to_an_equal_part(caplog: pytest.LogCaptureFixture) -> None:
    labels = np.repeat([0, 1], [900, 100])
    counts = histogram(labels, split("keyclass:0.8", 2, labels=labels), 2)
    assert counts.sum(axis=1).tolist() == [500, 500]
    assert counts[0].tolist() == [500, 0]
    assert "cut to it" in caplog.text


def test_one_client_per_value() -> None:
    columns = {"source": list("babacc"), "other": [0] * 6}
    parts = split_clients(np.zeros(6, dtype=int), columns, parse_partition("column:source"), 3, 0)
    assert [part.tolist() for part in parts] == [[1, 3], [0, 2], [4, 5]]


def test_values_are_grouped_evenly_and_never_cut() -> None:
    sizes = {"a": 7, "b": 6, "c": 5, "d": 4, "e": 2}
    values = [value for value, size in sizes.items() for _ in range(size)]
    parts = split_clients(np.zeros(24, dtype=int), {"x": values}, parse_partition("column:x"), 2, 0)
    groups = [{values[i] for i in part} for part in parts]
    # By hand: a | b, then c to b's (6 < 7), d to a's (7 < 11), e: 11 and 11, the first.
    assert groups == [{"a", "d", "e"}, {"b", "c"}]


def test_numbers_can_be_a_natural_column() -> None:
    parts = split_clients(np.zeros(4, dtype=int), {"x": [3, 1, 3, 1]}, Partition("column", "x"), 2, 0)
    assert [part.tolist() for part in parts] == [[1, 3], [0, 2]]
    # They have the order of texts.
    parts = split_clients(np.zeros(3, dtype=int), {"x": [9, 10, 9]}, Partition("column", "x"), 2, 0)
    assert [part.tolist() for part in parts] == [[1], [0, 2]]


def test_multi_label_rows_count_under_their_first_label() -> None:
    labels = np.array([[0, 1, 1], [1, 0, 1], [0, 0, 0], [0, 0, 1]], dtype=np.float32)
    assert partition_keys(labels).tolist() == [1, 0, 3, 2]
    assert key_names(labels, ("a", "b", "c")) == ("a", "b", "c", "none")
    assert key_names(labels[:2], ("a", "b", "c")) == ("a", "b", "c")
    assert histogram(labels, [np.array([0, 2]), np.array([1])], 3).tolist() == [
        [0, 1, 0, 1],
        [1, 0, 0, 0],
    ]
    many = np.random.default_rng(0).integers(0, 2, (300, 3)).astype(np.float32)
    assert sum(map(len, split("dirichlet:1", 3, labels=many))) == 300


def test_scores_count_under_their_rounded_value() -> None:
    scores = np.array([0.2, 4.6, 2.5, 1.4], dtype=np.float32)
    assert partition_keys(scores).tolist() == [0, 5, 2, 1]
    assert key_names(scores, ("score",)) == ("0", "1", "2", "3", "4", "5")
    assert key_names(np.array([-1.0, 1.0]), ("score",)) == ("-1", "0", "1")


@pytest.mark.parametrize("spec", SPECS)
def test_a_specification_survives_a_round_trip(spec: str) -> None:
    assert parse_partition(str(parse_partition(spec))) == parse_partition(spec)


@pytest.mark.parametrize(
    ("spec", "partition"),
    [
        (" iid ", Partition("iid")),
        ("dirichlet:1e-3", Partition("dirichlet", 1e-3)),
        ("keyclass:1", Partition("keyclass", 1.0)),
        ("pathological:1", Partition("pathological", 1)),
        ("pathological:2.0", Partition("pathological", 2)),
        ("column:a:b", Partition("column", "a:b")),
    ],
)
def test_a_specification_is_read(spec: str, partition: Partition) -> None:
    found = parse_partition(spec)
    assert found == partition
    assert type(found.value) is type(partition.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("random", "choose from iid, dirichlet"),
        ("", "choose from"),
        ("iid:3", "choose from"),
        ("dirichlet", "choose from"),
        ("dirichlet:lots", "'lots' is not a number"),
        ("dirichlet:0", "alpha must be above 0"),
        ("dirichlet:-1", "alpha must be above 0"),
        ("dirichlet:nan", "alpha must be above 0"),
        ("dirichlet:inf", "alpha must be above 0"),
        ("keyclass:nan", r"must lie in \(0, 1\]"),
        ("column", "choose from"),
        ("column:", "choose from"),
        ("keyclass:0", r"must lie in \(0, 1\]"),
        ("keyclass:1.2", r"must lie in \(0, 1\]"),
        ("pathological:0", "at least 1"),
        ("pathological:1.5", "whole number"),
        ("pathological:inf", "whole number"),
    ],
)
def test_a_bad_specification_is_refused(spec: str, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        parse_partition(spec)


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("iid", 0, "at least 1 is needed"),
        ("iid", 2001, "2000 rows cannot be divided among 2001 clients"),
        ("pathological:6", 4, "each client needs 6 classes, but the training rows have 5"),
        ("column:author", 2, "no such column; columns are source"),
        ("column:source", 9, "8 values for 9 clients, so client 8 would have no rows"),
        ("dirichlet:0.001", 200, "would have no rows; use fewer clients"),
    ],
)
def test_an_impossible_division_is_refused(spec: str, clients: int, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        split(spec, clients)


def test_rows_without_a_value_are_refused() -> None:
    with pytest.raises(PartitionError, match="1 rows have no value"):
        split_clients(np.zeros(2, dtype=int), {"x": ["a", None]}, Partition("column", "x"), 1, 0)


def test_scores_have_the_names_of_their_places() -> None:
    assert key_names(np.array([1.0, 4.9, 5.0, 2.1]), ()) == ("0", "1", "2", "3", "4", "5")
    assert key_names(np.array([-2.0, 1.0]), ()) == ("-2", "-1", "0", "1")
    assert partition_keys(np.array([-2.0, 1.0])).tolist() == [0, 3]
    assert partition_keys(np.array([3.0, 4.0])).tolist() == [3, 4]


def test_scores_of_a_range_of_a_thousand_are_rounded() -> None:
    assert partition_keys(np.array([0.0, 999.6])).tolist() == [0, 1000]
    assert partition_keys(np.array([0.0, 1000.5])).tolist() == [0, 9]
    assert partition_keys(np.array([-500.0, 500.0])).tolist() == [0, 1000]


def test_a_histogram_has_a_column_for_every_class() -> None:
    parts = [np.array([0, 2]), np.array([1])]
    for labels in (np.array([0, 1, 0]), np.array([0.2, 1.1, 0.0])):
        assert histogram(labels, parts, 4).tolist() == [[2, 0, 0, 0], [0, 1, 0, 0]]
        assert histogram(labels, parts, 1).tolist() == [[2, 0], [0, 1]]
        assert histogram(labels, parts, 1).dtype == np.int64


@pytest.mark.parametrize("spec", ["iid", "pathological:1", "keyclass:1", "column:x"])
def test_there_may_be_one_row_for_each_client(spec: str) -> None:
    columns = {"x": ["a", "b", "c"]}
    parts = split_clients(np.arange(3), columns, parse_partition(spec), 3, 0)
    assert sorted(part.tolist() for part in parts) == [[0], [1], [2]]


def test_clients_may_hold_all_classes() -> None:
    counts = histogram(LABELS, split("pathological:5", 3), 5)
    assert (counts > 0).all()
    assert counts.sum() == 2000


def test_key_classes_are_those_that_occur() -> None:
    labels = np.repeat([7, 3], 50)
    counts = histogram(labels, split("keyclass:1", 3, labels=labels), 8)
    # Clients 0 and 2 share class 3, of which none gets more than an equal part of all rows.
    assert counts[:, 3].tolist() == [25, 0, 25]
    assert counts[1].tolist() == [0, 0, 0, 0, 0, 0, 0, 33]


def test_a_client_of_a_column_without_rows_is_refused() -> None:
    with pytest.raises(PartitionError, match="there is no such column; columns are none besides text"):
        split_clients(np.arange(2), {}, Partition("column", "x"), 1, 0)
