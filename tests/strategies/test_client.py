"""Alignment in the client's mods: replies are in the received model's coordinates."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import fixedclipping_mod as legacy_fixedclipping_mod
from flwr.client.mod import secagg_mod, secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod, message_size_mod
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

import fedrot
from fedrot.aggregation import Fisher
from fedrot.collect.statistics import FISHER
from fedrot.strategies import (
    FedRot,
    Matching,
    align_mod,
    from_arrays,
    match_at_client,
    to_arrays,
    wanted_statistics,
)
from fedrot.strategies.client_matching import request
from fedrot.strategies.settings import Server
from fedrot.strategies.wire.arrays import wire_bytes
from fedrot.strategies.wire.records import STATISTICS, read_statistics, statistics_record
from tests import families
from tests.models import EAGER, State, config_of, near
from tests.models import largest_difference as difference
from tests.strategies.classifier import NAME, SYMMETRY, build, state
from tests.strategies.fakes import Client, FakeGrid, failure, largest_difference, reply, tensors_of

#: What a client does with a message.
Train = Callable[[Message], Message]

CONFIG = config_of(NAME)
CLIP = 0.5


def scrambled(seed: int = 1) -> State:
    """Return an update in other coordinates than the model it was trained from."""
    return fedrot.random_equivalent(near(state(), 0.02, seed), SYMMETRY, seed)


def sends(update: State, **metrics: Any) -> Train:
    return lambda message: reply(message, update, 10, **metrics)


def app_of(train: Train, mods: list[Any]) -> Client:
    """Return a node with a real ``ClientApp``."""
    app = ClientApp(mods=mods)
    context = Context(1, 1, {}, RecordDict(), {})
    app.train()(lambda message, context: train(message))
    app.evaluate()(lambda message, context: train(message))
    app.train("tuned")(lambda message, context: train(message))
    app.query()(lambda message, context: train(message))
    return lambda message: app(message, context)


def instruction(base: State, *, kind: str = "train", **config: Any) -> Message:
    content = RecordDict({"arrays": ArrayRecord(base), "config": ConfigRecord(config)})
    return Message(content, dst_node_id=1, message_type=kind)


def arrays(message: Message) -> State:
    return tensors_of(message.content.array_records["arrays"])


# What leaves


@pytest.mark.parametrize(
    "symmetry",
    [SYMMETRY, CONFIG, CONFIG.to_dict(), lambda message, context: CONFIG],
    ids=["symmetry", "config", "dictionary", "function"],
)
def test_the_update_leaves_in_the_received_coordinates(symmetry: Any) -> None:
    base, update = state(), scrambled()
    answer = app_of(sends(update, loss=0.5), [align_mod(symmetry)])(instruction(base))
    expected = fedrot.align(update, base, SYMMETRY).apply(update)
    assert difference(arrays(answer), expected) == 0
    assert difference(arrays(answer), near(base, 0.02, 1)) < 0.1 < difference(update, base)
    assert dict(answer.content["metrics"]) == {"num-examples": 10, "loss": 0.5}


def test_options_say_what_moves() -> None:
    base, update = state(), scrambled()
    options = fedrot.AlignmentOptions(parts=("ffn",))
    answer = app_of(sends(update), [align_mod(CONFIG, options)])(instruction(base))
    assert difference(arrays(answer), fedrot.align(update, base, SYMMETRY, options).apply(update)) == 0


def test_what_does_not_move_keeps_its_bytes_and_the_clients_reply_stays_as_it_was() -> None:
    base, update = state(), {k: v.half() for k, v in scrambled().items()}
    sent: list[Message] = []

    def train(message: Message) -> Message:
        sent.append(reply(message, update, 10))
        message.content.array_records["arrays"].clear()
        return sent[0]

    answer = app_of(train, [align_mod(CONFIG)])(instruction(base))
    assert difference(arrays(sent[0]), update) == 0
    assert {t.dtype for t in arrays(answer).values()} == {torch.float16}
    whole = {k: v.float() for k, v in update.items()}
    expected = fedrot.align(whole, base, SYMMETRY).apply(whole)
    assert difference(arrays(answer), expected) < 2e-3
    name = "bert.embeddings.word_embeddings.weight"
    left, given = (m.content.array_records["arrays"][name].data for m in (answer, sent[0]))
    assert left == given
    assert list(answer.content["arrays"]) == list(sent[0].content["arrays"])


@pytest.mark.parametrize("canonical", [False, True])
def test_tied_arrays_stay_tied_unless_they_move_apart(canonical: bool) -> None:
    """In canonical form the output layer holds the last norm's gain; the token table does not."""
    config, model = families.config_of("gpt2"), families.model_of("gpt2").float()
    base = model.state_dict()
    update = near(base, 0.02, 1)
    update["lm_head.weight"] = update["transformer.wte.weight"]
    options = fedrot.AlignmentOptions(("residual", "ffn"), canonical=canonical)

    def train(message: Message) -> Message:
        answer = reply(message, update, 10)
        answer.content["arrays"] = to_arrays(update)
        return answer

    answer = app_of(train, [align_mod(config, options)])(instruction(base))
    found = from_arrays(answer.content.array_records["arrays"])
    symmetry = fedrot.symmetry_of(config, base)
    expected = fedrot.align(update, base, symmetry, options).apply(update)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    tied = found["lm_head.weight"] is found["transformer.wte.weight"]
    assert tied is not canonical


def test_every_action_of_training_is_aligned() -> None:
    base, update = state(), scrambled()
    answer = app_of(sends(update), [align_mod(CONFIG)])(instruction(base, kind="train.tuned"))
    assert difference(arrays(answer), fedrot.align(update, base, SYMMETRY).apply(update)) == 0


@pytest.mark.parametrize("kind", ["evaluate", "query"])
def test_other_messages_pass_through_untouched(kind: str) -> None:
    base, sent = state(), []

    def serve(message: Message) -> Message:
        sent.append(reply(message, scrambled(), 10))
        return sent[0]

    assert app_of(serve, [align_mod(CONFIG)])(instruction(base, kind=kind)) is sent[0]


def test_requests_to_match_pass_through_untouched(warnings: Callable[[], str]) -> None:
    base, update, answers = state(), scrambled(), []
    for mods in ([], [align_mod(CONFIG)]):
        app = ClientApp(mods=mods)
        rows = {"input_ids": torch.arange(4, 20).reshape(2, 8)}
        match_at_client(app, lambda message, context: Matching(build, lambda: [rows]))  # noqa: B023
        message = request(base, update, ConfigRecord(), 7)
        answers.append(app(message, Context(1, 1, {}, RecordDict(), {})))
    first, second = ({n: dict(r) for n, r in a.content.items()} for a in answers)
    assert first == second
    assert warnings() == ""


def test_scrambled_clients_give_plain_fedavg_the_unscrambled_average() -> None:
    base = state()
    honest = [near(base, 0.02, seed) for seed in range(3)]

    def average(mods: list[Any], scramble: bool) -> ArrayRecord:
        sent = [
            fedrot.random_equivalent(u, SYMMETRY, i) if scramble else u for i, u in enumerate(honest)
        ]
        grid = FakeGrid({100 + i: app_of(sends(u), mods) for i, u in enumerate(sent)})
        return FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(base), 1).arrays

    mods = [align_mod(CONFIG, EAGER)]
    aligned = average(mods, scramble=True)
    assert largest_difference(aligned, average(mods, scramble=False)) < 1e-5
    assert largest_difference(aligned, average([], scramble=True)) > 0.1


# What cannot be aligned


def undecodable(message: Message) -> Message:
    answer = reply(message, scrambled(), 10)
    garbage = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=b"garbage")
    answer.content.array_records["arrays"]["classifier.bias"] = garbage
    return answer


def two_records(message: Message) -> Message:
    answer = reply(message, scrambled(), 10)
    answer.content["more"] = ArrayRecord(scrambled())
    return answer


def no_arrays(message: Message) -> Message:
    answer = reply(message, scrambled(), 10)
    del answer.content["arrays"]
    return answer


def without(name: str) -> State:
    return {k: v for k, v in scrambled().items() if k != name}


BROKEN: dict[str, Train] = {
    "the client failed: crashed": failure,
    "'classifier.bias' is missing": sends(without("classifier.bias")),
    "'extra' is not part of the model": sends({**scrambled(), "extra": torch.ones(2)}),
    "has shape": sends({**scrambled(), "classifier.bias": torch.ones(7)}),
    "holds NaN or Inf": sends({**scrambled(), "classifier.bias": torch.full((3,), torch.nan)}),
    "only floating-point weights": sends({k: (v * 100).int() for k, v in scrambled().items()}),
    "cannot be decoded": undecodable,
    "The reply holds 2 ArrayRecords": two_records,
    "The reply holds 0 ArrayRecords": no_arrays,
}


@pytest.mark.parametrize("reason", sorted(BROKEN))
def test_what_is_no_update_leaves_unchanged_with_a_warning(
    reason: str, warnings: Callable[[], str]
) -> None:
    sent: list[Message] = []

    def train(message: Message) -> Message:
        sent.append(BROKEN[reason](message))
        return sent[0]

    assert app_of(train, [align_mod(CONFIG)])(instruction(state())) is sent[0]
    assert "Not aligned" in warnings()
    assert reason in warnings()


def test_the_server_drops_replies_that_left_unaligned() -> None:
    base, mods = state(), [align_mod(CONFIG)]
    good = [app_of(sends(near(base, 0.02, i)), mods) for i in range(2)]
    bad = app_of(BROKEN["holds NaN or Inf"], mods)
    results = [
        FedRot(
            CONFIG,
            alignment=fedrot.AlignmentOptions(anchor="global"),
            server=Server(deterministic=True),
            fraction_evaluate=0.0,
        ).start(FakeGrid(dict(enumerate(clients, start=100))), ArrayRecord(base), 1)
        for clients in (good, [*good, bad])
    ]
    assert largest_difference(results[0].arrays, results[1].arrays) == 0
    assert results[1].train_metrics_clientapp[1]["fedrot-replies-dropped"] == 1


def test_a_message_with_several_models_is_left_alone(warnings: Callable[[], str]) -> None:
    message = instruction(state())
    message.content["more"] = ArrayRecord(state())
    answer = app_of(sends(scrambled()), [align_mod(CONFIG)])(message)
    assert difference(arrays(answer), scrambled()) == 0
    assert "the message holds 2 ArrayRecords" in warnings()


def never(message: Message) -> Message:
    raise AssertionError("the client must not train")


def test_a_model_that_does_not_fit_is_refused_before_training() -> None:
    with pytest.raises(fedrot.SymmetryError, match="'extra' differs from the model that was received"):
        app_of(never, [align_mod(SYMMETRY)])(instruction({**state(), "extra": torch.ones(2)}))
    with pytest.raises(fedrot.SymmetryError, match="not supported"):
        app_of(never, [align_mod({"model_type": "mamba"})])(instruction(state()))
    with pytest.raises(fedrot.SymmetryError, match="The config is a NoneType"):
        app_of(never, [align_mod(None)])(instruction(state()))


# Order


def clipped(update: Mapping[str, Tensor], base: State) -> State:
    """Return the oracle of flat clipping."""
    norm = sum(float((update[k] - base[k]).double().square().sum()) for k in base) ** 0.5
    return {k: base[k] + min(1.0, CLIP / norm) * (update[k] - base[k]) for k in base}


#: Flower's mods that change an update, and what the server sends for them. No noise: sensitivity 0.
CHANGING: dict[str, tuple[Any, dict[str, Any]]] = {
    "fixedclipping_mod": (fixedclipping_mod, {"clipping_norm": CLIP}),
    "adaptiveclipping_mod": (adaptiveclipping_mod, {"clipping_norm": CLIP}),
    "LocalDpMod": (LocalDpMod(CLIP, sensitivity=0.0, epsilon=1.0, delta=0.1), {}),
}
MASKING = {"secagg_mod": secagg_mod, "secaggplus_mod": secaggplus_mod}
WRONG: dict[str, Any] = {
    **{name: mod for name, (mod, _) in CHANGING.items()},
    **MASKING,
    "legacy": legacy_fixedclipping_mod,
    "partial": functools.partial(fixedclipping_mod),
    "wrapped": functools.wraps(fixedclipping_mod)(lambda m, c, n: fixedclipping_mod(m, c, n)),
    "subclass": type("Ours", (LocalDpMod,), {})(CLIP, 0.0, 1.0, 0.1),
}


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_alignment_comes_before_clipping(name: str) -> None:
    base, update = state(), scrambled()
    mod, config = CHANGING[name]
    node = app_of(sends(update), [message_size_mod, mod, message_size_mod, align_mod(CONFIG)])
    answer = node(instruction(base, **config))
    expected = clipped(fedrot.align(update, base, SYMMETRY).apply(update), base)
    assert difference(arrays(answer), expected) < 1e-6
    assert difference(arrays(answer), clipped(update, base)) > 1e-3
    assert answer.content["metrics"].get("norm_bit") == (1 if "adaptive" in name else None)


@pytest.mark.parametrize("between", [[], [message_size_mod]], ids=["next", "further in"])
@pytest.mark.parametrize("case", sorted(WRONG))
def test_clipping_before_alignment_is_refused_at_the_first_message(
    case: str, between: list[Any]
) -> None:
    node = app_of(never, [align_mod(CONFIG), *between, WRONG[case]])
    with pytest.raises(fedrot.FedrotError, match="behind align_mod"):
        node(instruction(state(), clipping_norm=CLIP))


def test_the_order_across_an_app_and_its_function_is_seen() -> None:
    app = ClientApp(mods=[align_mod(CONFIG)])
    app.train(mods=[fixedclipping_mod])(lambda message, context: never(message))
    with pytest.raises(fedrot.FedrotError, match=r"mods=\[fixedclipping_mod, align_mod"):
        app(instruction(state(), clipping_norm=CLIP), Context(1, 1, {}, RecordDict(), {}))


class Callback:
    """A way to the client that is no function."""

    def __call__(self, message: Message, context: Context) -> Message:
        return reply(message, scrambled(), 10)


@pytest.mark.parametrize("call_next", [Callback(), Callback().__call__, functools.partial(Callback())])
def test_a_chain_that_cannot_be_seen_through_is_trusted(call_next: Any) -> None:
    base, update = state(), scrambled()
    answer = align_mod(CONFIG)(instruction(base), Context(1, 1, {}, RecordDict(), {}), call_next)
    assert difference(arrays(answer), fedrot.align(update, base, SYMMETRY).apply(update)) == 0


# Statistics


def squares(message: Message, context: Context, aligned: Mapping[str, Tensor]) -> Any:
    """Return a stand-in for the diagonal Fisher information: it depends on the coordinates."""
    if FISHER not in wanted_statistics(message):
        return {}
    return {FISHER: {name: t.square() + 0.1 for name, t in aligned.items() if t.is_floating_point()}}


def test_statistics_are_of_the_aligned_update() -> None:
    base, update = state(), scrambled()
    node = app_of(sends(update), [align_mod(CONFIG, statistics=squares)])
    assert list(node(instruction(base)).content) == ["arrays", "metrics"]
    answer = node(instruction(base, **{STATISTICS: FISHER}))
    aligned = fedrot.align(update, base, SYMMETRY).apply(update)
    found = read_statistics(answer.content)
    assert list(found) == [FISHER]
    assert difference(found[FISHER], {k: v.square() + 0.1 for k, v in aligned.items()}) == 0


def test_diagonal_fisher_merges_scrambled_clients_that_align_first() -> None:
    base = state()
    honest = [near(base, 0.1, seed) for seed in range(3)]

    def merged(scramble: bool, mods: list[Any]) -> ArrayRecord:
        sent = [
            fedrot.random_equivalent(u, SYMMETRY, i) if scramble else u for i, u in enumerate(honest)
        ]
        strategy = FedRot(CONFIG, alignment=None, aggregation=Fisher, fraction_evaluate=0.0)
        grid = FakeGrid({100 + i: app_of(sends(u), mods) for i, u in enumerate(sent)})
        return strategy.start(grid, ArrayRecord(base), 1).arrays

    mods = [align_mod(CONFIG, EAGER, squares)]
    expected = merged(False, mods)
    assert largest_difference(merged(True, mods), expected) < 1e-5
    plain = FedRot(CONFIG, alignment=replace(EAGER, anchor="global"), fraction_evaluate=0.0)
    grid = FakeGrid({100 + i: app_of(sends(u), []) for i, u in enumerate(honest)})
    assert largest_difference(plain.start(grid, ArrayRecord(base), 1).arrays, expected) > 1e-4


def with_statistics(update: State, statistics: Any) -> Train:
    def train(message: Message) -> Message:
        answer = reply(message, update, 10)
        answer.content[STATISTICS] = statistics_record(statistics)
        return answer

    return train


def test_statistics_of_the_client_move_with_its_update() -> None:
    base, update = state(), scrambled()
    rows = {"input_ids": torch.arange(4, 36).reshape(4, 8)}
    model = build().eval()
    model.load_state_dict(update)
    grams = fedrot.collect_gram(model, [rows])
    answer = app_of(with_statistics(update, grams), [align_mod(CONFIG)])(instruction(base))
    expected = fedrot.align(update, base, SYMMETRY).transport(grams)["gram"]
    found = read_statistics(answer.content)["gram"]
    assert difference(found, expected) < 1e-6
    assert difference(found, grams["gram"]) > 1e-2


def test_statistics_of_the_client_and_of_the_mod_leave_together_in_the_precision_of_the_mod() -> None:
    marks = {"trained": {"classifier.bias": torch.tensor([True, False, True])}}
    mod = align_mod(CONFIG, statistics=squares, dtype=torch.bfloat16)
    answer = app_of(with_statistics(scrambled(), marks), [mod])(
        instruction(state(), **{STATISTICS: FISHER})
    )
    found = read_statistics(answer.content)
    assert set(found) == {"trained", FISHER}
    dtypes = {array.dtype for array in answer.content.array_records[STATISTICS].values()}
    assert dtypes == {"bool", "bfloat16"}


def test_matrices_are_sketched_after_they_have_moved() -> None:
    base, update = state(), scrambled()
    model = build().eval()
    model.load_state_dict(update)
    grams = fedrot.collect_gram(model, [{"input_ids": torch.arange(4, 36).reshape(4, 8)}])
    mod = align_mod(CONFIG, share=0.15)
    answer = app_of(with_statistics(update, grams), [mod])(instruction(base))
    record = answer.content.array_records[STATISTICS]
    moved = fedrot.align(update, base, SYMMETRY).transport(grams)
    budget = int(0.15 * wire_bytes(answer.content.array_records["arrays"]))
    assert wire_bytes(record) <= budget
    assert record == statistics_record(moved, budget=budget)
    with pytest.raises(fedrot.FedrotError, match="give a positive share"):
        align_mod(CONFIG, share=0)


def test_statistics_that_cannot_follow_are_refused() -> None:
    fisher = {FISHER: {name: t.square() for name, t in scrambled().items()}}
    node = app_of(with_statistics(scrambled(), fisher), [align_mod(CONFIG)])
    with pytest.raises(fedrot.FedrotError, match="Compute it after aligning"):
        node(instruction(state()))


# Flower's legacy records and secure aggregation


def nameless(tensors: State) -> Parameters:
    return ndarrays_to_parameters([t.numpy() for t in tensors.values()])


def legacy_instruction(base: State, secure: bool = False) -> Message:
    content = compat.fitins_to_recorddict(FitIns(nameless(base), {}), keep_input=True)
    if secure:
        content["secaggplus_configs"] = ConfigRecord({})
    return Message(content, dst_node_id=1, message_type="train")


def sends_nameless(update: State) -> Train:
    result = FitRes(Status(Code.OK, ""), nameless(update), 10, {})
    return lambda m: Message(compat.fitres_to_recorddict(result, keep_input=True), reply_to=m)


def named(message: Message) -> State:
    parameters = compat.recorddict_to_fitres(message.content, keep_input=True).parameters
    return {
        name: torch.from_numpy(Array("", (), "numpy.ndarray", data).numpy())
        for name, data in zip(SYMMETRY.shapes, parameters.tensors, strict=True)
    }


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_without_names_take_them_from_the_symmetry(dtype: torch.dtype, secure: bool) -> None:
    base, update = {k: v.to(dtype) for k, v in state().items()}, scrambled()
    node = app_of(sends_nameless(update), [align_mod(SYMMETRY)])
    answer = node(legacy_instruction(base, secure))
    expected = fedrot.align(update, state(), SYMMETRY).apply(update)
    assert difference(named(answer), expected) < 1e-5
    assert {t.dtype for t in named(answer).values()} == {torch.float32}


def test_names_must_come_from_somewhere() -> None:
    with pytest.raises(fedrot.FedrotError, match="Give align_mod a Symmetry"):
        app_of(never, [align_mod(CONFIG)])(legacy_instruction(state()))
    with pytest.raises(fedrot.FedrotError, match="tensors without names, but the symmetry names"):
        app_of(never, [align_mod(SYMMETRY)])(legacy_instruction(without("classifier.bias")))
    turned = {**state(), "classifier.bias": torch.ones(7)}
    with pytest.raises(fedrot.SymmetryError, match=r"'classifier\.bias' differs"):
        app_of(never, [align_mod(SYMMETRY)])(legacy_instruction(turned))


def test_under_secure_aggregation_a_broken_update_drops_out(warnings: Callable[[], str]) -> None:
    """Nobody could drop it: masked, it would be added to the others."""
    node = app_of(sends_nameless(without("classifier.bias")), [align_mod(SYMMETRY)])
    with pytest.raises(fedrot.UpdateError, match="tensors without names"):
        node(legacy_instruction(state(), secure=True))
    node(legacy_instruction(state()))
    assert "tensors without names" in warnings()


def test_statistics_that_secure_aggregation_would_lose_are_refused() -> None:
    def statistics(message: Message, context: Context, aligned: Mapping[str, Tensor]) -> Any:
        return {FISHER: aligned}

    node = app_of(sends_nameless(scrambled()), [align_mod(SYMMETRY, statistics=statistics)])
    with pytest.raises(fedrot.FedrotError, match=f"drops the statistics '{FISHER}'"):
        node(legacy_instruction(state(), secure=True))
    assert STATISTICS in node(legacy_instruction(state())).content


def test_importing_the_mod_loads_no_model_library(tmp_path: Path) -> None:
    code = (
        "import sys, json; from fedrot.strategies import align_mod; print(json.dumps(list(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    heavy = {"transformers", "ray", "datasets", "pandas", "sklearn", "matplotlib"}
    assert not heavy & set(json.loads(result.stdout))
