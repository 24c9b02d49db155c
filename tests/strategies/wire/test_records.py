"""Statistics as records of a reply: equal after a round trip, and malformed records are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

import fedrot
from fedrot.errors import UpdateError
from fedrot.strategies import statistics_record, wanted_statistics
from fedrot.strategies.wire.arrays import (
    STATISTICS,
    model_records,
    replace_changed,
    wire_bytes,
    without_arrays,
)
from fedrot.strategies.wire.statistics import read_statistics
from tests.models import inputs
from tests.strategies.classifier import build
from tests.strategies.fakes import broadcast, reply

SHARED = ("layer.query.weight", "layer.key.weight", "layer.value.weight")
Found = dict[str, dict[str, Tensor]]


def gram(size: int, seed: int = 0) -> Tensor:
    inputs = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(seed))
    return inputs.T @ inputs


def statistics() -> Found:
    one = gram(6)
    return {
        "gram": {**dict.fromkeys(SHARED, one), "layer.up.weight": gram(5, 1)},
        "fisher": {"layer.bias": torch.rand(4), "classifier.weight": torch.rand(3, 4)},
        "trained": {"classifier.weight": torch.tensor([True, False, True]), "x": torch.tensor(False)},
    }


def there_and_back(given: Found, **options: Any) -> Found:
    return read_statistics(RecordDict({STATISTICS: statistics_record(given, **options)}))


def message() -> Message:
    strategy = FedAvg(min_train_nodes=1, min_available_nodes=1)
    (found,) = broadcast(strategy, {"w": torch.ones(2)}, 1)
    return found


def test_statistics_come_back_as_they_were() -> None:
    given = statistics()
    found = there_and_back(given)
    assert {kind: set(by_name) for kind, by_name in found.items()} == {
        kind: set(by_name) for kind, by_name in given.items()
    }
    for kind, by_name in given.items():
        for name, value in by_name.items():
            assert found[kind][name].dtype == value.dtype
            assert torch.equal(found[kind][name], value)
    assert there_and_back({}) == {}
    assert read_statistics(RecordDict()) == {}


def test_a_matrix_that_layers_share_travels_once_and_stays_shared() -> None:
    record = statistics_record(statistics())
    assert len(record) == 2 + 2 + 2
    found = there_and_back(statistics())["gram"]
    assert len({id(found[name]) for name in SHARED}) == 1
    copies = {"gram": {name: gram(6) for name in SHARED}}
    assert len(statistics_record(copies)) == 3


def test_what_the_model_collects_travels_once_per_input() -> None:
    found = fedrot.collect_gram(build(), [inputs()])
    # Per layer: query, key and value; the heads' output; up; down. Then pooler and classifier.
    # Each input has a matrix and a mean.
    assert len(statistics_record(found)) == 2 * (2 * 4 + 2)
    assert len(found["gram"]) == 2 * 6 + 2


def test_the_record_holds_values_not_views_of_the_clients_tensors() -> None:
    value = torch.rand(4, requires_grad=True)
    record = statistics_record({"fisher": {"w": value}})
    with torch.no_grad():
        before = value.clone()
        value.zero_()
    assert torch.equal(read_statistics(RecordDict({STATISTICS: record}))["fisher"]["w"], before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions_travel_as_float32(dtype: torch.dtype) -> None:
    value = torch.rand(3, 4).to(dtype)
    found = there_and_back({"fisher": {"w": value}})["fisher"]["w"]
    assert found.dtype == torch.float32
    assert torch.equal(found, value.float())


def test_strided_and_empty_shapes_travel() -> None:
    value = gram(6)[:, ::2]
    for dtype in (torch.float32, torch.bfloat16):
        found = there_and_back({"fisher": {"w": value.T, "s": torch.tensor(2.0)}}, dtype=dtype)["fisher"]
        assert torch.equal(found["w"], value.T.to(dtype).float())
        assert found["s"].shape == ()


def test_bfloat16_is_half_the_bytes_and_three_digits() -> None:
    given = {"gram": {"w": gram(64)}}
    header = len(statistics_record({"gram": {"w": torch.zeros(0)}})["gram/w"].data)
    sizes = []
    for dtype in (torch.float32, torch.bfloat16):
        answer = reply(message(), {"w": torch.ones(2)}, 1)
        answer.content[STATISTICS] = statistics_record(given, dtype)
        sizes.append(wire_bytes(answer.content.array_records[STATISTICS]) - header)
    assert sizes == [4 * 64 * 64, 2 * 64 * 64]
    found = there_and_back(given, dtype=torch.bfloat16)["gram"]["w"]
    assert found.dtype == torch.float32
    assert torch.equal(found, given["gram"]["w"].bfloat16().float())
    torch.testing.assert_close(found, given["gram"]["w"], rtol=2**-8, atol=0)


def test_masks_stay_boolean_in_bfloat16() -> None:
    found = there_and_back(statistics(), dtype=torch.bfloat16)["trained"]
    assert {value.dtype for value in found.values()} == {torch.bool}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_other_precisions_on_the_wire_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(fedrot.FedrotError, match="float32 or bfloat16"):
        statistics_record(statistics(), dtype)


def test_a_name_with_the_separator_of_names_is_refused_at_the_client() -> None:
    given = {"gram": {"heads.en|de.weight": torch.eye(2)}}
    with pytest.raises(fedrot.FedrotError, match=r"'heads\.en\|de\.weight' cannot be sent.*Rename"):
        statistics_record(given)


def test_what_cannot_be_read_is_named() -> None:
    garbage = Array(dtype="float32", shape=(2, 2), stype="numpy.ndarray", data=b"garbage")
    with pytest.raises(UpdateError, match="'gram/w' cannot be decoded"):
        read_statistics(RecordDict({STATISTICS: ArrayRecord({"gram/w": garbage})}))
    other_basis = Array(dtype="float32", shape=(2,), stype="something.else", data=b"")
    with pytest.raises(UpdateError, match="'gram/w' cannot be decoded"):
        read_statistics(RecordDict({STATISTICS: ArrayRecord({"gram/w": other_basis})}))
    with pytest.raises(UpdateError, match=r"'gram' have no kind; use statistics_record"):
        read_statistics(RecordDict({STATISTICS: ArrayRecord({"gram": torch.ones(2)})}))


def test_complex_statistics_neither_leave_nor_arrive() -> None:
    value = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(fedrot.FedrotError, match=r"'fisher/w' is torch\.complex64"):
        statistics_record({"fisher": {"w": value}})
    with pytest.raises(UpdateError, match="'fisher/w' cannot be decoded"):
        read_statistics(RecordDict({STATISTICS: ArrayRecord({"fisher/w": Array(value.numpy())})}))


def test_bits_of_bfloat16_say_that_they_are() -> None:
    record = statistics_record({"fisher": {"w": torch.ones(2)}}, torch.bfloat16)
    assert record["fisher/w"].dtype == "bfloat16"
    # Plain integers stay integers, for check_statistics to refuse.
    integers = ArrayRecord({"fisher/w": torch.ones(2).bfloat16().view(torch.uint16)})
    found = read_statistics(RecordDict({STATISTICS: integers}))["fisher"]["w"]
    assert found.dtype == torch.uint16


def test_a_client_reads_what_is_wanted_from_whatever_record_it_is_in() -> None:
    found = message()
    assert wanted_statistics(found) == ()
    for asked, kinds in (("", ()), ("gram", ("gram",)), ("gram,fisher", ("gram", "fisher"))):
        found.content["settings"] = ConfigRecord({STATISTICS: asked})
        assert wanted_statistics(found) == kinds


def test_statistics_and_models_are_told_apart() -> None:
    answer = reply(message(), {"w": torch.ones(2)}, 1)
    answer.content[STATISTICS] = statistics_record(statistics())
    assert list(model_records(answer.content)) == ["arrays"]


def test_a_tensor_that_was_cast_is_not_sent_on_in_its_old_precision() -> None:
    """It is the same object before and after alignment; the received bytes are of another dtype."""
    value = torch.rand(3)
    received = ArrayRecord({"cast": value.half(), "kept": value})
    tensors = {"cast": value.half().float(), "kept": value}
    found = replace_changed(received, tensors, tensors)
    assert {name: array.dtype for name, array in found.items()} == {"cast": "float32", "kept": "float32"}
    assert found["kept"].data is received["kept"].data


LONG = "x" * 70_000


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("numbers", {"a": [0.5] * 10_000}),
        ("bytes", {"a": b"x" * 70_000}),
        ("texts", {"a": ["x" * 35_000] * 2}),
        ("key", {LONG: 1}),
        (LONG, {"a": 1}),
    ],
    ids=["numbers", "bytes", "texts", "key", "name"],
)
def test_a_large_configuration_is_left_out_whatever_makes_it_large(
    name: str, values: dict[str, Any]
) -> None:
    small = ConfigRecord({"partition-id": 3})
    content = RecordDict({"client": small, name: ConfigRecord(values)})
    assert list(without_arrays(content).config_records) == ["client"]
