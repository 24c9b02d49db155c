"""The promise of every strategy: a reply is in the mean, or it is dropped by name as if
never sent.
"""

import time
import tracemalloc

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

import fedrot
from fedrot.aggregation import Mean, RegMean
from fedrot.collect.statistics import TRAINED
from fedrot.simulations.run_folder import read_rows
from fedrot.strategies import FedRot, Reporting, Server, statistics_record, to_arrays
from fedrot.strategies.wire.arrays import STATISTICS, TIED, encode
from fedrot.strategies.wire.flower_compat import NUMPY
from fedrot.strategies.wire.statistics_record import wanted_statistics
from fedrot.tensors import LARGEST_NORM
from tests.models import EAGER, near
from tests.strategies.aggregating import grams
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import (
    arrays_of,
    broadcast,
    largest_difference,
    replies,
    reply,
)
from tests.strategies.hostile import CONFIG, SETUPS

NAME, GRAM, HALF = "classifier.weight", "gram/classifier.weight", "classifier.bias"
QUERY = "bert.encoder.layer.0.attention.self.query.weight"
NEURONS = "bert.encoder.layer.1.output.dense.weight"
BASE = {**state(), HALF: state()[HALF].half()}
HONEST = [
    fedrot.random_equivalent(near(BASE, 0.02, seed), SYMMETRY, seed)
    for seed in (1, 2, 3)
]
# All precisions hold it.
GOOD = {name: t.bfloat16().to(t.dtype) for name, t in near(BASE, 0.02, 4).items()}
TENSOR = GOOD[NAME]
WIDTH = TENSOR.shape[1]
INPUTS = torch.eye(WIDTH)
COLLECTED = statistics_record(grams(state()))
ALL = {
    "unaligned": lambda: FedRot(CONFIG, alignment=None),
    **SETUPS,
    "Mean": lambda: FedRot(CONFIG, alignment=None, aggregation=Mean),
    "RegMean": lambda: FedRot(CONFIG, alignment=None, aggregation=RegMean),
    "RegMean, aligned": lambda: FedRot(CONFIG, alignment=EAGER, aggregation=RegMean),
}


def sends(tensor=TENSOR, examples=10, own_id=None, /, **more):
    """Return a client that sends a good update with another tensor ``NAME``; None
    leaves it out.

    It sends an id of its own, and statistics if the server wants them.
    """
    arrays = to_arrays(
        {n: t for n, t in {**GOOD, **more, NAME: tensor}.items() if t is not None}
    )

    def client(to):
        client, loss = (
            (to.metadata.dst_node_id + 1000, 1e3)
            if own_id is None
            else (own_id, own_id / 2)
        )
        message = reply(to, {}, examples, client, loss=loss)
        message.content["arrays"] = ArrayRecord(dict(arrays))
        if wanted_statistics(to):
            message.content[STATISTICS] = ArrayRecord(dict(COLLECTED))
        return message

    return client


GOOD_CLIENT = sends()


def with_content(change):
    def client(to):
        message = GOOD_CLIENT(to)
        change(message.content)
        return message

    return client


def with_array(dtype, data):
    array = Array(dtype, tuple(TENSOR.shape) if dtype else (), NUMPY, data)
    return with_content(lambda content: content["arrays"].update({NAME: array}))


def with_metrics(**values):
    return with_content(lambda content: content["metrics"].update(values))


def with_statistics(**by_key):
    arrays = {k: v if isinstance(v, Array) else encode(k, v) for k, v in by_key.items()}
    return with_content(
        lambda content: content.update({STATISTICS: ArrayRecord(arrays)})
    )


def with_gram(gram):
    return with_statistics(**{GRAM: gram})


def with_metadata(**values):
    def client(to):
        message = GOOD_CLIENT(to)
        message.metadata.__dict__.update(values)
        return message

    return client


#: Replies that are dropped, each with the word that its reason must have. What arrays,
#: updates and statistics cannot be is tested where they are read: here is one of each.
BAD = {
    "NaN": (sends(TENSOR * torch.nan), NAME),
    "NaN for float16": (sends(**{HALF: torch.tensor([0, torch.nan, 0])}), HALF),
    # Their distance to the anchor shows it.
    **{
        f"{value:g} in a {layer}": (sends(**{name: GOOD[name] * value}), name)
        for value in (torch.nan, torch.inf, 100 * LARGEST_NORM)
        for layer, name in {"query": QUERY, "neuron": NEURONS}.items()
    },
    "beyond the largest norm": (sends(torch.full_like(TENSOR, 2 * LARGEST_NORM)), NAME),
    **{
        f"beyond float16 in {dtype}": (
            sends(**{HALF: torch.full((3,), 1e6, dtype=dtype)}),
            HALF,
        )
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    },
    "another shape": (sends(TENSOR.T.contiguous()), NAME),
    "another shape, not announced": (
        with_array("", encode("", TENSOR[:-1]).data),
        NAME,
    ),
    "a missing tensor": (sends(None), NAME),
    "an extra tensor": (sends(more=torch.ones(3)), "more"),
    "a forged line": (
        sends(**{"\x1b[31m\nWARNING " * 50_000: torch.ones(3)}),
        "WARNING",
    ),
    "integers": (sends(TENSOR.long()), NAME),
    "cut off": (with_array("float32", b"\x93NUMPY"), NAME),
    "nothing": (with_content(RecordDict.clear), "0 ArrayRecords"),
    "no tensors": (with_content(lambda c: c.update(arrays=ArrayRecord())), "missing"),
    "two models": (
        with_content(lambda c: c.update(more=ArrayRecord())),
        "2 ArrayRecords",
    ),
    "no metrics": (with_content(lambda c: c.pop("metrics")), "0 MetricRecords"),
    "two metrics": (
        with_content(lambda c: c.update(x=MetricRecord({"a": 1}))),
        "2 MetricRecords",
    ),
    "no weight": (
        with_content(lambda c: c.update(metrics=MetricRecord({"a": 1}))),
        "num-examples",
    ),
    **{
        f"weight {weight!r:.9}": (sends(TENSOR, weight), "number from 1e-09 to 1e+12")
        for weight in (0, 1e39, 1e-30, float("nan"), [1, 2], 10**400)
    },
    **{
        f"integer {number!r:.9}": (with_metrics(more=number), "64 bits")
        for number in (2**63, [1, -(2**63)])
    },
    "late": (with_metadata(_reply_to_message_id="of another round"), "no request"),
    "statistics with NaN": (with_gram(INPUTS * torch.nan), NAME),
    "statistics cut off": (
        with_gram(Array("float32", (3,), NUMPY, b"\x93NUMPY")),
        NAME,
    ),
    "statistics of no name": (with_statistics(**{"gram/": INPUTS}), "no tensor"),
    "a mask of floats": (
        with_statistics(**{f"{TRAINED}/{NAME}": torch.ones(3)}),
        "bool",
    ),
    "statistics twice": (
        with_statistics(**{GRAM: INPUTS, f"gram/x|{NAME}": INPUTS}),
        NAME,
    ),
    "statistics of no kind": (with_statistics(gram=INPUTS), "no kind"),
    "metrics as statistics": (
        with_content(lambda c: c.update({STATISTICS: MetricRecord({"loss": 1.0})})),
        "2 MetricRecords",
    ),
}


def ours(setup):
    """Return the replies that a set-up drops; more are bad where statistics are needed,
    or moved.
    """
    more = {}
    if setup.startswith("RegMean"):
        more |= {
            "no statistics": (with_content(lambda c: c.pop(STATISTICS)), "'gram'"),
            "others": (
                with_statistics(**{f"fisher/{NAME}": torch.ones(3, WIDTH)}),
                "'gram'",
            ),
            "settings": (
                with_content(lambda c: c.update({STATISTICS: ConfigRecord()})),
                "'gram'",
            ),
        }
    if setup == "RegMean, aligned":
        more |= {
            f"a rotated {kind}": (
                with_content(
                    lambda c, key=f"{kind}/{QUERY}", value=value: c[STATISTICS].update(
                        {key: value}
                    )
                ),
                "rotated diagonal",
            )
            for kind, value in {
                "fisher": encode("", torch.rand(WIDTH, WIDTH)),
                TRAINED: encode("", torch.arange(WIDTH) % 2 == 0),
            }.items()
        }
    return BAD | more


#: Replies that are in the mean.
TAKEN = {
    **{
        str(t): sends(TENSOR.to(t))
        for t in (torch.float64, torch.float16, torch.bfloat16)
    },
    "an own id": with_content(
        lambda c: c.update(client=ConfigRecord({"partition-id": -9}))
    ),
    "a text as id": with_content(
        lambda c: c.update(client=ConfigRecord({"partition-id": "me"}))
    ),
    "statistics": with_content(
        lambda c: c.update({STATISTICS: ArrayRecord(dict(COLLECTED))})
    ),
    "a configuration": with_content(lambda c: c.update(more=ConfigRecord({"a": "b"}))),
    "tensors in another order": with_content(
        lambda c: c.update(arrays=ArrayRecord(dict(reversed(c["arrays"].items()))))
    ),
}


def played(setup, folder, clients, twice=None):
    """Play one round; return its model and metrics, and the dropped clients with the
    reasons.

    At the end the client at the place ``twice`` answers once more, and a node that was
    not asked.
    """
    strategy = ALL[setup]()
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    strategy.reporting = Reporting(rows=path)
    asked = broadcast(strategy, BASE, len(clients))
    replies = [client(message) for client, message in zip(clients, asked, strict=True)]
    before = [
        message.content.object_id for message in replies[: None if twice is None else 0]
    ]
    if twice is not None:
        replies += [
            GOOD_CLIENT(asked[twice]),
            with_metadata(_src_node_id=5)(asked[twice]),
        ]
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert before == [message.content.object_id for message in replies[: len(before)]]
    rows = read_rows(path)
    return (
        arrays,
        dict(metrics or {}),
        [(row["client"], row["dropped"]) for row in rows if "dropped" in row],
    )


ALONE = [sends(update[NAME], 10 + i, i, **update) for i, update in enumerate(HONEST)]


@pytest.mark.parametrize("setup", ALL)
def test_dropped_by_name_as_if_never_sent(setup, tmp_path):
    """Half of the bad replies come first, where one would be the anchor; half come
    last.
    """
    expected, figures, none = played(setup, tmp_path, ALONE)
    assert not none
    turn = list(ALL).index(setup) % 2
    bad = ours(setup)
    early, late = ([*bad.items()][first::2] for first in (turn, 1 - turn))
    parts = [[client for _, (client, _) in half] for half in (early, late)]
    good = len(early)
    arrays, metrics, dropped = played(
        setup, tmp_path, [*parts[0], *ALONE, *parts[1]], twice=good
    )
    words = [*(word for _, (_, word) in early + late), "already answered", "no request"]
    # Who has answered another request has not answered.
    lost = {"fedrot-replies-dropped": len(words), "fedrot-replies-failed": 1}
    assert metrics == {**figures, **lost}
    nodes = [100 + i + (3 if i >= good else 0) for i in range(len(bad))]
    own = [0 if name == "nothing" else 1000 for name, _ in early + late]
    ids = [node + more for node, more in zip(nodes, own, strict=True)]
    assert [client for client, _ in dropped] == [*ids, 1100 + good, 1100 + good]
    reasons = [reason for _, reason in dropped]
    assert [r for r, word in zip(reasons, words, strict=True) if word not in r] == []
    assert all(len(reason) <= 500 and reason.isprintable() for reason in reasons)
    assert "Unusable" not in " ".join(reasons)
    assert largest_difference(arrays, expected) == 0


@pytest.mark.parametrize("setup", ALL)
def test_in_the_mean(setup, tmp_path):
    plain, _, _ = played(setup, tmp_path, [*ALONE, *[GOOD_CLIENT] * len(TAKEN)])
    arrays, metrics, dropped = played(setup, tmp_path, [*ALONE, *TAKEN.values()])
    assert not dropped
    assert metrics.get("fedrot-replies-accepted", len(TAKEN) + 3) == len(TAKEN) + 3
    # Other bits have another order, and the anchor runs with it.
    assert largest_difference(arrays, plain) <= (
        2e-3 if setup == "deterministic" else 1e-4
    )
    assert [(n, a.dtype) for n, a in arrays.items()] == [
        (n, a.dtype) for n, a in to_arrays(BASE).items()
    ]
    if setup == "unaligned":
        assert largest_difference(arrays, played(setup, tmp_path, ALONE)[0]) > 1e-4


@pytest.mark.parametrize("setup", ALL)
def test_metrics_that_are_not_finite_are_left_out_and_their_update_is_not(
    setup, tmp_path, warnings
):
    alone = played(setup, tmp_path, ALONE)[1]
    model, *_ = played(setup, tmp_path, [*ALONE, GOOD_CLIENT])
    for number in (np.nan, -np.inf):
        clients = [*ALONE, with_metrics(loss=number)]
        arrays, metrics, dropped = played(setup, tmp_path, clients)
        assert metrics["loss"] == alone["loss"]
        assert f"Metrics of client 1103 left out: The metric 'loss' is {number}" in (
            warnings()
        )
        assert not dropped
        assert largest_difference(arrays, model) == 0


def test_an_array_that_does_not_say_its_shape_is_checked_once_it_is_decoded():
    """Arrays of Flower's legacy workflows have an empty shape, as a number has."""
    strategy = FedRot(alignment=None)
    asked = broadcast(strategy, {"w": torch.tensor(1.0)}, 2)
    sent = replies(asked, [{"w": torch.tensor(3.0)}] * 2)
    two = Array("", (), NUMPY, encode("", torch.ones(2)).data)
    sent[0].content["arrays"] = ArrayRecord({"w": two})
    arrays, metrics = strategy.aggregate_train(1, sent)
    assert arrays_of(arrays)["w"] == 3.0
    assert metrics["fedrot-replies-dropped"] == 1


# --- replies that are large
# --------------------------------------------------------------------------

MIB = 2**20
POINT = encode("x", torch.zeros(1))
LARGE = encode("x", torch.zeros(MIB // 4))


def with_stype(stype, data=b"", shape=TENSOR.shape):
    array = Array("float32", tuple(shape), stype, data)
    return with_content(lambda content: content["arrays"].update({NAME: array}))


def many(what, count=10_000, name="x"):
    return {f"{name}{i}": what for i in range(count)}


#: Contents of about 1 MB on the wire each; arrays that are equal travel once.
BOMBS = {
    "arrays": lambda: with_content(lambda c: c["arrays"].update(many(POINT, 5000))),
    "array records": lambda: with_content(lambda c: c.update(many(ArrayRecord()))),
    "metric records": lambda: with_content(
        lambda c: c.update(many(MetricRecord({"num-examples": 1})))
    ),
    "config records": lambda: with_content(
        lambda c: c.update(many(ConfigRecord({"a": 1})))
    ),
    "config list": lambda: with_content(
        lambda c: c.update(x=ConfigRecord({"a": [1] * 100_000}))
    ),
    "metric keys": lambda: with_metrics(**many(1.0, 60_000)),
    "metric lists": lambda: with_metrics(**many([], 60_000)),
    "name": lambda: with_content(lambda c: c["arrays"].update({"x" * MIB: POINT})),
    "dtype": lambda: with_array("f" * MIB, encode("", TENSOR).data),
    "stype": lambda: with_stype("f" * MIB),
    "tied to a long name": lambda: with_stype(TIED, b"x" * MIB),
    "axes": lambda: with_stype(NUMPY, shape=(1,) * 200_000),
    "statistics": lambda: with_statistics(**many(POINT, 5000, "gram/x")),
    "one large array": lambda: with_statistics(**many(LARGE, name="gram/x")),
    "one name": lambda: with_statistics(
        **{"gram/" + "|".join("w" * 300_000): torch.eye(3)}
    ),
    "names": lambda: with_statistics(
        **{"gram/" + "|".join(map(str, range(150_000))): LARGE}
    ),
    "same statistics": lambda: with_statistics(
        **{f"gram/{'|'.join('w' * i)}": torch.eye(3) for i in range(1, 1000)}
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_reply_of_a_megabyte_takes_bounded_time_and_memory(name, tmp_path):
    reporting = Reporting(rows=tmp_path / "rows.jsonl")
    server = Server(deterministic=True)
    strategy = FedRot(alignment=None, server=server, reporting=reporting)
    clients = (BOMBS[name](), GOOD_CLIENT, GOOD_CLIENT)
    asked = zip(clients, broadcast(strategy, BASE), strict=True)
    answers = [client(message) for client, message in asked]
    start = time.process_time()
    tracemalloc.start()
    arrays, _ = strategy.aggregate_train(1, answers)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A fifth of a second on the slowest machine we know, and a few times as much if
    # memory is traced.
    assert time.process_time() - start < 5
    assert most < 64 * MIB
    assert largest_difference(arrays, to_arrays(GOOD)) <= 1e-6
    reasons = [row["dropped"] for row in read_rows(reporting.rows) if "dropped" in row]
    assert all(len(reason) <= 500 and reason.isprintable() for reason in reasons)
