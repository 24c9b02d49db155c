"""The ServerApp of ``flwr run`` on nodes in this process: the folder that it fills, and continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedrot.errors import FedrotError
from fedrot.simulations.federation import cells, client_app, server_app
from fedrot.simulations.federation.grids import local_clients
from fedrot.simulations.folder import only_writer, read_run
from fedrot.strategies.flower_compat import outside_of_the_engine
from tests.simulations.commands import simulated

#: The run configuration, as ``flwr run -c`` gives it.
SETTINGS: dict[str, Any] = {
    "train-limit": 120,
    "test-limit": 20,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "max-length": 16,
    "clients": 2,
    "rounds": 2,
    "seeds": 2,
    "strategies": "fedavg,joined,aligned",
}


def play(out: Path, clients: int = 2, **changes: Any) -> None:
    """Run the app with these settings."""
    context = Context(1, 0, {}, RecordDict(), {**SETTINGS, "out": str(out), **changes})
    with outside_of_the_engine():
        server_app.main(local_clients(client_app.app, clients), context)


def lasting(folder: Path) -> list[dict[str, Any]]:
    """Return the rows without wall times, and without messages: clients keep what they have received."""
    return [
        row
        for row in read_run(folder).rows
        if "seconds" not in row["metric"] and row["scope"] != "messages"
    ]


def files(folder: Path) -> dict[str, int]:
    """Return when every result's file was written."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / "cells").glob("*.json")}


def test_a_folder_is_continued_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, calls = tmp_path / "run", list[int]()
    joined = cells.RUNS["joined"]

    def broken(cell: Any, scratch: Path) -> None:
        calls.append(cell.seed)
        if cell.seed == 1:
            raise ValueError("no room for the joined model")
        joined(cell, scratch)

    with monkeypatch.context() as patch:
        patch.setitem(cells.RUNS, "joined", broken)
        with pytest.raises(ValueError, match="no room for the joined model"):
            play(out)
    # The second seed's first strategy is finished, and its second one failed.
    assert set(calls) == {0, 1}
    before = files(out)
    assert len(before) == 4
    assert len(read_run(out).missing) == 2
    play(out)
    after = files(out)
    assert len(after) == 6
    assert {name: after[name] for name in before} == before
    assert read_run(out).missing == []
    assert (out / "rows.csv").is_file()
    # The rows are those of fedrot simulate, which goes on in the same folder.
    same = {name.replace("-", "_"): value for name, value in SETTINGS.items()}
    simulated(tmp_path / "simulated", same)
    assert lasting(out) == lasting(tmp_path / "simulated")
    assert len(read_run(out).alignment) == len(read_run(tmp_path / "simulated").alignment)
    assert "6 of 6 results are there already" in simulated(out, same)
    assert files(out) == after
    # More seeds and strategies are added; other values of an experiment are refused.
    play(out, seeds=3)
    assert len(files(out)) == 9
    with pytest.raises(FedrotError, match=r"with another lr"):
        play(out, lr=0.5)


def test_nodes_that_are_not_the_clients_leave_an_unfinished_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"partition ids \[0, 1, 2\].*2 clients"):
        play(tmp_path / "run", clients=3)
    assert len(read_run(tmp_path / "run").missing) == 6


def test_a_folder_that_another_run_fills_is_refused(tmp_path: Path) -> None:
    with only_writer(tmp_path / "run"), pytest.raises(FedrotError, match="Another run"):
        play(tmp_path / "run")


@pytest.mark.parametrize("out", ["", "run"])
def test_a_folder_has_an_absolute_path(out: str) -> None:
    """Flower chooses the working directory."""
    with pytest.raises(ValueError, match=f"out is '{out or '.'}'; give an absolute path"):
        play(Path(out))


def test_bad_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holdout must not be 0"):
        play(tmp_path / "run", task="mlm", **{"label-kind": "", "strategies": "guarded", "holdout": 0.0})
    assert list(tmp_path.iterdir()) == []
