"""Sketches on the wire: within their bytes, equal after a round trip, and refused if malformed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from fedrot.collect.gram_sketch import sketched
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies import statistics_record
from fedrot.strategies.wire import sketches
from fedrot.strategies.wire.arrays import encode, wire_bytes
from fedrot.strategies.wire.records import STATISTICS, read_statistics
from fedrot.strategies.wire.sketches import SKETCH, encode_sketch

QUERY = "gram/query.weight"
SHARED = ("query.weight", "key.weight")
SHAPES = {"query.weight": (8, 40), "key.weight": (8, 40), "down.weight": (40, 64), "bias": (40,)}
Found = dict[str, dict[str, Tensor]]


def gram(size: int, seed: int = 0) -> Tensor:
    rows = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(seed)) + 0.5
    return rows.T @ rows / len(rows)


def statistics() -> Found:
    return {"gram": {**dict.fromkeys(SHARED, gram(40)), "down.weight": gram(64, 1)}}


def read(record: ArrayRecord, shapes: Any = SHAPES) -> Found:
    return read_statistics(RecordDict({STATISTICS: record}), shapes)


def sketch_bytes(size: int, rank: int) -> int:
    return size * (2 * rank + 4)


# --- bytes -------------------------------------------------------------------------------------------


def explained(matrix: Tensor) -> np.ndarray[Any, Any]:
    """Return the shares of the trace that eigenpairs explain at unit diagonal, the largest first."""
    roots = np.sqrt(np.diag(matrix.double().numpy()))
    values = np.linalg.eigvalsh(matrix.double().numpy() / np.outer(roots, roots))
    return values[::-1] / len(matrix)


@pytest.mark.parametrize("budget", [500, 2_000, 8_000])
def test_the_bytes_go_to_the_eigenpairs_that_explain_most(budget: int) -> None:
    """Shares come from NumPy's eigenvalues; rounding to float16 may swap two that are almost equal."""
    record = statistics_record(statistics(), budget=budget)
    assert {array.stype for array in record.values()} == {SKETCH}
    ranks = {array.shape[0]: array.shape[1] for array in record.values()}
    assert wire_bytes(record) == sum(sketch_bytes(*pair) for pair in ranks.items()) <= budget
    shares = {40: explained(gram(40)), 64: explained(gram(64, 1))}
    kept = np.concatenate([shares[size][:rank] for size, rank in ranks.items()])
    left = {size: shares[size][rank] for size, rank in ranks.items()}
    assert kept.min(initial=1) >= 0.99 * max(left.values())
    following = max(left, key=lambda size: left[size])
    assert wire_bytes(record) + 2 * following > budget


def test_a_matrix_that_is_smaller_than_its_sketch_travels_as_it_is() -> None:
    """In bfloat16 a matrix takes no more bytes than a sketch of its full rank."""
    first = torch.eye(40) * torch.arange(1, 41)
    given = {"gram": {"query.weight": first, "down.weight": gram(64, 1)}}
    record = statistics_record(given, torch.bfloat16, budget=2 * 40**2 + 128 + sketch_bytes(64, 40))
    assert record["gram/query.weight"].stype == "fedrot.bfloat16"
    assert record["gram/down.weight"].stype == SKETCH
    assert torch.equal(read(record)["gram"]["query.weight"], first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_fits_in_full_travels_in_full(dtype: torch.dtype) -> None:
    full = statistics_record(statistics(), dtype)
    assert statistics_record(statistics(), dtype, budget=wire_bytes(full)) == full
    less = statistics_record(statistics(), dtype, budget=wire_bytes(full) - 1)
    assert SKETCH in {array.stype for array in less.values()}
    assert wire_bytes(less) < wire_bytes(full)


def test_what_is_no_full_matrix_travels_as_it_is() -> None:
    blocks = {"gram": {"query.weight": gram(40).view(1, 40, 40), "down.weight": torch.ones(64)}}
    other = {"fisher": {"bias": torch.ones(40)}, "trained": {"bias": torch.tensor(True)}}
    given = {**blocks, **other}
    assert statistics_record(given, budget=1) == statistics_record(given)


def test_a_budget_below_the_diagonals_is_refused() -> None:
    diagonals = 4 * (40 + 64)
    record = statistics_record(statistics(), budget=diagonals)
    assert [array.shape[1] for array in record.values()] == [0, 0]
    assert torch.equal(read(record)["gram"]["down.weight"], torch.diag(gram(64, 1).diagonal()))
    with pytest.raises(FedrotError, match=r"may take 415 bytes, and their diagonals take 416\."):
        statistics_record(statistics(), budget=diagonals - 1)


def test_a_matrix_that_cannot_be_sketched_is_named() -> None:
    given = statistics()
    given["gram"]["down.weight"][0, 1] = float("nan")
    with pytest.raises(FedrotError, match=r"'gram/down\.weight' holds NaN.*Check the client's training"):
        statistics_record(given, budget=5_000)


# --- there and back ----------------------------------------------------------------------------------


def test_what_arrives_is_the_sketch_and_layers_that_share_an_input_share_it() -> None:
    record = statistics_record(statistics(), budget=5_000)
    assert list(record) == ["gram/query.weight|key.weight", "gram/down.weight"]
    shared, down = (array.shape[1] for array in record.values())
    found = read(record)["gram"]
    assert torch.equal(found["down.weight"], sketched(gram(64, 1), down).matrix())
    assert torch.equal(found["query.weight"], sketched(gram(40), shared).matrix())
    assert found["query.weight"] is found["key.weight"]
    assert found["query.weight"].dtype == torch.float32


# --- malformed ---------------------------------------------------------------------------------------


def sketch(rank: int = 3, size: int = 40, **changed: Any) -> Array:
    """Return a valid sketch with changed fields: dtype, shape, stype or data."""
    array = encode_sketch(sketched(gram(size), rank))
    fields = {"dtype": array.dtype, "shape": array.shape, "stype": SKETCH, "data": array.data}
    return Array(**{**fields, **changed})


def with_values(diagonal: float = 1.0, factor: float = 0.1) -> Array:
    data = np.full(40, diagonal, "<f4").tobytes() + np.full(120, factor, "<f2").tobytes()
    return sketch(data=data)


MALFORMED: dict[str, tuple[Array, str]] = {
    "wrong rank": (sketch(shape=(40, 4)), "does not have 400 bytes"),
    "rank above the inputs": (
        sketch(shape=(40, 41), data=bytes(sketch_bytes(40, 41))),
        "the rank at most in",
    ),
    "huge rank": (sketch(shape=(40, 2**62)), "does not have 400 bytes"),
    "negative rank": (sketch(shape=(40, -2), data=b""), "does not have 0 bytes"),
    "negative size": (sketch(shape=(-40, 3)), "does not have 400 bytes"),
    "three axes": (sketch(shape=(40, 3, 1)), "does not have 400 bytes"),
    "no axes": (sketch(shape=()), "does not have 400 bytes"),
    "no bytes": (sketch(data=b""), "does not have 0 bytes"),
    "one byte more": (sketch(data=sketch().data + b"0"), "does not have 401 bytes"),
    "another dtype": (sketch(dtype="float32"), "'float32'"),
    "NaN in the diagonal": (with_values(diagonal=float("nan")), "a diagonal with entries"),
    "a negative diagonal": (with_values(diagonal=-1), "a diagonal with entries"),
    "a huge diagonal": (with_values(diagonal=1e31), "a diagonal with entries"),
    "NaN in the factor": (with_values(factor=float("nan")), "longer than 1 or not finite"),
    "Inf in the factor": (with_values(factor=float("inf")), "longer than 1 or not finite"),
    "rows that are too long": (with_values(factor=0.6), "longer than 1 or not finite"),
    "of another size": (sketch(size=41), r"has 41 inputs, and 'query\.weight' has shape \[8, 40\]"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_sketches_are_refused(name: str) -> None:
    for valid in (sketch(), with_values()):
        assert read(ArrayRecord({QUERY: valid}))["gram"]["query.weight"].shape == (40, 40)
    array, pattern = MALFORMED[name]
    with pytest.raises(UpdateError, match=rf"'gram/query\.weight' cannot be decoded: .*{pattern}"):
        read(ArrayRecord({QUERY: array}))


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("fisher/query.weight", "only Gram matrices are sketched"),
        ("gram", "have no kind"),
        ("gram/unknown", r"'unknown' has shape \[\]"),
        ("gram/bias", r"'bias' has shape \[40\]"),
        ("gram_conv1d/query.weight", r"has shape \[8, 40\]"),
        ("gram/query.weight|down.weight", r"'down\.weight' has shape \[40, 64\]"),
    ],
)
def test_sketches_of_the_wrong_tensors_are_refused(key: str, pattern: str) -> None:
    with pytest.raises(UpdateError, match=pattern):
        read(ArrayRecord({key: sketch()}))


def test_a_tensor_has_one_sketch_or_matrix() -> None:
    whole = encode("x", gram(40))
    for other in (sketch(), whole):
        record = ArrayRecord({"gram/query.weight": sketch(), "gram/key.weight|query.weight": other})
        with pytest.raises(UpdateError, match="come twice"):
            read(record)


def test_what_all_sketches_stand_for_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of tokens has millions of squared rows; its sketch would be small, its matrix is not."""
    made: list[int] = []
    matrix = sketches.GramSketch.matrix

    def counted(of: Any) -> Tensor:
        made.append(len(of.diagonal))
        return matrix(of)

    monkeypatch.setattr(sketches.GramSketch, "matrix", counted)
    tokens = 30_000
    wide = Array("float16", (tokens, 0), SKETCH, bytes(4 * tokens))
    shapes = {"table": (tokens, 8)}
    with pytest.raises(UpdateError, match="stand for far more entries than the model has"):
        read(ArrayRecord({"gram_conv1d/table": wide}), shapes)
    assert made == []
    monkeypatch.setattr(sketches, "_MOST_ENTRIES", 0)
    many = {f"w{i}": (8, 40) for i in range(9)}
    limit = sketches._MOST_TIMES * 9 * 8 * 40
    with pytest.raises(UpdateError, match="stand for far more entries"):
        read(ArrayRecord({f"gram/{name}": sketch(seed) for seed, name in enumerate(many)}), many)
    assert sum(size**2 for size in made) <= limit
    assert len(made) == limit // 40**2
