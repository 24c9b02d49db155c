"""Statistics as records of a reply: equal after a round trip, and malformed records are
refused.
"""

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import fedrot
from fedrot.errors import UpdateError
from fedrot.strategies import statistics_record, wanted_statistics
from fedrot.strategies.wire import statistics_record as records
from fedrot.strategies.wire.arrays import (
    STATISTICS,
    encode,
    model_records,
    without_arrays,
)
from fedrot.strategies.wire.statistics_record import read_statistics
from tests.models import inputs
from tests.strategies.classifier import build
from tests.strategies.fakes import broadcast, reply, wire_bytes

SHARED = ("layer.query.weight", "layer.key.weight", "layer.value.weight")


def gram(size, seed=0):
    inputs = torch.randn(3 * size, size, generator=torch.Generator().manual_seed(seed))
    return inputs.T @ inputs


def statistics():
    one = gram(6)
    return {
        "gram": {**dict.fromkeys(SHARED, one), "layer.up.weight": gram(5, 1)},
        "fisher": {"layer.bias": torch.rand(4), "classifier.weight": torch.rand(3, 4)},
        "trained": {
            "classifier.weight": torch.tensor([True, False, True]),
            "x": torch.tensor(False),
        },
    }


def there_and_back(given, **options):
    return read(dict(statistics_record(given, **options)))


def message():
    return broadcast(FedAvg(), {"w": torch.ones(2)}, 2)[0]


def read(arrays, shapes=None):
    return read_statistics(RecordDict({STATISTICS: ArrayRecord(dict(arrays))}), shapes)


def test_statistics_come_back_as_they_were():
    given = statistics()
    found = there_and_back(given)
    assert {kind: set(of) for kind, of in found.items()} == {
        kind: set(of) for kind, of in given.items()
    }
    for kind, by_name in given.items():
        for name, value in by_name.items():
            assert found[kind][name].dtype == value.dtype
            assert torch.equal(found[kind][name], value)
    assert there_and_back({}) == {}
    assert read_statistics(RecordDict()) == {}


def test_a_matrix_that_layers_share_travels_once_and_stays_shared():
    assert len(statistics_record(statistics())) == 2 + 2 + 2
    found = there_and_back(statistics())["gram"]
    assert len({id(found[name]) for name in SHARED}) == 1
    copies = {"gram": {name: gram(6) for name in SHARED}}
    assert len(statistics_record(copies)) == 3
    # Per layer: query, key and value; the heads' output; up; down. Then pooler and
    # classifier.
    collected = fedrot.collect_gram(build(), [inputs()])
    assert len(statistics_record(collected)) == 2 * 4 + 2
    assert len(collected["gram"]) == 2 * 6 + 2


def test_the_record_holds_values_not_views_of_the_clients_tensors():
    value = torch.rand(4, requires_grad=True)
    record = statistics_record({"fisher": {"w": value}})
    with torch.no_grad():
        before = value.clone()
        value.zero_()
    assert torch.equal(read(record)["fisher"]["w"], before)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16]
)
def test_other_precisions_shapes_and_layouts_arrive_in_float32(dtype, wire):
    value = gram(6).to(dtype)[:, ::2].T
    given = {
        "fisher": {"w": value, "s": torch.tensor(2.0)},
        "trained": {"w": torch.tensor(True)},
    }
    found = there_and_back(given, dtype=wire)
    assert found["fisher"]["w"].dtype == torch.float32
    assert torch.equal(found["fisher"]["w"], value.to(wire).float())
    assert found["fisher"]["s"].shape == ()
    assert found["trained"]["w"].dtype == torch.bool


def test_bfloat16_is_half_the_bytes_and_says_what_it_is():
    header = len(statistics_record({"gram": {"w": torch.zeros(0)}})["gram/w"].data)
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        record = statistics_record({"gram": {"w": gram(64)}}, dtype)
        assert wire_bytes(record) - header == width * 64 * 64
        assert f"torch.{record['gram/w'].dtype}" == str(dtype)
    # Plain integers stay integers, for check_statistics to refuse.
    integers = {"fisher/w": torch.ones(2).bfloat16().view(torch.uint16)}
    assert read(ArrayRecord(integers))["fisher"]["w"].dtype == torch.uint16


COMPLEX = torch.ones(2, dtype=torch.complex64)
REFUSED = [
    *(
        (statistics(), dtype, "float32, torch.bfloat16")
        for dtype in (torch.float16, torch.float64, torch.int8)
    ),
    (
        {"gram": {"heads.en|de.weight": torch.eye(2)}},
        torch.float32,
        r"'heads\.en\|de\.weight'.*Rename",
    ),
    ({"fisher": {"w": COMPLEX}}, torch.float32, r"'fisher/w' is torch\.complex64"),
]


@pytest.mark.parametrize(("given", "dtype", "problem"), REFUSED)
def test_what_cannot_be_sent_is_refused_at_the_client(given, dtype, problem):
    with pytest.raises(fedrot.FedrotError, match=problem):
        statistics_record(given, dtype)


@pytest.mark.parametrize(
    ("key", "array", "problem"),
    [
        (
            "gram/w",
            Array("float32", (2, 2), "numpy.ndarray", b"garbage"),
            "'gram/w' cannot be decoded",
        ),
        (
            "gram/w",
            Array("float32", (2,), "something.else", b""),
            "'gram/w' cannot be decoded",
        ),
        ("fisher/w", Array(COMPLEX.numpy()), "'fisher/w' cannot be decoded"),
        (
            "gram",
            Array(torch.ones(2).numpy()),
            "'gram' have no kind; use statistics_record",
        ),
    ],
)
def test_what_cannot_be_read_is_named(key, array, problem):
    with pytest.raises(UpdateError, match=problem):
        read({key: array})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_array_under_many_names_is_decoded_once(dtype, monkeypatch):
    """Torch's memory is not traced: each decoded array of bfloat16 takes twice its
    bytes.
    """
    decoded = []
    decode = records.decode
    monkeypatch.setattr(
        records, "decode", lambda name, *a: decoded.append(name) or decode(name, *a)
    )
    large = encode("x", torch.zeros(1000, dtype=dtype))
    shapes = {"w": (4, 3), "v": (2, 3)}
    with pytest.raises(UpdateError, match="shape"):
        read(
            {f"{kind}/{name}": large for kind in ("gram", "fisher") for name in shapes},
            shapes,
        )
    assert len(decoded) == 1


def test_a_client_reads_what_is_wanted_from_whatever_record_it_is_in():
    found = message()
    assert wanted_statistics(found) == ()
    for asked, kinds in (
        ("", ()),
        ("gram", ("gram",)),
        ("gram,fisher", ("gram", "fisher")),
    ):
        found.content["settings"] = ConfigRecord({STATISTICS: asked})
        assert wanted_statistics(found) == kinds


def test_statistics_and_models_are_told_apart():
    answer = reply(message(), {"w": torch.ones(2)}, 1)
    answer.content[STATISTICS] = statistics_record(statistics())
    assert list(model_records(answer.content)) == ["arrays"]


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
def test_a_large_configuration_is_left_out_whatever_makes_it_large(name, values):
    small = ConfigRecord({"partition-id": 3})
    content = RecordDict({"client": small, name: ConfigRecord(values)})
    assert list(without_arrays(content).config_records) == ["client"]


def test_configurations_that_are_kept_have_a_bound_together():
    many = {f"x{i}": ConfigRecord({"a": "x" * 30_000}) for i in range(10)}
    assert len(without_arrays(RecordDict(many)).config_records) == 2
