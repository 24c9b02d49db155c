"""The benchmark for GPUs, as far as a device can be pretended."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from fedrot.alignment import by_layer
from tests.fedrot.pretend import Pretend

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
STAGES = {"upload", "finite", "neurons", "heads", "apply", "fold", "download"}


def test_its_path_on_a_gpu(tmp_path, monkeypatch, capsys):
    """Of a model small enough; what the pretended device cannot say is how long
    anything takes.
    """
    target = tmp_path / "numbers.json"
    script = runpy.run_path(str(SCRIPT))
    small = script["Shape"]("llama", 4, 64, 4, 2, 160, 100)
    monkeypatch.setitem(script["MODELS"], "llama-8b", small)
    arguments = ["--models", "llama-8b", "--repeats", "2", "--json", str(target)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    monkeypatch.setitem(script["main"].__globals__, "COPIED", 2**10)
    monkeypatch.setattr(
        by_layer, "STACKED", 0
    )  # A layer as small as these is a piece alone.
    with Pretend() as device:
        script["main"]()
        assert device.unrecorded == 0
    (row,) = json.loads(target.read_text())["models"].values()
    assert (row["layers"], row["stages"].keys()) == (4, STAGES)
    assert all(seconds >= 0 for seconds in row["stages"].values())
    assert 0 < row["floor"] < float("inf")
    assert row["of_floor"] == pytest.approx(row["next"] / row["floor"])
    assert 0 < row["orthogonal"] <= 1e-6
    assert row["difference"] <= 1
    assert 0 < row["held_by_one_piece"] < row["held_beside_mean"]
    assert (
        "met     llama-8b: beside the mean at most 2x what one piece takes"
        in capsys.readouterr().out
    )
