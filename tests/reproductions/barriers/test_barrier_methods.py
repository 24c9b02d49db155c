"""Ways to match two tiny models, the line between them, and its summary."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fedrot import FedrotError, canonical, random_equivalent, symmetry_of
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.models import build_model
from fedrot.simulations.tasks.training import task_of
from fedrot.symmetry import WHOLE_MODEL
from reproductions.barriers import line as line_module
from reproductions.barriers import methods
from reproductions.barriers.line import (
    BarrierLine,
    interpolate,
    training_batches,
)
from reproductions.barriers.methods import METHODS, match
from reproductions.barriers.summary import tables
from reproductions.ensemble import with_state
from tests.simulations.commands import SMALL
from tests.simulations.tasks.cases import parts
from tests.simulations.tensors import equal

measure = partial(line_module.measure, points=3, cell="c", pair="0-1")


@pytest.fixture(scope="module")
def task():
    return task_of(Experiment(task="mlm", **SMALL).to_json())


@pytest.fixture(scope="module")
def model(task):
    return build_model(task.experiment, task.data, seed=0)


@pytest.fixture(scope="module")
def symmetry(model):
    return symmetry_of(model.config, model.state_dict())


@pytest.fixture(scope="module")
def client(task):
    """A model of another seed."""
    return build_model(task.experiment, task.data, seed=1)


@pytest.fixture
def batches(task, model):
    return training_batches(task, model, 64)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    """What is learned in 600 steps is tested elsewhere; here it is enough that
    something is.
    """
    for name, method in METHODS.items():
        if isinstance(method.refine, partial):
            options = replace(method.refine.args[0], steps=5)
            refine = partial(methods._learned, options)
            monkeypatch.setitem(METHODS, name, replace(method, refine=refine))


def test_every_method_hides_labels_and_changes_neither_model(
    model,
    client,
    symmetry,
    batches,
    monkeypatch,
):
    seen = []
    original = methods.collect_activations

    def spy(anchor, client, batches, *args, **kwargs):
        batches = list(batches)
        seen.extend(map(frozenset, batches))
        return original(anchor, client, batches, *args, **kwargs)

    monkeypatch.setattr(methods, "collect_activations", spy)
    before = [parts(m) for m in (model, client)]
    assert sum(len(batch["labels"]) for batch in batches) == 64
    assert any((batch["input_ids"] == 4).any() for batch in batches), (
        "tokens are masked"
    )
    for method in METHODS.values():
        if not method.canonical:
            match(method, model, client, symmetry, batches)
    texts = frozenset(("input_ids", "attention_mask"))
    assert {*seen} == {texts, texts | {"token_type_ids"}}
    assert all(map(equal, map(parts, (model, client)), before))


def test_whole_model_methods_undo_a_random_equivalent(task, model, symmetry, batches):
    state = random_equivalent(model.state_dict(), symmetry, 3, WHOLE_MODEL)
    client = with_state(model, state)
    for name in ("whole", "whole+probe", "whole+data"):
        line = measure(name, model, client, symmetry, task, batches)
        assert line.after < 1e-6 * line.before
        assert line.barrier == pytest.approx(0, abs=1e-5)
    vanilla = measure("vanilla", model, client, symmetry, task, batches)
    assert vanilla.metrics[0] == pytest.approx(vanilla.metrics[-1], abs=1e-4, rel=1e-4)


def test_methods_that_rotate_the_stream_undo_a_rotation_of_it():
    task = task_of(Experiment(task="clm", architecture="gpt2", **SMALL).to_json())
    model = build_model(task.experiment, task.data, seed=0)
    symmetry = symmetry_of(model.config, model.state_dict())
    batches = training_batches(task, model, 64)
    folded = canonical(model.state_dict(), symmetry)
    client = with_state(
        model, random_equivalent(folded, symmetry.rotated, 3, WHOLE_MODEL)
    )
    names = [name for name, method in METHODS.items() if method.canonical]
    assert len(names) == 4
    for name in names:
        line = measure(name, model, client, symmetry, task, batches)
        assert line.barrier == pytest.approx(0, abs=1e-3), name
        # What is learned may lie elsewhere, as long as the loss of the average stays.
        assert line.after < 1e-2 * line.before or name == "stream+learned"


def test_permutations_keep_the_function_and_fewer_rows_are_the_first_ones(
    model, client, symmetry, batches
):
    matched = partial(match, anchor=model, client=client, symmetry=symmetry)
    inputs = {name: value for name, value in batches[0].items() if name != "labels"}
    before = with_state(client, client.state_dict()).eval()
    for name in ("heads", "monotonic", "stream-all"):
        state = matched(METHODS[f"verma-{name}"], batches=batches)
        moved = with_state(before, state)
        with torch.no_grad():
            logits, expected = (each(**inputs).logits for each in (moved, before))
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
        assert not equal(state, parts(client))
    many = {name: value.repeat(64, 1)[:100] for name, value in batches[0].items()}
    first = [{name: value[:64] for name, value in many.items()}]
    few = matched(METHODS["verma-heads@64"], batches=[many, many])
    assert equal(few, matched(METHODS["verma-heads"], batches=first))


def test_models_that_cannot_be_rotated_are_refused(task, model):
    tied = GPT2LMHeadModel(
        GPT2Config(vocab_size=12, n_layer=1, n_head=2, n_embd=8, n_positions=4)
    )
    for refused, word in (
        (model, "cannot be rotated"),
        (tied, "tie_word_embeddings=False"),
    ):
        symmetry = symmetry_of(refused.config, refused.state_dict())
        with pytest.raises(FedrotError, match=word):
            measure("stream", refused, refused, symmetry, task, [])


def test_a_method_may_refine_the_client(
    task,
    model,
    client,
    symmetry,
    batches,
    monkeypatch,
):
    moved = match(METHODS["whole"], model, client, symmetry, batches)

    def refine(anchor, aligned, *_):
        assert equal(aligned.state_dict(), moved)
        return parts(anchor)

    monkeypatch.setitem(METHODS, "refined", replace(METHODS["whole"], refine=refine))
    line = measure("refined", model, client, symmetry, task, batches)
    assert len({row["loss"] for row in line.metrics}) == 1
    assert line.after == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_ends_are_exact_and_dtypes_stay(dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = ({"w": torch.randn(50, generator=generator).to(dtype)} for _ in range(2))
    assert torch.equal(interpolate(a, b, 0)["w"], a["w"])
    assert torch.equal(interpolate(a, b, 1)["w"], b["w"])
    middle = interpolate(a, b, 0.3)["w"]
    exact = 0.7 * a["w"].double() + 0.3 * b["w"].double()
    torch.testing.assert_close(
        middle, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6
    )


def line(pair, method, *losses):
    positions = tuple(np.linspace(0, 1, len(losses)).tolist())
    metrics = tuple({"accuracy": 1 - loss, "loss": loss} for loss in losses)
    return BarrierLine("c", pair, method, 2.0, 10.0, 5.0, positions, metrics)


@pytest.mark.parametrize(
    ("losses", "barrier"),
    [
        ((0.1, 0.6, 0.3), 0.4),  # Above the mean of the ends.
        ((1.0, 0.0, 4.0), 1.5),  # A valley has the barrier of its higher end.
        ((3.0, 3.0, 3.0), 0.0),
        ((0.1, math.nan, 0.1), math.nan),
        ((0.1, math.inf, 0.1), math.inf),
    ],
)
def test_the_barrier_of_a_line(losses, barrier):
    assert line("0-1", "vanilla", *losses).barrier == pytest.approx(
        barrier, nan_ok=True
    )


def test_means_and_intervals_are_over_pairs():
    middles = (("0-1", "whole", 0.2), ("2-3", "whole", 0.4))
    middles += (("0-1", "vanilla", 0.5), ("2-3", "vanilla", 0.7))
    (table,) = tables([line(*names, 0.1, middle, 0.1) for *names, middle in middles])
    vanilla, whole = table.lines
    assert (vanilla[0], vanilla[2]) == ("vanilla (2)", "1.000")
    # Of the ratios 0.1 / 0.4 and 0.3 / 0.6: t(0.975, 1) = 12.706, sd / sqrt(2) = 0.125.
    assert whole[:3] == ["whole (2)", "0.200 [-1.071, 1.471]", "0.375 [-1.213, 1.963]"]
    assert (whole[3][:5], whole[4]) == ("0.700", "0.900, 0.900")


def test_a_share_needs_a_vanilla_barrier():
    whole = line("0-1", "whole", 0.1, 0.2, 0.1)
    for beside in ([], [line("0-1", "vanilla", 0.1, 0.1, 0.1)]):
        (table,) = tables([*beside, whole])
        assert table.lines[-1][2] == "-"
