"""What the verdict says of the sites, by rows of hand-made values."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fedrot.simulations.cli.app import app
from fedrot.simulations.comparison.summary import verdicts_of
from fedrot.simulations.report.findings import lead, sentences
from fedrot.simulations.report.plots import sites_plot
from fedrot.simulations.report.tables import sites_table
from tests.simulations.commands import simulated
from tests.simulations.data.files import write
from tests.simulations.report.runs import row, run_of

SITES = ("Aachen", "Bremen", "Celle")
#: Alone (head).
HEAD = [0.5, 0.6, 0.7]


def of(name, *seeds, headline="accuracy", head=HEAD):
    """Return rows of a strategy; ``seeds`` have the values of the sites' own models."""
    made = []
    for seed, own in enumerate(seeds):
        made.append(row(name, seed, 0.4 + 0.04 * seed, metric=headline))
        metric = "loss" if headline == "pearson" else headline
        values = {f"own-{metric}": own, f"global-{metric}": [0.3] * 3}
        values |= {f"alone-{metric}": head, "test-rows": (40, 20, 19)}
        made += [
            row(name, seed, value, scope=f"site:{site}", metric=metric)
            for metric, by_site in values.items()
            for site, value in zip(SITES, by_site, strict=False)
        ]
    return made


def judged(rows, about=(), partition="column:site"):
    (found,) = verdicts_of(run_of(rows, about, partition=partition))
    return found


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ([[0.1, 0.11, 0.12]], "join: 3 of 3 sites are better with fedavg"),
        ([[-0.1, -0.11, -0.12]], "stay alone: 0 of 3 sites are better with fedavg"),
        ([[-0.1, 0.11, 0.0]], "differ by noise: 1 of 3 sites are better with fedavg"),
        (
            [[0.1, 0.1, -0.05], [0.14, 0.14, -0.01]],
            "differ by noise: 2 of 3 sites are better with fedavg",
        ),
    ],
)
def test_the_first_sentence_has_both_answers(gains, words):
    first = lead(judged(of("fedavg", *np.add(HEAD, gains)))).split(". ")[0]
    assert words in first
    # Of several seeds, the interval is over their means.
    units = np.mean(gains, axis=1) if len(gains) > 1 else gains[0]
    low, high = stats.t.interval(0.95, len(units) - 1, np.mean(units), stats.sem(units))
    assert f"in accuracy: {np.mean(units):+.3f} [{low:+.3f}, {high:+.3f}]" in first
    assert f"over {len(units)} {'seeds' if len(gains) > 1 else 'sites'}" in first
    assert f"on all labels fedavg has accuracy 0.4{2 * (len(gains) - 1)}" in first
    assert "against alone (head)" in first


@pytest.mark.parametrize(
    ("values", "words"),
    [
        # The mean of equal values over three strategies is another float.
        ([0.7] * 3, "joining changes nothing: 0 of 3"),
        ([0.9] * 3, "no interval tells whether to join: 3 of 3"),
        ([np.nan] * 3, "no interval tells whether to join: 0 of 3"),
    ],
)
def test_without_an_interval_none_is_named(values, words):
    rows = [
        line for name in ("a", "b", "c") for line in of(name, values, head=[0.7] * 3)
    ]
    first = lead(judged(rows)).split(". ")[0]
    assert words in first
    assert "95 %" not in first


@pytest.mark.parametrize(
    ("trained", "alone"),
    [([0.9, 0.2, 0.8], "alone (trained)"), ([0.9, 0.1, 0.7], "alone (head)")],
)
def test_alone_is_the_stronger_of_the_two_and_no_strategy(trained, alone):
    about = [{"name": "fedavg"}, {"name": "solo", "kind": "alone"}]
    solo = [own for own in of("solo", trained) if "own" in own["metric"]]
    found = judged(of("fedavg", HEAD) + solo, about)
    assert [standing.name for standing in found.standings] == ["fedavg"]
    assert [*found.sites.against] == ["alone (head)", "alone (trained)", "fedavg"]
    assert found.sites.alone == alone
    beside = trained if alone == "alone (trained)" else HEAD
    assert [*found.sites.gains["fedavg"]] == pytest.approx(np.subtract(HEAD, beside))


def test_who_gains_is_named_with_what_few_rows_show():
    ours = of("fedavg", [0.6, 0.5, 0.9])
    named = "Celle +0.200 (19, few), Aachen +0.100 (40), Bremen -0.100 (20)."
    found = judged(ours)
    assert named in " ".join(sentences(found))
    three = of("fedavg", *[[0.6, 0.5, 0.9]] * 3)
    said = " ".join(sentences(judged(three + of("tuned", *[[0.9] * 3] * 3))))
    assert "Best on own rows: tuned, accuracy 0.900." in said
    lines = [
        ("alone (head)", "0.600", "-", "Aachen", "0.500", "40", "-"),
        ("fedavg", "0.667", "0.300", "Bremen", "0.500", "20", "2 of 3"),
    ]
    assert [line[:7] for line in sites_table(found.sites).lines] == lines


def test_sites_of_a_drawn_division_are_others_for_each_seed():
    ours = of("fedavg", [0.6, 0.5, 0.9], [0.4, 0.7, 0.9])
    drawn, same = judged(ours, partition="iid").sites, judged(ours).sites
    assert (drawn.better("fedavg"), same.better("fedavg")) == ("4 of 6", "1 of 3")
    assert "Bremen (seed 0)" in drawn.pairs("fedavg")


def test_lower_losses_are_better_and_stand_for_correlations():
    ours = of("fedavg", [1.0, 2.0, 3.0], headline="pearson", head=[2.0, 2.5, 3.0])
    found = judged(ours)
    sites = found.sites
    assert (sites.metric, sites.worst("fedavg")) == ("loss", "Celle")
    assert sites.better("fedavg") == "2 of 3"
    assert "in loss: -0.500 [" in lead(found)
    assert "Aachen -1.000 (40), Bremen -0.500 (20)" in " ".join(sentences(found))


def test_without_alone_the_worst_site_is_still_known():
    found = judged(of("fedavg", HEAD, head=()))
    assert "own rows" not in lead(found) + " ".join(sentences(found))
    lines = [("fedavg", "0.600", "0.300", "Aachen", "0.500", "40")]
    assert sites_table(found.sites).lines == lines


def test_the_picture_has_a_line_for_each_site():
    pairs = {"a": (0.5, 0.6), "b": (0.7, 0.6), "$x": (0.1, 0.1)}
    (ax,) = sites_plot(pairs, "accuracy", ("alone (head)", "fit_head")).axes
    drawn = [line.get_xdata() for line in ax.lines]
    assert [*zip(*drawn, strict=True)] == [*pairs.values()]
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names == ["a", "b", r"\$x"]


def test_the_first_screen_answers_whether_to_join_and_who_gains(tmp_path):
    """Five sites of 60 to 600 rows, one of which has two classes."""
    sizes = {"Aachen": 600, "Bremen": 300, "Celle": 150, "Dresden": 100, "Essen": 60}
    sites = [site for site, size in sizes.items() for _ in range(size)]
    # In one of two rows the last word is the class; each site has one more often.
    classes = [
        row % 2 if site == "Essen" else (row % 7 + len(site)) % 4
        for row, site in enumerate(sites)
    ]
    texts = [f"a story {row % 2 and number}" for row, number in enumerate(classes)]
    labels = [f"class {number}" for number in classes]
    file = write(tmp_path / "five.csv", site=sites, label=labels, text=texts)
    out = tmp_path / "out"
    given = ("--data", file, "--partition", "column:site", "--seeds", 1, "--rounds", 1)
    chosen = ("--strategies", "fedavg,head_only,alone,local_finetuning")
    simulated(out, {"train_limit": "", "test_limit": ""}, *given, *chosen)
    shown = CliRunner().invoke(app, ["report", str(out)]).output.splitlines()
    screen = " ".join(" ".join(shown[:24]).split())
    for words in ("For own rows, ", " of 5 sites are ", "than alone, in accuracy: "):
        assert words in screen.split("; on all labels ")[0], screen
    gains = screen.split("few are below 20): ")[1].split(". ")[0]
    assert all(f"{site} " in gains for site in sizes)
    # One test row in five of each class, so Essen has about twelve.
    assert ", few)" in gains.split("Essen")[1][:20]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Each site on its own rows" in page
    assert all(f"{site} 0." in page for site in sizes)
