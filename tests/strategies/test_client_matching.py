"""Replies from another basis that their senders match: elements are sent, functions are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

import fedrot
from fedrot.alignment import Alignment
from fedrot.learning import LearningOptions, learn_alignment, loss_of
from fedrot.strategies import FedRot, Matching, match_at_client
from fedrot.strategies.client_matching import (
    ELEMENTS,
    MESSAGE_TYPE,
    alignment_by,
    read_moves,
    request,
)
from fedrot.strategies.lazy_grid import LazyGrid, Replies
from fedrot.strategies.settings import OtherBasis
from fedrot.symmetry.actions import (
    HeadPermutation,
    HeadRotation,
    Kind,
    Permutation,
    QueryPermutation,
    Rescale,
    SignedPermutation,
)
from fedrot.symmetry.groups import Group, Slice, Slot, Symmetry
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from tests.models import EAGER, VOCABULARY, State, config_of, near
from tests.models import largest_difference as difference
from tests.strategies.classifier import NAME, SYMMETRY, WHOLE, build, error, permuted, state
from tests.strategies.fakes import (
    Client,
    FakeGrid,
    broadcast,
    failure,
    largest_difference,
    play,
    reply,
    tensors_of,
)

DEFAULT = LearningOptions()
LEARNING = LearningOptions(("attention",), steps=3)
EDITED = Callable[[dict[str, Tensor]], dict[str, Tensor]]

ATTENTION = next(g.name for g in SYMMETRY.select(("attention",)))
FFN = next(g.name for g in SYMMETRY.select(("ffn",)))
STREAM = next(g.name for g in SYMMETRY.select(("residual",)))
OUTPUT = next(g.name for g in SYMMETRY.select(("output",)))
HEADS = next(g.name for g in SYMMETRY.select(("heads",)))
RESCALE = next(g.name for g in SYMMETRY.select(("rescale",)))


def batches() -> Iterable[Mapping[str, Tensor]]:
    """Return a client's labelled rows."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        ids = torch.randint(VOCABULARY, (16, 8), generator=generator)
        labels = torch.randint(3, (16,), generator=generator)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def client(learning: LearningOptions = DEFAULT) -> Client:
    """Return a node with a real ``ClientApp`` that matches."""
    app = ClientApp()
    match_at_client(app, lambda message, context: Matching(build, batches, learning=learning))
    context = Context(1, 1, {}, RecordDict(), {})
    return lambda message: app(message, context)


def ask(node: Client, anchor: State, update: State, learn: bool = False) -> Message:
    return node(request(anchor, update, ConfigRecord(), 7, learn=learn))


def read_answer(answer: Message, update: State, anchor: State, symmetry: Symmetry) -> Alignment:
    return alignment_by(read_moves(answer, symmetry), update, anchor, symmetry)


def elements_of(answer: Message) -> dict[str, Tensor]:
    record: ArrayRecord = answer.content.array_records[ELEMENTS]
    return tensors_of(record)


def edited(node: Client, edit: EDITED) -> Client:
    """Return a node that answers with other elements than it found."""

    def answer(message: Message) -> Message:
        elements = edit(elements_of(node(message)))
        return Message(RecordDict({ELEMENTS: ArrayRecord(elements)}), reply_to=message)

    return answer


# One exchange


@pytest.mark.parametrize("learn", [False, True], ids=["closed", "learned"])
def test_the_answer_holds_elements_and_nothing_else(learn: bool) -> None:
    answer = ask(client(LEARNING), state(), state(3), learn)
    assert list(answer.content) == [ELEMENTS]
    elements = elements_of(answer)
    groups = {group.name: group for group in SYMMETRY.groups}
    parts = {groups[name].part for name in elements}
    assert parts == {"attention"} if learn else parts >= {"residual", "attention"}
    sizes = {"Permutation": 1, "SignedPermutation": 1, "HeadPermutation": 1, "HeadRotation": 3}
    for name, element in elements.items():
        group = groups[name]
        assert element.ndim == sizes[type(group.kind).__name__]
        assert element.is_floating_point() == (group.part == "attention")
        weights = {SYMMETRY.shapes[s.tensor] for g in SYMMETRY.groups for s in g.slots}
        assert not element.is_floating_point() or tuple(element.shape) not in weights


def test_a_permuted_update_comes_back_exactly() -> None:
    base = state()
    update = permuted(base, 2)
    alignment = read_answer(ask(client(), base, update), update, base, SYMMETRY)
    assert difference(alignment.apply(update), base) <= 1e-4
    assert alignment.report.after <= 1e-6 * alignment.report.before


def test_matching_draws_nothing_from_the_clients_random_numbers() -> None:
    before = torch.random.get_rng_state()
    build()
    assert not torch.equal(torch.random.get_rng_state(), before)
    torch.random.set_rng_state(before)
    app = ClientApp()
    rows = [*batches()]
    match_at_client(
        app, lambda *_: Matching(build, lambda: [rows[i] for i in torch.randperm(len(rows)).tolist()])
    )
    context = Context(1, 1, {}, RecordDict(), {})
    ask(lambda message: app(message, context), state(), permuted(state(), 2))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_clients_own_data_decide() -> None:
    base, update = state(), state(3)
    alignment = read_answer(ask(client(), base, update), update, base, SYMMETRY)
    by_weights = fedrot.align(update, base, SYMMETRY, WHOLE)
    assert difference(alignment.apply(update), by_weights.apply(update)) > 1e-2
    assert error(alignment.apply(update), update) <= 1e-4


def learned_here(base: State, update: State) -> Alignment:
    """The oracle: what the client does, without messages."""
    start = fedrot.align(update, base, SYMMETRY, fedrot.AlignmentOptions(()))
    loss = loss_of(build().eval())
    return learn_alignment(loss, batches(), update, base, SYMMETRY, start, LEARNING).alignment


def test_learned_elements_travel_exactly() -> None:
    base, update = state(), state(3)
    answer = ask(client(LEARNING), base, update, learn=True)
    alignment = read_answer(answer, update, base, SYMMETRY)
    found, expected = (
        {move.group.name: move for move in a.moves} for a in (alignment, learned_here(base, update))
    )
    assert found.keys() == expected.keys()
    for name, move in found.items():
        assert move.group == expected[name].group
        assert torch.equal(move.element, expected[name].element)
    attention = [move for move in found.values() if move.group.part == "attention"]
    eye = torch.eye(attention[0].element.shape[-1], dtype=torch.float64)
    assert max(float((m.element - eye).abs().max()) for m in attention) > 1e-3
    assert difference(alignment.apply(update), learned_here(base, update).apply(update)) == 0
    assert error(alignment.apply(update), update) <= 1e-4


# Answers that are refused


def put(name: str, value: Callable[[Tensor], Tensor] | Tensor) -> EDITED:
    """Replace or add one element."""

    def edit(elements: dict[str, Tensor]) -> dict[str, Tensor]:
        new = value if isinstance(value, Tensor) else value(elements[name])
        return {**elements, name: new}

    return edit


def with_entry(value: float) -> Callable[[Tensor], Tensor]:
    def change(element: Tensor) -> Tensor:
        element = element.clone()
        element[(0,) * element.ndim] = value
        return element

    return change


def no_record(message: Message) -> Message:
    return Message(RecordDict({}), reply_to=message)


def other_record(message: Message) -> Message:
    return Message(RecordDict({"arrays": ArrayRecord({"x": torch.ones(2)})}), reply_to=message)


def undecodable(message: Message) -> Message:
    answer = client()(message)
    record = answer.content.array_records[ELEMENTS]
    name = next(iter(record))
    record[name].data = b"garbage"
    return answer


def gl(heads: int, dim: int, value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return (value * torch.eye(dim, dtype=dtype)).expand(heads, dim, dim).contiguous()


NOT_ELEMENTS: dict[str, EDITED] = {
    "an order that names a unit twice": put(FFN, lambda e: e[:1].expand(len(e)).contiguous()),
    "an order outside": put(FFN, lambda e: e + 1),
    "a negative order": put(FFN, lambda e: e - 1),
    "an order of floats": put(FFN, lambda e: e.double()),
    "an order of int32": put(FFN, lambda e: e.int()),
    "a short order": put(FFN, lambda e: e[:-1].contiguous()),
    "an order of the stream twice": put(STREAM, lambda e: e[:1].expand(len(e)).contiguous()),
    "no sign": put(OUTPUT, lambda e: e.abs() - 1),
    "a rotation stretched by a thousandth": put(ATTENTION, lambda e: 1.001 * e),
    "a rotation shrunk by a thousandth": put(ATTENTION, lambda e: 0.999 * e),
    "a sheared rotation": put(ATTENTION, with_entry(3.0)),
    "NaN": put(ATTENTION, with_entry(float("nan"))),
    "Inf": put(ATTENTION, with_entry(float("inf"))),
    "too few heads": put(ATTENTION, lambda e: e[1:].contiguous()),
    "a flat rotation": put(ATTENTION, lambda e: e[0].contiguous()),
    "zeros": put(ATTENTION, lambda e: 0 * e),
    "unknown group": put("layer.9.qk", torch.arange(4)),
    "a weight": put("bert.pooler.dense.weight", torch.ones(32, 32)),
    "a suffix of its own": put(f"{ATTENTION}/general", gl(4, 8, 1.0)),
    "singular": put(ATTENTION, gl(4, 8, 0.0)),
    "zero scale": put(RESCALE, torch.zeros(4)),
    "NaN scale": put(RESCALE, torch.full((4,), float("nan"))),
}

#: Elements of the group, but far from the identity: read or refused, the function must survive.
EXTREME: dict[str, EDITED] = {
    "half precision": put(ATTENTION, gl(4, 8, 1.0, torch.float16)),
    "huge scale": put(RESCALE, torch.full((4,), 1e38)),
    "tiny scale": put(RESCALE, torch.full((4,), 1e-42)),
}

REFUSED: dict[str, Client] = {
    "failed": failure,
    "no record": no_record,
    "another record": other_record,
    "undecodable": undecodable,
    **{name: edited(client(), edit) for name, edit in NOT_ELEMENTS.items()},
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_no_element_is_refused(case: str) -> None:
    base, update = state(), state(3)
    with pytest.raises(fedrot.UpdateError):
        read_answer(ask(REFUSED[case], base, update), update, base, SYMMETRY)


def one_head(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the element with only its last head or row changed."""
    return lambda e: torch.cat([e[:-1], change(e[-1:])])


def doubled(e: Tensor) -> Tensor:
    """Return the element with its last entry where its first is."""
    e = e.clone()
    e[..., 0] = e[..., -1]
    return e


#: What is next to an element of a group that acts on 12 entries, but is none.
BESIDE: dict[str, tuple[Kind, dict[str, Callable[[Tensor], Tensor]]]] = {
    "rotation": (
        HeadRotation(3, 4),
        {
            "stretched": lambda e: 1.001 * e,
            "shrunk": lambda e: 0.999 * e,
            "one head stretched": one_head(lambda e: 1.001 * e),
            "one column stretched": lambda e: e * torch.tensor([1.0, 1.0, 1.0, 1.001]),
            "one column twice": doubled,
            "whole numbers": lambda e: torch.eye(4, dtype=torch.int64).expand(3, 4, 4),
        },
    ),
    "phases": (
        RotaryPhases(3, 4),
        {
            "infinite": lambda e: e / 0,
            "one head NaN": one_head(lambda e: e * math.nan),
            "whole numbers": lambda e: e.long(),
            "an angle too few": lambda e: e[:, 1:],
        },
    ),
    "rotary signs": (
        RotarySigns(3, 4),
        {
            "one head stretched": one_head(lambda e: 2 * e),
            "one head zero": one_head(lambda e: 0 * e),
            "floats": lambda e: e.float(),
            "floats next to signs": lambda e: 1.001 * e,
        },
    ),
    "rescale": (
        Rescale(3),
        {"one head zero": one_head(lambda e: 0 * e), "one head huge": one_head(lambda e: 1e5 * e)},
    ),
    "permutation": (
        Permutation(12),
        {"one twice": doubled, "floats": lambda e: e.double(), "beyond the end": lambda e: e + 1},
    ),
    "signed permutation": (
        SignedPermutation(12),
        {
            "one twice": doubled,
            "one twice with either sign": lambda e: torch.cat([-e[-1:], e[1:]]),
            "counted from 0": lambda e: e.sign() * (e.abs() - 1),
            "floats": lambda e: e.double(),
        },
    ),
    "head permutation": (
        HeadPermutation(3),
        {"one twice": doubled, "before the start": lambda e: e - 1},
    ),
    "query permutation": (
        QueryPermutation(2, 3),
        {
            "one group with one twice": one_head(doubled),
            "counted across groups": lambda e: e + 3 * torch.arange(2)[:, None],
            "a group too few": lambda e: e[:1],
        },
    ),
}


def element_read(kind: Kind, element: Tensor) -> Tensor:
    """Return the element that is read from a client's answer, for a model of one tensor."""
    group = Group("g", 0, "attention", kind, (Slot("w", 0, Slice(0, 12)),))
    model = {"w": torch.randn(12, 2, generator=torch.Generator().manual_seed(5))}
    elements = ArrayRecord({"g": element.contiguous()})
    asked = request(model, model, ConfigRecord(), 7)
    answer = Message(RecordDict({ELEMENTS: elements}), reply_to=asked)
    (move,) = read_answer(answer, model, model, Symmetry("", 1, (group,), {"w": (12, 2)})).moves
    return move.element


def drawn(kind: Kind) -> list[Tensor]:
    return [kind.random(torch.Generator().manual_seed(seed)) for seed in range(5)]


@pytest.mark.parametrize("name", BESIDE)
def test_elements_of_every_kind_are_read_as_they_were_sent(name: str) -> None:
    kind, _ = BESIDE[name]
    for element in drawn(kind):
        assert torch.equal(element_read(kind, element), element)
        if element.is_floating_point():
            assert torch.equal(element_read(kind, element.float()), element.float())


@pytest.mark.parametrize(
    ("name", "how"), [(name, how) for name, (_, beside) in BESIDE.items() for how in beside]
)
def test_what_is_beside_an_element_is_refused(name: str, how: str) -> None:
    kind, beside = BESIDE[name]
    for element in drawn(kind):
        with pytest.raises(fedrot.UpdateError, match="not an element of the model's symmetry"):
            element_read(kind, beside[how](element))


@pytest.mark.parametrize("case", sorted(EXTREME))
def test_what_is_read_preserves_the_function(case: str) -> None:
    """Whatever a client answers: it is refused, or the update still computes the same."""
    base, update = state(), state(3)
    answer = ask(edited(client(), EXTREME[case]), base, update)
    try:
        moved = read_answer(answer, update, base, SYMMETRY).apply(update)
    except fedrot.UpdateError:
        return
    assert error(moved, update) <= 1e-3


def test_an_empty_answer_moves_nothing() -> None:
    base, update = state(), state(3)
    answer = ask(edited(client(), lambda elements: {}), base, update)
    alignment = read_answer(answer, update, base, SYMMETRY)
    assert difference(alignment.apply(update), update) == 0


def test_head_orders_come_before_what_is_inside_heads() -> None:
    base = state()
    update = permuted(base, 2)

    def backwards(elements: dict[str, Tensor]) -> dict[str, Tensor]:
        assert HEADS in elements
        return dict(sorted(elements.items(), key=lambda item: item[0] == HEADS))

    alignment = read_answer(ask(edited(client(), backwards), base, update), update, base, SYMMETRY)
    assert difference(alignment.apply(update), base) <= 1e-4


def test_a_client_without_the_action_fails() -> None:
    message = request(state(), state(3), ConfigRecord(), 7)
    assert message.metadata.message_type == MESSAGE_TYPE
    with pytest.raises(ValueError, match="fedrot_match"):
        ClientApp()(message, Context(1, 1, {}, RecordDict(), {}))


# Rounds


@pytest.mark.parametrize("most", [True, False], ids=["most-in-another-basis", "one-in-another-basis"])
def test_a_round_matched_by_its_clients_keeps_the_function(
    most: bool, warnings: Callable[[], str]
) -> None:
    base = state()
    sent = [permuted(base, i) if most or i == 1 else base for i in range(3)]
    node = client()
    asked: list[Message] = []

    def counted(message: Message) -> Message:
        asked.append(message)
        return node(message)

    strategy = FedRot(config_of(NAME), other_basis=OtherBasis(options=WHOLE, at_clients=True))
    result, _ = play(strategy, base, sent, [counted] * 3)
    assert error(result, base) <= 1e-4
    assert warnings() == ""
    # The heaviest is the anchor where most are in another basis; nobody else needs to be asked.
    assert {m.metadata.dst_node_id for m in asked} == ({100, 101} if most else {101})
    assert {m.metadata.message_type for m in asked} == {MESSAGE_TYPE}


def test_nobody_is_asked_in_an_ordinary_round() -> None:
    base = state()
    sent = [near(base, 0.05, i) for i in range(3)]
    expected, _ = play(FedRot(config_of(NAME)), base, sent, [failure] * 3)
    grid = FakeGrid(dict.fromkeys((100, 101, 102), failure))
    strategy = FedRot(config_of(NAME), other_basis=OtherBasis(model=build, at_clients=True))
    result, _ = play(strategy, base, sent, grid)
    assert grid.asked == []
    assert largest_difference(expected, result) == 0


def test_an_update_that_its_client_matched_leaves_the_others_to_the_anchor() -> None:
    base = state()
    theirs = permuted(near(base, 0.5, 1), 2)
    ours = [
        fedrot.random_equivalent(near(base, 0.1, i), SYMMETRY, i, ("attention", "ffn")) for i in (3, 4)
    ]
    others = OtherBasis(options=WHOLE, at_clients=True)
    options = replace(EAGER, anchor="global")
    strategy = FedRot(config_of(NAME), alignment=options, other_basis=others)
    result, _ = play(strategy, base, [theirs, *ours], [client()] * 3)
    first = read_answer(ask(client(), base, theirs), theirs, base, SYMMETRY).apply(theirs)
    weighted = zip(ours, (11, 12), strict=True)
    rest = fedrot.align_round(weighted, base, SYMMETRY, options)
    aligned = [first, *(found.tensors for found in rest)]
    mean = {n: sum(w * t[n] for w, t in zip((10, 11, 12), aligned, strict=True)) / 33 for n in base}
    assert largest_difference(result, ArrayRecord(mean)) <= 1e-5


class Silent(FakeGrid):
    """A grid whose clients never answer."""

    def send_and_receive(self, messages: Iterable[Message], **kwargs: Any) -> Iterable[Message]:
        return []


def nothing_moved(message: Message) -> Message:
    return Message(RecordDict({ELEMENTS: ArrayRecord({})}), reply_to=message)


class Chatty(FakeGrid):
    """A grid on which nodes answer twice, one that was not asked answers, and one in another's name."""

    def send_and_receive(self, messages: Iterable[Message], **kwargs: Any) -> Iterable[Message]:
        asked = list(messages)
        stranger = nothing_moved(asked[0])
        stranger.metadata.__dict__["_src_node_id"] = 999
        in_its_name = nothing_moved(asked[0])
        in_its_name.metadata.__dict__["_reply_to_message_id"] = "of another request"
        answers = super().send_and_receive(asked)
        return [stranger, in_its_name, *answers, *map(nothing_moved, asked), stranger]


def test_the_first_answer_of_who_was_asked_counts(warnings: Callable[[], str]) -> None:
    base, update = state(), state(3)
    sent, nodes = [base, update, base], [client()] * 3
    options: dict[str, Any] = {
        "alignment": fedrot.AlignmentOptions(anchor="global"),
        "other_basis": OtherBasis(options=WHOLE, at_clients=True),
    }
    expected, before = play(FedRot(config_of(NAME), **options), base, sent, nodes)
    grid = Chatty(dict(enumerate(nodes, start=100)))
    found, metrics = play(FedRot(config_of(NAME), **options), base, sent, grid)
    assert grid.asked == [[101]]
    assert largest_difference(found, expected) == 0
    assert metrics["fedrot-replies-accepted"] == before["fedrot-replies-accepted"] == 3
    assert warnings() == ""


def left(message: Message) -> Message:
    """Answer as the SuperLink does for a node that has left."""
    answer = failure(message)
    answer.metadata.__dict__["_src_node_id"] = 1
    return answer


BAD_NODES: dict[str, Client] = {"left": left} | {
    name: REFUSED[name]
    for name in ("failed", "no record", "NaN", "a short order", "unknown group", "a sheared rotation")
}


@pytest.mark.parametrize("case", sorted(BAD_NODES))
def test_after_a_bad_answer_the_reply_is_matched_at_the_server(
    case: str, warnings: Callable[[], str]
) -> None:
    base = state()
    sent = [permuted(base, i) if i else base for i in (0, 1, 0)]
    strategy = FedRot(config_of(NAME), other_basis=OtherBasis(model=build, at_clients=True))
    at_server, _ = play(
        FedRot(config_of(NAME), other_basis=OtherBasis(model=build)), base, sent, [failure] * 3
    )
    result, metrics = play(strategy, base, sent, [BAD_NODES[case]] * 3)
    assert "Client 1 is matched at the server" in warnings()
    assert largest_difference(result, at_server) == 0
    assert error(result, base) <= 1e-4
    assert metrics["fedrot-replies-dropped"] == 0


def test_clients_that_never_answer_are_matched_at_the_server() -> None:
    base = state()
    sent = [permuted(base, i) if i else base for i in (0, 1, 0)]
    strategy = FedRot(config_of(NAME), other_basis=OtherBasis(model=build, at_clients=True))
    result, _ = play(strategy, base, sent, Silent(dict.fromkeys((100, 101, 102), failure)))
    assert error(result, base) <= 1e-4


@pytest.mark.parametrize("case", sorted(EXTREME))
def test_no_answer_ends_the_round(case: str) -> None:
    base = state()
    sent = [base, permuted(base, 1), base]
    node = edited(client(), EXTREME[case])
    strategy = FedRot(
        config_of(NAME),
        alignment=fedrot.AlignmentOptions(anchor="global"),
        other_basis=OtherBasis(options=WHOLE, at_clients=True),
    )
    result, _ = play(strategy, base, sent, [node] * 3)
    assert error(result, base) <= 0.1


def test_what_a_client_found_is_what_is_averaged() -> None:
    """Its data decided; to move the update again, by weights alone, would undo that."""
    base, update = state(), state(3)
    node = client()
    found = read_answer(ask(node, base, update), update, base, SYMMETRY).apply(update)
    strategy = FedRot(
        config_of(NAME),
        alignment=fedrot.AlignmentOptions(anchor="global"),
        other_basis=OtherBasis(options=WHOLE, at_clients=True),
    )
    result, _ = play(strategy, base, [base, update, base], [node] * 3)
    mean = {k: 22 / 33 * base[k] + 11 / 33 * found[k] for k in base}
    assert difference(tensors_of(result), mean) <= 1e-4


def test_each_client_is_reported_once() -> None:
    base, update = state(), state(3)
    sent = [base, update, base]
    strategy = FedRot(
        config_of(NAME),
        alignment=fedrot.AlignmentOptions(anchor="global"),
        other_basis=OtherBasis(options=WHOLE, at_clients=True),
    )
    _, metrics = play(strategy, base, sent, [client()] * 3)
    alignment = read_answer(ask(client(), base, update), update, base, SYMMETRY)
    assert metrics["fedrot-share-removed"] == pytest.approx(alignment.report.share(), rel=1e-3)


def test_messages_of_the_first_round_are_those_of_the_strategy() -> None:
    """Matching adds an exchange where it is needed, and changes nothing about training."""
    base = state()
    stock, ours = (
        FedRot(config_of(NAME)),
        FedRot(config_of(NAME), other_basis=OtherBasis(at_clients=True, model=build)),
    )
    kinds = [[m.metadata.message_type for m in broadcast(s, base)] for s in (stock, ours)]
    assert kinds[0] == kinds[1]


class Timed(LazyGrid):
    """Notes how long it is to wait for what kind of messages."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Replies:
        asked = list(messages)
        self.waits = [*getattr(self, "waits", []), *((m.metadata.message_type, timeout) for m in asked)]
        return super().send_and_receive(asked, timeout=timeout)


def test_requests_to_match_have_the_timeout_of_the_run_and_its_configuration() -> None:
    asked: list[Message] = []

    def answer(message: Message) -> Message:
        node = message.metadata.dst_node_id
        if message.metadata.message_type == MESSAGE_TYPE:
            asked.append(message)
            return nothing_moved(message)
        return reply(message, permuted(state(), node), 10, node)

    grid = Timed(FakeGrid(dict.fromkeys((1, 2), answer)))
    others = OtherBasis(options=WHOLE, at_clients=True)
    strategy = FedRot(config_of(NAME), other_basis=others, fraction_evaluate=0.0)
    given = ConfigRecord({"lr": 0.5})
    strategy.start(grid, ArrayRecord(state()), 1, timeout=12.5, train_config=given)
    # One of the two is the anchor.
    assert grid.waits == [("train", 12.5), ("train", 12.5), (MESSAGE_TYPE, 12.5)]
    (config,) = asked[0].content.config_records.values()
    assert (config["lr"], config["server-round"]) == (0.5, 1)
