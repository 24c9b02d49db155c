"""The laboratory of what clients' answers tell, and the table of its page."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm
from typer.testing import CliRunner

from fedrot.task_head.noisy.noisy_fit import fit_to_noisy_sums
from reproductions.private import __main__, membership, noise
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
        membership, "federation_of", lambda *place, **sizes: small_federation()
    )
    out = tmp_path / "rows.jsonl"
    line = ["membership", f"--data-dir={tmp_path}", f"--out={out}"]
    CliRunner().invoke(__main__.app, line, catch_exceptions=False)
    rows = pd.read_json(out, lines=True)
    assert rows["rows"].tolist() == [20] * 5 + [120] * 5
    # A class with few rows is not sent.
    assert rows["sent"].between(16, 120).all()
    assert rows["leverage"][:5].min() > 0.9


def test_the_noise_of_sites_is_that_of_their_answers(tmp_path, monkeypatch):
    federation = small_federation()
    monkeypatch.setattr(membership, "federation_of", lambda *place, **sizes: federation)
    monkeypatch.setattr(noise, "SEEDS", [3])
    monkeypatch.setattr(noise, "DIVISIONS", [(2, 100)])
    monkeypatch.setattr(noise, "EPSILONS", [0.0, 4.0])
    fitted = []

    def fit(sums, public):
        fitted.append(sums)
        return fit_to_noisy_sums(sums, public)

    monkeypatch.setattr(noise, "fit_to_noisy_sums", fit)
    out = tmp_path / "rows.jsonl"
    line = ["noise", "--data-dir=.", f"--out={out}"]
    CliRunner().invoke(__main__.app, line, catch_exceptions=False)
    assert pd.read_json(out, lines=True)["noises"].tolist() == [2, 1] * 8
    # Epsilon 4 with delta 1e-5: a deviation of 1.0812 times what a row changes, 2^0.5.
    variances = [float(sums.variance) for sums in fitted[:4]]
    assert variances == pytest.approx([0, 0, 4.676, 2.338], rel=1e-3)
    # Without noise: the classes of all rows of both sites.
    torch.manual_seed(3)
    labels = federation.labels[torch.randperm(230)[:200]]
    assert fitted[0].counts.tolist() == labels.bincount().tolist()


def test_the_table_of_the_page_has_the_figures_of_its_rows():
    page = (DOCS / "explanation" / "privacy.md").read_text("utf-8")
    rows = pd.read_parquet(DOCS / "results" / "private" / "membership.parquet")
    by_rows = rows.groupby("rows")[["span", "leverage", "ratio"]]
    assert (by_rows.min().loc[[60, 150, 380]] == 1).all(axis=None)
    assert "| 60, 150, 380 | 1.000 | 1.000 | 1.000 |" in page
    told = by_rows.mean().map("{:.3f} ± ".format) + by_rows.std().map("{:.3f}".format)
    for number in (1000, 10000):
        assert f"| {number:,} | {' | '.join(told.loc[number])} |" in page


def test_the_table_of_noise_has_the_figures_of_its_rows():
    page = (DOCS / "results" / "private.md").read_text("utf-8")
    folder = DOCS / "results" / "private"
    tested = pd.read_parquet(folder / "noise-membership.parquet")
    found = tested.groupby("epsilon")["best"].mean()
    rows = pd.read_parquet(folder / "noise.parquet")
    means = rows[rows["rows"] == 750].groupby(["epsilon", "arm"], observed=True)
    order = ["sites", "one", "gram", "dp-sgd-sites", "dp-sgd"]
    f1 = means["macro_f1"].mean().map("{:.3f}".format).unstack()[order]
    for epsilon in (8, 4, 2, 1):
        # The bound of a test of one row: two normal distributions 1 / noise apart.
        bound = norm.cdf(0.5**0.5 / noise.multiplier_of(epsilon))
        assert found[epsilon] <= bound + 0.02
        arms = " | ".join(f1.loc[epsilon])
        assert f"| {epsilon} | {found[epsilon]:.3f} ({bound:.3f}) | {arms} |" in page
