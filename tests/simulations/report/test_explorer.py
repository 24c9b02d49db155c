"""The page of published rows in a browser: with keys alone, on a phone; and without a script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import material
import numpy as np
import pandas
import pytest
from markdown import markdown
from scipy import stats

from docs.hooks import on_page_markdown
from tests.simulations.report.test_browser import CHROMIUM

DOCS = Path(__file__).parents[3] / "docs"
KEYS = {"Tab": 9, "ArrowDown": 40}
FIGURES = """Object.fromEntries([...document.querySelectorAll("#explorer figure")].map(one => [
    one.querySelector("figcaption").textContent,
    [...one.querySelectorAll("tbody tr")].map(row => [...row.cells].map(cell => cell.textContent))]))"""
#: Shows every table; returns what is then wider than the window or its place, and choices that are cut.
WIDE = """[...document.querySelectorAll("details")].flatMap(({dataset: {page, data, skew}}) => {
    history.replaceState(null, "", `#${new URLSearchParams({page, data, skew})}`);
    dispatchEvent(new Event("hashchange"));
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = getComputedStyle(document.querySelector("select")).font;
    return [...document.querySelectorAll("body *:not(details *)")].filter(one =>
        one.getBoundingClientRect().right > innerWidth ||
        one.clientWidth && one.scrollWidth > one.clientWidth + 1 ||
        one.text && one.parentElement.clientWidth - 36 < pen.measureText(one.text).width)}
    ).map(one => one.outerHTML)"""


class Browser:
    """A headless Chromium that is told what to do through two pipes, with a page as wide as a phone."""

    def __init__(self, profile: Path) -> None:
        (told, tell), (hear, said) = os.pipe(), os.pipe()
        options = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe"
        command = f"exec {CHROMIUM} {options} --user-data-dir={profile} 3<&{told} 4>&{said}"
        self.process = subprocess.Popen(["bash", "-c", command], pass_fds=(told, said))
        os.close(told)
        os.close(said)
        self.tell, self.hear, self.session = os.fdopen(tell, "wb", 0), os.fdopen(hear, "rb"), {}
        made = self.call("Target.createTarget", url="about:blank")
        self.session = self.call("Target.attachToTarget", **made, flatten=True)
        self.call("Page.enable")
        size = {"width": 360, "height": 900, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=False)

    def call(self, method: str, until: str = '"id":1', **params: Any) -> Any:
        """Return the answer, or wait for a message with other words."""
        message = {"id": 1, "method": method, "params": params, **self.session}
        self.tell.write(json.dumps(message).encode() + b"\0")
        while until not in (said := b"".join(iter(lambda: self.hear.read(1), b"\0")).decode()):
            assert said, "Chromium has ended"
        return json.loads(said).get("result")

    def value(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"]["value"]

    def press(self, key: str) -> Any:
        """Press a key; return the id of what has the focus then."""
        pressed = {"type": "rawKeyDown", "key": key, "windowsVirtualKeyCode": KEYS[key]}
        self.call("Input.dispatchKeyEvent", **pressed)
        return self.value("document.activeElement.id")


def interval(values: Any, sign: str = "") -> str:
    ends = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    mean, low, high = (f"{value:{sign}.3f}" for value in (np.mean(values), *ends))
    return f"{mean} [{low}, {high}]"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_the_page_has_the_figures_of_the_rows(tmp_path: Path) -> None:
    shutil.copytree(DOCS / "assets", tmp_path / "assets")
    (style,) = Path(material.__file__).parent.glob("templates/assets/stylesheets/main.*.min.css")
    text = on_page_markdown((DOCS / "results" / "explorer.md").read_text(encoding="utf-8"))
    file = tmp_path / "results" / "explorer" / "index.html"
    file.parent.mkdir(parents=True)
    head = f'<!doctype html><meta charset="utf-8"><style>{style.read_text(encoding="utf-8")}</style>'
    file.write_text(f'{head}<body class="md-typeset">{markdown(text)}', encoding="utf-8")
    rows = pandas.read_parquet(DOCS / "results" / "guard" / "rows.parquet")
    rows = rows[rows["setting"] == "three rounds Dirichlet 0.5"]
    of_client = rows["scope"].str.startswith("client:") & (rows["metric"] == "accuracy")
    rows.loc[of_client, ["scope", "metric"]] = ["central", "worst client"]
    known = rows[rows["scope"] == "central"].groupby(["metric", "arm", "round", "seed"])["value"].min()
    browser = Browser(tmp_path / "profile")

    browser.call("Page.navigate", "Page.loadEventFired", url=file.as_uri())
    assert browser.press("Tab") == "choose-page"
    for key in ("ArrowDown", "ArrowDown", "Tab", "ArrowDown", "Tab", "Tab", "ArrowDown"):
        browser.press(key)
    link = "data=dair_emotion%2C+three+rounds&skew=Dirichlet+0.5&strategy=aligned%3Aloss&beside=plain"
    assert browser.value("location.hash") == f"#page=guard&{link}"
    figures = browser.value(FIGURES)
    assert [*figures] == ["accuracy", "worst client", "loss"]
    for metric, lines in figures.items():
        assert len(lines) == 4 - (metric == "worst client")
        for number, *shown in lines:
            ours, plain = (known[metric, arm, int(number)] for arm in ("aligned:loss", "plain"))
            assert shown[:2] == [interval(ours), interval(plain)]
        assert shown[2:] == ([] if metric == "worst client" else [interval(ours - plain, "+")])
        assert f"{metric} {shown[0]}" in browser.value("document.querySelector('[aria-live]').innerText")
        # Without a script they are in the page, too.
        assert all(f"<td>{cell}</td>" in text for line in lines for cell in line[1:])
    assert browser.value(WIDE) == []
    browser.call("Browser.close")
    assert browser.process.wait(60) == 0
