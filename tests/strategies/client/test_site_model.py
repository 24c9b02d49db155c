"""A copy of a model with one site's shares in its bias."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import fedrot
from fedrot.lora import adapter_tensors
from fedrot.strategies import site_model
from fedrot.task_head import collect_counts, site_shift
from tests.strategies.fitting.site_cases import CASES, by_class, sites_of

PRIORS = [0.5, 0.3, 0.2]
NAMES = ["single", "multi", "regression", "tokens", "adapter"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_move_by_the_shares_of_the_site(name):
    kind = CASES[name]
    (site,) = sites_of(kind, 1)
    model = kind.build()
    before = kind.logits(model, site.test)
    new = site_model(model, [site.training], PRIORS)
    counts = collect_counts(model, [site.training], kind.problem)
    shift = site_shift(torch.tensor(PRIORS), counts, kind.problem)
    assert torch.allclose(kind.logits(new, site.test), before + shift, atol=1e-5)
    assert torch.equal(kind.logits(model, site.test), before)
    assert getattr(model.config, "fedrot", None) is None
    if name == "adapter":
        pairs = zip(*(adapter_tensors(m).items() for m in (model, new)), strict=True)
        moved = {n for (n, old), (_, tensor) in pairs if not torch.equal(old, tensor)}
        assert moved == {f"{kind.head}.bias"}


def test_a_saved_model_has_its_shares_and_keeps_the_head(tmp_path):
    """The priors of all are read from the configuration, and become the site's."""
    kind = CASES["single"]
    (site,) = sites_of(kind, 1)
    model = kind.build()
    model.config.fedrot = {"priors": PRIORS}
    model.save_pretrained(tmp_path / "all")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "all")
    own = site_model(loaded, [site.training])
    expected = site_model(model, [site.training], PRIORS)
    own.save_pretrained(tmp_path / "own")
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "own")
    assert torch.equal(saved.classifier.bias, expected.classifier.bias)
    counts = by_class(site.training)
    shares = (counts + torch.tensor(PRIORS)) / (counts.sum() + 1)
    assert saved.config.fedrot["priors"] == pytest.approx(shares.tolist())


@pytest.mark.parametrize(
    ("name", "counts"), [("single", [500, 500, 0]), ("multi", [1000, 900, 500, 100])]
)
def test_expected_shares_count_as_those_of_a_thousand_rows(name, counts):
    kind = CASES[name]
    model = kind.build()
    expected = [count / 1000 for count in counts[-3:]]
    new = site_model(model, [], PRIORS, expected=expected)
    counts = torch.tensor(counts).double()
    shift = site_shift(torch.tensor(PRIORS), counts, kind.problem)
    bias = model.classifier.bias.double()
    assert torch.allclose(new.classifier.bias.double(), bias + shift, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "given", "word"),
    [
        ("score", {"priors": PRIORS}, "site_shift"),
        ("single", {}, "class_priors"),
        ("single", {"priors": ["a", "b", "c"]}, "no list of shares"),
        ("single", {"priors": PRIORS[:2]}, r"priors are \[0.5, 0.3\d*\]"),
        ("single", {"priors": PRIORS, "expected": [0.5, 0.5, 0.5]}, "add up to 1"),
        ("single", {"priors": PRIORS, "expected": [0.5, 0.5]}, r"\[500.0, 500.0\]"),
        ("regression", {"expected": [1.0]}, "no classes"),
    ],
)
def test_what_gives_no_head_is_named(name, given, word):
    kind = CASES[name]
    (site,) = sites_of(kind, 1)
    with pytest.raises(fedrot.FedrotError, match=word):
        site_model(kind.build(), [site.training], **given)
