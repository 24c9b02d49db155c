"""What each site gains: reports of sites, who is left out, and what a lie changes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

import fedrot
from fedrot.strategies import (
    Checkpointing,
    FedRot,
    LabelledRows,
    Reporting,
    fit_task_head,
    report_sites,
)
from fedrot.strategies.wire.fitting_messages import FIGURES, PRIORS, STAGE
from fedrot.task_head.site_figures import interval
from tests.models import near
from tests.strategies.fakes import (
    failure,
    grid_of,
    largest_difference,
    model_in,
    reply,
    tensors_of,
)
from tests.strategies.fitting.site_cases import (
    CASES,
    alone_logits,
    figures_of,
    labels_of,
    logits_of,
    one_class,
    own_shift,
    pooled_priors,
    sites_of,
)

SINGLE = CASES["single"]
FIRST = SINGLE.state()
FINAL = near(FIRST, 0.2, 1)


def reported(nodes, kind=SINGLE, first=FIRST, final=FINAL, **given):
    return report_sites(
        grid_of(nodes),
        ArrayRecord(final),
        kind.config,
        first=ArrayRecord(first),
        timeout=1,
        **given,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_site_reports_what_a_slow_oracle_counts(name, warnings, tmp_path):
    kind = CASES[name]
    sites = sites_of(kind)
    first = kind.state()
    final = near(first, 0.2, 1)
    nodes = [site.node(tmp_path) for site in sites]
    found = reported(nodes, kind, first, final)
    assert warnings() == ""
    priors = pooled_priors(sites)
    for site, row in zip(sites, found.rows, strict=True):
        labels = labels_of(site.test)
        whole = logits_of(kind, final, site.test)
        shift = own_shift(site, priors, logits_of(kind, final, site.training))
        answers = {
            "global": whole,
            "own": whole + shift,
            "alone": alone_logits(site, first, site.test),
        }
        expected = {
            head: figures_of(kind, logits, labels) for head, logits in answers.items()
        }
        for head, figures in expected.items():
            assert row[head] == pytest.approx(figures, rel=1e-4), head
        own, alone = (expected[head][found.measure] for head in ("own", "alone"))
        gain = alone - own if name == "regression" else own - alone
        assert row["gain"][0] == pytest.approx(gain, abs=1e-4)
        assert row["gain"][1] <= row["gain"][0] <= row["gain"][2]
        trained = labels_of(site.training)
        assert (row["site"], row["chose"]) == (site.name, False)
        assert (row["rows"], row["training"]) == (len(labels), len(trained))
        if name != "regression":
            hot = [
                y if y.ndim > 1 else y[:, None] == range(3) for y in (trained, labels)
            ]
            counts = [of.sum(0).tolist() for of in hot]
            assert [*row["classes"].values()] == [*map(list, zip(*counts, strict=True))]
    metrics = found.metrics()
    assert (metrics["sites"], metrics["withheld"]) == (3, 0)
    owns = [row["own"][found.measure] for row in found.rows]
    worst = max(owns) if name == "regression" else min(owns)
    assert metrics[f"own-{found.measure}-worst"] == worst
    assert metrics[f"own-{found.measure}"] == pytest.approx(sum(owns) / 3)
    assert metrics["sites-better"] == sum(row["gain"][1] > 0 for row in found.rows)


def test_an_interval_is_that_of_rows_drawn_again():
    """The oracle draws rows, not how often each value is drawn."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(60, generator=generator).double()
    drawn = torch.randint(60, (20000, 60), generator=generator)
    quantiles = torch.tensor([0.025, 0.975]).double()
    expected = values[drawn].mean(1).quantile(quantiles)
    assert torch.allclose(interval(values), expected, atol=0.03)
    assert interval(torch.ones(1).double()).tolist() == [1, 1]


#: What a liar makes of its figures, by record, and whether this is found.
LIES = {
    "NaN": ("heads", lambda value: value.mul_(math.nan)),
    "huge": ("heads", lambda value: value.mul_(1e31)),
    "negative": ("heads", lambda value: value.neg_()),
    "above 1": ("heads", lambda value: value.add_(1)),
    "an interval upside down": (
        "noise",
        lambda value: value.copy_(value.new_tensor([1, -1])),
    ),
    "parts of rows": ("rows", lambda value: value.add_(0.5)),
    "more of a class": ("rows", lambda value: value[:, 1].fill_(1e6)),
    "many rows": ("rows", lambda value: value[:, 0].fill_(1e13)),
    "no rows": ("rows", lambda value: value.zero_()),
    "another shape": ("noise", lambda value: value.resize_(3)),
    "a perfect head": ("heads", lambda value: value.zero_()),
}


def lying(node, what):
    name, edit = LIES[what]

    def answer(message):
        found = node(message)
        if FIGURES in found.content:
            figures = {
                n: t.clone() for n, t in tensors_of(found.content[FIGURES]).items()
            }
            edit(figures[name])
            found.content[FIGURES] = ArrayRecord(figures)
        return found

    return answer


def crashing(node):
    """Return a node whose errors are answers, as Flower's."""

    def answer(message):
        try:
            return node(message)
        except fedrot.FedrotError as error:
            return Message(Error(code=1, reason=str(error)), reply_to=message)

    return answer


def learning(site, folder, seed):
    """Return a node that trains and evaluates, too."""
    node = site.node(folder)

    def answer(message):
        kind = message.metadata.message_type
        if kind == "train":
            return reply(message, near(model_in(message), 0.05, seed), 10, seed)
        if kind == "evaluate":
            metrics = MetricRecord({"num-examples": 9, "mine": 0.5})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        return node(message)

    return answer


def played(nodes, rounds=2, **given):
    strategy = FedRot(SINGLE.config, fit_head=True, alignment=None, **given)
    arrays = ArrayRecord(FIRST)
    return strategy, strategy.start(grid_of(nodes), arrays, rounds, timeout=1)


def test_lies_of_a_report_are_named_and_change_nobodys_model(tmp_path, warnings):
    """A lie that could be true counts for the site that tells it."""
    sites = sites_of(SINGLE)
    nodes = [learning(site, tmp_path, seed) for seed, site in enumerate(sites)]
    _, honest = played(nodes)
    expected = honest.train_metrics_clientapp[2]
    assert (expected["fedrot-sites"], warnings().count("out of range")) == (3, 0)
    for count, what in enumerate(LIES, start=1):
        _, found = played([lying(nodes[0], what), *nodes[1:]])
        assert largest_difference(found.arrays, honest.arrays) == 0
        metrics = found.train_metrics_clientapp[2]
        believed = what == "a perfect head"
        assert metrics["fedrot-sites"] == 2 + believed
        assert warnings().count("Client 100: ") == count - believed, what


def test_a_run_reports_its_sites_to_files_functions_and_the_log(tmp_path, caplog):
    """Site 1 withholds, site 2 fails, site 3 has no rows; names are made unique."""
    base = sites_of(SINGLE)
    unlabelled = {**base[0].test, "labels": torch.full_like(base[0].test["labels"], -1)}
    sites = [
        replace(base[0], name="A\x1b[31m\n"),
        replace(base[1], report=False),
        base[2],
        replace(base[2], test=unlabelled),
        replace(base[1], name="A [31m", test=None),
        replace(base[2], name="B" * 999),
        replace(base[1], name="B" * 999),
    ]
    nodes = [learning(site, tmp_path, seed) for seed, site in enumerate(sites)]
    fails = nodes[2]

    def failing(message):
        config = message.content.get("config", {})
        return (failure if config.get(STAGE) == "report" else fails)(message)

    nodes[2] = failing
    nodes[3] = crashing(nodes[3])
    told, noted = list[ConfigRecord](), dict[str, float]()

    def listening(message):
        told.append(message.content["config"])
        return answers(message)

    caplog.set_level("INFO", "flwr")
    reporting = Reporting(tmp_path / "rows", on_round=lambda n, own: noted.update(own))
    nodes[0], answers = listening, nodes[0]
    strategy, result = played(nodes, reporting=reporting, trusted=True)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    ours = [row for row in rows if row.get("stage") == "site"]
    names = ["A [31m", "A [31m (2)", "B" * 60, "B" * 60 + " (2)"]
    assert [row["site"] for row in ours] == names
    # By the clients' own ids.
    assert [row["client"] for row in ours] == [0, 4, 5, 6]
    assert [row["chose"] for row in ours] == [False, True, False, False]
    assert {row["round"] for row in ours} == {2}
    (of_all,) = (row for row in rows if row.get("stage") == "sites")
    assert (of_all["metrics"]["sites"], of_all["metrics"]["withheld"]) == (4, 1)
    for name, value in of_all["metrics"].items():
        assert result.train_metrics_clientapp[2][f"fedrot-{name}"] == value
        assert noted[f"sites/{name}"] == value
    assert result.evaluate_metrics_clientapp[2]["mine"] == pytest.approx(0.5)
    text = caplog.text
    assert "Client 102: it failed: crashed" in text
    assert "Client 103: it failed: No row has a label" in text
    assert "of 4 sites are better with their own head than alone" in text
    assert "1 sites withhold" in text
    # Priors are told from the first fit on, and are shares.
    shares = [[*config[PRIORS]] for config in told if PRIORS in config]
    stages = [config.get(STAGE, "train") for config in told if PRIORS not in config]
    assert stages == ["count", "sum", "evaluate"]
    assert shares[-1] == strategy.priors
    assert sum(shares[0]) == pytest.approx(1)


def test_a_site_that_joins_late_and_a_resumed_run_report_the_same(tmp_path):
    """The head alone is that of the first model, whenever it is fitted."""
    sites = sites_of(SINGLE)
    nodes = [learning(site, tmp_path / "a", n) for n, site in enumerate(sites)]
    _, whole = played(nodes)
    checkpoints = Checkpointing(tmp_path / "runs")
    nodes = [learning(site, tmp_path / "b", n) for n, site in enumerate(sites)]
    first, _ = played(nodes[:2], 1, checkpoints=checkpoints, fraction_evaluate=0.0)
    resumed, found = played(nodes, 2, checkpoints=checkpoints, fraction_evaluate=0.0)
    metrics, before = (run.train_metrics_clientapp[2] for run in (found, whole))
    assert metrics["fedrot-sites"] == 3
    assert metrics["fedrot-alone-accuracy"] == before["fedrot-alone-accuracy"]
    # The shares of two sites stay where the old model stays.
    assert first.priors == pytest.approx(pooled_priors(sites[:2]))
    joined = sites if metrics["fedrot-head-fitted"] else sites[:2]
    assert resumed.priors == pytest.approx(pooled_priors(joined))
    again, _ = played(nodes, 2, checkpoints=checkpoints, fraction_evaluate=0.0)
    assert again.priors == resumed.priors


@pytest.mark.parametrize("name", ["single", "multi", "regression"])
def test_a_site_of_one_label_alone_is_a_constant(name, tmp_path):
    kind = CASES[name]
    # Without held-out rows no temperature is chosen.
    sites = [replace(one_class(site), held_out=None) for site in sites_of(kind)]
    first = kind.state()
    nodes = [site.node(tmp_path) for site in sites]
    found = reported(nodes, kind, first, first)
    for site, row in zip(sites, found.rows, strict=True):
        labels = labels_of(site.test)
        n = len(site.training["labels"])
        share = torch.tensor([0.5, n, 0.5]) / (n + 1)
        constant = {
            "single": share.log(),
            "multi": torch.full((3,), (n + 0.5) / (n + 1)).logit(),
            "regression": torch.ones(1),
        }[name]
        logits = constant.double().expand(len(labels), -1).numpy()
        assert row["alone"] == pytest.approx(figures_of(kind, logits, labels), rel=1e-4)


def test_a_model_that_nobody_trained_is_the_first_one(tmp_path):
    sites = sites_of(SINGLE)
    nodes = [site.node(tmp_path) for site in sites]
    final = fit_task_head(grid_of(nodes), ArrayRecord(FIRST), SINGLE.config)
    found = report_sites(
        grid_of(nodes), final.arrays, SINGLE.config, priors=final.priors
    )
    both = reported(nodes, final=tensors_of(final.arrays), priors=final.priors)
    assert found == both


def test_nobody_who_reports_is_no_error(tmp_path, caplog):
    caplog.set_level("INFO", "flwr")
    sites = [replace(site, report=False) for site in sites_of(SINGLE)]
    nodes = [learning(site, tmp_path, n) for n, site in enumerate(sites)]
    _, result = played(nodes, 1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["fedrot-sites"], metrics["fedrot-withheld"]) == (0, 3)
    assert "3 sites withhold their figures" in caplog.text
    with pytest.raises(fedrot.FedrotError, match="usable answer"):
        reported([failure])
    with pytest.raises(fedrot.FedrotError, match="test of LabelledRows"):
        LabelledRows(list, list, list, test=[])
