"""Subclasses of Flower's documentation work over our strategies as they do over
Flower's.
"""

import random
from functools import partial

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAvg,
    FedMedian,
)

import fedrot
from fedrot.errors import FedrotError
from fedrot.strategies import Checkpointing, FedRot, Server
from fedrot.strategies.wire.lazy_grid import LazyGrid
from tests.models import config_of, near
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import (
    FakeGrid,
    failure,
    in_front_of,
    largest_difference,
    model_in,
    reply,
    round_of,
    tensors_of,
)
from tests.strategies.templates import TEMPLATES, looking, own_messages, own_start

CONFIG, ROUNDS, NODES = config_of(NAME), 3, range(100, 104)
GLOBAL = fedrot.AlignmentOptions(anchor="global")
DETERMINISTIC = Server(deterministic=True)


class Sent(FakeGrid):
    """Notes what is sent: node, kind of message, and the identity of the content."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.noted = []

    def push_messages(self, messages):
        sent = list(messages)
        for m in sent:
            about = (m.metadata.dst_node_id, m.metadata.message_type)
            self.noted.append((*about, m.content.object_id))
        return super().push_messages(sent)


def client(message, scramble=False):
    """Train or evaluate; node 101 does not train in round 2, node 103 fails in round
    3.
    """
    node = message.metadata.dst_node_id
    number = round_of(message)
    if (number, node) == (3, 103):
        return failure(message)
    if message.metadata.message_type == "evaluate":
        metrics = {"num-examples": node, "score": (node * number) % 7 / 10}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
    update = near(model_in(message), 0.02, 10 * number + node)
    if scramble:
        update = fedrot.random_equivalent(update, SYMMETRY, 100 * number + node)
    answer = reply(message, update, node - 90, loss=0.1 * number)
    answer.content["state"] = ConfigRecord({"trained": (number, node) != (2, 101)})
    return answer


def clients(scramble=False):
    return {node: partial(client, scramble=scramble) for node in NODES}


def played(strategy, tensors=None, grid=None):
    """Run a strategy; return the result, what was sent, and what the subclass has
    seen.
    """
    random.seed(0)
    grid = Sent(clients()) if grid is None else grid
    initial = ArrayRecord(state() if tensors is None else tensors)
    result = strategy.start(
        grid, initial, ROUNDS, train_config=ConfigRecord({"lr": 0.1})
    )
    return result, grid.noted, strategy.seen


def ends(result):
    """Return the model bit for bit, and the metrics without ours."""
    metrics = [result.train_metrics_clientapp, result.evaluate_metrics_clientapp]
    pairs = [[*record.items()] for by in metrics for record in by.values()]
    return [
        result.arrays.object_id,
        [[p for p in one if "fedrot-" not in p[0]] for one in pairs],
    ]


def accepted(result):
    return [
        m["fedrot-replies-accepted"] for m in result.train_metrics_clientapp.values()
    ]


#: All templates and models of clients' own over FedRot, and over another strategy the
#: templates that do not replace its messages.
BASES = [(FedAvg, FedRot, template) for template in (*TEMPLATES, "personal")] + [
    (FedAdagrad, in_front_of(FedAdagrad), template)
    for template in TEMPLATES
    if "messages" not in template
]
WITH_ALIGNMENT = (
    "learning rate",
    "FlowerTune",
    "whisper",
    "own start",
    "own messages, replies",
)


@pytest.mark.parametrize(("flowers", "ours", "template"), BASES)
def test_without_alignment_a_template_sends_sees_and_ends_as_over_flowers_strategy(
    flowers, ours, template
):
    build = TEMPLATES.get(template, personal)
    theirs, sent, seen = played(build(flowers)())
    result, our_sent, our_seen = played(build(ours)(alignment=None))
    assert our_sent == sent
    assert len(sent) == 2 * ROUNDS * len(NODES)
    assert our_seen == seen
    assert ends(result) == ends(theirs)


@pytest.mark.parametrize("template", WITH_ALIGNMENT)
def test_with_alignment_every_round_has_its_clients(template):
    """Where none is left out, the model is that of Flower's own methods."""
    build = TEMPLATES[template]
    settings = {"server": DETERMINISTIC}
    settings["alignment"] = fedrot.AlignmentOptions(chance=0.0, anchor="global")
    _, _, seen = played(build(FedAvg)())
    honest, _, honest_seen = played(build(FedRot)(CONFIG, **settings))
    result, _, _ = played(
        build(FedRot)(CONFIG, **settings), grid=Sent(clients(scramble=True))
    )
    assert honest_seen[0] == seen[0] if isinstance(seen, list) else honest_seen == seen
    assert accepted(result) == ([4, 3, 3] if template == "whisper" else [4, 4, 3])
    assert largest_difference(result.arrays, honest.arrays) <= 1e-4
    plain, _, _ = played(type("Seen", (FedRot,), {"seen": ()})(CONFIG, **settings))
    assert (ends(honest) == ends(plain)) == (template != "whisper")


READ_TWICE = {
    "FedRot": lambda of: of(FedRot)(CONFIG),
    "FedRot, deterministic": lambda of: of(FedRot)(CONFIG, server=DETERMINISTIC),
    "FedRot, half precision": lambda of: of(FedRot)(
        CONFIG, server=Server(wire=torch.float16)
    ),
    "FedMedian": lambda of: of(in_front_of(FedMedian))(CONFIG),
    "privacy": lambda of: of(in_front_of(DifferentialPrivacyServerSideFixedClipping))(
        CONFIG, FedAvg(), 0.1, 1.0, 4, alignment=GLOBAL
    ),
}


@pytest.mark.parametrize("name", READ_TWICE)
def test_a_subclass_reads_the_same_replies_before_and_afterwards(name):
    result, _, seen = played(
        READ_TWICE[name](looking), grid=Sent(clients(scramble=True))
    )
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    for before, after, evaluated, count in zip(*[iter(seen)] * 4, strict=True):
        assert before == after
        assert len(set(before)) == len(before) >= 3
        assert len(evaluated) == count == 4


def test_a_subclass_may_pass_on_a_generator_and_is_named_where_a_client_is_missing(
    caplog,
):
    class AllButOne(FedRot):
        seen = ()

        def aggregate_train(self, server_round, replies):
            others = (r for r in replies if r.metadata.src_node_id > 100)
            return super().aggregate_train(server_round, others)

    with caplog.at_level("INFO", logger="flwr"):
        result, _, _ = played(AllButOne(CONFIG))
    assert accepted(result) == [3, 3, 2]
    assert "AllButOne.aggregate_train" in caplog.text


def test_a_method_of_the_instance_sees_the_replies_too():
    strategy = FedRot(CONFIG)
    strategy.seen = []
    inner = strategy.aggregate_train

    def looks(server_round, replies):
        aggregated = inner(server_round, replies)
        strategy.seen.append(len(replies))
        return aggregated

    strategy.aggregate_train = looks
    result, _, seen = played(strategy)
    assert seen == [4, 4, 4]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]


def test_replies_are_streamed_as_long_as_nobody_else_reads_them():
    found = []

    class Watched(LazyGrid):
        def send_and_receive(self, *args, **kwargs):
            found.append(super().send_and_receive(*args, **kwargs))
            return found[-1]

    grid = Watched(FakeGrid(clients()))
    FedRot(CONFIG, fraction_evaluate=0.0).start(grid, ArrayRecord(state()), 1)
    assert found[0].asked == {}
    for read in (
        len,
        list,
        bool,
        lambda replies: replies[0],
        lambda replies: next(replies.stream()),
    ):
        with pytest.raises(FedrotError, match="aggregate_train"):
            read(found[0])  # type: ignore[operator]


def personal(base):
    """A strategy that sends every client a model of its own."""

    class Personal(base):
        seen = ()

        def configure_train(self, *given):
            number, arrays, config, grid = given
            config["server-round"] = number
            for node in grid.get_node_ids():
                model = ArrayRecord(near(tensors_of(arrays), 0.01, node))
                content = RecordDict({"arrays": model, "config": config})
                yield Message(content, node, "train")

    return Personal


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: personal(FedRot)(CONFIG),
        lambda: personal(FedRot)(alignment=None, aggregation=fedrot.aggregation.Mean),
        lambda: own_start(own_messages(FedRot))(CONFIG),
    ],
)
def test_what_cannot_work_says_what_to_call(strategy):
    with pytest.raises(FedrotError, match="configure_train"):
        played(strategy())


def fails_until(number):
    def answer(message):
        return (failure if round_of(message) < number else client)(message)

    return answer


@pytest.mark.parametrize(
    ("settings", "checkpoints", "until", "empty"),
    [
        ({"alignment": None}, False, 3, 2),
        ({"alignment": None}, True, 9, 4),
        ({"model_config": CONFIG}, False, 9, 4),
        ({"model_config": CONFIG}, True, 3, 2),
        ({"model_config": CONFIG}, False, 1, 0),
        ({"model_config": CONFIG, "fraction_train": 0.0}, False, 1, 4),
    ],
)
def test_rounds_without_a_client_in_the_mean_are_named_at_the_end(
    settings,
    checkpoints,
    until,
    empty,
    tmp_path,
    warnings,
):
    own = {"checkpoints": Checkpointing(tmp_path)} if checkpoints else {}
    grid = FakeGrid(dict.fromkeys(NODES, fails_until(until)))
    initial = ArrayRecord(state())
    result = FedRot(**settings, **own, fraction_evaluate=0.0).start(grid, initial, 4)
    assert (result.arrays.object_id == initial.object_id) == (empty == 4)
    assert (f"in {empty} of 4 rounds, the first" in warnings()) == bool(empty)
    assert ("No new model" in warnings()) == bool(empty)
