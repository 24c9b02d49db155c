"""The ServerApp of ``flwr run`` on nodes in this process: the folder that it fills, and continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedrot.errors import FedrotError
from fedrot.simulations.federation import client_app, server_app
from fedrot.simulations.federation.cells import RUNS, CellRun
from fedrot.simulations.federation.grids import local_clients
from fedrot.simulations.folder import read_run
from fedrot.strategies.flower_compat import outside_of_the_engine
from tests.simulations.commands import simulated, values

#: The run configuration, as ``flwr run -c`` gives it.
SETTINGS: dict[str, Any] = {
    **{"train-limit": 120, "test-limit": 20, "layers": 1, "width": 16, "heads": 2, "max-length": 16},
    **{"clients": 2, "rounds": 2, "seeds": "2", "strategies": "fedavg,head_only,aligned"},
}


def play(out: Path, nodes: int = 2, **changes: Any) -> None:
    """Run the app with these settings."""
    context = Context(1, 0, {}, RecordDict(), {**SETTINGS, "out": str(out), **changes})
    with outside_of_the_engine():
        server_app.main(local_clients(client_app.app, nodes), context)


def test_a_folder_is_continued_as_by_simulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real = tmp_path / "run", RUNS["head_only"]

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
    given = {name.replace("-", "_"): value for name, value in SETTINGS.items()}
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
        (Path("run"), {}, "out is 'run'; give an absolute path"),
        (Path("/nowhere"), {"strategies": "plain"}, "unknown strategy 'plain'"),
        (Path("/nowhere"), {"colour": 1}, "colour"),
        (Path("/nowhere"), {"data": "/none.csv"}, "none.csv"),
        (Path("/nowhere"), {"nodes": 3}, r"partition ids \[0, 1, 2\].*2 clients"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_written(
    out: Path, changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError, RuntimeError), match=said):
        play(tmp_path / "run" if out == Path("/nowhere") else out, **changes)
    assert list(tmp_path.iterdir()) == []
