"""Tensors on the wire: equal bits after a round trip, and malformed arrays are
refused.
"""

import io
import math
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.common.constant import SType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertForMaskedLM

import fedrot
from fedrot.errors import UpdateError
from fedrot.strategies import from_arrays, to_arrays
from fedrot.strategies.wire.arrays import (
    BFLOAT16,
    PRECISIONS,
    TIED,
    replace_changed,
)
from fedrot.tensors import same_bits
from tests.strategies.fakes import wire_bytes

INTEGERS = tuple(
    getattr(torch, f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)
)
DTYPES = (*PRECISIONS, *INTEGERS, torch.bool)
NPY = b"\x93NUMPY\x01\x00"
SCALAR_HEADER = 128


@st.composite
def tensors(draw):
    """Draw a tensor of any dtype, shape, layout and bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    wide = [2 * n for n in shape]
    size = math.prod(wide) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)) + b"\0" * 8)
    bits = (
        torch.frombuffer(raw, dtype=torch.uint8, count=size)
        if size
        else torch.zeros(0).byte()
    )
    full = (bits > 127 if dtype == torch.bool else bits.view(dtype)).reshape(wide)
    layout = draw(st.sampled_from(("whole", "strided", "transposed")))
    if layout == "whole":
        return full[tuple(slice(n) for n in shape)].contiguous()
    strided = full[tuple(slice(None, None, 2) for _ in shape)]
    return (
        strided
        if layout == "strided"
        else strided.permute(tuple(reversed(range(len(shape)))))
    )


def identical(one, other):
    return (
        one.dtype == other.dtype and one.shape == other.shape and same_bits(one, other)
    )


def through_the_wire(record):
    """Send a record the way Flower does: deflated into objects, inflated from them."""
    content = RecordDict({"arrays": record})
    contents = {
        key: found.deflate() for key, found in get_all_nested_objects(content).items()
    }
    assert set(contents) == {
        node.object_id for node in iterate_object_tree(get_object_tree(content))
    }
    found = inflate_object_from_contents(content.object_id, contents)
    assert isinstance(found, RecordDict)
    return found.array_records["arrays"]


def array(
    data,
    shape=(2,),
    dtype="float32",
    stype=SType.NUMPY,
):
    return Array(dtype=dtype, shape=shape, stype=stype, data=data)


def npy(header, data=b""):
    text = header.encode("latin1") if isinstance(header, str) else header
    return NPY + len(text).to_bytes(2, "little") + text + data


def described(shape, descr="'<f4'", order="False"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def refuse(found, problem):
    with pytest.raises(UpdateError, match=problem) as error:
        from_arrays(
            ArrayRecord({**PLAIN, "tie": array(b"a", stype=TIED), "some.weight": found})
        )
    assert "'some.weight'" in str(error.value)
    assert len(str(error.value)) < 1000


EVERY = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)


@given(st.lists(tensors(), max_size=4), st.booleans())
@EVERY
def test_tensors_arrive_with_the_same_bits(values, writable):
    given_ = {f"t{i}": value for i, value in enumerate(values)}
    found = from_arrays(through_the_wire(to_arrays(given_)), writable=writable)
    assert list(found) == list(given_)
    assert all(identical(found[name], value) for name, value in given_.items())


@given(tensors(), st.sampled_from(PRECISIONS))
@EVERY
def test_precision_is_changed_on_floats_only(value, dtype):
    found = from_arrays(to_arrays({"w": value}, dtype))["w"]
    expected = value.contiguous().to(dtype) if value.is_floating_point() else value
    # How a cast writes NaN depends on where in memory it is.
    assert torch.equal(found.isnan(), expected.isnan())
    assert identical(found[~found.isnan()], expected[~expected.isnan()])


@given(tensors())
@EVERY
def test_flower_reads_what_numpy_has_and_its_own_arrays_are_read(value):
    found = to_arrays({"w": value})["w"]
    assert found.shape == tuple(value.shape)
    assert f"torch.{found.dtype}" == str(value.dtype)
    if value.dtype == torch.bfloat16:
        with pytest.raises(TypeError, match=BFLOAT16):
            found.numpy()
        return
    assert identical(torch.from_numpy(found.numpy()), value)
    # The very bytes of Flower's own, so that equal arrays stay one object on the wire.
    assert found.data == Array(value.contiguous().numpy()).data
    assert identical(from_arrays(ArrayRecord({"w": Array(value.numpy())}))["w"], value)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tied_embeddings_travel_once(dtype):
    tied = build_tied().state_dict()
    apart = {name: value.clone() for name, value in tied.items()}
    record = to_arrays(tied, dtype)
    whole = to_arrays(apart, dtype)
    assert set(record) == set(tied)
    width = (dtype or torch.float32).itemsize
    # The decoder's bias is tied as well.
    saved = 50 * 16 * width + 50 * width + 2 * SCALAR_HEADER
    names = sum(len(array.data) for array in record.values() if array.stype == TIED)
    assert wire_bytes(whole) - wire_bytes(record) == saved - names
    found = from_arrays(through_the_wire(record))
    assert (
        found["cls.predictions.decoder.weight"]
        is found["bert.embeddings.word_embeddings.weight"]
    )
    for name, tensor in tied.items():
        assert identical(found[name], tensor.to(dtype or tensor.dtype))
    build_tied().load_state_dict(found)


def build_tied():
    return BertForMaskedLM(
        BertConfig(
            hidden_size=16,
            num_hidden_layers=1,
            intermediate_size=24,
            vocab_size=50,
            num_attention_heads=2,
            max_position_embeddings=8,
        )
    )


def test_ties_are_of_memory_shape_and_layout():
    full = torch.rand(4, 4)
    given_ = {
        "full": full,
        "transposed": full.T,
        "part": full[:2],
        "other_part": full[2:],
        "bits": full.view(torch.int32),
        "again": full[:2],
        "empty": torch.zeros(0),
        "also_empty": torch.zeros(0),
    }
    record = to_arrays(given_)
    assert [name for name, array in record.items() if array.stype == TIED] == ["again"]
    found = from_arrays(record, writable=True)
    assert found["again"] is found["part"]
    assert all(identical(found[name], value) for name, value in given_.items())


def test_ties_may_point_forward():
    record = to_arrays({"a": torch.ones(2)})
    found = from_arrays(ArrayRecord({"b": array(b"a", stype=TIED), "a": record["a"]}))
    assert list(found) == ["b", "a"]
    assert found["a"] is found["b"]


def test_views_are_of_the_received_bytes_and_warn_nobody():
    value = torch.rand(5, 3)
    record = to_arrays({"w": value, "h": value.bfloat16()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = from_arrays(record)
        own = from_arrays(record, writable=True)
    start = np.frombuffer(record["w"].data, np.uint8).ctypes.data
    assert 0 < found["w"].data_ptr() - start < len(record["w"].data)
    before = record["w"].data[:]
    for tensor in own.values():
        tensor.zero_()
    assert record["w"].data == before
    del record
    assert torch.equal(found["w"], value)


def test_the_clients_tensors_stay_as_they_are_and_can_be_used_on():
    value = torch.rand(3, requires_grad=True)
    record = to_arrays({"w": value})
    before = value.detach().clone()
    with torch.no_grad():
        value.zero_()
    assert torch.equal(from_arrays(record)["w"], before)


@pytest.mark.parametrize(
    ("value", "dtype", "problem"),
    [
        (torch.zeros(2, dtype=torch.complex64), None, r"'w' is torch\.complex64"),
        (torch.zeros(2).to(torch.float8_e4m3fn), None, r"'w' is torch\.float8"),
        (torch.zeros(2), torch.int8, r"dtype is torch\.int8"),
    ],
)
def test_what_cannot_travel_is_refused_before_it_does(value, dtype, problem):
    with pytest.raises(fedrot.FedrotError, match=problem):
        to_arrays({"w": value}, dtype)


def decoded(value):
    """Return the tensor of one array."""
    return from_arrays(ArrayRecord({"w": value}))["w"]


def test_fortran_order_and_newer_headers_are_read():
    values = np.asfortranarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    found = from_arrays(ArrayRecord({"w": Array(values)}))["w"]
    assert torch.equal(found, torch.arange(24.0).reshape(2, 3, 4))
    stream = io.BytesIO()
    np.lib.format.write_array(stream, values, version=(2, 0))
    assert torch.equal(decoded(array(stream.getvalue(), (2, 3, 4))), found)


def test_what_is_misaligned_is_copied():
    values = np.arange(3, dtype=np.float64)
    for spaces in range(8):
        text = described("(3,)", "'<f8'").replace("\n", " " * spaces + "\n")
        found = decoded(array(npy(text, values.tobytes()), (3,), "float64"))
        assert found.tolist() == [0, 1, 2]
        assert found.data_ptr() % 8 == 0


def test_legacy_records_without_shapes_are_read():
    values = np.arange(6.0).reshape(2, 3)
    found = decoded(array(Array(values).data, (), ""))
    assert torch.equal(found, torch.from_numpy(values))


def archive(compressed):
    stream = io.BytesIO()
    if compressed:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("arr_0.npy", b"\0" * 10_000_000)
    else:
        np.savez(stream, np.zeros(2, np.float32))
    return stream.getvalue()


class Bomb:
    """Fails the test if it is read from a pickle."""

    def __reduce__(self):
        return pytest.fail, ("opened",)


def pickled():
    stream = io.BytesIO()
    np.save(stream, np.array([Bomb(), Bomb()], dtype=object), allow_pickle=True)
    return stream.getvalue()


STRUCTURES = ("[('a', '<f4')]", "('<f4', (2,))")
UNREADABLE = (
    b"\xff\xfe" * 20,
    b"{'descr': '\xe9'}\n",
    b"(" * 900,
    b"[" * 900 + b"]" * 90,
    b"{" + b"'a':" * 200,
    b"-" * 900 + b"1",
    b"__import__('os').getcwd()\n",
    b"{'descr': '<f4', 'shape': (2,)}\n",
    b"{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}\n",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': [2]}\n",
    b"{'descr': 5, 'fortran_order': False, 'shape': (2,)}\n",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (2.0,)}\n",
    b"\n" * 2000,
)
DATA = Array(np.zeros(2, np.float32)).data
BITS = Array(np.zeros(2, np.uint16)).data
TRUTH = Array(np.array([True, False])).data
PLAIN = to_arrays({"a": torch.ones(2)})
#: Arrays of two numbers that are refused, by a part of the reason.
REFUSED = {
    "byte order|no readable npy header": [
        array(npy(described("(2,)", descr), bytes(8)))
        for descr in (
            "'>f4'",
            "'<c8'",
            "'<U4'",
            "'|S4'",
            "'<M8[s]'",
            "'|V4'",
            "'<f16'",
            *STRUCTURES,
        )
    ],
    r"claims to be 'float32' \(3, 2\), but its header says float32 \(2,\)": [
        array(DATA, (3, 2))
    ],
    "claims to be": [
        array(DATA, ()),
        *(
            array(DATA, dtype=claimed)
            for claimed in ("float64", "int32", "bfloat16", "", "x" * 10_000)
        ),
        array(BITS, dtype="bfloat16"),
        array(BITS, dtype="uint16", stype=BFLOAT16),
        array(DATA, dtype="float32", stype=BFLOAT16),
        array(DATA, dtype="bfloat16", stype=BFLOAT16),
        array(DATA, (), "", BFLOAT16),
    ],
    "impossible shape": [
        *(
            array(npy(described(str(s)), bytes(8)), s)
            for s in ((-1,), (-2, -1), (0, -1))
        ),
        array(npy(described(str((1,) * 40)), bytes(4)), (1,) * 40),
    ],
    "has 9 bytes of values instead of 8": [array(DATA + b"\0")],
    "bytes of values instead of 8": [array(DATA + DATA)],
    "no readable npy header|bytes of values instead of 8": [
        array(DATA[:n]) for n in range(len(DATA))
    ],
    "holds 'object'": [array(pickled(), dtype="object")],
    "no readable npy header": [
        *(
            array(data)
            for data in (archive(True), archive(False), b"\x80\x04" + b"." * 100)
        ),
        *(array(npy(text, bytes(8))) for text in UNREADABLE),
        *(
            array(NPY[:-2] + bytes(version) + bytes(100))
            for version in ((0, 0), (3, 0), (9, 9))
        ),
        array(NPY[:-2] + b"\2\0" + b"\xff" * 4 + bytes(100)),
    ],
    "serialised as": [
        array(DATA, stype=stype) for stype in ("", "torch", "fedrot.", "x" * 10_000)
    ],
    "truth values": [array(TRUTH[:-1] + b"\2", dtype="bool")],
    "tied to 'some.weight'": [array(b"some.weight", stype=TIED)],
    "tied to 'other', which is not in the record": [array(b"other", stype=TIED)],
    "tied to 'tie', which is not in the record with values": [
        array(b"tie", stype=TIED)
    ],
    "tied to '\ufffd\ufffd'": [array(b"\xff\xfe", stype=TIED)],
    "tied to ''": [array(b"", stype=TIED)],
    "has another shape": [
        array(b"a", (1, 2), stype=TIED),
        array(b"a", dtype="int32", stype=TIED),
    ],
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_is_no_array_of_its_claims_is_refused(problem):
    for found in REFUSED[problem]:
        refuse(found, problem)


@pytest.mark.parametrize(
    "shape",
    [
        "(2**40,)",
        "(1099511627776,)",
        "(0, 9223372036854775808)",
        "(" + "65536, " * 4 + ")",
    ],
)
def test_a_huge_shape_is_refused_without_memory_for_it(shape):
    claimed = eval(shape)
    tracemalloc.start()
    refuse(
        array(npy(described(shape)), claimed),
        "impossible shape|no readable npy header|bytes of values instead",
    )
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_000_000


def test_shapes_of_truth_values_are_numbers():
    assert decoded(array(npy(described("(True,)"), bytes(4)), (1,))).shape == (1,)
    assert decoded(array(TRUTH, dtype="bool")).tolist() == [True, False]


def test_stock_strategies_get_numpys_arrays():
    value = torch.rand(3)
    half = torch.rand(3).bfloat16()
    given_ = {"plain": value, "tied": value, "half": half, "moved": value + 1}
    sent = to_arrays(given_)
    before = from_arrays(sent)
    after = {**before, "moved": before["moved"].flip(0)}
    record = replace_changed(sent, before, after)
    assert list(record) == list(given_)
    assert record["plain"].data is sent["plain"].data
    for name, tensor in after.items():
        assert torch.equal(torch.from_numpy(record[name].numpy()), tensor.float())
    assert all(
        identical(t, after[name].float()) for name, t in from_arrays(record).items()
    )
    # A tensor that was cast is the same object before and after; its bytes are of
    # another dtype.
    cast = {"plain": value.half().float()}
    assert (
        replace_changed(to_arrays({"plain": value.half()}), cast, cast)["plain"].dtype
        == "float32"
    )
