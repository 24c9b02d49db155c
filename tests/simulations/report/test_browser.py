"""The page in a browser: only heat maps scroll sideways, on a phone and on a desk,
light and dark.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import sync_playwright
from rich.console import Console

from fedrot.simulations.report.pages import present, write_strategy_report
from tests.simulations.report.runs import HOSTILE, group, write_folder
from tests.simulations.report.test_pages import live_site, write_lines

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
#: Opens what is folded; returns what is wider than the window, and pictures without a
#: text.
MEASURE = """() => {
document.querySelectorAll("details").forEach(one => one.open = true);
const wide = [...document.querySelectorAll("body *:not(.wide, .wide *)")].filter(one =>
  one.getBoundingClientRect().right > innerWidth + 0.5 ||
  one.scrollWidth > one.clientWidth + 1 &&
  getComputedStyle(one).overflowX !== "visible");
return {
  all: document.documentElement.scrollWidth,
  wide: wide.map(one => one.outerHTML.slice(0, 80)),
  page: getComputedStyle(document.body).backgroundColor,
  tables: !!document.querySelector("table"),
  silent: [...document.images].filter(one => !one.alt).length}}"""


@contextmanager
def opened(file, width, scheme="light"):
    """Open a file in a headless Chromium, in a window of this width."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        page.goto(file.resolve().as_uri())
        yield page
        browser.close()


def with_sites(folder):
    """Add own rows of eight sites to the results of a run folder."""
    for file in (folder / "cells").glob("*.json"):
        cell = json.loads(file.read_text())
        shared = {**cell["rows"][-1], "round": 3}
        for number, name in enumerate([HOSTILE, "b" * 60, *"cdefgh"]):
            values = dict.fromkeys(("own-accuracy", "global-accuracy"), 0.1 * number)
            values |= {"alone-accuracy": 0.4, "test-rows": 9}
            for metric, value in values.items():
                place = {"scope": f"site:{name}", "metric": metric}
                cell["rows"].append({**shared, **place, "value": value})
        file.write_text(json.dumps(cell))
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    rows = [group(n, "ffn", 0, 0.4, found=0.8, chance=0.2) for n in (1, 2)]
    write_lines(
        folder / "rows.jsonl",
        [
            *rows,
            {"round": 1, "client": 7, "dropped": HOSTILE},
            live_site(HOSTILE, 9, 0.5, 0.625),
            live_site("b" * 40, 90, 0.5, 0.375),
        ],
    )
    gains = {"fedavg": 0.0, "aligned": 0.0008, "fit_head": 0.05}
    hostile = {HOSTILE: {"fedavg": 0.0, HOSTILE: 0.01}, "two": gains}
    quiet = Console(quiet=True)
    return {
        "run": present(write_folder(folder / "run", {"main": gains}), quiet),
        "sites": present(
            with_sites(write_folder(folder / "sites", {"main": gains})), quiet
        ),
        "hostile": present(write_folder(folder / "hostile", hostile), quiet),
        "strategy": write_strategy_report(folder / "rows.jsonl"),
    }


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
@pytest.mark.parametrize("name", ["run", "sites", "hostile", "strategy"])
def test_nothing_scrolls_sideways(name, width, scheme, pages):
    with opened(pages[name], width, scheme) as page:
        found = page.evaluate(MEASURE)
    assert (found["all"] <= width, found["wide"]) == (True, [])
    assert found["page"] == (
        "rgb(20, 23, 27)" if scheme == "dark" else "rgb(255, 255, 255)"
    )
    assert (found["tables"], found["silent"]) == (True, 0)
