"""The ServerApp of ``flwr run`` on nodes in this process: the folder that it fills, and
continues.
"""

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
from typing import Any

import psutil
import pytest
from flwr.app import Context, RecordDict

from fedrot.errors import FedrotError
from fedrot.simulations.environment import ENVIRONMENT
from fedrot.simulations.federation import client_app, server_app
from fedrot.simulations.federation.cells import RUNS, CellRun
from fedrot.simulations.federation.grids import local_clients
from fedrot.simulations.run_folder import read_run
from fedrot.strategies.wire.flower_compat import outside_of_the_engine
from tests.deployment.federation import free_ports
from tests.simulations import commands
from tests.simulations.commands import simulated, values

#: The run configuration, as ``flwr run -c`` gives it.
SERVED = {
    "train-limit": 120,
    "test-limit": 20,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "max-length": 16,
    "clients": 2,
    "rounds": 2,
    "seeds": "2",
    "strategies": "fedavg,head_only,aligned",
}


def play(out: Path, nodes: int = 2, **changes: Any) -> None:
    """Run the app with these settings."""
    context = Context(1, 0, {}, RecordDict(), {**SERVED, "out": str(out), **changes})
    with outside_of_the_engine():
        server_app.main(local_clients(client_app.app, nodes), context)


def test_a_folder_is_continued_as_by_simulate(tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "run"
    real = RUNS["head_only"]

    def broken(cell: CellRun) -> None:
        if cell.seed == 1:
            raise ValueError("no room for the head")
        real(cell)

    with monkeypatch.context() as patch:
        patch.setitem(RUNS, "head_only", broken)
        with pytest.raises(RuntimeError, match="1 of 6 parts failed"):
            play(out)
    (failure,) = (out / "cells").glob("*.txt")
    assert "no room for the head" in failure.read_text()
    before = {file: file.stat().st_mtime_ns for file in (out / "cells").glob("*.json")}
    assert (len(before), len(read_run(out).missing)) == (5, 1)
    play(out)
    assert read_run(out).missing == []
    assert {file: file.stat().st_mtime_ns for file in before} == before
    # The rows are those of fedrot simulate, which goes on in the same folder.
    given = {name.replace("-", "_"): value for name, value in SERVED.items()}
    simulated(tmp_path / "again", given)
    for scope in ("central", "client:1", "round", "messages"):
        assert values(out, scope) == values(tmp_path / "again", scope)
    assert read_run(out).alignment == read_run(tmp_path / "again").alignment
    assert "6 of 6 results are there already" in simulated(out, given)
    with pytest.raises(FedrotError, match=r"another lr \(0\.001\)"):
        play(out, lr=0.5)


@pytest.mark.parametrize(
    ("out", "changes", "said"),
    [
        (Path(), {}, r"out is '\.'; give an absolute path"),
        (Path("/nowhere"), {"strategies": "plain"}, "unknown strategy 'plain'"),
        (Path("/nowhere"), {"data": "/none.csv"}, "none.csv"),
        (Path("/nowhere"), {"nodes": 3}, r"partition ids \[0, 1, 2\].*2 clients"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_written(
    out: Path,
    changes: Any,
    said: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError, RuntimeError), match=said):
        play(tmp_path / "run" if out == Path("/nowhere") else out, **changes)
    assert list(tmp_path.iterdir()) == []


SCRIPTS = Path(sys.executable).parent
SETTINGS = {
    "train-limit": 480,
    "test-limit": 200,
    "clients": 2,
    "max-length": 32,
    "layers": 1,
    "width": 32,
    "heads": 2,
    "seeds": "1",
    "rounds": 2,
    "lr": 5e-3,
    "local-epochs": 2,
    "start": "scrambled",
    "partition": "dirichlet:1",
    "strategies": "fedavg,aligned,fit_head",
}


@pytest.fixture(scope="module")
def flower_home(tmp_path_factory: Any) -> Iterator[Path]:
    """A Flower home of its own, whose superlink is stopped afterwards."""
    home = tmp_path_factory.mktemp("flower")
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = ":local:"\n'
    )
    yield home
    every = psutil.process_iter(["environ"])
    started = [
        p for p in every if (p.info["environ"] or {}).get("FLWR_HOME") == str(home)
    ]
    # Children first: Ray's agents hide their environment, and outlive a killed parent.
    for process in {
        child for p in started for child in p.children(recursive=True)
    } | set(started):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture(scope="module")
def served(flower_home: Path, tmp_path_factory: Any) -> Path:
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
    commands.run("flower-app", folder / "app")
    out = folder / "run"
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in SETTINGS.items())
    command = [
        str(SCRIPTS / "flwr"), "run", str(folder / "app"), "local", "--stream",
        "--federation-config", "num-supernodes=2 client-resources-num-cpus=1",
        "-c", f'out="{out}" {settings}',
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=folder
        )
        try:
            deadline = time.monotonic() + 300
            written = out / "report.html"  # The last file of a run.
            while (
                not written.exists()
                and process.poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.5)
        finally:
            process.kill()
            process.wait()
    text = (folder / "log").read_text()
    assert written.exists(), text
    assert read_run(out).missing == [], text
    assert "· aligned: accuracy" in text
    return out


def test_the_run_folder_tells_the_whole_story(served: Path) -> None:
    found = read_run(served)
    assert found.commands == ["flwr run"]
    assert [own["partition"] for own in found.experiments.values()] == ["dirichlet:1"]
    assert {row["strategy"] for row in found.alignment} >= {"aligned"}
    report = (served / "report.html").read_text()
    assert re.search(r'(src|href)="(?!data:|#)', report) is None
    assert "<img" in report


def test_fedrot_simulate_gives_the_same_rows(served: Path, tmp_path: Path) -> None:
    """What is simulated is what is deployed: the apps' results do not depend on the
    engine.
    """
    simulated(
        tmp_path / "again",
        {name.replace("-", "_"): value for name, value in SETTINGS.items()},
    )
    for scope in ("central", "client:0", "client:1", "round"):
        assert values(served, scope) == values(tmp_path / "again", scope)
    # Scrambled clients have another plain average.
    assert (
        values(served)["aligned", 0, 2, "loss"]
        != values(served)["fedavg", 0, 2, "loss"]
    )
