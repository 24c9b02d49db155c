"""``fit_task_head`` for every kind of classifier: the head of all rows together, or a
reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from flwr.clientapp import ClientApp

import fedrot
from fedrot.strategies import FedRot
from fedrot.strategies.wire.fitting_messages import LOSSES, ROWS, STAGE, SUMS
from fedrot.task_head.losses import temperature_in_words
from tests.strategies.fakes import (
    Client,
    failure,
    grid_of,
    largest_difference,
    node_of,
    tensors_of,
)
from tests.strategies.fitting.classifiers import (
    KINDS,
    SINGLE,
    Answer,
    as_predicted,
    edited,
)


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


def test_a_head_that_is_worse_on_held_out_rows_is_not_taken(
    caplog,
):
    pairs = (
        (SINGLE.rows(seed), as_predicted(SINGLE.rows(10 + seed, 30)))
        for seed in range(3)
    )
    with caplog.at_level("INFO", logger="flwr"):
        found = SINGLE.fitted([SINGLE.client(*pair) for pair in pairs])
    assert "taken is the model before" in caplog.text
    assert "higher than before" in caplog.text
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

    def claim(answer: Answer) -> None:
        if SUMS in answer:
            answer[SUMS]["counts"][-1] *= 1e12

    nodes = [*kind.clients(), *kind.clients()]
    honest = kind.fitted(nodes)
    found = kind.fitted([edited(nodes[0], claim), *nodes[1:]])
    assert found.losses == pytest.approx(honest.losses, rel=0.5)


def scaled(record: str, factor: float, *names: str) -> Callable[[Client], Client]:
    def edit(answer: Answer) -> None:
        for name in names or tuple(answer.get(record, ())):
            if record in answer:
                answer[record][name] = answer[record][name] * factor

    return lambda node: edited(node, edit)


def without_scatter(answer: Answer) -> None:
    answer.get(SUMS, {}).pop("scatter", None)


def narrower(answer: Answer) -> None:
    if SUMS in answer:
        answer[SUMS] = {
            name: value[..., 1:].contiguous() for name, value in answer[SUMS].items()
        }


def without_the_action(message: Message) -> Message | None:
    try:
        return node_of(ClientApp())(message)
    except ValueError as error:  # As Flower's own grids do.
        return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)


def announcing(training: object) -> Callable[[Client], Client]:
    def spoil(node: Client) -> Client:
        def answer(message: Message) -> Message | None:
            found = node(message)
            if found is not None and ROWS in found.content:
                vars(found.content[ROWS])["_data"].update(training=training, held_out=0)
            return found

        return answer

    return spoil


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
    "negative": (scaled(SUMS, -1.0, "counts"), "negative", "held out"),
    "more rows": (scaled(SUMS, 2.0), "announced were 40", "held out"),
    "parts of rows": (scaled(SUMS, 0.3), "announced were 40", "held out"),
    "beyond tanh": (
        scaled(SUMS, 1e5, "scatter"),
        "larger than the model's",
        "held out",
    ),
    "impossible": (scaled(SUMS, -1.0, "scatter"), "second moments", "held out"),
    "infinite losses": (scaled(LOSSES, math.inf, "losses"), "NaN or Inf", "training"),
    "negative losses": (scaled(LOSSES, -1.0, "losses"), "negative", "training"),
    "no rows": (scaled(LOSSES, 0.0, "counts"), "0.0 rows", "training"),
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

    def node(message: Message) -> Message | None:
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
        assert f"Task head: the task head is not fitted. {found.reason}" in warnings()
        assert found.metrics() == {
            "fedrot-head-fitted": 0,
            "fedrot-head-failed": 1,
            "fedrot-head-temperature": 1,
        }


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
