"""What each site gains: reports of sites, who is left out, and what a lie changes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from scipy.stats import bootstrap

import fedrot
from fedrot.lora import adapter_tensors
from fedrot.strategies import (
    Checkpointing,
    FedRot,
    LabelledRows,
    Reporting,
    fit_task_head,
    report_sites,
    site_model,
)
from fedrot.strategies.wire.fitting_messages import FIGURES, PRIORS, STAGE
from fedrot.task_head.site_figures import mean_and_interval
from tests.models import near
from tests.strategies.fakes import (
    failure,
    grid_of,
    largest_difference,
    model_in,
    reply,
    tensors_of,
)
from tests.strategies.fitting.classifiers import edited
from tests.strategies.fitting.site_cases import (
    CASES,
    by_class,
    figures_of,
    labels_of,
    loaded,
    logits_of,
    priors_of,
    sites_of,
)

SINGLE = CASES["single"]
FIRST = SINGLE.state()


def reported(nodes, kind=SINGLE, change=0.2, **given):
    """Return the report of a model that has moved away from the first one."""
    first = kind.state()
    final = ArrayRecord(near(first, change, 1))
    given = {"first": ArrayRecord(first), "timeout": 1, **given}
    return report_sites(grid_of(nodes), final, kind.config, **given)


@pytest.mark.parametrize("name", CASES)
def test_a_site_reports_what_other_ways_to_its_heads_give(name, warnings, tmp_path):
    """The head alone is that of a federation of one site, with the first body."""
    kind = CASES[name]
    sites = sites_of(kind)
    final = near(kind.state(), 0.2, 1)
    found = reported([site.node(tmp_path) for site in sites], kind)
    assert warnings() == ""
    sign = -1 if name == "regression" else 1
    for site, row in zip(sites, found.rows, strict=True):
        labels = labels_of(site.test)
        models = {"global": final}
        # A decoder's head has no bias, and so no head of a site.
        if name != "score":
            grid = grid_of([site.node(tmp_path / site.name)])
            alone = fit_task_head(grid, ArrayRecord(kind.state()), kind.config)
            model = site_model(loaded(kind, final), [site.training], priors_of(sites))
            own = adapter_tensors(model) if kind.adapter else model.state_dict()
            models |= {"alone": tensors_of(alone.arrays), "own": own}
        for head, tensors in models.items():
            figures = figures_of(kind, logits_of(kind, tensors, site.test), labels)
            assert row[head] == pytest.approx(figures, rel=1e-4), head
        mean, low, high = row["gain"]
        gain = sign * (row["own"][found.measure] - row["alone"][found.measure])
        assert low <= mean <= high
        assert mean == pytest.approx(gain, abs=1e-4)
        sizes = (len(labels), len(labels_of(site.training)))
        assert (row["rows"], row["training"]) == sizes
        assert (row["site"], row["chose"]) == (site.name, False)
        if name != "regression":
            counts = torch.stack([by_class(site.training), by_class(site.test)], 1)
            assert [*row["classes"].values()] == counts.tolist()
    metrics = found.metrics()
    values = torch.tensor([row["own"][found.measure] for row in found.rows])
    means = {"": values.mean(), "-worst": sign * (sign * values).min()}
    for end, value in means.items():
        assert metrics[f"own-{found.measure}{end}"] == pytest.approx(float(value))
    assert metrics["sites-better"] == sum(row["gain"][1] > 0 for row in found.rows)


def test_an_interval_is_that_of_rows_drawn_again():
    values = torch.randn(60, generator=torch.Generator().manual_seed(1)).double()
    drawn = bootstrap((values.numpy(),), np.mean, method="percentile", random_state=1)
    expected = [float(values.mean()), *drawn.confidence_interval]
    assert mean_and_interval(values).tolist() == pytest.approx(expected, abs=0.03)
    assert mean_and_interval(torch.ones(1).double()).tolist() == [1, 1, 1]


#: What a liar writes into its figures, by record and place; the last one could be true.
LIES = [
    ("heads", 0, math.nan),
    ("heads", 0, math.inf),
    ("heads", 0, -1),
    ("heads", 1, 2),
    ("gain", 2, -1),
    ("gain", 0, 2),
    ("rows", 1, 0.5),
    ("rows", 1, 1e6),
    ("rows", 0, 1e13),
    ("rows", 4, 0),
    ("others", 0, 0),
    ("heads", 7, 1),
]


def lying(node, lie):
    name, place, value = lie

    def edit(answer):
        if FIGURES in answer:
            figures = {n: tensor.double() for n, tensor in answer[FIGURES].items()}
            figures.setdefault(name, torch.zeros(1)).view(-1)[place] = value
            answer[FIGURES] = figures

    return edited(node, edit)


def learning(site, folder, seed):
    """Return a node that trains and evaluates, too, and whose errors are answers."""
    node = site.node(folder)

    def answer(message):
        kind = message.metadata.message_type
        if kind == "train":
            return reply(message, near(model_in(message), 0.05, seed), 10, seed)
        if kind == "evaluate":
            metrics = MetricRecord({"num-examples": 9, "mine": 0.5})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        try:
            return node(message)
        except fedrot.FedrotError as error:
            return Message(Error(code=1, reason=str(error)), reply_to=message)

    return answer


def learning_all(sites, folder):
    return [learning(site, folder, seed) for seed, site in enumerate(sites)]


def played(nodes, rounds=2, **given):
    strategy = FedRot(SINGLE.config, fit_head=True, alignment=None, **given)
    arrays = ArrayRecord(FIRST)
    return strategy, strategy.start(grid_of(nodes), arrays, rounds, timeout=1)


def test_lies_of_a_report_are_named_and_change_nobodys_model(tmp_path, warnings):
    """A lie that could be true counts for the site that tells it."""
    first, *others = learning_all(sites_of(SINGLE), tmp_path)
    honest = reported([first, *others])
    for lie in LIES:
        sites = reported([lying(first, lie), *others])
        assert sites.rows[-2:] == honest.rows[-2:]
        assert len(sites.rows) == 2 + (lie is LIES[-1])
    assert warnings().count("Client 100: ") == len(LIES) - 1
    (_, fair), (_, unfair) = (
        played([node, *others]) for node in (first, lying(first, lie))
    )
    assert largest_difference(fair.arrays, unfair.arrays) == 0


def test_a_run_reports_its_sites_to_files_functions_and_the_log(tmp_path, caplog):
    """Sites 1 and 3, which has no rows, withhold; site 2 fails; names become unique."""
    base = sites_of(SINGLE)
    unlabelled = {**base[0].test, "labels": torch.full((50,), -1)}
    sites = [
        replace(base[0], name="A\x1b[31m\n"),
        replace(base[1], report=False),
        base[2],
        replace(base[2], test=unlabelled),
        replace(base[1], name="A [31m", test=None),
        replace(base[2], name="B" * 999),
    ]
    nodes = learning_all(sites, tmp_path)
    configs, noted = [], {}

    def listening(message):
        configs.append(message.content["config"])
        return nodes[0](message)

    def failing(message):
        stage = message.content.get("config", {}).get(STAGE)
        return (failure if stage == "report" else nodes[2])(message)

    caplog.set_level("INFO", "flwr")
    reporting = Reporting(tmp_path / "rows", on_round=lambda n, new: noted.update(new))
    asked = [listening, nodes[1], failing, *nodes[3:]]
    strategy, result = played(asked, reporting=reporting, trusted=True)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    # By the clients' own ids.
    assert [
        (row["round"], row["client"], row["site"], row["chose"])
        for row in rows
        if row.get("stage") == "site"
    ] == [
        (2, 0, "A [31m", False),
        (2, 4, "A [31m (2)", True),
        (2, 5, "B" * 60, False),
    ]
    (metrics,) = (row["metrics"] for row in rows if row.get("stage") == "sites")
    assert (metrics["sites"], metrics["withheld"]) == (3, 2)
    for name, value in metrics.items():
        assert result.train_metrics_clientapp[2][f"fedrot-{name}"] == value
        assert noted[f"sites/{name}"] == value
    assert result.evaluate_metrics_clientapp[2]["mine"] == pytest.approx(0.5)
    for text in (
        "Client 102: it failed: crashed",
        "of 3 sites are better with their own head than alone",
        "2 sites withhold",
    ):
        assert text in caplog.text
    # Priors are told from the first fit on, and are shares.
    told = [PRIORS in config for config in configs]
    stages = [config.get(STAGE, "train") for config in configs]
    assert stages[: told.index(True)] == ["count", "sum", "evaluate"]
    assert all(told[3:])
    assert configs[-1][PRIORS] == strategy.priors
    assert sum(configs[3][PRIORS]) == pytest.approx(1)


def test_a_site_that_joins_late_and_a_resumed_run_report_the_same(tmp_path):
    """The head alone is that of the first model. A run that is over reports again."""
    sites = sites_of(SINGLE)
    _, whole = played(learning_all(sites, tmp_path / "a"))
    given = {
        "checkpoints": Checkpointing(tmp_path / "runs"),
        "reporting": Reporting(tmp_path / "rows"),
        "fraction_evaluate": 0.0,
    }
    nodes = learning_all(sites, tmp_path / "b")
    first, _ = played(nodes[:2], 1, **given)
    # The shares of two sites stay where the old model stays.
    assert first.priors == pytest.approx(priors_of(sites[:2]))
    before = whole.train_metrics_clientapp[2]
    for _ in range(2):
        resumed, result = played(nodes, 2, **given)
        metrics = result.train_metrics_clientapp[2]
        assert metrics["fedrot-sites"] == 3
        assert metrics["fedrot-alone-accuracy"] == before["fedrot-alone-accuracy"]
        joined = sites if metrics["fedrot-head-fitted"] else sites[:2]
        assert resumed.priors == pytest.approx(priors_of(joined))
        assert (tmp_path / "rows").read_text().count('"stage": "site"') == 3


@pytest.mark.parametrize("name", ["single", "multi", "regression"])
def test_a_site_of_one_row_has_a_constant_alone(name, tmp_path):
    kind = CASES[name]
    (site,) = sites_of(kind, 1)
    one_row = {tensor: value[:1] for tensor, value in site.training.items()}
    # Without held-out rows no temperature is chosen.
    site = replace(site, training=one_row, held_out=None)
    (row,) = reported([site.node(tmp_path)], kind).rows
    constant = {
        "single": (by_class(one_row) + 1).log(),
        "multi": (3.0 ** (2 * by_class(one_row) - 1)).log(),
        "regression": one_row["labels"],
    }[name]
    labels = labels_of(site.test)
    logits = constant.double().expand(len(labels), -1)
    assert row["alone"] == pytest.approx(figures_of(kind, logits, labels), rel=1e-4)


def test_a_site_cannot_take_the_name_of_another():
    nodes = learning_all(
        [
            replace(site, name=name)
            for site, name in zip(
                sites_of(SINGLE), ("", "client 100", "B"), strict=True
            )
        ],
        None,
    )
    assert [row["site"] for row in reported(nodes).rows] == ["", "client 100 (2)", "B"]


def test_a_model_that_nobody_trained_is_the_first_one(tmp_path):
    nodes = [site.node(tmp_path) for site in sites_of(SINGLE)]
    sites = report_sites(grid_of(nodes), ArrayRecord(FIRST), SINGLE.config)
    assert sites == reported(nodes, change=0.0)


def test_nobody_who_reports_is_no_error(tmp_path, caplog):
    caplog.set_level("INFO", "flwr")
    sites = [replace(site, report=False) for site in sites_of(SINGLE)]
    _, result = played(learning_all(sites, tmp_path), 1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["fedrot-sites"], metrics["fedrot-withheld"]) == (0, 3)
    assert "3 sites withhold their figures" in caplog.text
    with pytest.raises(fedrot.FedrotError, match="usable answer"):
        reported([failure])
    with pytest.raises(fedrot.FedrotError, match="test of LabelledRows"):
        LabelledRows(list, list, list, test=[])
