"""Whatever a client sends is an update that fits, or is refused as one that does
not.
"""

import io

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import SType
from flwr.serverapp.strategy import FedAvg
from hypothesis import strategies as st

from fedrot.collect.statistics import check_statistics
from fedrot.errors import UpdateError
from fedrot.strategies import FedRot, statistics_record, to_arrays
from fedrot.strategies.round.asked import Asked
from fedrot.strategies.round.inbox import Inbox, Schema
from fedrot.strategies.round.record import RoundRecord
from fedrot.strategies.wire.arrays import BFLOAT16, STATISTICS, TIED
from fedrot.tensors import compute_dtype
from tests.fuzz.cases import EDGES, fuzzed, mutated
from tests.strategies.fakes import broadcast

MODEL = {
    "embeddings": torch.linspace(-1, 1, 12).reshape(4, 3),
    "layer.weight": torch.linspace(0, 2, 6).reshape(2, 3),
    "layer.bias": torch.tensor([0.5, -0.5]).bfloat16(),
    "half": torch.ones(3).half(),
    "double": torch.zeros(2, 1, 2).double(),
    "count": torch.tensor(3),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}
UPDATE = {name: t + 1 if t.is_floating_point() else t for name, t in MODEL.items()}
UPDATE["decoder"] = UPDATE["embeddings"]
MODEL["decoder"] = MODEL["embeddings"]
STATS = {
    "gram": {"layer.weight": torch.eye(3), "embeddings": torch.eye(3)},
    "fisher": {"half": torch.rand(3)},
    "trained": {"layer.weight": torch.tensor([True, False])},
}
HEADER = 128
FLOATS = {name: t for name, t in UPDATE.items() if t.is_floating_point()}
#: Records that good clients send.
GOOD = (
    to_arrays(UPDATE),
    to_arrays(UPDATE, torch.bfloat16),
    to_arrays(UPDATE, torch.float16),
    ArrayRecord({n: Array(t.float().numpy()) for n, t in FLOATS.items()}
                | {n: Array(UPDATE[n].numpy()) for n in ("count", "mask")}),
)  # fmt: skip
SHAPES = {name: tuple(t.shape) for name, t in MODEL.items()}
(ASKED,) = broadcast(
    FedAvg(min_train_nodes=1, min_available_nodes=1), {"w": torch.ones(2)}, 1
)


def inbox(needs):
    """Return the inbox of a round that needs these statistics."""
    return Inbox(FedRot(alignment=None), Asked(), Schema(MODEL), RoundRecord(1), needs)


DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "bool",
    "uint16",
    "object",
    "",
    ">f4",
)
STYPES = (SType.NUMPY, BFLOAT16, TIED, "fedrot.unchanged", "", "torch")
NAMES = (*MODEL, "layer.weigh", "", "\0", "\n\x1b[31m", "x" * 300)
NAMES += ("gram/layer.weight", "fisher/half|empty", "gram")
dimensions = st.integers(-1, 5) | st.sampled_from(EDGES)
shapes = st.lists(dimensions, max_size=4).map(tuple) | st.just((1,) * 70)
floats = st.floats() | st.sampled_from((0.0, 1e-320, 1e13, 1e38, 1e300))


@st.composite
def headers(draw):
    """Draw npy bytes with a header of its own, true or not."""
    descr = draw(
        st.sampled_from(
            ("<f4", "<f8", "|b1", "<i8", "<u2", "|O", ">f4", "<f2", "<c8", "<U9", "")
        )
    )
    described = {"descr": descr, "fortran_order": draw(st.booleans())}
    described["shape"] = draw(shapes)
    if draw(st.integers(0, 9)) == 0:
        described[
            draw(st.sampled_from(("descr", "shape", "fortran_order", "more")))
        ] = draw(st.none() | st.text(max_size=5) | st.lists(st.integers(), max_size=3))
    stream = io.BytesIO()
    text = (str(described) + " " * draw(st.integers(0, 70)) + "\n").encode(
        "latin1", "replace"
    )
    stream.write(b"\x93NUMPY" + bytes([draw(st.sampled_from((1, 1, 1, 2, 3))), 0]))
    stream.write(len(text).to_bytes(2, "little") + text + draw(st.binary(max_size=64)))
    return stream.getvalue()


@st.composite
def values(draw):
    """Draw a well-formed array of edge values."""
    dtype = draw(
        st.sampled_from(
            ("float32", "float64", "float16", "int64", "bool", "uint16", "int8")
        )
    )
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    with np.errstate(all="ignore"):
        value = np.full(
            shape, draw(floats if "f" in dtype else st.integers(0, 1))
        ).astype(dtype)
    return Array(np.asarray(value))


@st.composite
def arrays(draw, good):
    """Draw an array like a good one."""
    dtype, shape, stype, data = good.dtype, good.shape, good.stype, good.data
    for _ in range(draw(st.integers(1, 2))):
        match draw(st.integers(0, 9)):
            case 0 | 1:
                data = draw(mutated(data))
            case 6 | 7 | 8:
                # The values only: of the right size and, often, possible.
                size = max(0, len(data) - HEADER)
                data = data[: len(data) - size] + draw(
                    st.binary(min_size=size, max_size=size)
                )
            case 2:
                data = draw(headers() | st.binary(max_size=40))
            case 3:
                dtype = draw(st.sampled_from(DTYPES) | st.text(max_size=4))
            case 4:
                shape = draw(shapes)
            case 5:
                stype = draw(st.sampled_from(STYPES))
                if stype == TIED:
                    data = draw(
                        st.sampled_from(NAMES).map(str.encode) | st.binary(max_size=4)
                    )
            case _:
                return draw(values())
    return Array(dtype=dtype, shape=shape, stype=stype, data=data)


@st.composite
def records(draw, good):
    """Draw a record like a good one."""
    found = dict(good)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        name = draw(st.sampled_from(sorted(good)))
        match draw(st.integers(0, 7)):
            case 0:
                found.pop(name, None)
            case 1:
                found[draw(st.sampled_from(NAMES))] = good[name]
            case 2:
                found[name] = good[draw(st.sampled_from(sorted(good)))]
            case 3:
                found = dict(sorted(found.items(), reverse=True))
            case _:
                found[name] = draw(arrays(good[name]))
    return ArrayRecord(found)


metric_values = floats | st.integers(-(2**63), 2**64 - 1) | st.lists(floats, max_size=3)
metrics = st.dictionaries(
    st.sampled_from(("num-examples", "loss", "")), metric_values, max_size=3
)
good_metrics = st.just({"num-examples": 7})
GOOD_STATISTICS = statistics_record(STATS)
statistics = records(GOOD_STATISTICS) | records(
    statistics_record(STATS, torch.bfloat16)
)


@st.composite
def contents(draw):
    """Draw what a reply holds."""
    good = draw(st.sampled_from(GOOD))
    content = RecordDict(
        {"arrays": draw(st.just(good) | records(good) | records(good))}
    )
    content["metrics"] = MetricRecord(
        draw(metrics if draw(st.integers(0, 9)) == 0 else good_metrics)
    )
    if draw(st.booleans()):
        content[STATISTICS] = draw(
            st.just(GOOD_STATISTICS) | st.just(GOOD_STATISTICS) | statistics
        )
    match draw(st.integers(0, 30)):
        case 0:
            del content[draw(st.sampled_from(sorted(content)))]
        case 1:
            content["more"] = draw(
                st.sampled_from((good, MetricRecord({"num-examples": 1})))
            )
        case 2:
            content["client"] = ConfigRecord(
                {"partition-id": draw(st.text(max_size=3) | st.integers(-9, 9))}
            )
    return content


@fuzzed(
    30, content=contents(), needs=st.sampled_from(((), (), (), ("gram",), ("hessian",)))
)
def test_a_reply_is_a_fitting_update_or_refused(content, needs):
    try:
        reply = inbox(needs).decode(Message(content, reply_to=ASKED))
    except UpdateError:
        return False
    assert list(reply.tensors) == list(MODEL)
    for name, tensor in reply.tensors.items():
        # What came wider than the broadcast model is rounded after the mean.
        assert tensor.dtype in (MODEL[name].dtype, compute_dtype(MODEL[name]))
        assert tensor.shape == MODEL[name].shape
        assert bool(tensor.to(MODEL[name].dtype).isfinite().all())
    assert 0 < reply.weight < float("inf")
    check_statistics(reply.statistics, SHAPES)
    sums = (
        value for by_name in reply.statistics.values() for value in by_name.values()
    )
    assert all(bool(value.isfinite().all()) for value in sums)
    return True


def test_good_replies_are_accepted():
    metrics = MetricRecord({"num-examples": 7})
    for good in GOOD:
        sent = RecordDict({"arrays": good, "m": metrics, STATISTICS: GOOD_STATISTICS})
        update = inbox(("gram",)).decode(Message(sent, reply_to=ASKED))
        assert list(update.tensors) == list(MODEL)
