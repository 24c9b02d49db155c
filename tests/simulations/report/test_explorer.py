"""The page of published rows in a browser: with keys alone, on a phone; and without a
script.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import material
import numpy as np
import pandas
import pytest
from markdown import markdown
from scipy import stats

from docs.hooks import on_page_markdown
from tests.simulations.report.test_browser import CHROMIUM, opened

DOCS = Path(__file__).parents[3] / "docs"
FIGURES = """Object.fromEntries(
  [...document.querySelectorAll("#explorer figure")].map(one => [
    one.querySelector("figcaption").textContent,
    [...one.querySelectorAll("tbody tr")].map(row =>
      [...row.cells].map(cell => cell.textContent))]))"""
#: Shows every table; returns what is then wider than the window or its place, and
#: choices that are cut.
WIDE = """[...document.querySelectorAll("details")].flatMap((one) => {
  const {dataset: {page, data, skew}} = one;
    history.replaceState(null, "", `#${new URLSearchParams({page, data, skew})}`);
    dispatchEvent(new Event("hashchange"));
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = getComputedStyle(document.querySelector("select")).font;
    return [...document.querySelectorAll("body *:not(details *)")].filter(one =>
        one.getBoundingClientRect().right > innerWidth ||
        one.clientWidth && one.scrollWidth > one.clientWidth + 1 ||
        one.text &&
        one.parentElement.clientWidth - 36 < pen.measureText(one.text).width)}
    ).map(one => one.outerHTML)"""


def interval(values, sign=""):
    ends = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    mean, low, high = (f"{value:{sign}.3f}" for value in (np.mean(values), *ends))
    return f"{mean} [{low}, {high}]"


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)
def test_the_page_has_the_figures_of_the_rows(tmp_path):
    shutil.copytree(DOCS / "assets", tmp_path / "assets")
    (style,) = Path(material.__file__).parent.glob(
        "templates/assets/stylesheets/main.*.min.css"
    )
    text = on_page_markdown(
        (DOCS / "results" / "explorer.md").read_text(encoding="utf-8")
    )
    file = tmp_path / "results" / "explorer" / "index.html"
    file.parent.mkdir(parents=True)
    css = style.read_text(encoding="utf-8")
    head = f'<!doctype html><meta charset="utf-8"><style>{css}</style>'
    file.write_text(
        f'{head}<body class="md-typeset">{markdown(text)}', encoding="utf-8"
    )
    rows = pandas.read_parquet(DOCS / "results" / "guard" / "rows.parquet")
    rows = rows[rows["setting"] == "three rounds Dirichlet 0.5"]
    of_client = rows["scope"].str.startswith("client:") & (rows["metric"] == "accuracy")
    rows.loc[of_client, ["scope", "metric"]] = ["central", "worst client"]
    known = (
        rows[rows["scope"] == "central"]
        .groupby(["metric", "arm", "round", "seed"])["value"]
        .min()
    )
    with opened(file, 360) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "choose-page"
        for key in (
            "ArrowDown",
            "ArrowDown",
            "Tab",
            "ArrowDown",
            "Tab",
            "Tab",
            "ArrowDown",
        ):
            page.keyboard.press(key)
        chosen = page.evaluate("location.hash")
        figures = page.evaluate(FIGURES)
        said = page.inner_text("[aria-live]")
        assert page.evaluate(WIDE) == []
    link = (
        "data=dair_emotion%2C+three+rounds&skew=Dirichlet+0.5&strategy=aligned%3Aloss"
        "&beside=plain"
    )
    assert chosen == f"#page=guard&{link}"
    assert [*figures] == ["accuracy", "worst client", "loss"]
    for metric, lines in figures.items():
        assert len(lines) == 4 - (metric == "worst client")
        for number, *shown in lines:
            ours, plain = (
                known[metric, arm, int(number)] for arm in ("aligned:loss", "plain")
            )
            assert shown[:2] == [interval(ours), interval(plain)]
        assert shown[2:] == (
            [] if metric == "worst client" else [interval(ours - plain, "+")]
        )
        assert f"{metric} {shown[0]}" in said
        # Without a script they are in the page, too.
        assert all(f"<td>{cell}</td>" in text for line in lines for cell in line[1:])
