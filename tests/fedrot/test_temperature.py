"""One temperature from summed losses, against losses that are computed row by row."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import scipy.optimize
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedrot import temperature as module
from fedrot.errors import FedrotError, UpdateError
from fedrot.head import head_of
from fedrot.temperature import (
    LARGEST_LOSS,
    ONE,
    TEMPERATURES,
    Heads,
    LossSums,
    best_temperature,
    collect_losses,
    compare_losses,
    with_temperature,
)
from tests.families import inputs, model_of, state_of
from tests.fedrot.collect.tiny import TINY
from tests.fedrot.oracles import seeded
from tests.models import fresh_model
from tests.models import inputs as tokens

CLASSES = 3
#: Classifiers of sequences, with and without a bias, of images and of tokens.
NAMES = ("bert", "camembert", "gpt2-classifier", "vit", "deberta-embedding")


def batch_for(name: str, rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Return inputs with labels, some of them -100."""
    batch = inputs(name, rows)
    shape = batch["input_ids"].shape if name == "deberta-embedding" else (rows,)
    batch["labels"] = torch.randint(CLASSES, shape, generator=seeded(seed))
    batch["labels"][1] = -100
    return batch


def rows_of(model: Any, batches: Sequence[dict[str, Tensor]]) -> list[tuple[list[float], int]]:
    """Return the logits and the label of every row that has one."""
    found = []
    for batch in batches:
        with torch.no_grad():
            logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        for z, y in zip(logits.reshape(-1, CLASSES).tolist(), batch["labels"].flatten(), strict=True):
            if y >= 0:
                found.append((z, int(y)))
    return found


def loss_of(rows: Sequence[tuple[list[float], int]], temperature: float) -> float:
    """Return the summed cross entropy, from its definition."""
    total = 0.0
    for z, y in rows:
        largest = max(z)
        exponentials = [math.exp((value - largest) / temperature) for value in z]
        total += math.log(sum(exponentials)) - (z[y] - largest) / temperature
    return total


@pytest.mark.parametrize("name", NAMES)
def test_summed_losses_are_those_of_a_loop_over_rows(name: str) -> None:
    model = model_of(name)
    batches = [batch_for(name, 4, seed=1), batch_for(name, 3, seed=2)]
    found, rows = collect_losses(model, batches), rows_of(model, batches)
    assert found.losses.dtype == torch.float64
    assert found.counts.tolist() == [len(rows), sum(z[y] == max(z) for z, y in rows)]
    for temperature, loss in zip(TEMPERATURES, found.losses[0].tolist(), strict=True):
        assert loss == pytest.approx(loss_of(rows, temperature), rel=1e-9)


def heads_of(model: Any, factors: Sequence[float], partner: Sequence[int]) -> tuple[str, Heads]:
    """Return multiples of a model's own head."""
    state = model.state_dict()
    head = head_of(model.config, state)
    weight = state[f"{head}.weight"]
    bias = state.get(f"{head}.bias", torch.zeros(len(weight)))
    weights, biases = (torch.stack([factor * one for factor in factors]) for one in (weight, bias))
    return head, Heads(weights, biases, torch.tensor(partner))


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_heads_are_those_of_models_with_these_heads(name: str) -> None:
    """The squares are those of a loop over rows, against the old model or a head's partner."""
    bodies = [model_of(name), model_of(name, state_of(name, seed=1))]
    batches = [batch_for(name, 4, seed=1), batch_for(name, 3, seed=2)]
    given, of_rows, place = [], [], 0
    factors, partners = ((1, 2, -1), (1, 0.5)), ((-1, 0, 1), (-1, 0))
    for model, factor, partner in zip(bodies, factors, partners, strict=True):
        head, heads = heads_of(model, factor, partner)
        given.append(heads)
    found = compare_losses(iter(bodies), batches, head, given)
    for model, heads in zip(bodies, given, strict=True):
        state, start = model.state_dict(), place
        for index, partner in enumerate(heads.partner.tolist()):
            with_bias = {f"{head}.bias": heads.bias[index]} if f"{head}.bias" in state else {}
            model.load_state_dict({**state, f"{head}.weight": heads.weight[index], **with_bias})
            alone, rows = collect_losses(model, batches), rows_of(model, batches)
            torch.testing.assert_close(found.losses[place], alone.losses[0], rtol=1e-6, atol=1e-6)
            assert found.counts[[0, place + 1]].tolist() == alone.counts.tolist()
            of_rows.append([[loss_of([row], t) for row in rows] for t in TEMPERATURES])
            for t in range(0, len(TEMPERATURES), 7):
                old = of_rows[0][ONE] if partner < 0 else of_rows[start + partner][t]
                squares = sum((a - b) ** 2 for a, b in zip(of_rows[place][t], old, strict=True))
                assert float(found.squares[place, t]) == pytest.approx(squares, rel=1e-5, abs=1e-9)
            place += 1


def test_losses_of_half_precision_are_summed_in_float64() -> None:
    model = model_of("vit").bfloat16()
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch_for("vit", 6).items()}
    found, rows = collect_losses(model, [batch]), rows_of(model, [batch])
    assert found.losses[0].tolist() == pytest.approx([loss_of(rows, t) for t in TEMPERATURES], rel=1e-12)


def test_losses_of_clients_add_up_in_any_order() -> None:
    model, batch = model_of("bert"), batch_for("bert", 6)
    rows = [{key: v[i : i + 1] for key, v in batch.items()} for i in (0, 2, 3, 4, 5)]
    whole = collect_losses(model, [batch])
    clients = [collect_losses(model, part) for part in (rows[:1], rows[1:3], rows[3:])]
    for order in (clients, clients[::-1]):
        found = sum(order[1:], order[0])
        assert found.counts.tolist() == whole.counts.tolist() == [5, whole.counts[1]]
        torch.testing.assert_close(found.losses, whole.losses, rtol=1e-12, atol=0)
    head, heads = heads_of(model, [1, 2], [-1, 0])
    with pytest.raises(UpdateError, match="different numbers of heads"):
        whole + compare_losses([model], [batch], head, [heads])


def sums_of(losses: Tensor, rows: float, correct: float) -> LossSums:
    counts = torch.tensor([rows, correct], dtype=torch.float64)
    return LossSums(losses[None], torch.zeros_like(losses[None]), counts)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sharpness=st.floats(0.5, 8))
def test_the_best_temperature_is_within_a_step_of_the_optimum(seed: int, sharpness: float) -> None:
    generator = seeded(seed)
    sure = 2 * torch.randn(60, CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(sure.softmax(1), 1, generator=generator)[:, 0].tolist()
    rows = list(zip((sharpness * sure).tolist(), labels, strict=True))
    losses = torch.tensor([loss_of(rows, t) for t in TEMPERATURES], dtype=torch.float64)
    found = best_temperature(sums_of(losses, 60, 0))
    # The loss is convex in 1 / T.
    bounds = (1 / TEMPERATURES[-1], 1 / TEMPERATURES[0])
    optimum = scipy.optimize.minimize_scalar(
        lambda x: loss_of(rows, 1 / x), bounds=bounds, method="bounded", options={"xatol": 1e-9}
    )
    assert abs(math.log2(found * optimum.x)) <= 1 / 8 + 1e-5


def test_of_equal_losses_the_temperature_nearest_to_1_is_best() -> None:
    losses = torch.full((len(TEMPERATURES),), 5.0, dtype=torch.float64)
    assert best_temperature(sums_of(losses, 4, 1)) == 1
    assert {TEMPERATURES[0], 1, TEMPERATURES[-1]} == {0.25, 1, 16}


@pytest.mark.parametrize("name", NAMES)
def test_a_folded_temperature_divides_the_logits(name: str) -> None:
    model, batch = model_of(name), batch_for(name, 4)
    state, head = model.state_dict(), head_of(model.config, model.state_dict())
    before, losses = rows_of(model, [batch]), collect_losses(model, [batch])
    cooled = with_temperature(state, head, 2.0)
    assert {key for key in state if cooled[key] is not state[key]} <= {f"{head}.weight", f"{head}.bias"}
    model.load_state_dict(cooled)
    for (z, _), (y, _) in zip(rows_of(model, [batch]), before, strict=True):
        assert z == pytest.approx([value / 2 for value in y], rel=1e-12, abs=1e-12)
    # A factor of 2 is 8 steps of the grid.
    torch.testing.assert_close(collect_losses(model, [batch]).losses[:, :-8], losses.losses[:, 8:])


def test_a_temperature_folds_into_the_dtype_of_the_layer() -> None:
    state = {"score.weight": torch.tensor([[3.0]]).bfloat16(), "score.bias": torch.tensor([1.0]).half()}
    cooled = with_temperature(state, "score", 2)
    assert (cooled["score.weight"].dtype, cooled["score.bias"].dtype) == (torch.bfloat16, torch.float16)
    assert (cooled["score.weight"].item(), cooled["score.bias"].item()) == (1.5, 0.5)
    assert state["score.weight"].item() == 3


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    state = {"score.weight": torch.ones(2, 2)}
    with pytest.raises(FedrotError, match="must be positive and finite"):
        with_temperature(state, "score", temperature)


def test_a_temperature_of_another_layer_is_refused() -> None:
    with pytest.raises(FedrotError, match="The model has no layer 'classifier'"):
        with_temperature({"score.weight": torch.ones(2, 2)}, "classifier", 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"losses": s.losses.float()}, r"losses are torch.float32 \[1, 49\], not float64"),
        (lambda s: {"losses": s.losses[:, 1:]}, r"losses are torch.float64 \[1, 48\], not float64"),
        (lambda s: {"squares": s.squares[0]}, r"squares are torch.float64 \[49\], not float64"),
        (lambda s: {"losses": s.losses * math.nan}, "losses are negative, NaN or Inf"),
        (lambda s: {"losses": s.losses * math.inf}, "losses are negative, NaN or Inf"),
        (lambda s: {"squares": -s.losses}, "squares are negative, NaN or Inf"),
        (lambda s: {"counts": s.counts * 0}, "of 0.0 rows"),
        (lambda s: {"counts": s.counts * math.nan}, "counts are negative, NaN or Inf"),
        (lambda s: {"counts": s.counts * math.inf}, "counts are negative, NaN or Inf"),
        (lambda s: {"counts": s.counts.flip(0)}, "of 3.0 rows"),
    ],
)
def test_sums_that_no_rows_have_are_refused(
    change: Callable[[LossSums], dict[str, Any]], message: str
) -> None:
    sums = sums_of(torch.arange(1.0, 50).double(), 5, 3)
    with pytest.raises(UpdateError, match=message):
        replace(sums, **change(sums))


def test_logits_and_labels_that_are_none_are_refused() -> None:
    model, batch = model_of("vit"), batch_for("vit", 3)
    batch["pixel_values"][0, 0, 0, 0] = torch.inf
    assert float(collect_losses(model, [batch]).losses.min()) >= LARGEST_LOSS
    with pytest.raises(FedrotError, match="No row has a label"):
        collect_losses(model, [])
    bare = transformers.BertModel(transformers.BertConfig(**TINY))
    with pytest.raises(FedrotError, match="The output of BertModel has no logits"):
        collect_losses(bare, [{**tokens(), "labels": torch.tensor([0, 1])}])


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool) -> None:
    settings: dict[str, Any] = {**TINY, "num_labels": CLASSES, "hidden_dropout_prob": 0.5}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**settings)).train()
    model.bert.encoder.eval()
    before, random = [m.training for m in model.modules()], torch.get_rng_state()
    batch = {**tokens(), "labels": torch.tensor([2, 7 if fails else 0])}
    with pytest.raises(FedrotError, match="A label is 7") if fails else nullcontext():
        sums = [collect_losses(model, [batch]) for _ in range(2)]
        assert torch.equal(sums[0].losses, sums[1].losses)  # no dropout
    assert [m.training for m in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_choices_of_a_question_have_a_loss() -> None:
    model = fresh_model("bert-choice")
    batch = {**tokens("bert-choice"), "labels": torch.tensor([1])}
    with torch.no_grad():
        expected = float(model(**batch).loss)
    assert float(collect_losses(model, [batch]).losses[0, ONE]) == pytest.approx(expected)


def test_the_example_runs() -> None:
    assert doctest.testmod(module) == (0, 1)
