"""The benchmark for GPUs: its path on the CPU, and the one on a GPU as far as it can be pretended."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fedrot.pretend import Pretend

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
STAGES = {"upload", "finite", "neurons", "heads", "apply", "fold", "download"}


def _checked(target: Path, layers: int) -> dict[str, Any]:
    """Return what was measured of one model, once it is complete."""
    (row,) = json.loads(target.read_text())["models"].values()
    assert (row["layers"], row["stages"].keys()) == (layers, STAGES)
    assert all(seconds >= 0 for seconds in row["stages"].values())
    assert 0 < row["floor"] < float("inf")
    assert row["of_floor"] == pytest.approx(row["next"] / row["floor"])
    assert 0 < row["orthogonal"] <= 1e-6
    return row


def test_it_runs_where_there_is_torch_and_nothing_of_flower(tmp_path: Path) -> None:
    target = tmp_path / "numbers.json"
    arguments = ["--device", "cpu", "--models", "bert-base", "--layers", "2", "--repeats", "1"]
    code = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(('flwr', 'ray', 'transformers', 'datasets')))\n"
        f"sys.argv = ['gpu.py', *{[*arguments, '--json', str(target)]!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "MISSED" not in done.stdout
    assert done.stdout.count("met ") == 2
    row = _checked(target, 2)
    assert (row["difference"], row["parameters"]) == (0, 38_011_392)


def test_its_path_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model small enough; what the pretended device cannot say is how long anything takes."""
    target = tmp_path / "numbers.json"
    script = runpy.run_path(str(SCRIPT))
    small = script["Shape"]("llama", 4, 64, 4, 2, 160, 100)
    monkeypatch.setitem(script["MODELS"], "llama-8b", small)
    arguments = ["--models", "llama-8b", "--repeats", "2", "--json", str(target)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    monkeypatch.setitem(script["main"].__globals__, "COPIED", 2**10)
    with Pretend() as device:
        script["main"]()
        assert device.unrecorded == 0
    row = _checked(target, 4)
    assert row["difference"] <= 1
    assert 0 < row["held_by_one_layer"] < row["held_beside_mean"]
    assert "met     llama-8b: beside the mean at most 2x what one layer takes" in capsys.readouterr().out


def test_a_missing_gpu_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "nowhere"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "The device 'nowhere' cannot be used" in capsys.readouterr().err
