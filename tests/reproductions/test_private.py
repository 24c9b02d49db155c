"""The laboratory of what clients' answers tell, and the table of its page."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from typer.testing import CliRunner

from reproductions.private import __main__, membership
from tests.reproductions.bert import small_federation

DOCS = Path(__file__).parents[2] / "docs"


def test_scores_are_those_of_the_rows_themselves():
    torch.manual_seed(0)
    features, labels = torch.randn(30, 24).double(), torch.arange(30) % 2
    summed = torch.arange(20)
    distances, scores = membership.tests(features, labels, summed, torch.arange(30))
    rows = features.numpy()
    means = np.stack([rows[:20][c::2].mean(0) for c in range(2)])
    away = rows - means[labels]
    basis = away[:20].T
    fitted = basis @ np.linalg.lstsq(basis, away.T, rcond=1e-8)[0]
    expected = ((away.T - fitted) ** 2).sum(0)
    np.testing.assert_allclose(distances, expected, rtol=1e-4, atol=1e-6)
    # Among its own rows, of a row that is summed.
    leverage = np.diag(np.linalg.pinv(basis, rcond=1e-8) @ basis)
    np.testing.assert_allclose(scores[:20], 20 * leverage, rtol=1e-3)


def test_the_command_writes_a_line_for_each_client(tmp_path, monkeypatch):
    sizes = {"ROWS": (20, 120), "TEXTS": 200, "OUTSIDERS": 40, "OTHERS": 40}
    for name, size in sizes.items():
        monkeypatch.setattr(membership, name, size)
    monkeypatch.setattr(
        membership, "federation_of", lambda *place, size: small_federation()
    )
    out = tmp_path / "rows.jsonl"
    line = ["membership", f"--data-dir={tmp_path}", f"--out={out}"]
    CliRunner().invoke(__main__.app, line, catch_exceptions=False)
    rows = pd.read_json(out, lines=True)
    assert rows["rows"].tolist() == [20] * 5 + [120] * 5
    # A class with few rows is not sent.
    assert rows["sent"].between(16, 120).all()
    assert rows["leverage"][:5].min() > 0.9


def test_the_table_of_the_page_has_the_figures_of_its_rows():
    page = (DOCS / "explanation" / "privacy.md").read_text("utf-8")
    rows = pd.read_parquet(DOCS / "results" / "private" / "membership.parquet")
    by_rows = rows.groupby("rows")[["span", "leverage", "ratio"]]
    assert (by_rows.min().loc[[60, 150, 380]] == 1).all(axis=None)
    assert "| 60, 150, 380 | 1.000 | 1.000 | 1.000 |" in page
    told = by_rows.mean().map("{:.3f} ± ".format) + by_rows.std().map("{:.3f}".format)
    for number in (1000, 10000):
        assert f"| {number:,} | {' | '.join(told.loc[number])} |" in page
