"""The page in a browser: only heat maps scroll sideways, on a phone and on a desk, light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedrot.simulations.report.pages import present, write_strategy_report
from tests.simulations.report.runs import HOSTILE, group, write_folder
from tests.simulations.report.test_pages import write_lines

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCHEMES = {"dark": 0, "light": 1}
#: Opens what is folded; notes what is wider than the window, and pictures without a text.
MEASURE = """<script>
document.querySelectorAll("details").forEach(one => one.open = true);
const wide = [...document.querySelectorAll("body *:not(.wide, .wide *)")].filter(one =>
  one.getBoundingClientRect().right > innerWidth + 0.5 || one.scrollWidth > one.clientWidth + 1 &&
  getComputedStyle(one).overflowX !== "visible");
const measured = {
  width: innerWidth, all: document.documentElement.scrollWidth,
  wide: wide.map(one => one.outerHTML.slice(0, 80)),
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  page: getComputedStyle(document.body).backgroundColor, tables: !!document.querySelector("table"),
  silent: [...document.images].filter(one => !one.alt).length};
parent.document.body.setAttribute("data-measured", JSON.stringify(measured));
</script></body>"""
#: A window is at least 500 points wide, a frame may be as wide as a phone.
FRAME = """<!doctype html><html style="color-scheme: light dark"><body style="margin: 0">
<iframe width="{width}" height="900" style="border: 0" srcdoc="{page}"></iframe></body></html>"""


def measured(page: Path, width: int, scheme: str) -> dict[str, Any]:
    """Return what a headless Chromium measures of a copy of the page."""
    assert CHROMIUM is not None
    measuring = page.read_text(encoding="utf-8").replace("</body>", MEASURE)
    frame = page.with_suffix(f".{width}.html")
    frame.write_text(FRAME.format(width=width, page=html.escape(measuring)), encoding="utf-8")
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *(f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width + 200},1000"),
        *(f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", frame.resolve().as_uri()),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-measured="([^"]*)"', shown)
    assert found, shown[-500:]
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    rows = [group(n, "ffn", 0, 0.4, found=0.8, chance=0.2) for n in (1, 2)]
    write_lines(folder / "rows.jsonl", [*rows, {"round": 1, "client": 7, "dropped": HOSTILE}])
    gains = {"fedavg": 0.0, "aligned": 0.0008, "fit_head": 0.05}
    hostile = {HOSTILE: {"fedavg": 0.0, HOSTILE: 0.01}, "two": gains}
    quiet = Console(quiet=True)
    return {
        "run": present(write_folder(folder / "run", {"main": gains}), quiet),
        "hostile": present(write_folder(folder / "hostile", hostile), quiet),
        "strategy": write_strategy_report(folder / "rows.jsonl"),
    }


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
@pytest.mark.parametrize("name", ["run", "hostile", "strategy"])
def test_nothing_scrolls_sideways(name: str, width: int, scheme: str, pages: dict[str, Path]) -> None:
    found = measured(pages[name], width, scheme)
    assert (found["width"], found["all"] <= width, found["wide"]) == (width, True, [])
    assert found["dark"] == (scheme == "dark")
    assert found["page"] == ("rgb(20, 23, 27)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert (found["tables"], found["silent"]) == (True, 0)
