"""What simulations compute, and what they leave: arms, starts and ways to merge."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

import reproductions.arms  # noqa: F401
from fedrot.simulations.federation.run_folder import read_rows
from tests.simulations.in_process import simulated
from tests.simulations.runs import SMALL, central


def test_partial_participation_is_the_same_in_every_arm(tmp_path: Path) -> None:
    options = [*SMALL, "--clients", "4", "--set", "fraction_train=0.5"]
    simulated(tmp_path / "run", "simulate", *options)
    trained: dict[str, set[tuple[int, str]]] = {"plain": set(), "aligned": set()}
    for row in read_rows(tmp_path / "run"):
        if row["metric"] == "train-loss":
            trained[row["arm"]].add((row["round"], row["scope"]))
    assert trained["plain"] == trained["aligned"]
    assert len(trained["plain"]) == 4


def test_a_pretrained_encoder_from_a_folder(tmp_path: Path) -> None:
    options = shlex.split(
        "--train-limit 96 --test-limit 64 --clients 2 --max-length 24 --seeds 1 --rounds 1 --lr 5e-5"
        " --start same,scrambled --arms aligned*0,plain"
    )
    simulated(tmp_path / "run", "simulate", "--model", "minilm", *options)
    run = tmp_path / "run"
    moved = {
        row["metric"]: row["value"]
        for row in read_rows(run)
        if (row["start"], row["arm"], row["scope"]) == ("scrambled", "aligned*0", "alignment")
    }
    assert moved["fedrot-share-removed"] > 0.99
    same = central(run, "same", "aligned*0", "loss", 1)
    aligned = abs(central(run, "scrambled", "aligned*0", "loss", 1) - same)
    assert aligned < 1e-5
    assert abs(central(run, "scrambled", "plain", "loss", 1) - same) > 20 * aligned


def test_masked_language_modelling_in_every_start(tmp_path: Path) -> None:
    options = shlex.split(
        "--task mlm --rounds 1 --local-epochs 1 --train-limit 240 --test-limit 80"
        " --start same,scrambled,different --arms aligned*0 --partition dirichlet:1"
    )
    printed = simulated(tmp_path / "run", "simulate", *SMALL, *options)
    assert "pseudo_perplexity" in printed
    run = tmp_path / "run"
    rows = read_rows(run)
    for scope in ("central", "alone:0", "alone:1"):
        found = {row["metric"] for row in rows if row["scope"] == scope}
        assert found == {"pseudo_perplexity", "accuracy", "loss"}
    assert {"train-loss", "pseudo_perplexity"} <= {r["metric"] for r in rows if r["scope"] == "client:0"}
    headline = central(run, "same", "aligned*0", "pseudo_perplexity", 1)
    assert headline < 0.9 * central(run, "same", "aligned*0", "pseudo_perplexity", 0)
    assert headline == pytest.approx(math.exp(central(run, "same", "aligned*0", "loss", 1)))
    scrambled = central(run, "scrambled", "aligned*0", "pseudo_perplexity", 1)
    assert scrambled == pytest.approx(headline, rel=1e-4)
    assert {path.name for path in (run / "plots").glob("*perplexity*")} == {
        "goemotions_ekman-dirichlet-1-mlm-pseudo_perplexity.png"
    }


def test_clients_from_different_starts_are_matched_as_a_whole(tmp_path: Path) -> None:
    arms = ("plain", "attention+ffn", "aligned", "aligned~clients")
    small = [*SMALL, "--rounds", "1", "--local-epochs", "1", "--set", "first_epochs=2"]
    simulated(tmp_path / "run", "simulate", *small, "--start", "different", "--arms", ",".join(arms))
    rows = {
        (row["arm"], row["metric"]): row["value"]
        for row in read_rows(tmp_path / "run")
        if row["scope"] == "alignment"
    }
    # Both come from elsewhere; one of them is the anchor, and the other is moved in every part.
    for arm in arms[2:]:
        assert rows[arm, "fedrot-groups-moved"] > 0
    assert rows["attention+ffn", "fedrot-groups-moved"] == 0
    losses = {arm: central(tmp_path / "run", "different", arm, "loss", 1) for arm in arms}
    # Of attention and neurons alone nothing moved: that is plain averaging to the last bit.
    assert losses["attention+ffn"] == losses["plain"]
    assert len(set(losses.values())) == len(arms) - 1, "the others average other models"
    assert "matched at the server" not in (tmp_path / "run" / "flower.log").read_text()


def test_ways_of_merging_see_through_scrambling_once_aligned(tmp_path: Path) -> None:
    blind = ("aligned*0/regmean", "aligned*0/fisher", "ensemble", "joined")
    arms = ("plain/regmean", *blind, "greedy")
    # Fewer epochs leave the small BERT so near to its start that its encoder hardly matters.
    options = [*SMALL, "--rounds", "1", "--local-epochs", "6", "--start", "same,scrambled"]
    simulated(tmp_path / "run", "simulate", *options, "--arms", ",".join(arms))
    run = tmp_path / "run"

    def gap(arm: str) -> float:
        return abs(central(run, "scrambled", arm, "loss", 1) - central(run, "same", arm, "loss", 1))

    assert {arm: gap(arm) for arm in blind if gap(arm) > 1e-5} == {}
    assert gap("plain/regmean") > 1e-3
    losses = {arm: central(run, "same", arm, "loss", 1) for arm in arms}
    assert len(set(losses.values())) == len(arms), "every arm merges in its own way"
    assert all(math.isfinite(loss) for loss in losses.values())
    assert "dropped: " not in (run / "flower.log").read_text()
