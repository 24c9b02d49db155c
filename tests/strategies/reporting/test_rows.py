"""Rows of JSON-lines files that a resumed run writes again are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrot.strategies.reporting.rows import cut_rows

ROWS = ['{"round": 1, "a": "é"}', '{"round": 2}', '{"other": 3}', '{"round": 3}']


@pytest.mark.parametrize("unfinished", ["", '{"round": 1', '{"round": 1}', '{"round": "é'])
def test_later_rows_are_cut(tmp_path: Path, unfinished: str) -> None:
    path = tmp_path / "rows.jsonl"
    for after, expected in ((0, [2]), (1, [0, 2]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])):
        path.write_bytes("".join(row + "\n" for row in ROWS).encode() + unfinished.encode())
        cut_rows(path, after)
        assert path.read_text(encoding="utf-8").splitlines() == [ROWS[i] for i in expected]
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_that_does_not_exist_needs_no_cutting(tmp_path: Path) -> None:
    cut_rows(tmp_path / "rows.jsonl", 1)
    assert list(tmp_path.iterdir()) == []
