"""One temperature and heads compared by summed losses, against losses computed row by
row.
"""

import doctest
import math
from dataclasses import replace

import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrot.errors import FedrotError, UpdateError
from fedrot.task_head import losses as module
from fedrot.task_head.losses import (
    ONE,
    TEMPERATURES,
    LossSums,
    TaskHeads,
    best_temperature,
    collect_losses,
    compare_losses,
    with_temperature,
)
from tests.families import model_of, state_of
from tests.fedrot.oracles import normal, seeded
from tests.fedrot.task_head.classifiers import (
    CLASSES,
    LAST,
    batch_for,
    loss_of,
    rows_of,
)
from tests.models import fresh_model
from tests.models import inputs as tokens


def heads_of(name, model, factors, partner):
    """Return multiples of a model's own head."""
    state = model.state_dict()
    weight = state[f"{LAST[name]}.weight"]
    bias = state.get(f"{LAST[name]}.bias", torch.zeros(len(weight)))
    weights, biases = (
        torch.stack([factor * one for factor in factors]) for one in (weight, bias)
    )
    return TaskHeads(weights, biases, torch.tensor(partner))


@pytest.mark.parametrize("name", ["bert", "gpt2-classifier", "deberta-embedding"])
def test_losses_of_heads_are_those_of_models_with_these_heads(name):
    """The squares are those of a loop over rows, against the old model or a head's
    partner.
    """
    bodies = [model_of(name), model_of(name, state_of(name, seed=1))]
    batches = [batch_for(name, 4, seed=1), batch_for(name, 3, seed=2)]
    head = LAST[name]
    factors = ((1, 2, -1), (1, 0.5))
    partners = ((-1, 0, 1), (-1, 0))
    given = [
        heads_of(name, *each) for each in zip(bodies, factors, partners, strict=True)
    ]
    found = compare_losses(iter(bodies), batches, head, given)
    of_rows = []
    for model, heads in zip(bodies, given, strict=True):
        state = model.state_dict()
        start = len(of_rows)
        for index, partner in enumerate(heads.partner.tolist()):
            place = len(of_rows)
            own = {
                f"{head}.weight": heads.weight[index],
                f"{head}.bias": heads.bias[index],
            }
            model.load_state_dict(
                {**state, **{k: v for k, v in own.items() if k in state}}
            )
            _, labels, logits = rows_of(model, batches, name)
            of_rows.append([loss_of(logits, labels, t) for t in TEMPERATURES])
            right = (logits.argmax(1) == labels).sum()
            assert found.counts[[0, place + 1]].tolist() == [len(labels), right]
            summed = [losses.sum() for losses in of_rows[place]]
            assert found.losses[place].tolist() == pytest.approx(summed, rel=1e-6)
            for t in range(0, len(TEMPERATURES), 7):
                old = of_rows[0][ONE] if partner < 0 else of_rows[start + partner][t]
                squares = ((of_rows[place][t] - old) ** 2).sum()
                assert float(found.squares[place, t]) == pytest.approx(
                    squares, rel=1e-5, abs=1e-9
                )


def test_one_model_may_come_with_other_weights_and_not_with_other_rows():
    model = model_of("bert")
    rows = [batch_for("bert", 4, seed) for seed in (1, 2)]
    heads = [heads_of("bert", model, [1], [-1])]

    def models(change):
        yield model
        change()
        yield model

    found = compare_losses(
        models(lambda: model.bert.pooler.dense.weight.data.mul_(3)),
        rows,
        "classifier",
        heads * 2,
    )
    alone = compare_losses([model], rows, "classifier", heads)
    torch.testing.assert_close(found.losses[1:], alone.losses)
    assert found.losses[0, ONE] != found.losses[1, ONE]
    with pytest.raises(FedrotError, match="differ"):
        compare_losses(models(rows.reverse), rows, "classifier", heads * 2)
    with pytest.raises(UpdateError, match="different numbers of heads"):
        alone + found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda h: h._replace(weight=h.weight[:, :, 1:]),
            r"Weights \[2, 3, 23\].* \[3, 24\]",
        ),
        (lambda h: h._replace(bias=h.bias[:, 1:]), r"biases \[2, 2\]"),
        (lambda h: h._replace(partner=torch.tensor([-1, 2])), r"partners \[-1, 2\]"),
        (lambda h: TaskHeads(*(value[:0] for value in h)), r"partners \[\]"),
    ],
)
def test_heads_that_do_not_fit_the_layer_are_refused(change, message):
    model = model_of("bert")
    heads = change(heads_of("bert", model, [1, 2], [-1, 0]))
    with pytest.raises(FedrotError, match=message):
        compare_losses([model], [batch_for("bert", 4)], "classifier", [heads])


def sums_of(losses, rows=5, correct=3):
    counts = torch.tensor([rows, correct], dtype=torch.float64)
    return LossSums(losses[None], torch.zeros_like(losses[None]), counts)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sharpness=st.floats(0.5, 8))
def test_the_best_temperature_is_within_a_step_of_the_optimum(seed, sharpness):
    generator = seeded(seed)
    sure = 2 * normal(generator, 60, CLASSES)
    labels = torch.multinomial(sure.softmax(1), 1, generator=generator)[:, 0].numpy()
    logits = (sharpness * sure).numpy()
    losses = [loss_of(logits, labels, t).sum() for t in TEMPERATURES]
    found = best_temperature(sums_of(torch.tensor(losses)))
    # The loss is convex in 1 / T.
    optimum = scipy.optimize.minimize_scalar(
        lambda x: loss_of(logits, labels, 1 / x).sum(),
        bounds=(1 / TEMPERATURES[-1], 1 / TEMPERATURES[0]),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert abs(math.log2(found * optimum.x)) <= 1 / 8 + 1e-5


def test_of_equal_losses_the_temperature_nearest_to_1_is_best():
    assert (
        best_temperature(sums_of(torch.full((len(TEMPERATURES),), 5.0).double())) == 1
    )
    assert (TEMPERATURES[0], TEMPERATURES[ONE], TEMPERATURES[-1]) == (0.25, 1, 16)
    assert doctest.testmod(module) == (0, 1)


def test_a_temperature_folds_into_the_dtype_of_the_layer_or_is_refused():
    state = {
        "score.weight": torch.tensor([[3.0]]).bfloat16(),
        "score.bias": torch.tensor([1.0]).half(),
    }
    cooled = with_temperature(state, "score", 2)
    assert (cooled["score.weight"].dtype, cooled["score.bias"].dtype) == (
        torch.bfloat16,
        torch.float16,
    )
    assert (cooled["score.weight"].item(), cooled["score.bias"].item()) == (1.5, 0.5)
    assert state["score.weight"].item() == 3
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(FedrotError, match="positive"):
            with_temperature(state, "score", temperature)
    with pytest.raises(FedrotError, match="no layer 'classifier'"):
        with_temperature(state, "classifier", 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {"losses": s.losses.float()},
            r"losses are torch.float32 \[1, 49\], not float64",
        ),
        (
            lambda s: {"losses": s.losses[:, 1:]},
            r"losses are torch.float64 \[1, 48\], not float64",
        ),
        (
            lambda s: {"squares": s.squares[0]},
            r"squares are torch.float64 \[49\], not float64",
        ),
        (lambda s: {"losses": s.losses * math.nan}, "losses are negative"),
        (lambda s: {"squares": -s.losses}, "squares are negative"),
        (lambda s: {"counts": s.counts * 0}, "of 0.0 rows"),
        (lambda s: {"counts": s.counts * math.inf}, "counts are negative"),
        (lambda s: {"counts": s.counts.flip(0)}, "of 3.0 rows"),
    ],
)
def test_sums_that_no_rows_have_are_refused(change, message):
    sums = sums_of(torch.arange(1.0, 50).double())
    with pytest.raises(UpdateError, match=message):
        replace(sums, **change(sums))


def test_choices_of_a_question_have_a_loss():
    model = fresh_model("bert-choice")
    batch = {**tokens("bert-choice"), "labels": torch.tensor([1])}
    with torch.no_grad():
        expected = float(model(**batch).loss)
    assert float(collect_losses(model, [batch]).losses[0, ONE]) == pytest.approx(
        expected
    )
