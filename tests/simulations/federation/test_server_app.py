"""The ServerApp of ``flwr run`` on nodes in this process: the folder that it fills, and
continues.
"""

import json
import re
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedrot.errors import FedrotError
from fedrot.simulations.federation import client_app, server_app
from fedrot.simulations.federation.cells import RUNS
from fedrot.simulations.federation.grids import local_clients
from fedrot.simulations.run_folder import read_run
from fedrot.strategies.wire.flower_compat import outside_of_the_engine
from tests.examples.test_examples import Run
from tests.simulations import commands
from tests.simulations.commands import simulated, values

#: The run configuration, as ``flwr run -c`` gives it.
SERVED = {
    "train-limit": 120,
    "test-limit": 20,
    "depth": 1,
    "width": 16,
    "heads": 2,
    "max-length": 16,
    "clients": 2,
    "rounds": 2,
    "seeds": "2",
    "strategies": "fedavg,head_only,aligned",
}


def play(out, nodes=2, **changes):
    """Run the app with these settings."""
    context = Context(1, 0, {}, RecordDict(), {**SERVED, "out": str(out), **changes})
    with outside_of_the_engine():
        server_app.main(local_clients(client_app.app, nodes), context)


def underlined(settings):
    """Return settings of a run configuration by the names of an experiment's fields."""
    return {name.replace("-", "_"): value for name, value in settings.items()}


def has_the_rows_of_simulate(out, settings):
    again = out.parent / "again"
    simulated(again, underlined(settings))
    for scope in ("central", "client:0", "client:1", "round"):
        assert values(out, scope) == values(again, scope)
    # Nodes keep models from one strategy to the next.
    found, most = (values(folder, "messages") for folder in (out, again))
    assert found.keys() == most.keys()
    assert all(found[name] <= most[name] for name in most)
    assert read_run(out).alignment == read_run(again).alignment


def test_a_folder_is_continued_as_by_simulate(tmp_path, monkeypatch):
    out = tmp_path / "run"
    real = RUNS["head_only"]

    def broken(cell):
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
    has_the_rows_of_simulate(out, SERVED)
    # It goes on in the same folder.
    assert "6 of 6 results are there already" in simulated(out, underlined(SERVED))
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
    out, changes, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError, RuntimeError), match=said):
        play(tmp_path / "run" if out == Path("/nowhere") else out, **changes)
    assert list(tmp_path.iterdir()) == []


SETTINGS = {
    **SERVED,
    "train-limit": 480,
    "test-limit": 200,
    "max-length": 32,
    "width": 32,
    "seeds": "1",
    "lr": 5e-3,
    "local-epochs": 2,
    "start": "scrambled",
    "partition": "dirichlet:1",
    "strategies": "fedavg,aligned,fit_head",
}


def test_flwr_run_fills_a_folder_with_the_rows_of_fedrot_simulate(tmp_path):
    """``fedrot flower-app`` and ``flwr run``, with Ray: the apps' results do not depend
    on the engine.
    """
    out = tmp_path / "run"
    commands.run("flower-app", tmp_path / "app")
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in SETTINGS.items())
    with Run(tmp_path) as run:
        log = run.simulated(tmp_path / "app", 2, f'out="{out}" {settings}')
    assert "· aligned: accuracy" in log
    found = read_run(out)
    assert (found.missing, found.commands) == ([], ["flwr run"]), log
    assert [own["partition"] for own in found.experiments.values()] == ["dirichlet:1"]
    assert {row["strategy"] for row in found.alignment} >= {"aligned"}
    report = (out / "report.html").read_text()
    assert re.search(r'(src|href)="(?!data:|#)', report) is None
    assert "<img" in report
    has_the_rows_of_simulate(out, SETTINGS)
    # Scrambled clients have another plain average.
    assert len({values(out)[name, 0, 2, "loss"] for name in ("aligned", "fedavg")}) == 2
