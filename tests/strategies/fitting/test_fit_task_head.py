"""``fit_task_head`` for every kind of classifier: the head of all rows together, or a
reason.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedrot
from fedrot.strategies import (
    FedRot,
    LabelledRows,
    answer_with_sums,
    fit_task_head,
)
from fedrot.strategies.fitting.fit_task_head import WIDEST
from fedrot.strategies.fitting.result import FittedTaskHead
from fedrot.strategies.wire.fitting_messages import LOSSES, ROWS, STAGE, SUMS
from fedrot.task_head import task_head_of
from fedrot.task_head.losses import collect_losses, temperature_in_words
from tests.strategies.fakes import (
    failure,
    grid_of,
    largest_difference,
    node_of,
    tensors_of,
)
from tests.strategies.fitting.classifiers import (
    ALL_ROWS,
    KINDS,
    SINGLE,
    as_predicted,
    edited,
)
from tests.strategies.fitting.feature_clients import OLD, client, drawn, fitted


@pytest.mark.parametrize("name", KINDS)
def test_the_head_is_that_of_one_place_at_the_best_temperature(name, warnings):
    """Clients' adapters may have smaller ranks: features are those of the server's."""
    kind = KINDS[name]
    before = torch.random.get_rng_state()
    found = kind.fitted(kind.clients())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert warnings() == ""
    best, shrinkage, temperature, head = kind.best()
    assert (found.fitted, found.clients, found.rows) == (True, 3, 135)
    assert (found.reason, found.metrics()["fedrot-head-failed"]) == ("", 0)
    assert (found.shrinkage, found.temperature) == (shrinkage, temperature)
    for key, tensor in tensors_of(found.arrays).items():
        if key in head:
            torch.testing.assert_close(tensor, head[key], rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(tensor, kind.state()[key])
    was, calibrated, after = found.losses
    assert after == pytest.approx(best, rel=1e-4)
    assert after < calibrated <= was
    if not kind.adapter:
        assert was == pytest.approx(kind.judged(kind.state()), rel=1e-4)
        old = kind.judged(kind.state(), kind.temperatures)
        assert calibrated == pytest.approx(old, rel=1e-4)
        assert kind.judged(tensors_of(found.arrays)) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize(
    ("temperature", "word"),
    [
        (6.17, "over-confident"),
        (1.26, "over-"),
        (1.25, "near 1"),
        (0.8, "near 1"),
        (0.71, "under-"),
    ],
)
def test_a_temperature_is_explained(temperature, word):
    assert temperature_in_words(temperature).startswith(
        f"temperature {temperature:.2f} ({word}"
    )


@pytest.mark.parametrize(
    ("loss", "change", "error", "words"),
    [
        (-0.0, -0.0, 0.0, ("rows is 0. By", "is the same as the old model's; ")),
        (0.7, 1e-9, 1e-10, ("is the same as the old model's; ",)),
        (
            0.7,
            0.02,
            0.005,
            ("is higher than the old model's by 0.02 ± 0.005 (standard error)",),
        ),
        (
            0.7,
            -0.02,
            0.01,
            ("is lower than the old model's by 0.02 ± 0.01", "within noise"),
        ),
    ],
)
def test_numbers_of_the_choice_in_words(loss, change, error, words, caplog):
    losses = (1.0, 0.9, loss)
    figures = {"losses": losses, "rows": 200, "change": change, "error": error}
    found = FittedTaskHead(ArrayRecord(), fitted=True, clients=5, **figures)
    with caplog.at_level("INFO", logger="flwr"):
        found.log("Round 1")
    assert "By the trimmed mean of the clients' changes" in caplog.text
    assert [word for word in words if word not in caplog.text] == []


def test_the_loss_that_is_told_is_a_property_of_the_model():
    """Of five clients and more, whatever the head before: the oracle are all rows."""
    sizes = [10, 20, 40, 80, 160, 320]
    clients = [client(seed, held_out=rows) for seed, rows in enumerate(sizes)]
    rows = [drawn(1000 + seed, rows) for seed, rows in enumerate(sizes)]
    features, labels = map(torch.cat, zip(*rows, strict=True))
    told = {}
    for seed in range(6):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            old = {name: torch.randn(tensor.shape) for name, tensor in OLD.items()}
        found = fitted(clients, old)
        weight, bias = (tensors_of(found.arrays)[name].double() for name in OLD)
        loss = cross_entropy(features @ weight.mT + bias, labels)
        assert found.loss == pytest.approx(float(loss), rel=1e-5)
        assert found.metrics()["fedrot-head-loss"] == found.loss
        assert found.rows == sum(sizes)
        told.setdefault((found.shrinkage, found.temperature), []).append(found.loss)
    several = [losses for losses in told.values() if len(losses) > 1]
    assert several
    assert all(max(losses) - min(losses) < 1e-9 for losses in several)


def test_a_head_that_is_worse_on_held_out_rows_is_not_taken(
    caplog,
):
    pairs = (
        (SINGLE.rows(seed), as_predicted(SINGLE.rows(10 + seed, 30)))
        for seed in range(3)
    )
    with caplog.at_level("INFO", logger="flwr"):
        found = SINGLE.fitted([SINGLE.client(*pair) for pair in pairs])
    assert "taken is the old model" in caplog.text
    assert "higher than the old model's by" in caplog.text
    assert "90 held-out rows are few" in caplog.text
    assert not found.fitted
    assert found.losses[1] < found.losses[2]
    for name, tensor in tensors_of(found.arrays).items():
        own = SINGLE.state()[name] / (
            found.temperature if name.startswith("classifier") else 1
        )
        assert torch.allclose(tensor, own, rtol=1e-6, atol=0)


def test_numbers_in_other_units_have_the_same_head():
    """Their loss has one unit, which no client sets alone."""
    kind = KINDS["regression"]
    before = kind.fitted(kind.clients())
    for factor, offset in ((1e6, 0), (1e-6, 0), (1, 1e3)):
        other = replace(
            kind, label=lambda ids, f=factor, o=offset: f * kind.label(ids) + o
        )
        found = other.fitted(other.clients())
        assert (found.fitted, found.shrinkage) == (True, before.shrinkage)
        expected, weight = (
            tensors_of(fit.arrays)["classifier.weight"] for fit in (before, found)
        )
        torch.testing.assert_close(weight / factor, expected, rtol=1e-3, atol=1e-3)

    def claim(answer):
        if SUMS in answer:
            answer[SUMS]["counts"][-1] *= 1e12

    nodes = [*kind.clients(), *kind.clients()]
    honest = kind.fitted(nodes)
    found = kind.fitted([edited(nodes[0], claim), *nodes[1:]])
    assert found.losses == pytest.approx(honest.losses, rel=0.5)


def scaled(record, factor, *names):
    def edit(answer):
        for name in names or tuple(answer.get(record, ())):
            if record in answer:
                answer[record][name] = answer[record][name] * factor

    return lambda node: edited(node, edit)


def without_scatter(answer):
    answer.get(SUMS, {}).pop("scatter", None)


def narrower(answer):
    if SUMS in answer:
        answer[SUMS] = {
            name: value[..., 1:].contiguous() for name, value in answer[SUMS].items()
        }


def without_the_action(message):
    try:
        return node_of(ClientApp())(message)
    except ValueError as error:  # As Flower's own grids do.
        return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)


def announcing(training):
    numbers = {"training": training, "held_out": 0}
    return lambda node: edited(
        node, lambda answer: answer.get(ROWS, {}).update(numbers)
    )


#: What a client answers, a word of the reason, and the rows of it that count: those
#: that it trains on ("training"), those that it holds out ("held out"), or none.
BAD = {
    "fails": (lambda node: failure, "it failed: crashed", ""),
    "no action": (lambda node: without_the_action, "answer_with_sums", ""),
    "silent": (lambda node: lambda message: None, "no answer before the timeout", ""),
    **{f"{n} rows": (announcing(n), "numbers of rows", "") for n in (-1, 1.5, 10**13)},
    "other sums": (
        lambda node: edited(node, without_scatter),
        "sums of features",
        "held out",
    ),
    "another shape": (
        lambda node: edited(node, narrower),
        "sums of features",
        "held out",
    ),
    "NaN": (scaled(SUMS, math.nan, "scatter"), "NaN or Inf", "held out"),
    "huge": (scaled(SUMS, 1e30, "sums"), "values above", "held out"),
    "more rows": (scaled(SUMS, 2.0), "announced were 40", "held out"),
    "parts of rows": (scaled(SUMS, 0.3), "announced were 40", "held out"),
    "beyond tanh": (
        scaled(SUMS, 1e5, "scatter"),
        "larger than the model's",
        "held out",
    ),
    "infinite losses": (scaled(LOSSES, math.inf, "losses"), "NaN or Inf", "training"),
    "half a row": (scaled(LOSSES, 1.0125, "counts"), "40.5 rows", "training"),
}
#: Of one kind all, of the others those whose sums have another form.
CASES = [("single", what) for what in BAD] + [
    (name, what)
    for name in ("multi", "regression", "adapter")
    for what in ("another shape", "NaN", "more rows", "infinite losses")
]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_an_answer_that_is_none_is_left_out_and_named(name, what, warnings):
    """The head is that without the client; of its rows those count about which it says
    nothing bad.
    """
    kind, (spoil, word, counts) = KINDS[name], BAD[what]
    training = kind.rows(7, 40)
    held_out = kind.rows(17, 40)
    clients = kind.clients()
    place = 3 * (len(what) % 2)
    clients.insert(place, spoil(kind.client(training, held_out)))
    found = kind.fitted(clients)
    assert f"Client {100 + place}" in warnings()
    assert word in warnings()
    left = (
        training if counts == "training" else None,
        held_out if counts == "held out" else None,
    )
    expected = kind.fitted([*kind.clients(), kind.client(*left)])
    assert (found.fitted, found.temperature) == (True, expected.temperature)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert largest_difference(found.arrays, expected.arrays) == 0


def answering(**rows):
    """Return a client whose functions return these in each call."""
    app = ClientApp()
    both = {"training": [SINGLE.rows(7)], "held_out": [SINGLE.rows(17, 40)], **rows}
    functions = {name: (lambda own=own: own) for name, own in both.items()}
    data = LabelledRows(SINGLE.drawn, **functions)
    answer_with_sums(app, lambda message, context: data, privacy=ALL_ROWS)
    return node_of(app)


@pytest.mark.parametrize("name", ["training", "held_out"])
def test_an_iterator_that_is_used_up_is_named(name, warnings):
    used = answering(**{name: iter([SINGLE.rows(7)])})
    # All functions return the same object; a client without rows has an empty list.
    SINGLE.fitted([used, answering(**{name: []}), answering()])
    assert "Client 100: it failed" in warnings()
    assert f"{name} of LabelledRows returns the same iterator" in warnings()
    assert "Client 101" not in warnings()
    with pytest.raises(fedrot.FedrotError, match="used up"):
        SINGLE.fitted([used])
    with pytest.raises(fedrot.FedrotError, match="iterator"):
        collect_losses(SINGLE.build(), iter([]))


@pytest.mark.parametrize(
    "convert", [Tensor.tolist, Tensor.numpy], ids=["list", "array"]
)
@pytest.mark.parametrize("name", ["single", "multi", "regression"])
def test_labels_may_be_arrays_and_lists(name, convert, warnings):
    kind = KINDS[name]
    pairs = [
        [{**rows, "labels": convert(rows["labels"])} for rows in pair]
        for pair in kind.pairs()
    ]
    found = kind.fitted([kind.client(*pair) for pair in pairs])
    assert warnings() == ""
    assert largest_difference(found.arrays, kind.fitted(kind.clients()).arrays) == 0


@pytest.mark.parametrize(
    ("batch", "word"),
    [
        ({**SINGLE.rows(7), "labels": ["good", "bad"]}, "a batch are ['good', 'bad']"),
        ({**SINGLE.rows(7), "labels": [[0, 1], [2]]}, "a batch are [[0, 1], [2]]"),
        (tuple(SINGLE.rows(7).values()), "A batch is a tuple"),
    ],
)
def test_batches_that_cannot_be_read_are_named(batch, word, warnings):
    SINGLE.fitted([*SINGLE.clients(), answering(held_out=[batch])])
    assert "Client 103: it failed" in warnings()
    assert word in warnings()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda given: None,
        lambda given: {**given, "labels": torch.full_like(given["labels"], -100)},
        lambda given: {
            name.replace("labels", "label"): value for name, value in given.items()
        },
    ],
    ids=["none", "unlabelled", "misnamed"],
)
@pytest.mark.parametrize("place", [0, 1], ids=["training", "held-out"])
def test_a_client_may_lack_rows_of_one_kind(place, spoil):
    """The rows of the other kind count; nobody asks for those that it lacks."""
    pair = [SINGLE.rows(1, 30), SINGLE.rows(2, 30)]
    pair[place] = spoil(pair[place])
    asked = []

    def node(message):
        asked.extend(message.content.config_records.values())
        return SINGLE.client(*pair)(message)

    clients = [node, SINGLE.client(SINGLE.rows(7), SINGLE.rows(17, 40))]
    found = SINGLE.fitted(clients, config=ConfigRecord({"epoch": 7}))
    assert [(one[STAGE], one["epoch"]) for one in asked] == [
        ("count", 7),
        ("sum" if place else "evaluate", 7),
    ]
    assert found.rows == 40 + 30 * (place == 0)


def test_a_head_that_cannot_be_fitted_stays_as_it_is(
    warnings,
):
    one_class = {**SINGLE.rows(0), "labels": torch.zeros(80, dtype=torch.int64)}
    for training, reason in ((one_class, "two classes"), (None, "training rows")):
        found = SINGLE.fitted(
            [SINGLE.client(training, SINGLE.rows(seed)) for seed in (10, 11)]
        )
        assert (found.fitted, found.temperature) == (False, 1)
        assert largest_difference(found.arrays, ArrayRecord(SINGLE.state())) == 0
        assert reason in found.reason
        assert f"the model is taken as it is. {found.reason}" in warnings()
        assert found.metrics() == {
            "fedrot-head-fitted": 0,
            "fedrot-head-failed": 1,
            "fedrot-head-temperature": 1,
        }


def test_a_task_head_with_more_inputs_than_stated_is_refused():
    state = SINGLE.state()
    weight = f"{task_head_of(SINGLE.config, state)}.weight"
    state[weight] = torch.zeros(len(state[weight]), WIDEST + 1)
    with pytest.raises(fedrot.FedrotError, match=f"{WIDEST + 1} inputs"):
        fit_task_head(grid_of([]), ArrayRecord(state), SINGLE.config)


@pytest.mark.parametrize(
    ("clients", "given", "word"),
    [
        ([failure, failure], {}, "No client gave a usable answer"),
        ([SINGLE.client(SINGLE.rows(1), None)], {}, "no client has held-out rows"),
        ([], {"task_head": "elsewhere"}, "no layer 'elsewhere'"),
    ],
)
def test_what_gives_no_head_is_an_error(clients, given, word):
    with pytest.raises(fedrot.FedrotError, match=word):
        SINGLE.fitted(clients, **given)
    if given:
        strategy = FedRot(SINGLE.config, fit_head="elsewhere")
        with pytest.raises(fedrot.FedrotError, match=word):
            strategy.start(grid_of(clients), ArrayRecord(SINGLE.state()), 1)
