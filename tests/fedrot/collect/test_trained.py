"""Updates of clients that trained a part of the model are completed, and what they
trained is marked.
"""

import pytest
import torch

from fedrot import UpdateError, completed

RECEIVED = {
    "body": torch.zeros(4, 2),
    "head": torch.zeros(3, 2),
    "scale": torch.tensor(0.0),
}
UPDATE = {"body": torch.ones(4, 2), "head": torch.ones(3, 2)}


def test_rows_and_tensors_that_were_not_trained_are_the_received_ones():
    full, statistics = completed(UPDATE, RECEIVED, {"head": [2, 0]})
    assert list(full) == list(RECEIVED)
    assert full["head"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert full["body"] is UPDATE["body"]
    assert full["scale"] is RECEIVED["scale"]
    masks = {name: mask.tolist() for name, mask in statistics.pop("trained").items()}
    assert (masks, statistics) == ({"head": [True, False, True], "scale": False}, {})
    assert completed(RECEIVED, RECEIVED) == (RECEIVED, {})


@pytest.mark.parametrize(
    ("update", "rows", "word"),
    [
        ({"more": torch.ones(2)}, {}, "'more'"),
        ({"body": torch.ones(2, 2)}, {}, "'body'"),
        (UPDATE, {"nowhere": [0]}, "'nowhere'"),
        ({"body": UPDATE["body"]}, {"head": [0]}, "not in the update"),
        (UPDATE, {"head": [3]}, "3 rows"),
        (UPDATE, {"head": [0, -1]}, "3 rows"),
    ],
)
def test_what_cannot_be_completed_is_refused(update, rows, word):
    with pytest.raises(UpdateError, match=word):
        completed(update, RECEIVED, rows)
