"""``fedrot merge --base``: the scale of the mean change that held-out rows choose."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file

import fedrot
from fedrot.strategies.pooled_classifier import PooledClassifier, PooledClassifierConfig
from tests.models import near
from tests.simulations.commands import run
from tests.simulations.data.files import write
from tests.simulations.saved.folders import (
    WEIGHTS,
    model_of,
    refused,
    saved,
    scrambled,
    tokenizer,
    with_state,
)
from tests.simulations.saved.folders import near as trained
from tests.simulations.tensors import close, equal

SCALES = (0, 0.3, 0.5, 0.7, 1, 1.3)
#: A row of the table of scales.
_LINE = r"scale [\d.]+\)?(?: -?[\d.]+)* (\d+\.\d{3})"
#: Words by number, of 40 texts.
WORDS = torch.tensor([[n % 7, 7 + n % 11, 20 + n % 5] for n in range(40)])


def rows(folder, scores=WORDS[:, 2]):
    """Options for data with known held-out rows."""
    texts = [" ".join(f"w{number}" for number in row) for row in WORDS.tolist()]
    for split in ("train", "test"):
        write(folder / "rows" / f"{split}.csv", text=texts, label=scores.tolist())
    return "--data", folder / "rows"


def scorer(**settings):
    """A regression whose scores depend on the text."""
    config = model_of("bert-classifier").config
    config.update({"id2label": {0: "score"}, "initializer_range": 0.3, **settings})
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config).eval()


def scores(tensors):
    """Scores by transformers; the tokenizer has two tokens before the words."""
    with torch.no_grad():
        return with_state(scorer(), tensors)(WORDS + 2).logits.flatten()


def between(base, mean, scale):
    return {name: base[name] + scale * (mean[name] - base[name]) for name in base}


def merge(folder, *options):
    base = folder / "base"
    return run("merge", folder / "a", folder / "b", "--base", base, *options)


def losses(output):
    """The last column of the rows of scales."""
    return [*map(float, re.findall(_LINE, output))]


@pytest.mark.parametrize(
    ("best", "words"),
    [(0, "the base (scale 0)"), (0.5, "scale 0.5"), (1, "the mean (scale 1)")],
)
def test_the_scale_with_the_lowest_loss_is_written(best, words, tmp_path):
    """The labels are the scores of one scale, whose loss is 0.

    The second model is in other coordinates than the base.
    """
    model = scorer()
    base = model.state_dict()
    outer = {name: t for name, t in base.items() if ".layer." not in name}
    tuned = [base | near(outer, 0.3, seed) for seed in (1, 2)]
    tokenizer(saved(model, tmp_path / "base"))
    tokenizer(saved(with_state(model, tuned[0]), tmp_path / "a"))
    tokenizer(saved(scrambled(with_state(model, tuned[1])), tmp_path / "b"))
    mean = between(*tuned, 0.5)
    line = [between(base, mean, scale) for scale in SCALES]
    target = between(base, mean, best)
    labels = scores(target)
    said = merge(
        tmp_path,
        *rows(tmp_path, labels),
        *("--parts", "attention+ffn", "--out", tmp_path / "out"),
    )
    errors = [float((scores(tensors) - labels).square().mean()) for tensors in line]
    assert losses(said) == pytest.approx(errors, abs=6e-4)
    assert f"mean change, {words} has the lowest loss" in said
    assert close(load_file(tmp_path / "out" / WEIGHTS), target, 1e-4)


@pytest.mark.parametrize("kind", ["an encoder", "other classes", "pooled"])
def test_what_the_base_lacks_is_averaged_and_ties_are_the_base(kind, tmp_path):
    model = scorer()
    base = model.bert
    if kind == "other classes":
        base = scorer(id2label=dict(enumerate("vwxyz")))
    tokenizer(saved(base, tmp_path / "base"))
    if kind == "pooled":
        model = PooledClassifier.from_encoder(tmp_path / "base", num_labels=1)
    state = model.state_dict()
    head = state["classifier.weight"]
    for place, scale in {"a": 3, "b": -1}.items():
        model.classifier.weight.data = scale * head
        tokenizer(saved(model, tmp_path / place))
    data = rows(tmp_path)
    said = merge(tmp_path, *data, "--out", tmp_path / "out")
    assert "The base lacks classifier.bias, classifier.weight: the mean's" in said
    assert "mean change, the base (scale 0) has the lowest loss" in said
    assert len({*losses(said)}) == 1
    assert equal(load_file(tmp_path / "out" / WEIGHTS), state)
    fitted = merge(tmp_path, *data, "--fit-head")
    assert max(losses(fitted)) < min(losses(said))


def test_the_base_of_models_that_are_matched_as_a_whole_is_canonical(tmp_path):
    base = model_of("gpt-neox")
    tokenizer(saved(base, tmp_path / "base"))
    for place in "ab":
        tokenizer(saved(scrambled(base, fedrot.WHOLE_MODEL), tmp_path / place))
    options = ("--parts", "whole", "--out", tmp_path / "out")
    said = merge(tmp_path, *rows(tmp_path), *options)
    assert len({*losses(said)}) == 1
    tensors = base.state_dict()
    expected = fedrot.canonical(tensors, fedrot.symmetry_of(base.config, tensors))
    found = type(base).from_pretrained(tmp_path / "out").state_dict()
    assert equal(found, expected)


def test_a_base_that_does_not_fit_is_refused(tmp_path):
    model = scorer()
    broken = with_state(model, near(model.state_dict(), torch.nan))
    a = saved(model, tmp_path / "a")
    base = tmp_path / "base"
    line = ("merge", a, a, "--base", base, "--out", tmp_path / "out", *rows(tmp_path))
    words = "no tensor 'bert.encoder.layer.0.intermediate.dense.weight' of shape [48, "
    refused(words, saved(scorer(intermediate_size=80), base), *line)
    refused("holds NaN", saved(broken, base), *line)
    refused("num_attention_heads", saved(scorer(num_attention_heads=8), base), *line)
    tokenizer(a)
    tokenizer(saved(model, base), w3="w4", w4="w3")
    refused("tokenizer", base, *line)
    run(*line, "--base", "", code=2, says="''")
    for place, layer in {"a": 1, "base": 2}.items():
        config = PooledClassifierConfig(model.config, layers=[layer])
        saved(PooledClassifier(config), tmp_path / place)
    refused("layers", base, *line)


def test_an_encoder_is_the_base_of_both_tied_tables(tmp_path):
    model = model_of("gpt2")
    tokenizer(saved(model.transformer, tmp_path / "base"))
    for place in "ab":
        tokenizer(saved(trained(model), tmp_path / place))
    said = merge(tmp_path, *rows(tmp_path))
    assert "lacks" not in said
    assert "another basis" not in said
