"""The ServerApp of ``flwr run`` on nodes in this process: the folder that it fills, and continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedrot.errors import FedrotError
from fedrot.simulations.federation import client_app, experiment, server_app
from fedrot.simulations.federation.local_grid import local_clients
from fedrot.simulations.federation.run_folder import read_alignment, read_rows
from fedrot.simulations.folder import only_writer
from fedrot.strategies.flower_compat import outside_of_the_engine
from tests.simulations.commands import options_of
from tests.simulations.in_process import simulated

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
    "arms": "plain,joined,aligned",
}


def play(out: Path, clients: int = 2, **changes: Any) -> None:
    """Run the app with these settings."""
    context = Context(1, 0, {}, RecordDict(), {**SETTINGS, "out": str(out), **changes})
    with outside_of_the_engine():
        server_app.main(local_clients(client_app.app, clients), context)


def lasting(folder: Path) -> list[dict[str, Any]]:
    """Return the rows without wall times."""
    return [row for row in read_rows(folder) if "seconds" not in row["metric"]]


def files(folder: Path) -> dict[str, int]:
    """Return when every cell's file was written."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / "cells").glob("*.json")}


def status(folder: Path) -> object:
    return json.loads((folder / "status.json").read_text())


def test_a_folder_is_continued_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, calls = tmp_path / "run", list[int]()
    train = experiment.train_joined

    def broken(task: Any, arm: Any, seed: int, *arguments: Any) -> None:
        calls.append(seed)
        if seed == 1:
            raise ValueError("no room for the joined model")
        train(task, arm, seed, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "train_joined", broken)
        with pytest.raises(ValueError, match="no room for the joined model"):
            play(out)
    # The second seed's first arm is finished, and its second one failed.
    assert set(calls) == {0, 1}
    before = files(out)
    assert len(before) == 4
    assert status(out) == {"complete": False}
    assert [(row["seed"], row["arm"]) for row in read_rows(out) if row["round"] == 0] != []
    play(out)
    after = files(out)
    assert len(after) == 6
    assert {name: after[name] for name in before} == before
    assert status(out) == {"complete": True}
    # The rows are those of fedrot simulate, which goes on in the same folder.
    options = options_of(SETTINGS)
    simulated(tmp_path / "simulated", "simulate", *options)
    assert lasting(out) == lasting(tmp_path / "simulated")
    assert len(read_alignment(out)) == len(read_alignment(tmp_path / "simulated"))
    assert "6 of 6 cells are finished already" in simulated(out, "simulate", *options)
    assert files(out) == after
    # More seeds and arms are added; other values of a setting are refused.
    play(out, seeds=3)
    assert len(files(out)) == 9
    with pytest.raises(FedrotError, match=r"with lr 0\.001, not 0\.5"):
        play(out, lr=0.5)


def test_nodes_that_are_not_the_clients_leave_an_unfinished_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"partition ids \[0, 1, 2\].*2 clients"):
        play(tmp_path / "run", clients=3)
    assert status(tmp_path / "run") == {"complete": False}


def test_a_folder_that_another_run_fills_is_refused(tmp_path: Path) -> None:
    with only_writer(tmp_path / "run"), pytest.raises(FedrotError, match="Another run"):
        play(tmp_path / "run")


@pytest.mark.parametrize("out", ["", "run"])
def test_a_folder_has_an_absolute_path(out: str) -> None:
    """Flower chooses the working directory."""
    with pytest.raises(ValueError, match=f"out is '{out or '.'}'; give an absolute path"):
        play(Path(out))


def test_bad_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(FedrotError, match="unknown metric 'perplexity'"):
        play(tmp_path / "run", arms="aligned:perplexity", holdout=0.2)
    assert list(tmp_path.iterdir()) == []
