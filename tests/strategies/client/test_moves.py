"""Replies from another basis that their senders match: elements are sent, functions are
kept.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

import fedrot
from fedrot.alignment.learning import LearningOptions, learn_alignment, loss_of
from fedrot.strategies import FedRot, Matching, match_at_client
from fedrot.strategies.client.moves import (
    ELEMENTS,
    MESSAGE_TYPE,
    alignment_by,
    read_moves,
    request,
)
from fedrot.strategies.settings import OtherBasis
from fedrot.strategies.wire.lazy_grid import LazyGrid
from fedrot.symmetry.actions import (
    HeadPermutation,
    HeadRotation,
    Permutation,
    QueryPermutation,
)
from fedrot.symmetry.groups import Group, Slice, Slot, Symmetry
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from fedrot.symmetry.signs import SignedPermutation
from tests.models import EAGER, VOCABULARY, config_of, near
from tests.models import largest_difference as difference
from tests.strategies.classifier import (
    NAME,
    SYMMETRY,
    WHOLE,
    build,
    error,
    permuted,
    state,
)
from tests.strategies.fakes import (
    FakeGrid,
    aggregated,
    failure,
    grid_of,
    largest_difference,
    node_of,
    reply,
    tensors_of,
)
from tests.strategies.fitting.classifiers import edited

BASE = state()
OTHER = state(3)
LEARNING = LearningOptions(("attention",), steps=3)
GLOBAL = fedrot.AlignmentOptions(anchor="global")

ATTENTION, HEADS = (SYMMETRY.select((part,))[0].name for part in ("attention", "heads"))


def batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        ids = torch.randint(VOCABULARY, (16, 8), generator=generator)
        labels = torch.randint(3, (16,), generator=generator)
        yield {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": labels,
        }


def client(batches=batches):
    app = ClientApp()
    match_at_client(
        app, lambda message, context: Matching(build, batches, learning=LEARNING)
    )
    return node_of(app)


def ask(node, update, learn=False):
    answer = node(request(ConfigRecord(), 7, BASE, update, learn=learn))
    assert answer is not None
    return answer


def read(answer, update):
    return alignment_by(read_moves(answer, SYMMETRY), update, BASE, SYMMETRY)


def elements_of(answer):
    return tensors_of(answer.content.array_records[ELEMENTS])


def put(name, value):
    def edit(answer):
        elements = answer[ELEMENTS]
        elements[name] = value if isinstance(value, Tensor) else value(elements[name])

    return edited(client(), edit)


@pytest.mark.parametrize("learn", [False, True], ids=["closed", "learned"])
def test_the_answer_holds_elements_and_nothing_else(learn):
    answer = ask(client(), OTHER, learn)
    assert list(answer.content) == [ELEMENTS]
    groups = {group.name: group for group in SYMMETRY.groups}
    parts = {groups[name].part for name in elements_of(answer)}
    assert parts == {"attention"} if learn else parts >= {"residual", "attention"}
    sizes = {
        "Permutation": 1,
        "SignedPermutation": 1,
        "HeadPermutation": 1,
        "HeadRotation": 3,
    }
    for name, element in elements_of(answer).items():
        assert element.ndim == sizes[type(groups[name].action).__name__]
        assert element.is_floating_point() == (groups[name].part == "attention")


def test_a_permuted_update_comes_back_exactly_in_any_order_of_the_elements():
    update = permuted(BASE, 2)
    # Orders of heads last.
    backwards = edited(
        client(), lambda a: a[ELEMENTS].update({HEADS: a[ELEMENTS].pop(HEADS)})
    )
    for node in (client(), backwards):
        alignment = read(ask(node, update), update)
        assert difference(alignment.apply(update), BASE) <= 1e-4
        assert alignment.report.after <= 1e-6 * alignment.report.before


def test_matching_draws_nothing_from_the_clients_random_numbers():
    rows = [*batches()]
    before = torch.random.get_rng_state()
    ask(client(lambda: [rows[i] for i in torch.randperm(len(rows)).tolist()]), OTHER)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_clients_own_data_decide():
    alignment = read(ask(client(), OTHER), OTHER)
    by_weights = fedrot.align(OTHER, BASE, SYMMETRY, WHOLE)
    assert difference(alignment.apply(OTHER), by_weights.apply(OTHER)) > 1e-2
    assert error(alignment.apply(OTHER), OTHER) <= 1e-4


def test_learned_elements_travel_exactly():
    """The oracle: what the client does, without messages."""
    start = fedrot.align(OTHER, BASE, SYMMETRY, fedrot.AlignmentOptions(()))
    given = (loss_of(build().eval()), batches(), OTHER, BASE, SYMMETRY, start, LEARNING)
    expected = learn_alignment(*given).alignment
    alignment = read(ask(client(), OTHER, learn=True), OTHER)
    found, known = (
        {m.group.name: m.element for m in a.moves} for a in (alignment, expected)
    )
    assert difference(found, known) == 0
    eye = torch.eye(8, dtype=torch.float64)
    assert max(float((element - eye).abs().max()) for element in found.values()) > 1e-3
    assert difference(alignment.apply(OTHER), expected.apply(OTHER)) == 0
    assert error(alignment.apply(OTHER), OTHER) <= 1e-4


def undecodable(message):
    answer = client()(message)
    assert answer is not None
    next(iter(answer.content.array_records[ELEMENTS].values())).data = b"garbage"
    return answer


def other_record(message):
    return Message(
        RecordDict({"arrays": ArrayRecord({"x": torch.ones(2)})}), reply_to=message
    )


def one_head(change):
    """Return the element with only its last head or row changed."""
    return lambda e: torch.cat([e[:-1], change(e[-1:])])


def doubled(e):
    """Return the element with its last entry where its first is."""
    e = e.clone()
    e[..., 0] = e[..., -1]
    return e


def identity(dtype):
    return torch.eye(8, dtype=dtype).expand(4, 8, 8).contiguous()


REFUSED = {
    "failed": failure,
    "no record": lambda message: Message(RecordDict({}), reply_to=message),
    "another record": other_record,
    "undecodable": undecodable,
    "unknown group": put("layer.9.qk", torch.arange(4)),
    "a weight": put("bert.pooler.dense.weight", torch.ones(32, 32)),
    "a suffix of its own": put(f"{ATTENTION}/general", identity(torch.float64)),
    "half precision": put(ATTENTION, identity(torch.float16)),
    "NaN": put(ATTENTION, one_head(lambda e: e * math.nan)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_element_is_refused(case):
    with pytest.raises(fedrot.UpdateError):
        read(ask(REFUSED[case], OTHER), OTHER)


#: Groups that act on 12 entries, and what is next to an element of theirs, but is none.
BESIDE = [
    (
        HeadRotation(3, 4),
        [
            one_head(lambda e: 1.001 * e),
            lambda e: e * torch.tensor([1.0, 1.0, 1.0, 0.999]),
            doubled,
            lambda e: torch.eye(4, dtype=torch.int64).expand(3, 4, 4),
            lambda e: e / 0,
            lambda e: e[1:],
        ],
    ),
    (
        RotaryPhases(3, 4),
        [one_head(lambda e: e * math.nan), lambda e: e.long(), lambda e: e[:, 1:]],
    ),
    (
        RotarySigns(3, 4),
        [one_head(lambda e: 2 * e), one_head(lambda e: 0 * e), lambda e: 1.001 * e],
    ),
    (
        Permutation(12),
        [doubled, lambda e: e.double(), lambda e: e + 1, lambda e: e - 1],
    ),
    (
        SignedPermutation(12),
        [
            doubled,
            lambda e: torch.cat([-e[-1:], e[1:]]),
            lambda e: e.sign() * (e.abs() - 1),
            lambda e: e.double(),
        ],
    ),
    (HeadPermutation(3), [doubled, lambda e: e - 1]),
    (
        QueryPermutation(2, 3),
        [
            one_head(doubled),
            lambda e: e + 3 * torch.arange(2)[:, None],
            lambda e: e[:1],
        ],
    ),
]


def element_read(kind, element):
    """Return the element that is read from a client's answer, for a model of one
    tensor.
    """
    group = Group("g", 0, "attention", kind, (Slot("w", 0, Slice(0, 12)),))
    model = {"w": torch.randn(12, 2, generator=torch.Generator().manual_seed(5))}
    asked = request(ConfigRecord(), 7, model, model)
    content = RecordDict({ELEMENTS: ArrayRecord({"g": element.contiguous()})})
    symmetry = Symmetry("", 1, (group,), {"w": (12, 2)})
    moves = read_moves(Message(content, reply_to=asked), symmetry)
    (move,) = alignment_by(moves, model, model, symmetry).moves
    return move.element


@pytest.mark.parametrize(("kind", "beside"), BESIDE)
def test_elements_are_read_as_they_were_sent_and_what_is_beside_them_is_refused(
    kind, beside
):
    for element in [
        kind.random(torch.Generator().manual_seed(seed)) for seed in range(5)
    ]:
        assert torch.equal(element_read(kind, element), element)
        if element.is_floating_point():
            assert torch.equal(element_read(kind, element.float()), element.float())
        for change in beside:
            with pytest.raises(fedrot.UpdateError, match="element"):
                element_read(kind, change(element))


def strategy(**given):
    others = OtherBasis(
        **{"options": WHOLE, "at_clients": True, **given.pop("others", {})}
    )
    return FedRot(config_of(NAME), other_basis=others, **given)


@pytest.mark.parametrize("most", [True, False], ids=["most", "one"])
def test_a_round_matched_by_its_clients_keeps_the_function(most, warnings):
    sent = [permuted(BASE, i) if most or i == 1 else BASE for i in range(3)]
    grid = grid_of([client()] * 3)
    result, _ = aggregated(strategy(), BASE, sent, nodes=grid)
    assert error(result, BASE) <= 1e-4
    assert warnings() == ""
    # The heaviest is the anchor where most are in another basis; nobody else needs to
    # be asked.
    assert {node for nodes in grid.asked for node in nodes} == (
        {100, 101} if most else {101}
    )


def test_nobody_is_asked_in_an_ordinary_round():
    sent = [near(BASE, 0.05, i) for i in range(3)]
    expected, _ = aggregated(FedRot(config_of(NAME)), BASE, sent)
    grid = grid_of([failure] * 3)
    result, _ = aggregated(
        strategy(others={"options": None, "model": build}), BASE, sent, nodes=grid
    )
    assert grid.asked == []
    assert largest_difference(expected, result) == 0


def test_what_a_client_found_is_averaged_and_reported_as_it_is():
    """Its data decided; to move the update again, by weights alone, would undo that."""
    found = read(ask(client(), OTHER), OTHER)
    result, metrics = aggregated(
        strategy(alignment=GLOBAL), BASE, [BASE, OTHER, BASE], nodes=[client()] * 3
    )
    aligned = found.apply(OTHER)
    mean = {k: 22 / 33 * BASE[k] + 11 / 33 * aligned[k] for k in BASE}
    assert difference(tensors_of(result), mean) <= 1e-4
    assert metrics["fedrot-share-removed"] == pytest.approx(
        found.report.share(), rel=1e-3
    )


def test_an_update_that_its_client_matched_leaves_the_others_to_the_anchor():
    theirs = permuted(near(BASE, 0.5, 1), 2)
    ours = [
        fedrot.random_equivalent(near(BASE, 0.1, i), SYMMETRY, i, ("attention", "ffn"))
        for i in (3, 4)
    ]
    options = replace(EAGER, anchor="global")
    result, _ = aggregated(
        strategy(alignment=options), BASE, [theirs, *ours], nodes=[client()] * 3
    )
    first = read(ask(client(), theirs), theirs).apply(theirs)
    rest = fedrot.align_round(zip(ours, (11, 12), strict=True), BASE, SYMMETRY, options)
    aligned = [first, *(found.tensors for found in rest)]
    mean = {
        n: sum(w * t[n] for w, t in zip((10, 11, 12), aligned, strict=True)) / 33
        for n in BASE
    }
    assert largest_difference(result, ArrayRecord(mean)) <= 1e-5


def nothing_moved(message):
    return Message(RecordDict({ELEMENTS: ArrayRecord({})}), reply_to=message)


def test_beside_clients_that_matched_themselves_others_keep_their_alignment():
    sent = [permuted(near(BASE, 0.01, seed), seed) for seed in (1, 2, 3)]
    _, metrics = aggregated(
        strategy(), BASE, sent, nodes=[nothing_moved, failure, failure]
    )
    assert metrics["fedrot-replies-accepted"] == 3


class Chatty(FakeGrid):
    """A grid on which nodes answer twice, one that was not asked answers, and one in
    another's name.
    """

    def send_and_receive(self, messages, **kwargs):
        asked = list(messages)
        stranger = nothing_moved(asked[0])
        in_its_name = nothing_moved(asked[0])
        stranger.metadata.__dict__["_src_node_id"] = 999
        in_its_name.metadata.__dict__["_reply_to_message_id"] = "of another request"
        answers = super().send_and_receive(asked)
        return [stranger, in_its_name, *answers, *map(nothing_moved, asked), stranger]


def test_the_first_answer_of_who_was_asked_counts(warnings):
    sent = [BASE, OTHER, BASE]
    nodes = [client()] * 3
    expected, before = aggregated(strategy(alignment=GLOBAL), BASE, sent, nodes=nodes)
    grid = Chatty(dict(enumerate(nodes, start=100)))
    found, metrics = aggregated(strategy(alignment=GLOBAL), BASE, sent, nodes=grid)
    assert grid.asked == [[101]]
    assert largest_difference(found, expected) == 0
    assert metrics["fedrot-replies-accepted"] == before["fedrot-replies-accepted"] == 3
    assert warnings() == ""


class Silent(FakeGrid):
    def send_and_receive(self, messages, **kwargs):
        return []


def left(message):
    """Answer as the SuperLink does for a node that has left."""
    answer = failure(message)
    answer.metadata.__dict__["_src_node_id"] = 1
    return answer


BAD_NODES = {"left": left, "silent": failure} | {
    name: REFUSED[name] for name in ("failed", "no record", "NaN", "unknown group")
}


SENT = [BASE, permuted(BASE, 1), BASE]


@cache
def matched_at_the_server(model):
    others = OtherBasis(model, None if model else WHOLE)
    return aggregated(FedRot(config_of(NAME), other_basis=others), BASE, SENT)[0]


@pytest.mark.parametrize("case", BAD_NODES)
def test_after_a_bad_answer_the_reply_is_matched_at_the_server(case, warnings):
    model = build if case == "failed" else None
    kind = Silent if case == "silent" else FakeGrid
    grid = kind(dict.fromkeys((100, 101, 102), BAD_NODES[case]))
    given = {"model": model, "options": None if model else WHOLE}
    result, metrics = aggregated(strategy(others=given), BASE, SENT, nodes=grid)
    assert ("Client 1 is matched at the server" in warnings()) == (case != "silent")
    assert largest_difference(result, matched_at_the_server(model)) == 0
    assert error(result, BASE) <= 1e-4
    assert metrics["fedrot-replies-dropped"] == 0


class Timed(LazyGrid):
    """Notes how long it is to wait for what kind of messages."""

    def send_and_receive(self, messages, *, timeout=None):
        asked = list(messages)
        self.waits = [
            *getattr(self, "waits", []),
            *((m.metadata.message_type, timeout) for m in asked),
        ]
        return super().send_and_receive(asked, timeout=timeout)


def test_requests_to_match_have_the_timeout_of_the_run_and_its_configuration():
    asked = []

    def answer(message):
        node = message.metadata.dst_node_id
        if message.metadata.message_type == MESSAGE_TYPE:
            asked.append(message)
            return nothing_moved(message)
        return reply(message, permuted(BASE, node), 10, node)

    grid = Timed(grid_of([answer] * 2))
    config = ConfigRecord({"lr": 0.5})
    ours = strategy(fraction_evaluate=0.0)
    ours.start(grid, ArrayRecord(BASE), 1, timeout=12.5, train_config=config)
    # One of the two is the anchor.
    assert grid.waits == [("train", 12.5), ("train", 12.5), (MESSAGE_TYPE, 12.5)]
    (told,) = asked[0].content.config_records.values()
    assert (told["lr"], told["server-round"]) == (0.5, 1)
    with pytest.raises(ValueError, match="fedrot_match"):
        node_of(ClientApp())(asked[0])
