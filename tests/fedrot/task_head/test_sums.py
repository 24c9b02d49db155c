"""Sums over rows and task heads in models of every family, against loops over rows."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from fedrot.errors import FedrotError, SymmetryError, UpdateError
from fedrot.task_head.bounds import largest_inputs
from fedrot.task_head.fit import fitted_task_head, with_task_head
from fedrot.task_head.losses import ONE, TEMPERATURES, collect_losses, with_temperature
from fedrot.task_head.names import task_head_of
from fedrot.task_head.outputs import OUTPUT_KINDS
from fedrot.task_head.sums import collect_classes
from tests.families import config_of, inputs, model_of, state_of
from tests.fedrot.oracles import gap
from tests.fedrot.task_head.classifiers import (
    CLASSES,
    LAST,
    batch_for,
    loss_of,
    rows_of,
    sums_of,
)

#: Families whose task heads read what has passed tanh, or a norm.
BOUNDED = ("bert", "albert", "camembert", "mpnet", "t5-classifier", "bart-classifier")
BOUNDED += (
    "vit",
    "vit-plain",
    "gpt2-classifier",
    "llama-biased",
    "qwen2",
    "phi3-partial",
)


def assert_close(found, expected, tolerance=1e-10):
    assert torch.equal(found.counts, expected.counts)
    for name in ("sums", "gram"):
        ours = getattr(found, name)
        theirs = getattr(expected, name)
        assert (ours.dtype, ours.device.type) == (torch.float64, "cpu")
        assert gap(ours, theirs) <= tolerance * theirs.abs().max(), name


@pytest.mark.parametrize("name", LAST)
def test_sums_losses_and_logits_of_every_family_are_those_of_a_loop_over_rows(
    name,
):
    model = model_of(name)
    head = LAST[name]
    batches = [batch_for(name, 6, seed=1), batch_for(name, 5, seed=2)]
    nothing = {**batches[0], "labels": torch.full_like(batches[0]["labels"], -1)}
    features, labels, logits = rows_of(model, batches, name)
    assert task_head_of(model.config, model.state_dict()) == head
    found = collect_classes(model, [nothing, *batches, nothing], head)
    assert_close(found, sums_of(features, labels))
    losses = collect_losses(model, [*batches, nothing])
    assert losses.losses.dtype == torch.float64
    assert losses.counts.tolist() == [len(labels), (logits.argmax(1) == labels).sum()]
    expected = [
        loss_of(logits, labels, temperature).sum() for temperature in TEMPERATURES
    ]
    assert losses.losses[0].tolist() == pytest.approx(expected, rel=1e-9)
    # The model with the fitted head, and with a temperature: 2 is 8 steps of the grid.
    state = model.state_dict()
    weight, bias = fitted_task_head(found, bias=f"{head}.bias" in state)
    after = with_task_head(state, head, weight, bias)
    own = {f"{head}.weight", f"{head}.bias"} & {*state}
    assert {key for key in state if after[key] is not state[key]} == own
    cooled = with_temperature(state, head, 2.0)
    assert {key for key in state if cooled[key] is not state[key]} == own
    model.load_state_dict(after)
    np.testing.assert_allclose(
        rows_of(model, batches, name)[2],
        features @ weight.numpy().T + bias.numpy(),
        1e-7,
        1e-7,
    )
    model.load_state_dict(cooled)
    torch.testing.assert_close(
        collect_losses(model, batches).losses[:, :-8],
        losses.losses[:, 8:],
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("name", LAST)
def test_features_are_within_what_the_model_allows(name):
    """Also with weights that drive tanh to its ends; larger features are refused."""
    model = model_of(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    largest = largest_inputs(model.config, model.state_dict(), LAST[name])
    assert (largest is not None) == (name in BOUNDED)
    if largest is not None:
        collect_classes(model, [batch_for(name, 6)], LAST[name]).check_within(largest)
        for signs in ([1, 1], [1, -1]):
            features = 1.03 * np.outer(signs, largest.numpy())
            with pytest.raises(UpdateError, match="larger than"):
                sums_of(features, np.array([1, 1])).check_within(largest)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bert", torch.float16),
        ("gpt2-classifier", torch.bfloat16),
        ("vit", torch.bfloat16),
    ],
)
def test_features_and_losses_of_half_precision_are_summed_in_float64(name, dtype):
    model = model_of(name).to(dtype)
    batch = {
        k: v.to(dtype) if v.is_floating_point() else v
        for k, v in batch_for(name, 6).items()
    }
    features, labels, logits = rows_of(model, [batch], name)
    assert_close(
        collect_classes(model, [batch], LAST[name]), sums_of(features, labels), 1e-14
    )
    expected = [
        loss_of(logits, labels, temperature).sum() for temperature in TEMPERATURES
    ]
    assert collect_losses(model, [batch]).losses[0].tolist() == pytest.approx(
        expected, rel=1e-12
    )


def test_neither_order_nor_size_of_batches_matters_and_clients_add_up():
    model = model_of("gpt2-classifier")
    batch = batch_for("gpt2-classifier", 6)
    single = [{key: v[i : i + 1] for key, v in batch.items()} for i in (4, 0, 5, 2, 3)]
    whole = collect_classes(model, [batch], "score")
    losses = collect_losses(model, [batch])
    assert_close(collect_classes(model, single, "score"), whole)
    parts = (single[:1], single[1:4], single[4:])
    clients = [collect_classes(model, rows, "score") for rows in parts]
    assert_close(sum(clients[1:], clients[0]), whole)
    answers = [collect_losses(model, rows) for rows in parts]
    for order in (answers, answers[::-1]):
        found = sum(order[1:], order[0])
        assert torch.equal(found.counts, losses.counts)
        torch.testing.assert_close(found.losses, losses.losses, rtol=1e-12, atol=0)


def test_a_head_is_written_in_the_models_dtype_and_refused_where_it_does_not_fit():
    state = {
        "score.weight": torch.zeros(3, 5, dtype=torch.float16),
        "other": torch.zeros(2),
    }
    weight = torch.ones(3, 5).double()
    bias = torch.zeros(3).double()
    after = with_task_head(state, "score", weight, bias)
    assert after["score.weight"].dtype == torch.float16
    assert torch.equal(after["score.weight"], torch.ones(3, 5).half())
    assert after["other"] is state["other"]
    assert not bool(state["score.weight"].any())
    for head, given, message in (
        ("score", (weight, bias + 1), r"'score' has no bias: fit it with .*bias=False"),
        ("classifier", (weight, bias), r"'classifier.weight' is missing"),
        (
            "score",
            (weight[:, :4], bias),
            r"has shape \[3, 5\], but the task head has \[3, 4\]",
        ),
        ("score", (1e5 * weight, bias), r"is torch.float16, which cannot hold"),
    ):
        with pytest.raises(FedrotError, match=message):
            with_task_head(state, head, *given)


# The layer's name

THREE = {"classifier.weight": (3, 8)}


@pytest.mark.parametrize(
    ("settings", "tensors", "expected"),
    [
        (
            {"id2label": {"0": "a", "1": "b", "2": "c"}},
            {"module.score.weight": (3, 8)},
            "module.score",
        ),
        # Files of transformers do not list the labels of two classes.
        ({"model_type": "bert"}, {"classifier.weight": (2, 8)}, "classifier"),
        (
            {"num_labels": 4},
            {"score.weight": (4, 8), "pre_classifier.weight": (4, 8)},
            "score",
        ),
        *(
            ({"problem_type": kind, "num_labels": 3}, THREE, "classifier")
            for kind in OUTPUT_KINDS
        ),
        ({"num_labels": 1}, {"classifier.weight": (1, 8)}, "classifier"),
    ],
)
def test_the_last_layer_is_found(settings, tensors, expected):
    assert task_head_of(settings, tensors) == expected


SINGLE_ONE = {"num_labels": 1, "problem_type": "single_label_classification"}


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        (
            SINGLE_ONE,
            {"classifier.weight": (1, 8)},
            FedrotError,
            "task head of 1 classes",
        ),
        (
            {"problem_type": "ranking"},
            THREE,
            FedrotError,
            "'ranking' is unknown; use one of single",
        ),
        (
            {"num_labels": 3},
            {**THREE, "score.weight": (3, 8)},
            FedrotError,
            "one: classifier, score",
        ),
        ("bert", THREE, SymmetryError, "The config is a str"),
        *(
            (
                config_of(name),
                state_of(name),
                FedrotError,
                "the model has none. Use a model",
            )
            for name in ("roberta", "llama", "t5-encoder", "deit")
        ),
    ],
)
def test_a_model_without_one_head_of_classes_is_told(config, tensors, error, message):
    with pytest.raises(error, match=message):
        task_head_of(config, tensors)


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        ("camembert", "classifier.dense", "model's logits"),
        ("bert", "bert.encoder.layer.1.output.dense", "model's logits"),
        ("deit", "cls_classifier", "model's logits"),
        ("bert", "bert.embeddings.word_embeddings", "has no linear layer"),
        ("bert", "score", "has no linear layer 'score'"),
    ],
)
def test_another_layer_than_the_last_is_refused(name, head, message):
    for model in (model_of(name), *[model_of(name).bfloat16()] * (name == "camembert")):
        with pytest.raises(FedrotError, match=message):
            collect_classes(model, [batch_for(name, 4)], head)


class _Odd(nn.Module):
    """Does with its task head what a test says."""

    def __init__(self, logits):
        super().__init__()
        self.score = nn.Linear(4, CLASSES)
        self.logits = logits

    def forward(self, x):
        found = self.logits(self.score, x)
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=found)


@pytest.mark.parametrize(
    ("logits", "rows"),
    [
        (lambda score, x: torch.cat([score(half) for half in x.chunk(2)]), 6),
        (lambda score, x: (score(x), score(2 * x))[1], 6),
        (lambda score, x: score(x).flip(1) + torch.arange(CLASSES), 6),
        # Places above 256 are rounded: two rows have one place, or the only row has
        # another's.
        (lambda score, x: score(x).bfloat16().float(), 299),
        (lambda score, x: score(x.expand(300, 4))[257:258].bfloat16(), 1),
    ],
)
def test_logits_that_are_not_the_outputs_of_the_head_are_refused(logits, rows):
    batch = {"x": torch.randn(rows, 4), "labels": torch.arange(rows) % CLASSES}
    with pytest.raises(FedrotError, match="model's logits"):
        collect_classes(_Odd(logits), [batch], "score")


def test_no_rows_classes_or_logits_and_features_that_are_not_finite_are_refused():
    vit = model_of("vit")
    batch = batch_for("vit", 3)
    for collect in (lambda m, b: collect_classes(m, b, "classifier"), collect_losses):
        with pytest.raises(FedrotError, match="No row"):
            collect(vit, [])
    language = {**inputs("gpt2"), "labels": inputs("gpt2")["input_ids"]}
    with pytest.raises(FedrotError, match="GPT2LMHeadModel predicts"):
        collect_classes(model_of("gpt2"), [language], "lm_head")
    bare = model_of("bert").bert
    with pytest.raises(FedrotError, match="BertModel has no logits"):
        collect_losses(bare, [batch_for("bert", 2)])
    batch["pixel_values"][0, 0, 0, 0] = torch.inf
    with pytest.raises(UpdateError, match="hold NaN or Inf"):
        collect_classes(vit, [batch], "classifier")
    # A loss, which has a bound, does not end the comparison.
    assert 1e6 <= float(collect_losses(vit, [batch]).losses[0, ONE]) < 2.1e6
