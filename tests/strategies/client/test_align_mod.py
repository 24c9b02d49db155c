"""Alignment in the client's mods: replies are in the received model's coordinates."""

from __future__ import annotations

import functools

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.client.mod import fixedclipping_mod as legacy_fixedclipping_mod
from flwr.client.mod import secagg_mod, secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat

import fedrot
from fedrot.aggregation import Fisher
from fedrot.collect.statistics import FISHER
from fedrot.strategies import (
    FedRot,
    align_mod,
    from_arrays,
    to_arrays,
    wanted_statistics,
)
from fedrot.strategies.client.moves import ACTION, MESSAGE_TYPE
from fedrot.strategies.wire.arrays import STATISTICS
from fedrot.strategies.wire.statistics_record import read_statistics, statistics_record
from tests import families
from tests.models import EAGER, config_of, near
from tests.models import largest_difference as difference
from tests.strategies.classifier import NAME, SYMMETRY, state
from tests.strategies.fakes import (
    failure,
    grid_of,
    largest_difference,
    model_in,
    node_of,
    reply,
)

CONFIG, CLIP, BASE, BIAS = config_of(NAME), 0.5, state(), "classifier.bias"
#: An update in other coordinates than the model it was trained from, and what alignment
#: makes of it.
UPDATE = fedrot.random_equivalent(near(BASE, 0.02, 1), SYMMETRY, 1)
ALIGNED = fedrot.align(UPDATE, BASE, SYMMETRY).apply(UPDATE)


def sends(update, **metrics):
    return lambda message: reply(message, update, 10, **metrics)


def app_of(train, mods):
    app = ClientApp(mods=mods)
    for register in (
        app.train(),
        app.evaluate(),
        app.train("tuned"),
        app.train(ACTION),
        app.query(),
    ):
        register(lambda message, context: train(message))
    return node_of(app)


def instruction(base=BASE, *, kind="train", **config):
    content = RecordDict({"arrays": ArrayRecord(base), "config": ConfigRecord(config)})
    return Message(content, dst_node_id=1, message_type=kind)


def answered(train, mod, message=None):
    found = app_of(train, [mod])(instruction() if message is None else message)
    assert found is not None
    return found


def arrays(message):
    return model_in(message)


@pytest.mark.parametrize("kind", ["train", "train.tuned"])
@pytest.mark.parametrize(
    "symmetry",
    [SYMMETRY, CONFIG, CONFIG.to_dict(), lambda message, context: CONFIG],
    ids=["symmetry", "config", "dictionary", "function"],
)
def test_the_update_leaves_in_the_received_coordinates(symmetry, kind):
    answer = answered(
        sends(UPDATE, loss=0.5), align_mod(symmetry), instruction(kind=kind)
    )
    assert difference(arrays(answer), ALIGNED) == 0
    assert (
        difference(arrays(answer), near(BASE, 0.02, 1)) < 0.1 < difference(UPDATE, BASE)
    )
    assert dict(answer.content["metrics"]) == {"num-examples": 10, "loss": 0.5}


def test_what_does_not_move_keeps_its_bytes_and_the_clients_reply_stays_as_it_was():
    update = {k: v.half() for k, v in UPDATE.items()}
    sent = list[Message]()

    def train(message):
        sent.append(reply(message, update, 10))
        message.content.array_records["arrays"].clear()
        return sent[0]

    answer = answered(train, align_mod(CONFIG))
    assert difference(arrays(sent[0]), update) == 0
    assert {t.dtype for t in arrays(answer).values()} == {torch.float16}
    assert difference(arrays(answer), ALIGNED) < 2e-3
    name = "bert.embeddings.word_embeddings.weight"
    left, given = (
        m.content.array_records["arrays"][name].data for m in (answer, sent[0])
    )
    assert left == given
    assert list(answer.content["arrays"]) == list(sent[0].content["arrays"])


@pytest.mark.parametrize("canonical", [False, True])
def test_tied_arrays_stay_tied_unless_they_move_apart(canonical):
    """In canonical form the output layer holds the last norm's gain; the token table
    does not.
    """
    config = families.config_of("gpt2")
    base = families.model_of("gpt2").float().state_dict()
    update = near(base, 0.02, 1)
    update["lm_head.weight"] = update["transformer.wte.weight"]
    options = fedrot.AlignmentOptions(("residual", "ffn"), canonical=canonical)

    def train(message):
        answer = reply(message, update, 10)
        answer.content["arrays"] = to_arrays(update)
        return answer

    answer = answered(train, align_mod(config, options), instruction(base))
    found = from_arrays(answer.content.array_records["arrays"])
    symmetry = fedrot.symmetry_of(config, base)
    assert (
        difference(found, fedrot.align(update, base, symmetry, options).apply(update))
        == 0
    )
    tied = found["lm_head.weight"] is found["transformer.wte.weight"]
    assert tied is not canonical


@pytest.mark.parametrize("kind", ["evaluate", "query", MESSAGE_TYPE])
def test_other_messages_pass_through_untouched(kind):
    sent = []

    def serve(message):
        sent.append(reply(message, UPDATE, 10))
        return sent[0]

    assert answered(serve, align_mod(CONFIG), instruction(kind=kind)) is sent[0]


def squares(message, context, aligned):
    """Return a stand-in for the diagonal Fisher information: it depends on the
    coordinates.
    """
    if FISHER not in wanted_statistics(message):
        return {}
    return {
        FISHER: {
            name: t.square() + 0.1
            for name, t in aligned.items()
            if t.is_floating_point()
        }
    }


def test_scrambled_clients_give_the_unscrambled_mean_by_their_fisher_information():
    honest = [near(BASE, 0.1, seed) for seed in range(3)]
    turned = [
        fedrot.random_equivalent(update, SYMMETRY, i) for i, update in enumerate(honest)
    ]

    def average(updates, *mods, aggregation=Fisher):
        given = {"aggregation": aggregation, "fraction_evaluate": 0.0}
        strategy = FedRot(CONFIG, alignment=None, **given)
        grid = grid_of(app_of(sends(update), [*mods]) for update in updates)
        return strategy.start(grid, ArrayRecord(BASE), 1).arrays

    mod = align_mod(CONFIG, EAGER, squares)
    expected = average(honest, mod)
    assert largest_difference(average(turned, mod), expected) < 1e-5
    assert largest_difference(average(turned, aggregation=None), expected) > 0.1
    assert largest_difference(average(honest, mod, aggregation=None), expected) > 1e-4


def spoilt(change):
    def train(message):
        answer = reply(message, UPDATE, 10)
        change(answer.content)
        return answer

    return train


def without(name):
    return {key: value for key, value in UPDATE.items() if key != name}


BROKEN = {
    "the client failed: crashed": failure,
    "'classifier.bias' is missing": sends(without("classifier.bias")),
    "holds NaN or Inf": sends(
        {**UPDATE, "classifier.bias": torch.full((3,), torch.nan)}
    ),
    "The reply holds 2 ArrayRecords": spoilt(
        lambda content: content.update(more=ArrayRecord(UPDATE))
    ),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_what_is_no_update_leaves_unchanged_with_a_warning(reason, warnings):
    sent = []

    def train(message):
        sent.append(BROKEN[reason](message))
        return sent[0]

    assert answered(train, align_mod(CONFIG)) is sent[0]
    assert "Not aligned" in warnings()
    assert reason in warnings()


def test_a_message_with_several_models_is_left_alone(
    warnings,
):
    message = instruction()
    message.content["more"] = ArrayRecord(BASE)
    assert (
        difference(arrays(answered(sends(UPDATE), align_mod(CONFIG), message)), UPDATE)
        == 0
    )
    assert "the message holds 2 ArrayRecords" in warnings()


def never(message):
    raise AssertionError("the client must not train")


def clipped(update, base):
    norm = (
        sum(float((update[k] - base[k]).double().square().sum()) for k in base) ** 0.5
    )
    return {k: base[k] + min(1.0, CLIP / norm) * (update[k] - base[k]) for k in base}


#: Flower's mods that change an update, and what the server sends for them. No noise:
#: sensitivity 0.
CHANGING = {
    "fixedclipping_mod": (fixedclipping_mod, {"clipping_norm": CLIP}),
    "adaptiveclipping_mod": (adaptiveclipping_mod, {"clipping_norm": CLIP}),
    "LocalDpMod": (LocalDpMod(CLIP, sensitivity=0.0, epsilon=1.0, delta=0.1), {}),
}
WRONG = {
    **{name: mod for name, (mod, _) in CHANGING.items()},
    "secagg_mod": secagg_mod,
    "secaggplus_mod": secaggplus_mod,
    "legacy": legacy_fixedclipping_mod,
    "partial": functools.partial(fixedclipping_mod),
    "wrapped": functools.wraps(fixedclipping_mod)(
        lambda m, c, n: fixedclipping_mod(m, c, n)
    ),
    "subclass": type("Ours", (LocalDpMod,), {})(CLIP, 0.0, 1.0, 0.1),
}


@pytest.mark.parametrize("name", CHANGING)
def test_alignment_comes_before_clipping(name):
    mod, config = CHANGING[name]
    node = app_of(
        sends(UPDATE), [message_size_mod, mod, message_size_mod, align_mod(CONFIG)]
    )
    answer = node(instruction(**config))
    assert answer is not None
    assert difference(arrays(answer), clipped(ALIGNED, BASE)) < 1e-6
    assert difference(arrays(answer), clipped(UPDATE, BASE)) > 1e-3
    assert answer.content["metrics"].get("norm_bit") == (
        1 if "adaptive" in name else None
    )


@pytest.mark.parametrize("case", WRONG)
def test_clipping_before_alignment_is_refused_at_the_first_message(case):
    for between in ([], [message_size_mod]):
        node = app_of(never, [align_mod(CONFIG), *between, WRONG[case]])
        with pytest.raises(fedrot.FedrotError, match="behind align_mod"):
            node(instruction(clipping_norm=CLIP))
    if case in CHANGING and case != "LocalDpMod":  # Across an app and its function.
        app = ClientApp(mods=[align_mod(CONFIG)])
        app.train(mods=[WRONG[case]])(lambda message, context: never(message))
        with pytest.raises(fedrot.FedrotError, match=rf"mods=\[{case}, align_mod"):
            node_of(app)(instruction(clipping_norm=CLIP))


def with_statistics(statistics):
    return spoilt(
        lambda content: content.update({STATISTICS: statistics_record(statistics)})
    )


def test_statistics_are_of_the_aligned_update_if_the_server_asks_for_them():
    mod = align_mod(CONFIG, statistics=squares)
    assert list(answered(sends(UPDATE), mod).content) == ["arrays", "metrics"]
    answer = answered(sends(UPDATE), mod, instruction(**{STATISTICS: FISHER}))
    found = read_statistics(answer.content)
    assert list(found) == [FISHER]
    assert (
        difference(found[FISHER], {k: v.square() + 0.1 for k, v in ALIGNED.items()})
        == 0
    )


def test_statistics_of_client_and_mod_leave_together_in_the_mods_precision():
    marks = {"trained": {"classifier.bias": torch.tensor([True, False, True])}}
    mod = align_mod(CONFIG, statistics=squares, dtype=torch.bfloat16)
    answer = answered(with_statistics(marks), mod, instruction(**{STATISTICS: FISHER}))
    assert set(read_statistics(answer.content)) == {"trained", FISHER}
    dtypes = {
        array.dtype for array in answer.content.array_records[STATISTICS].values()
    }
    assert dtypes == {"bool", "bfloat16"}


# Flower's legacy records and secure aggregation


def nameless(tensors):
    return ndarrays_to_parameters([t.numpy() for t in tensors.values()])


def legacy(base=BASE, secure=False):
    content = compat.fitins_to_recorddict(FitIns(nameless(base), {}), keep_input=True)
    if secure:
        content["secaggplus_configs"] = ConfigRecord({})
    return Message(content, dst_node_id=1, message_type="train")


def sends_nameless(update):
    result = FitRes(Status(Code.OK, ""), nameless(update), 10, {})
    return lambda m: Message(
        compat.fitres_to_recorddict(result, keep_input=True), reply_to=m
    )


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_without_names_take_them_from_the_symmetry(dtype, secure):
    base = {k: v.to(dtype) for k, v in BASE.items()}
    answer = answered(sends_nameless(UPDATE), align_mod(SYMMETRY), legacy(base, secure))
    parameters = compat.recorddict_to_fitres(answer.content, keep_input=True).parameters
    data = (Array("", (), "numpy.ndarray", one).numpy() for one in parameters.tensors)
    found = dict(zip(SYMMETRY.shapes, map(torch.from_numpy, data), strict=True))
    assert difference(found, ALIGNED) < 1e-5
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def every(message, context, aligned):
    return {FISHER: aligned}


NAMELESS = align_mod(SYMMETRY)
FEWER = without(BIAS)
SQUARES = with_statistics(
    {FISHER: {name: tensor.square() for name, tensor in UPDATE.items()}}
)
#: What raises at the client: the mod, what the client does with which message, and a
#: word of the error.
RAISES = [
    (
        NAMELESS,
        never,
        instruction({**BASE, "extra": torch.ones(2)}),
        "'extra' differs from the model",
    ),
    (align_mod({"model_type": "mamba"}), never, instruction(), "not supported"),
    (align_mod(None), never, instruction(), "The config is a NoneType"),
    (align_mod(CONFIG), SQUARES, instruction(), "Compute it after aligning"),
    (align_mod(CONFIG), never, legacy(), "Give align_mod a Symmetry"),
    (NAMELESS, never, legacy(FEWER), "tensors without names, but the symmetry names"),
    (NAMELESS, never, legacy({**BASE, BIAS: torch.ones(7)}), f"'{BIAS}' differs"),
    (NAMELESS, sends_nameless(FEWER), legacy(secure=True), "tensors without names"),
    (
        align_mod(SYMMETRY, statistics=every),
        sends_nameless(UPDATE),
        legacy(secure=True),
        f"drops the statistics '{FISHER}'",
    ),
]


@pytest.mark.parametrize(("mod", "train", "message", "word"), RAISES)
def test_what_cannot_go_on_says_so_at_the_client(mod, train, message, word):
    with pytest.raises(fedrot.FedrotError, match=word):
        answered(train, mod, message)


def test_without_secure_aggregation_the_same_is_sent(
    warnings,
):
    answered(sends_nameless(FEWER), NAMELESS, legacy())
    assert "tensors without names" in warnings()
    mod = align_mod(SYMMETRY, statistics=every)
    assert STATISTICS in answered(sends_nameless(UPDATE), mod, legacy()).content
