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

from fedrot.simulations.environment import ENVIRONMENT
from fedrot.simulations.folder import read_run
from tests.deployment.federation import free_ports
from tests.simulations.commands import invoke, simulated, values

SCRIPTS = Path(sys.executable).parent
SETTINGS = {
    **{"train-limit": 480, "test-limit": 200, "clients": 2, "max-length": 32, "layers": 1, "width": 32},
    **{"heads": 2, "seeds": "1", "rounds": 2, "lr": 5e-3, "local-epochs": 2, "start": "scrambled"},
    **{"partition": "dirichlet:1", "strategies": "fedavg,aligned,fit_head"},
}


@pytest.fixture(scope="module")
def flower_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Flower home of its own, whose superlink is stopped afterwards."""
    home = tmp_path_factory.mktemp("flower")
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = ":local:"\n'
    )
    yield home
    every = psutil.process_iter(["environ"])
    started = [p for p in every if (p.info["environ"] or {}).get("FLWR_HOME") == str(home)]
    # Children first: Ray's agents hide their environment, and outlive a killed parent.
    for process in {child for p in started for child in p.children(recursive=True)} | set(started):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture(scope="module")
def run(flower_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of three strategies: ``fedrot flower-app`` and ``flwr run``, with Ray."""
    folder = tmp_path_factory.mktemp("engine")
    ports = [*map(str, free_ports(2))]
    environment = {
        **os.environ,
        "FLWR_HOME": str(flower_home),
        **ENVIRONMENT,
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
            written = out / "report.html"  # The last file of a run.
            while not written.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
    text = (folder / "log").read_text()
    assert written.exists(), text
    assert read_run(out).missing == [], text
    assert "· aligned: accuracy" in text
    return out


def test_the_run_folder_tells_the_whole_story(run: Path) -> None:
    found = read_run(run)
    assert found.commands == ["flwr run"]
    assert [own["partition"] for own in found.experiments.values()] == ["dirichlet:1"]
    assert {row["strategy"] for row in found.alignment} >= {"aligned"}
    report = (run / "report.html").read_text()
    assert re.search(r'(src|href)="(?!data:|#)', report) is None
    assert "<img" in report


def test_fedrot_simulate_gives_the_same_rows(run: Path, tmp_path: Path) -> None:
    """What is simulated is what is deployed: the apps' results do not depend on the engine."""
    simulated(tmp_path / "again", {name.replace("-", "_"): value for name, value in SETTINGS.items()})
    for scope in ("central", "client:0", "client:1", "round"):
        assert values(run, scope) == values(tmp_path / "again", scope)
    # Scrambled clients have another plain average.
    assert values(run)["aligned", 0, 2, "loss"] != values(run)["fedavg", 0, 2, "loss"]
