"""Evaluations of clients: averaged, or left out and named in one line."""

import math

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedrot.strategies import FedRot
from tests.strategies.classifier import SYMMETRY, state
from tests.strategies.fakes import failure, grid_of


def evaluation(**metrics):
    content = RecordDict({"metrics": MetricRecord(metrics)})
    return lambda message: Message(content, reply_to=message)


def without_content(to):
    message = evaluation(rows=1, loss=9.0)(to)
    message.__dict__["_content"] = None
    return message


def without_reason(to):
    return Message(Error(1), reply_to=to)


def evaluated(strategy, answers, again=()):
    """Return the average of the answers; the first client answers again at the end."""
    grid = grid_of([failure] * len(answers))
    arrays = ArrayRecord(state())
    asked = list(strategy.configure_evaluate(1, arrays, ConfigRecord(), grid))
    sent = [answer(message) for answer, message in zip(answers, asked, strict=True)]
    sent += [answer(asked[0]) for answer in again]
    return strategy.aggregate_evaluate(1, iter(sent))


FORGED = "crashed\n\x1b[31msecond " * 50_000
#: Evaluations that are left out, and a word of the line of the log.
LEFT_OUT = {
    "nothing": (lambda m: Message(RecordDict(), reply_to=m), "0 MetricRecords"),
    "no content": (without_content, "Unusable"),
    "negative": (evaluation(rows=-1, loss=9.0), "'rows' is -1"),
    "infinite": (evaluation(rows=math.inf, loss=9.0), "'rows' is inf"),
    "no weight": (evaluation(loss=9.0), "no 'rows'"),
    "a list": (evaluation(rows=1, loss=[9.0, 9.0], accuracy=1.0), "loss (list of 2)"),
    "another metric": (evaluation(rows=1, loss=9.0, f1=1.0), "f1"),
    "NaN of no rows": (evaluation(rows=0, loss=math.nan, accuracy=1.0), "is nan"),
    "Inf of no rows": (evaluation(rows=0.0, loss=1.0, accuracy=math.inf), "is inf"),
    "NaN": (evaluation(rows=5, loss=1.0, accuracy=math.nan), "'accuracy' is nan"),
    "-Inf": (evaluation(rows=5, loss=-math.inf, accuracy=1.0), "'loss' is -inf"),
    "nearly no rows": (evaluation(rows=1e-30, loss=9.0, accuracy=1.0), "from 1e-09"),
    "failed": (lambda m: Message(Error(1, FORGED), reply_to=m), "second"),
}


def test_evaluations_that_cannot_be_averaged_are_left_out_and_named_in_one_line(
    caplog,
):
    """The others are weighted by the metric that the strategy names, in whatever order
    theirs are.
    """
    good = [
        evaluation(rows=1, loss=0.0, accuracy=1.0),
        evaluation(accuracy=0.0, loss=1.0, rows=3),
        evaluation(rows=0, loss=7.0, accuracy=7.0),
    ]
    answers, words = zip(*LEFT_OUT.values(), strict=True)
    strategy = FedRot(SYMMETRY, weighted_by_key="rows")
    with caplog.at_level("INFO", logger="flwr"):
        again = [evaluation(rows=100, loss=9.0), failure]
        mean = evaluated(strategy, [*good, *answers], again)
    assert dict(mean) == pytest.approx({"loss": 0.75, "accuracy": 0.25})
    lines = [record.getMessage().strip() for record in caplog.records]
    assert all(line.isprintable() and len(line) < 1000 for line in lines)
    told = [line for line in lines if "Evaluation of c" in line or "crashed" in line]
    assert len(told) == len(LEFT_OUT) + 1
    text = " ".join(told)
    assert [w for w in (*words, "already answered") if w not in text] == []


def test_numbers_in_lists_are_finite_unless_no_client_has_finite_ones(warnings):
    honest, odd = (
        evaluation(**{"num-examples": 1, "losses": [3.0, last]})
        for last in (4.0, math.nan)
    )
    strategy = FedRot(SYMMETRY)
    assert evaluated(strategy, [odd, honest, odd])["losses"] == [3.0, 4.0]
    assert warnings().count("dropped: The metric 'losses' is nan") == 2
    first, last = evaluated(strategy, [odd, odd])["losses"]
    assert first == 3.0
    assert math.isnan(last)
    assert "No client has finite metrics only" in warnings()


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_evaluations_without_examples_average_to_nothing(loss):
    strategy = FedRot(SYMMETRY)
    nothing = evaluation(**{"num-examples": 0, "loss": loss})
    assert evaluated(strategy, [nothing, without_reason]) is None
    assert strategy.aggregate_evaluate(1, []) is None
