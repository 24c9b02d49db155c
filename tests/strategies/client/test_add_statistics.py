"""``add_statistics``: one call at the client answers what the server asks for, and
nothing else.
"""

from __future__ import annotations

import pytest
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader
from transformers import BatchEncoding, GPT2Config, GPT2ForSequenceClassification

import fedrot
from fedrot.aggregation import Fisher, RegMean
from fedrot.collect.statistics import STATISTIC_KINDS, StatisticKind
from fedrot.errors import FedrotError
from fedrot.strategies import FedRot, add_statistics, statistics_record
from fedrot.strategies.wire.arrays import STATISTICS
from fedrot.strategies.wire.statistics_record import read_statistics
from tests.models import config_of, near
from tests.strategies.aggregating import Client as Given
from tests.strategies.aggregating import batches, loaded, merged
from tests.strategies.classifier import NAME, state
from tests.strategies.fakes import broadcast, grid_of, largest_difference, node_of

EXAMPLES = (3, 10, 5)
(BATCH,) = batches(0)


def request(kinds="gram"):
    message = broadcast(FedRot(config_of(NAME), aggregation=RegMean), state())[0]
    message.content.config_records["config"][STATISTICS] = kinds
    return message


def model():
    return loaded(state())


def content(tensors=None):
    return RecordDict(
        {"arrays": ArrayRecord(tensors or state()), "metrics": MetricRecord({"n": 1})}
    )


def added(kinds="gram", rows=None, to=None, **given):
    reply = content() if to is None else to
    rows = batches(0) if rows is None else rows
    add_statistics(reply, request(kinds), model(), rows, **given)
    return reply.array_records[STATISTICS]


class Counted:
    def __init__(self, of):
        self.of, self.begun, self.read = of, 0, 0

    def __iter__(self):
        self.begun += 1
        for batch in self.of:
            self.read += 1
            yield batch


def one_row_each(rows):
    (batch,) = batches(0, rows)
    return [
        {name: value[n : n + 1] for name, value in batch.items()} for n in range(rows)
    ]


@pytest.mark.parametrize("kind", ["gram", "fisher"])
def test_it_adds_what_the_collector_of_the_kind_returns(kind):
    collect = {"gram": fedrot.collect_gram, "fisher": fedrot.collect_fisher}[kind]
    network = loaded(near(state(), 0.05, 1))
    reply = content()
    network.train()
    assert add_statistics(reply, request(kind), network, batches(0)) == (kind,)
    assert network.training
    expected = statistics_record(collect(network, batches(0)))
    found = {key: array.data for key, array in reply.array_records[STATISTICS].items()}
    assert found == {key: array.data for key, array in expected.items()}


def test_forms_of_batches_and_precisions_on_the_wire():
    grams = fedrot.collect_gram(model(), batches(0))
    labelled = BatchEncoding({**BATCH, "labels": torch.zeros(16, dtype=torch.int64)})
    for rows in (lambda: iter(batches(0)), iter(batches(0)), [labelled]):
        assert added(rows=rows) == statistics_record(grams)
    assert added(dtype=torch.bfloat16) == statistics_record(grams, torch.bfloat16)


@pytest.mark.parametrize(("most", "expected"), [(3, 3), (None, 100), (102, 102)])
def test_the_number_of_batches_is_bounded(most, expected):
    rows = Counted(one_row_each(110))
    added(rows=rows, max_batches=most)
    assert rows.read == expected


def test_without_a_request_nothing_is_read_or_added():
    other = request()
    other.content["config"] = ConfigRecord({"lr": 0.1})
    for message in (request(""), broadcast(FedRot(config_of(NAME)), state())[0], other):
        reply = content()
        rows = Counted(batches(0))
        assert add_statistics(reply, message, model(), rows) == ()
        assert list(reply) == ["arrays", "metrics"]
        assert rows.begun == rows.read == 0


def test_statistics_that_the_reply_has_stay_and_are_not_collected_again():
    full, marked = fedrot.completed(state(), state(), {"classifier.weight": [0]})
    known = {"gram": {"classifier.weight": torch.eye(16)}, **marked}
    reply = content(full)
    rows = Counted(batches(0))
    reply[STATISTICS] = statistics_record(known)
    assert add_statistics(reply, request("gram"), model(), rows) == ()
    assert rows.read == 0
    assert add_statistics(reply, request("gram,fisher"), model(), rows) == ("fisher",)
    found = read_statistics(reply)
    assert set(found) == {"gram", "fisher", "trained"}
    assert torch.equal(found["gram"]["classifier.weight"], torch.eye(16))
    assert torch.equal(
        found["trained"]["classifier.weight"], marked["trained"]["classifier.weight"]
    )


def test_matrices_of_conv1d_count_as_gram_matrices():
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        pad_token_id=0,
        num_labels=2,
    )
    network = GPT2ForSequenceClassification(config)
    reply = content(network.state_dict())
    message = request()
    rows = [{"input_ids": torch.randint(1, 64, (4, 8))}]
    assert add_statistics(reply, message, network, rows) == ("gram",)
    assert set(read_statistics(reply)) == {"gram", "gram_conv1d"}
    assert add_statistics(reply, message, network, rows) == ()


def test_two_kinds_read_the_batches_twice_and_random_numbers_are_as_before():
    rows = Counted(DataLoader(one_row_each(8), batch_size=None, shuffle=True))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    reply, message, network = content(), request("gram,fisher"), model()
    torch.manual_seed(3)
    assert add_statistics(reply, message, network, rows) == ("gram", "fisher")
    assert torch.equal(torch.rand(4), expected)
    assert rows.begun == 2
    assert set(read_statistics(reply)) == {"gram", "fisher"}


def test_a_tensor_that_only_the_received_model_has_may_have_statistics():
    """A reply may hold only what has changed; see ``to_arrays``."""
    changed = {
        name: tensor
        for name, tensor in state().items()
        if name.startswith("classifier")
    }
    assert add_statistics(content(changed), request(), model(), batches(0)) == ("gram",)


def test_a_kind_of_ones_own_is_collected_too(monkeypatch):
    def collect(model, rows):
        count = float(sum(len(row["input_ids"]) for row in rows))
        return {"rows": {"classifier.bias": torch.tensor([count])}}

    kind = StatisticKind(
        "rows", lambda value, shape: None, lambda value, *_: value, "rows", collect
    )
    monkeypatch.setitem(STATISTIC_KINDS, "rows", kind)
    reply = content()
    assert add_statistics(
        reply, request("rows"), model(), batches(0) * 3, max_batches=2
    ) == ("rows",)
    assert float(read_statistics(reply)["rows"]["classifier.bias"]) == 32


WRONG = [
    ({"dtype": torch.float16}, r"dtype is torch\.float16"),
    ({"max_batches": 0}, "max_batches is 0"),
    ({"max_batches": -1}, "max_batches is -1"),
]
#: Arguments other than those of a good call, and a word of the error.
REFUSED = [
    *WRONG,
    *(({**given, "message": request("")}, word) for given, word in WRONG),
    ({"batches": []}, "at least one batch"),
    ({"batches": [(BATCH["input_ids"],)]}, "A batch is a tuple"),
    (
        {"batches": iter(batches(0)), "message": request("gram,fisher")},
        "gram and fisher, but an iter",
    ),
    ({"message": request("hessian")}, "Unknown statistics 'hessian'"),
    ({"message": request("trained")}, "'trained' cannot be computed"),
    (
        {"model": torch.nn.DataParallel(model())},
        r"of 'module\..*' belong to no tensor of the reply",
    ),
]


@pytest.mark.parametrize(("given", "word"), REFUSED)
def test_mistakes_are_refused_and_change_nothing(given, word):
    good = {
        "content": content(),
        "message": request(),
        "model": model(),
        "batches": batches(0),
    }
    called = {**good, **given}
    with pytest.raises(FedrotError, match=word):
        add_statistics(**called)
    assert STATISTICS not in called["content"]


UPDATES = [near(state(), 0.05, seed) for seed in range(3)]


def played(aggregation, add=add_statistics, **given):
    """Return the model after a round whose clients send their updates, with what
    ``add`` adds.
    """

    def client(place):
        app = ClientApp()

        @app.train()
        def train(message, context):
            network = loaded(UPDATES[place])
            metrics = MetricRecord({"num-examples": EXAMPLES[place]})
            arrays = ArrayRecord(network.state_dict())
            reply = RecordDict({"arrays": arrays, "metrics": metrics})
            add(reply, message, network, batches(place))
            return Message(reply, reply_to=message)

        return node_of(app)

    strategy = FedRot(
        config_of(NAME), aggregation=aggregation, fraction_evaluate=0.0, **given
    )
    result = strategy.start(grid_of(map(client, range(3))), ArrayRecord(state()), 1)
    assert result.arrays is not None
    return result.arrays


def clients(collect):
    return [
        Given(update, weight, collect(loaded(update), batches(seed)))
        for seed, (update, weight) in enumerate(zip(UPDATES, EXAMPLES, strict=True))
    ]


@pytest.mark.parametrize("aggregation", [RegMean, Fisher])
def test_a_run_merges_what_the_clients_add(aggregation):
    found = played(aggregation, alignment=None)
    collect = fedrot.collect_gram if aggregation is RegMean else fedrot.collect_fisher
    expected = merged(aggregation(), clients(collect))
    assert largest_difference(found, ArrayRecord(expected)) <= 1e-6


def test_the_error_of_a_run_without_statistics_names_the_call():
    with pytest.raises(
        FedrotError, match=r"has no statistics 'gram'.*\.add_statistics\(content, "
    ):
        played(RegMean, lambda *_: None)
