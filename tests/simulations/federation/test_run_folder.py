"""Rows of run folders, as they are read."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from fedrot.errors import FedrotError
from fedrot.simulations.federation.run_folder import (
    ROW_FIELDS,
    read_alignment,
    read_results,
    read_rows,
    versions,
)


def row(arm: str, seed: int = 0, server_round: int = 1, value: float = 0.5) -> dict[str, Any]:
    about = {"setting": "a", "arm": arm, "start": "same", "seed": seed, "round": server_round}
    return {**about, "scope": "central", "metric": "loss", "value": value}


def found(arm: str, seed: int = 0) -> dict[str, Any]:
    about = {"setting": "a", "arm": arm, "start": "same", "seed": seed, "round": 1}
    return {**about, "part": "ffn", "layer": 0, "before": 2.0, "after": 1.0, "found": 1.0, "moved": 1}


@pytest.mark.parametrize("name", ROW_FIELDS)
def test_a_row_of_results_without_a_field_is_no_result(name: str, tmp_path: Path) -> None:
    lines = [row("plain"), {k: v for k, v in row("aligned").items() if k != name}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(FedrotError, match=f"a row has no '{name}'"):
        read_results(tmp_path)


@pytest.mark.parametrize("name", ["start", "arm", "part", "layer", "after", "found", "moved"])
def test_a_measured_row_without_a_field_is_no_alignment(name: str, tmp_path: Path) -> None:
    assert read_alignment(tmp_path) == []
    lost = {"arm": "aligned", "dropped": "not finite"}
    lines = [found("aligned"), lost, {k: v for k, v in found("aligned").items() if k != name}]
    (tmp_path / "alignment.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    assert read_alignment(tmp_path) == lines[:2]
    (tmp_path / "alignment.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(FedrotError, match=f"a row has no '{name}'"):
        read_alignment(tmp_path)


def test_rows_end_where_a_line_is_unfinished(tmp_path: Path) -> None:
    whole = "".join(json.dumps(row("plain", seed)) + "\n" for seed in (0, 1))
    (tmp_path / "rows.jsonl").write_text(whole + '{"setting": "a", "arm"')
    assert [one["seed"] for one in read_rows(tmp_path)] == [0, 1]
    # What follows a damaged line is left out, too.
    for damaged in ("no JSON", "[" * 100_000):
        lines = [json.dumps(row("plain", 0)), damaged, json.dumps(row("plain", 1))]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        assert [one["seed"] for one in read_rows(tmp_path)] == [0]


def test_damaged_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(FedrotError, match=r"rows\.jsonl' is damaged: it is not UTF-8 text"):
        read_rows(tmp_path)


def test_a_field_of_another_type_is_named_with_its_line(tmp_path: Path) -> None:
    lines = [row("plain"), {**row("plain"), "seed": "x" * 100}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(FedrotError, match=r"rows.jsonl' has rows .*: seed is 'x{10,70} in line 2\.$"):
        read_rows(tmp_path)


def test_versions_are_of_what_is_installed() -> None:
    found = versions()
    names = {"fedrot", "torch", "numpy", "scipy", "flwr", "transformers", "tokenizers"}
    assert {name: found[name] for name in names} == {name: version(name) for name in names}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
