"""Whatever a client answers about rows, sums and losses, the others keep a good and
finite head.
"""

import torch
from hypothesis import strategies as st

from fedrot.strategies.wire.fitting_messages import LOSSES, ROWS, SUMS
from tests.fuzz.cases import EDGES, fuzzed
from tests.fuzz.test_rounds import places, scales
from tests.strategies.fakes import tensors_of
from tests.strategies.fitting.feature_clients import (
    OLD,
    accuracy,
    client,
    fitted,
)

edits = st.tuples(
    st.sampled_from(
        ("times", "entry", "row", "negated", "zero", "shape", "dtype", "gone")
    ),
    scales | st.floats(allow_nan=True),
    st.integers(0, 99),
)


def changed(value, how, number, at):
    """Return a tensor of an answer with one change."""
    found = value.clone()
    match how:
        case "times":
            found = found * number
        case "entry":
            found.view(-1)[at % found.numel()] = number
        case "row":
            found[at % len(found)] *= number
        case "negated":
            found = -found
        case "zero":
            found.zero_()
        case "shape":
            found = found.flatten()[: at % (found.numel() + 1)]
        case "dtype":
            found = found.to(
                torch.float32 if found.dtype == torch.float64 else torch.float64
            )
        case _:
            return None
    return found


@st.composite
def lies(draw):
    """Draw a lie about some of rows, sums and losses."""
    told = {}
    for name in draw(st.sets(st.sampled_from((ROWS, SUMS, LOSSES)), min_size=1)):
        one = st.integers(0, 300) | st.sampled_from(EDGES) | st.floats()
        kept = st.sampled_from(
            ("counts", "sums", "scatter")
            if name == SUMS
            else ("losses", "squares", "counts")
        )
        told[name] = draw(
            st.tuples(one, one)
            if name == ROWS
            else st.lists(st.tuples(kept, edits), max_size=2)
        )

    def lie(answer):
        for name in answer.keys() & told.keys():
            if name == ROWS:
                answer[ROWS].update(
                    zip(("training", "held_out"), told[ROWS], strict=True)
                )
            for kept, edit in told[name] if name != ROWS else ():
                if kept in answer[name]:
                    found = changed(answer[name].pop(kept), *edit)
                    answer[name] |= {kept: found} if found is not None else {}

    return lie


@fuzzed(2, lie=lies(), place=places)
def test_a_head_is_fitted_to_the_others_over_rounds(lie, place):
    old = OLD
    before = accuracy(fitted([client(seed) for seed in range(3)]), 500)
    for number in range(2):
        clients = [
            client(10 * number + seed, lie=lie if seed == place else None)
            for seed in range(4)
        ]
        found = fitted(clients, old)
        old = tensors_of(found.arrays)
        assert all(bool(tensor.isfinite().all()) for tensor in old.values())
        assert accuracy(found, 500) > before - 0.15
    return found.clients == 4
