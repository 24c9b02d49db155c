"""The whole path through Flower's simulation engine, as a user starts it."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedrot.simulations.federation.run_folder import read_rows
from tests.simulations.in_process import simulated
from tests.simulations.runs import SMALL, central

SCRIPTS = Path(sys.executable).parent
ROOT = Path(__file__).parents[3]

#: Moves whatever helps, so that coordinates do not matter.
ALIGNED = "aligned*0"
COMMAND = (
    *SMALL,
    "--start",
    "same,scrambled",
    "--arms",
    f"plain,{ALIGNED}",
    "--partition",
    "dirichlet:1",
)


def fedrot(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / "fedrot"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run over two starts, plain and aligned."""
    folder = tmp_path_factory.mktemp("engine")
    result = fedrot("simulate", "--out", "run", *COMMAND, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ALIGNED in result.stdout
    return folder / "run"


def test_scrambling_does_not_touch_the_aligned_average_and_changes_the_plain_one(run: Path) -> None:
    def gap(arm: str) -> float:
        return abs(central(run, "scrambled", arm, "loss", 2) - central(run, "same", arm, "loss", 2))

    assert gap(ALIGNED) < 1e-5
    assert gap("plain") > 20 * gap(ALIGNED)


def test_every_arm_starts_from_the_same_model(run: Path) -> None:
    starts = {
        central(run, start, arm, "loss", 0)
        for start in ("same", "scrambled")
        for arm in ("plain", ALIGNED)
    }
    assert len(starts) == 1


def test_the_run_folder_tells_the_whole_story(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert config["command"].startswith("fedrot simulate")
    assert config["settings"][0]["partition"] == "dirichlet:1"
    assert {"fedrot", "flwr", "torch", "python"} <= set(json.loads((run / "versions.json").read_text()))
    assert json.loads((run / "status.json").read_text()) == {"complete": True}
    rows = read_rows(run)
    with (run / "rows.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    scopes = {row["scope"] for row in rows}
    assert scopes == {"central", "client:0", "client:1", "alone:0", "alone:1", "alignment"}
    aligned = read_rows(run, "alignment.jsonl")
    assert {row["arm"] for row in aligned} == {ALIGNED}
    assert all(row["after"] <= row["before"] * (1 + 1e-6) for row in aligned)
    assert list((run / "plots").glob("*.png"))
    report = (run / "report.html").read_text()
    assert re.search(r'(src|href)="(?!data:|#)', report) is None
    assert 'src="data:image/png;base64,' in report


def test_the_same_command_gives_the_same_rows(run: Path, tmp_path: Path) -> None:
    """Here without the engine: what the apps compute does not depend on it."""
    simulated(tmp_path / "again", "simulate", *COMMAND)

    def timeless(folder: Path) -> list[dict[str, object]]:
        return [row for row in read_rows(folder) if "seconds" not in row["metric"]]

    assert timeless(tmp_path / "again") == timeless(run)


def test_ctrl_c_leaves_what_is_done_readable(tmp_path: Path) -> None:
    command = [str(SCRIPTS / "fedrot"), "simulate", "--out", "run", *SMALL, "--rounds", "500"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "round 3/500" in line:
                break
        # As a terminal does it: every process in the foreground gets the signal.
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, rest
    assert "Interrupted" in rest
    folder = tmp_path / "run"
    assert json.loads((folder / "status.json").read_text()) == {"complete": False}
    assert max(row["round"] for row in read_rows(folder)) >= 3
    assert "incomplete" in (folder / "report.html").read_text()


@pytest.fixture
def flower_home(tmp_path: Path) -> Iterator[Path]:
    """A Flower home of its own, whose superlink is stopped afterwards."""
    home = tmp_path / "flower"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = ":local:"\n'
    )
    yield home
    started = [process for process in psutil.process_iter() if _flower_home(process) == str(home)]
    # Children first: Ray's agents hide their environment, and outlive a killed parent.
    for process in {child for p in started for child in p.children(recursive=True)} | set(started):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _flower_home(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("FLWR_HOME")
    except psutil.Error:
        return None


def test_the_app_starts_by_flwr_run(flower_home: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "FLWR_HOME": str(flower_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
    }
    out = tmp_path / "run"
    settings = f'out="{out}" clients=2 rounds=1 width=32 heads=2 train-limit=200 test-limit=100'
    command = [
        str(SCRIPTS / "flwr"), "run", str(ROOT / "simulations" / "flower_app"), "local", "--stream",
        "--federation-config", "num-supernodes=2 client-resources-num-cpus=1",
        "-c", settings,
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
        try:
            deadline = time.monotonic() + 300
            status = out / "status.json"
            while not status.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
    text = (tmp_path / "log").read_text()
    assert status.exists(), text
    assert json.loads(status.read_text()) == {"complete": True}, text
    assert {row["arm"] for row in read_rows(out)} == {"plain", "aligned"}
