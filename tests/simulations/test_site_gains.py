"""What the verdict says of the sites, by rows of hand-made values."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fedrot.simulations.cli.app import app
from fedrot.simulations.report.findings import lead, sentences
from fedrot.simulations.report.plots import MOST_SITES, sites_plot
from fedrot.simulations.report.tables import sites_table
from fedrot.simulations.summary import verdicts_of
from tests.simulations.commands import simulated
from tests.simulations.data.files import write
from tests.simulations.report.runs import levels, row, run_of

SITES = ("Aachen", "Bremen", "Celle")
COLUMN = {"partition": "column:site"}


def own(strategy, values, rows=(40, 30, 12), **more):
    """Return rows of sites' own test rows; ``values`` has scopes, with values by seed
    and site.
    """
    metric = more.pop("metric", "accuracy")
    made = []
    for scope, seeds in values.items():
        for seed, sites in enumerate(seeds):
            for site, value, count in zip(SITES, sites, rows, strict=True):
                place = {"scope": f"{scope}:{site}"}
                made.append(row(strategy, seed, value, metric=metric, **place))
                made.append(row(strategy, seed, count, metric="test-rows", **place))
    return made


#: Alone (head) of two seeds.
HEAD = [[0.5, 0.6, 0.7], [0.5, 0.6, 0.7]]


def central(name="fedavg", values=(0.4, 0.44)):
    return levels(name, {"accuracy": values})


def of_strategy(name, values, head=HEAD, **more):
    scopes = {"own": values, "own-global": [[0.3] * 3] * len(values)}
    return central(name, [0.4, 0.44][: len(values)]) + own(
        name, {**scopes, "own-alone": head[: len(values)]}, **more
    )


def judged(rows, about=(), **more):
    (found,) = verdicts_of(run_of(rows, about, **{**COLUMN, **more}))
    return found


def test_the_first_sentence_has_both_answers():
    ours = [[0.6, 0.7, 0.65], [0.64, 0.74, 0.69]]
    said = lead(judged(of_strategy("fedavg", ours)))
    first = said.split(". ")[0]
    # Differences .1, .1, -.05 and .14, .14, -.01: by seed .05 and .09.
    low, high = stats.t.interval(0.95, 1, 0.07, stats.sem([0.05, 0.09]))
    for words in (
        "on all labels fedavg has accuracy 0.420",
        "fedavg and alone differ by noise; better with it: 2 of 3",
        f"accuracy +0.070 [{low:.3f}, +{high:.3f}]",
        "interval over 2 seeds",
        "against alone (head)",
    ):
        assert words in first, first


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ((0.10, 0.11, 0.12), "sites are better with fedavg than alone: 3 of 3"),
        ((-0.10, -0.11, -0.12), "sites are better alone than with fedavg: 3 of 3"),
        (
            (-0.10, 0.11, 0.0),
            "fedavg and alone differ by noise; better with it: 1 of 3",
        ),
    ],
)
def test_with_one_seed_the_interval_is_over_sites(gains, words):
    ours = [[alone + gain for alone, gain in zip(HEAD[0], gains, strict=True)]]
    first = lead(judged(of_strategy("fedavg", ours))).split(". ")[0]
    low, high = stats.t.interval(0.95, 2, np.mean(gains), stats.sem(gains))
    assert words in first
    assert f"{np.mean(gains):+.3f} [{low:+.3f}, {high:+.3f}]" in first
    assert "over 3 sites" in first


def test_alone_is_the_stronger_of_the_two_and_no_strategy():
    trained = own("solo", {"own": [[0.9, 0.2, 0.8], [0.9, 0.2, 0.8]]})
    about = [{"name": "fedavg"}, {"name": "solo", "kind": "alone"}]
    rows = of_strategy("fedavg", HEAD) + trained
    found = judged(rows, about)
    assert [standing.name for standing in found.standings] == ["fedavg"]
    assert found.sites.alone == "alone (trained)"
    gains = found.sites.gains
    assert [*gains] == ["alone (head)", "alone (trained)", "fedavg"]
    # Against .9, .2, .8: -.4, .4, -.1.
    ours = gains["fedavg"]
    assert (ours.better, ours.worse) == (1, 2)
    assert [*ours.differences] == pytest.approx([-0.4, 0.4, -0.1])
    weaker = own("solo", {"own": [[0.9, 0.1, 0.7], [0.9, 0.1, 0.7]]})
    assert judged(of_strategy("fedavg", HEAD) + weaker, about).sites.alone == (
        "alone (head)"
    )


def test_who_gains_is_named_with_what_few_rows_show():
    ours = [[0.6, 0.5, 0.9], [0.6, 0.5, 0.9]]
    found = judged(of_strategy("fedavg", ours))
    said = " ".join(sentences(found))
    named = "Celle +0.200 (12, few), Aachen +0.100 (40), Bremen -0.100 (30)."
    assert named in said
    tuned = own("tuned", {"own": [[0.9] * 3] * 2})
    said = " ".join(sentences(judged(of_strategy("fedavg", ours) + tuned)))
    assert "Best on own rows: tuned, accuracy 0.900." in said
    table = sites_table(found.sites)
    assert table.lines == [
        ("alone (head)", "0.600", "-", "Aachen", "0.500", "40", "-", "-"),
        ("fedavg", "0.667", "0.300", "Bremen", "0.500", "30", "2 of 3", "+0.067"),
    ]
    few = judged(of_strategy("fedavg", ours, rows=(40, 19, 20))).sites
    assert [line[5] for line in sites_table(few).lines] == ["40", "19, few"]


def test_sites_of_a_drawn_division_are_others_for_each_seed():
    ours = [[0.6, 0.5, 0.9], [0.4, 0.7, 0.9]]
    drawn = judged(of_strategy("fedavg", ours), partition="iid").sites.gains["fedavg"]
    assert (len(drawn.differences), drawn.better, drawn.worse) == (6, 4, 2)
    assert "Bremen (seed 0)" in drawn.values
    same = judged(of_strategy("fedavg", ours)).sites.gains["fedavg"]
    assert (len(same.differences), same.better, same.worse) == (3, 1, 0)


def test_lower_losses_are_better_and_stand_for_correlations():
    rows = levels("fedavg", {"pearson": [0.5], "loss": [1.0]})
    values = {"own": [[1.0, 2.0, 3.0]], "own-alone": [[2.0, 2.5, 3.0]]}
    rows += own("fedavg", values, metric="loss")
    found = judged(rows)
    gain = found.sites.gains["fedavg"]
    assert (found.sites.metric, gain.better, gain.worse) == ("loss", 2, 0)
    assert gain.worst == "Celle"
    assert "by loss -0.500 [" in lead(found)


def test_without_alone_nothing_is_said_of_sites():
    rows = central() + own("fedavg", {"own": [[0.5] * 3]})
    found = judged(rows)
    assert found.sites is None
    assert "own rows" not in lead(found)


def test_the_picture_has_a_line_for_each_site_that_falls_or_rises():
    pairs = {"a": (0.5, 0.6), "b": (0.7, 0.6), "$x": (0.1, 0.1)}
    (ax,) = sites_plot(pairs, "accuracy", ("alone (head)", "fit_head")).axes
    drawn = [[*line.get_ydata()] for line in ax.lines]
    assert drawn == [[0.5, 0.6], [0.7, 0.6], [0.1, 0.1]]
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--", "-"]
    assert {text.get_text() for text in ax.texts} == {"a", "b", r"\$x"}
    many = {str(n): (0.1, 0.2) for n in range(MOST_SITES + 1)}
    (ax,) = sites_plot(many, "accuracy", ("a", "b")).axes
    assert (len(ax.lines), len(ax.texts)) == (MOST_SITES + 1, 0)


# As a new user sees it


def test_the_first_screen_answers_whether_to_join_and_who_gains(tmp_path):
    """Five sites of 60 to 600 rows, one of which has two classes."""
    sizes = {"Aachen": 600, "Bremen": 300, "Celle": 150, "Dresden": 100, "Essen": 60}
    sites = [site for site, size in sizes.items() for _ in range(size)]
    # In one of two rows the last word is the class; each site has one more often.
    classes = [
        (row % 2 if site == "Essen" else (row % 7 + len(site)) % 4)
        for row, site in enumerate(sites)
    ]
    columns = {
        "site": sites,
        "label": [f"class {number}" for number in classes],
        "text": [f"a story {row % 2 and number}" for row, number in enumerate(classes)],
    }
    file = write(tmp_path / "five.csv", **columns)
    out = tmp_path / "out"
    given = ("--data", file, "--partition", "column:site", "--seeds", 1, "--rounds", 1)
    chosen = ("--strategies", "fedavg,head_only,alone,local_finetuning")
    limits = {"train_limit": "", "test_limit": ""}
    simulated(out, limits, *given, *chosen)
    shown = CliRunner().invoke(app, ["report", str(out)]).output.splitlines()
    screen = " ".join(" ".join(shown[:24]).split())
    first = screen.split(". ")[0]
    for words_of_answer in (
        " has accuracy 0.",
        "on their own rows",
        " of 5, by accuracy",
        "against alone (",
    ):
        assert words_of_answer in first, screen
    gains = screen.split("few are below 20): ")[1].split(". ")[0]
    assert {part.split()[0] for part in gains.split(", ") if part[0].isupper()} == {
        *sizes
    }
    # One test row in five of each class, so Essen has about twelve.
    assert ", few)" in gains.split("Essen")[1][:20]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Each site on its own rows" in page
    assert all(f"{site} 0." in page for site in sizes)
