"""A copy of a model with one site's shares in its bias."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import fedrot
from fedrot.lora import adapter_tensors
from fedrot.strategies import site_model
from tests.strategies.fitting.site_cases import CASES, labels_of, own_shift, sites_of

PRIORS = [0.5, 0.3, 0.2]
NAMES = ["single", "multi", "regression", "tokens", "adapter"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_move_by_the_shares_of_the_site(name):
    kind = CASES[name]
    (site,) = sites_of(kind, 1)
    model = kind.build()
    before = kind.logits(model, site.test)
    own = site_model(model, [site.training], PRIORS)
    at_site = kind.logits(model, site.training).numpy()
    shift = torch.tensor(own_shift(site, PRIORS, at_site))
    assert torch.allclose(kind.logits(own, site.test), before + shift, atol=1e-5)
    assert torch.equal(kind.logits(model, site.test), before)
    assert getattr(model.config, "fedrot", None) is None
    if name == "adapter":
        changed = adapter_tensors(own)
        names = {
            n for n, t in adapter_tensors(model).items() if (t != changed[n]).any()
        }
        assert names == {f"{kind.head}.bias"}


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
    labels = labels_of(site.training)
    counts = np.bincount(labels, minlength=3) + np.array(PRIORS)
    shares = counts / (len(labels) + 1)
    assert saved.config.fedrot["priors"] == pytest.approx(shares.tolist())


@pytest.mark.parametrize(
    ("name", "expected", "logits"),
    [
        ("single", [0.5, 0.5, 0.0], lambda e: (e * 1000 + PRIORS) / 1001 / PRIORS),
        (
            "multi",
            [0.9, 0.5, 0.1],
            lambda e: (
                (e * 1000 + PRIORS)
                / PRIORS
                / ((1000 - e * 1000 + 1 - np.array(PRIORS)) / (1 - np.array(PRIORS)))
            ),
        ),
    ],
)
def test_expected_shares_take_the_place_of_those_of_rows(name, expected, logits):
    kind = CASES[name]
    (site,) = sites_of(kind, 1)
    model = kind.build()
    own = site_model(model, [site.training], PRIORS, expected=expected)
    shift = torch.tensor(np.log(logits(np.array(expected))))
    moved = kind.logits(own, site.test) - kind.logits(model, site.test)
    assert torch.allclose(moved, shift.expand_as(moved), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "given", "word"),
    [
        ("score", {"priors": PRIORS}, "site_shift"),
        ("single", {}, "class_priors"),
        ("single", {"priors": PRIORS[:2]}, "2 priors"),
        ("single", {"priors": PRIORS, "expected": [0.5, 0.5, 0.5]}, "add up to 1"),
        ("single", {"priors": PRIORS, "expected": [0.5, 0.5]}, "2 counts"),
        ("regression", {"expected": [1.0]}, "no classes"),
    ],
)
def test_what_gives_no_head_is_named(name, given, word):
    kind = CASES[name]
    (site,) = sites_of(kind, 1)
    with pytest.raises(fedrot.FedrotError, match=word):
        site_model(kind.build(), [site.training], **given)
