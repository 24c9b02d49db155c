"""The ServerApp of ``flwr run`` on nodes in this process: the folder that it fills, and continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedrot.errors import FedrotError
from fedrot.simulations.federation import client_app, server_app
from fedrot.simulations.federation.cells import RUNS
from fedrot.simulations.federation.grids import local_clients
from fedrot.simulations.folder import only_writer, read_run
from fedrot.strategies.flower_compat import outside_of_the_engine
from tests.simulations.commands import simulated, values

#: The run configuration, as ``flwr run -c`` gives it.
SETTINGS: dict[str, Any] = {
    **{"train-limit": 120, "test-limit": 20, "layers": 1, "width": 16, "heads": 2, "max-length": 16},
    **{"clients": 2, "rounds": 2, "seeds": "2", "strategies": "fedavg,joined,aligned"},
}


def play(out: Path, nodes: int = 2, **changes: Any) -> None:
    """Run the app with these settings."""
    context = Context(1, 0, {}, RecordDict(), {**SETTINGS, "out": str(out), **changes})
    with outside_of_the_engine():
        server_app.main(local_clients(client_app.app, nodes), context)


def files(folder: Path) -> dict[str, int]:
    """Return when every result was written."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / "cells").glob("*.json")}


def test_a_folder_is_continued_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real = tmp_path / "run", RUNS["joined"]

    def broken(cell: Any, scratch: Path) -> None:
        if cell.seed == 1:
            raise ValueError("no room for the joined model")
        real(cell, scratch)

    with monkeypatch.context() as patch:
        patch.setitem(RUNS, "joined", broken)
        with pytest.raises(ValueError, match="no room for the joined model"):
            play(out)
    # The second seed's first strategy is finished, and its second one failed.
    before = files(out)
    assert len(before) == 4
    assert (out / "rows.csv").is_file()
    assert [title.split(" · ", 1)[1] for title in read_run(out).missing] == [
        *("seed 1 · joined", "seed 1 · aligned")
    ]
    play(out)
    after = files(out)
    assert len(after) == 6
    assert {name: after[name] for name in before} == before
    # The rows are those of fedrot simulate, which goes on in the same folder.
    given = {name.replace("-", "_"): value for name, value in SETTINGS.items()}
    simulated(tmp_path / "again", given)
    for scope in ("central", "client:1", "round", "messages"):
        assert values(out, scope) == values(tmp_path / "again", scope)
    assert read_run(out).alignment == read_run(tmp_path / "again").alignment
    assert "6 of 6 results are there already" in simulated(out, given)
    assert files(out) == after
    # More seeds are added; other values of a setting are refused.
    play(out, seeds="3")
    assert len(files(out)) == 9
    with pytest.raises(FedrotError, match=r"another lr \(0\.001\)"):
        play(out, lr=0.5)


def test_nodes_that_are_not_the_clients_leave_an_unfinished_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"partition ids \[0, 1, 2\].*2 clients"):
        play(tmp_path / "run", nodes=3)
    assert len(read_run(tmp_path / "run").missing) == 6


def test_a_folder_that_another_run_fills_is_refused(tmp_path: Path) -> None:
    with only_writer(tmp_path / "run"), pytest.raises(FedrotError, match="Another run"):
        play(tmp_path / "run")


@pytest.mark.parametrize(
    ("out", "changes", "said"),
    [
        (Path(), {}, r"out is '\.'; give an absolute path"),
        (Path("run"), {}, "out is 'run'; give an absolute path"),
        (Path("/nowhere"), {"strategies": "plain"}, "unknown strategy 'plain'"),
        (Path("/nowhere"), {"colour": 1}, "colour"),
        (Path("/nowhere"), {"data": "/none.csv"}, "none.csv"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(
    out: Path, changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=said):
        play(tmp_path / "run" if out == Path("/nowhere") else out, **changes)
    assert list(tmp_path.iterdir()) == []
