"""What a client leaves out of its answers, beside plain counting."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrot.errors import FedrotError
from fedrot.strategies import LabelledRows, Privacy
from fedrot.task_head.outputs import REGRESSION, SEVERAL, SINGLE


def data_of(training, held_out=(), test=None):
    """Return rows whose batches have these labels alone."""

    def reads(labels):
        return lambda: [{"labels": torch.tensor(batch)} for batch in labels]

    return LabelledRows(
        lambda: None, reads(training), reads(held_out), test and reads(test)
    )


def labels_of(rows):
    return [batch["labels"].tolist() for batch in rows()]


def test_scarce_classes_leave_all_rows_that_are_sent():
    data = data_of(
        [[0] * 6 + [1] * 4, [2] * 5 + [-100]],
        [[0, 1, 2, 0, 2, 2, 3]],
        [[0] * 5 + [1] * 9 + [2] * 4 + [3] * 5],
    )
    kept = Privacy().kept(data, SINGLE, reports=True)
    assert labels_of(kept.training) == [[0] * 6 + [-100] * 4, [2] * 5 + [-100]]
    # Of a class that is left out of training, no other row is sent. A class without
    # training rows is judged by the others.
    assert labels_of(kept.held_out) == [[0, -100, 2, 0, 2, 2, -100]]
    assert labels_of(kept.test) == [[0] * 5 + [-100] * 13 + [3] * 5]
    assert kept.build is data.build


@pytest.mark.parametrize(
    ("training", "held_out", "sent"),
    [
        ([[0] * 5 + [1] * 4], [[0] * 5], (0, 1)),  # 5 of at least 10 rows are left
        ([[0] * 10], [[0] * 4], (1, 0)),
        ([[0] * 10], [[1] * 5], (1, 1)),
        ([], [], (0, 0)),
    ],
)
def test_few_rows_are_not_sent(training, held_out, sent):
    kept = Privacy().kept(data_of(training, held_out), SINGLE)
    assert (len(labels_of(kept.training)), len(labels_of(kept.held_out))) == sent


def test_tokens_are_counted_by_text():
    text = [0, 1, 1, 1, 1, 1, 1, -100]
    kept = Privacy(3, 1).kept(data_of([[text, text], [[0] * 8]]), SINGLE)
    assert labels_of(kept.training) == [
        [[0, *[-100] * 7]] * 2,
        [[0] * 8],
    ]


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3)))
def test_labels_that_few_rows_have_or_lack_leave_with_their_rows(rows):
    kept = Privacy(3, 1).kept(data_of([rows] if rows else []), SEVERAL)
    left = [
        row
        for batch in labels_of(kept.training)
        for row in batch
        if not math.isnan(row[0])
    ]
    for column in zip(*left, strict=True):
        for value in (0, 1):
            assert column.count(value) == 0 or column.count(value) >= 3
    # The order of rows does not matter, and no row more is left out than has to be.
    expected = [*rows]
    while True:
        columns = [*zip(*expected, strict=True)]
        few = {
            (place, value)
            for place, column in enumerate(columns)
            for value in (0, 1)
            if 0 < column.count(value) < 3
        }
        if not few:
            break
        expected = [row for row in expected if not few & {*enumerate(row)}]
    assert sorted(left) == sorted(expected)


def test_a_regression_has_rows_alone():
    data = data_of([[[0.5]] * 9, [[math.nan]]])
    assert labels_of(Privacy(5, 10).kept(data, REGRESSION).training) == []
    assert len(labels_of(Privacy(5, 9).kept(data, REGRESSION).training)) == 2


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_numbers_of_rows_are_whole_and_positive(value):
    with pytest.raises(FedrotError, match="min_rows"):
        Privacy(min_rows=value)
