"""Several models that learn a common basis at once."""

from __future__ import annotations

import pytest
import torch

import fedrot
from fedrot.learning import loss_of
from reproductions.learning import LearningOptions, learn_together
from tests.models import State
from tests.trained import CONFIG, build, loss, rows, trained

SYMMETRY = fedrot.symmetry_of(CONFIG, trained(1))


def matched(count: int) -> list[State]:
    """Return models in canonical form, all but the first matched to it by weights."""
    first = fedrot.canonical(trained(1), SYMMETRY)
    options = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL)
    rest = (trained(seed) for seed in range(2, count + 1))
    return [first, *(fedrot.align(t, first, SYMMETRY, options).apply(t) for t in rest)]


def mean(models: list[State]) -> State:
    return {name: sum(model[name] for model in models) / len(models) for name in models[0]}


@pytest.mark.parametrize("count", [2, 3])
def test_the_mean_is_better_and_every_function_stays(count: int) -> None:
    models = matched(count)
    batches = [batch for seed in range(1, count + 1) for batch in rows(seed, 10)]
    options = LearningOptions(("residual", "attention"), steps=60, lr=3e-3)
    found = learn_together(loss_of(build().eval()), batches, models, SYMMETRY.rotated, options)
    moved = [a.apply(m) for a, m in zip(found.alignments, models, strict=True)]
    assert loss(mean(moved)) < loss(mean(models)) - 0.02
    assert [loss(m) for m in moved] == pytest.approx([loss(m) for m in models], abs=1e-4)
    assert all(alignment.moves for alignment in found.alignments), "all models move"
    assert len(found.losses) == 60


def test_with_one_weight_per_model_the_first_loss_is_that_of_the_mean() -> None:
    models, (batch,) = matched(2), rows(5, 1)
    options = LearningOptions(("residual",), steps=1, lr=1e-3)
    given = (loss_of(build().eval()), [batch], models, SYMMETRY.rotated, options)
    (first,) = learn_together(*given, concentration=1e9).losses
    model = build().eval()
    model.load_state_dict(mean(models))
    with torch.no_grad():
        assert first == pytest.approx(float(model(**batch).loss), abs=1e-4)


def test_learning_together_is_deterministic() -> None:
    models, batches = matched(2), [*rows(5, 2)]
    options = LearningOptions(("residual",), steps=3, lr=1e-3)
    both = [
        learn_together(loss_of(build().eval()), batches, models, SYMMETRY.rotated, options)
        for _ in range(2)
    ]
    assert both[0].losses == both[1].losses


def test_what_cannot_be_learned_is_refused() -> None:
    models, batches, symmetry = matched(2), [*rows(5, 1)], SYMMETRY.rotated
    how = loss_of(build().eval())
    with pytest.raises(fedrot.FedrotError, match="two models are needed"):
        learn_together(how, batches, models[:1], symmetry)
    with pytest.raises(fedrot.FedrotError, match="concentration is 0"):
        learn_together(how, batches, models, symmetry, concentration=0)
    with pytest.raises(fedrot.FedrotError, match="No batches"):
        learn_together(how, [], models, symmetry)
    with pytest.raises(fedrot.FedrotError, match="lower the learning rate"):
        learn_together(lambda *_: how(models[0], batches[0]) * torch.nan, batches, models, symmetry)
