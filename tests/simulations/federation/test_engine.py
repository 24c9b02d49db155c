"""The whole path through Flower's own engine, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedrot.simulations.federation.run_folder import read_rows
from tests.deployment.federation import free_ports
from tests.simulations.commands import invoke, options_of
from tests.simulations.in_process import simulated
from tests.simulations.runs import central

SCRIPTS = Path(sys.executable).parent

#: Moves whatever helps, so that coordinates do not matter.
ALIGNED = "aligned*0"
SETTINGS = {
    "train-limit": 480,
    "test-limit": 200,
    "clients": 2,
    "width": 32,
    "heads": 2,
    "max-length": 32,
    "seeds": "0-0",
    "rounds": 2,
    "lr": 5e-3,
    "local-epochs": 2,
    "starts": "same,scrambled",
    "arms": f"plain,{ALIGNED}",
    "partition": "dirichlet:1",
}


@pytest.fixture(scope="module")
def flower_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Flower home of its own, whose superlink is stopped afterwards."""
    home = tmp_path_factory.mktemp("flower")
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


@pytest.fixture(scope="module")
def run(flower_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run over two starts, plain and aligned: ``fedrot flower-app`` and ``flwr run``, with Ray."""
    folder = tmp_path_factory.mktemp("engine")
    ports = [*map(str, free_ports(2))]
    environment = {
        **os.environ,
        "FLWR_HOME": str(flower_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "HF_HUB_OFFLINE": "1",
        # Other tests start a SuperLink, too.
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
    }
    assert invoke("flower-app", folder / "app")[0] == 0
    out = folder / "run"
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in SETTINGS.items())
    command = [
        str(SCRIPTS / "flwr"), "run", str(folder / "app"), "local", "--stream",
        "--federation-config", "num-supernodes=2 client-resources-num-cpus=1",
        "-c", f'out="{out}" {settings}',
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
        try:
            deadline = time.monotonic() + 300
            status = out / "status.json"
            while not status.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
    text = (folder / "log").read_text()
    assert status.exists(), text
    assert json.loads(status.read_text()) == {"complete": True}, text
    assert f"{ALIGNED}: round 2/2" in text
    return out


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
    assert config["command"] == "flwr run"
    assert config["settings"][0]["partition"] == "dirichlet:1"
    assert {"fedrot", "flwr", "torch", "python"} <= set(json.loads((run / "versions.json").read_text()))
    assert json.loads((run / "status.json").read_text()) == {"complete": True}
    rows = read_rows(run)
    scopes = {row["scope"] for row in rows}
    assert scopes == {"central", "client:0", "client:1", "alone:0", "alone:1", "alignment"}
    aligned = read_rows(run, "alignment.jsonl")
    assert {row["arm"] for row in aligned} == {ALIGNED}
    assert all(row["after"] <= row["before"] * (1 + 1e-6) for row in aligned)
    code, printed = invoke("report", run)
    assert (code, ALIGNED in printed) == (0, True), printed
    assert list((run / "plots").glob("*.png"))
    report = (run / "report.html").read_text()
    assert re.search(r'(src|href)="(?!data:|#)', report) is None
    assert 'src="data:image/png;base64,' in report


def test_fedrot_simulate_gives_the_same_rows(run: Path, tmp_path: Path) -> None:
    """What is simulated is what is deployed: the apps' results do not depend on the engine."""
    simulated(tmp_path / "again", "simulate", *options_of(SETTINGS))

    def timeless(folder: Path) -> list[dict[str, object]]:
        return [row for row in read_rows(folder) if "seconds" not in row["metric"]]

    assert timeless(tmp_path / "again") == timeless(run)
