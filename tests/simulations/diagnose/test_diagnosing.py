"""``fedrot diagnose``: saved models, finished runs, files of a strategy, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedrot
from tests.models import LAYERS, State, fresh_model, near, state_of, symmetry_for
from tests.simulations.commands import invoke
from tests.simulations.in_process import simulated
from tests.simulations.runs import SMALL

NAME = "bert-classifier"


def diagnose(*arguments: object) -> tuple[int, str]:
    return invoke("diagnose", *arguments)


def read(*arguments: object) -> list[dict[str, Any]]:
    """Return what ``--json`` printed, which has to be one line and nothing else."""
    code, output = diagnose(*arguments, "--json")
    assert code == 0, output
    found: list[dict[str, Any]] = json.loads(output, parse_constant=pytest.fail)["diagnoses"]
    return found


def updates(parts: tuple[str, ...] = (), count: int = 2) -> list[State]:
    base, symmetry = state_of(NAME), symmetry_for(NAME)
    clients = [near(base, 0.1, seed) for seed in range(1, count + 1)]
    return [fedrot.random_equivalent(u, symmetry, i, parts) for i, u in enumerate(clients)]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., list[Path]]:
    """Save the base and updates; returns their folders."""

    def saved(*states: State) -> list[Path]:
        folders = [tmp_path / f"model-{i}" for i in range(1 + len(states))]
        for folder, state in zip(folders, [state_of(NAME), *states], strict=True):
            model = fresh_model(NAME)
            model.load_state_dict(state)
            model.float().save_pretrained(folder)
        return folders

    return saved


def rows_of(states: list[State], number: int = 1, **more: Any) -> list[dict[str, Any]]:
    """Rows as a strategy writes them, of updates aligned to their running mean."""
    given = ((state, 1.0) for state in states)
    aligned = fedrot.align_round(given, state_of(NAME), symmetry_for(NAME))
    reports = [one.alignment.report for one in aligned]
    return [
        {"round": number, "client": client, **more, **row}
        for client, report in enumerate(reports)
        for row in report.rows()
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# Saved models


def test_saved_models_are_diagnosed_in_tables_and_a_sentence(save: Any) -> None:
    folders = save(*updates(("attention", "ffn")))
    code, output = diagnose(*folders)
    assert code == 0, output
    assert "Updates compared with the mean of those before" in output
    assert "Updates compared with the base" in output
    assert "share found" in output
    assert "Clients are in different coordinates: average with FedRot" in output
    assert f"fedrot merge {folders[1]} {folders[2]}" in "".join(output.split("\n"))
    assert "--parts" not in output
    (found,) = read(*folders)
    assert (found["choice"], found["name"], found["rounds"]) == ("aligned", "", [])
    assert {(line["part"], line["layer"]) for line in found["base"]} == {
        (part, layer) for part in ("attention", "ffn") for layer in range(LAYERS)
    }
    clients = [_floats(state) for state in updates(("attention", "ffn"))]
    expected = fedrot.diagnose(_floats(state_of(NAME)), clients, symmetry_for(NAME))
    assert found["sentence"] == str(expected)


def _floats(state: State) -> State:
    return {name: t.float() if t.is_floating_point() else t for name, t in state.items()}


def test_of_two_models_both_are_to_be_merged(save: Any) -> None:
    """The first has only taken the base's place."""
    folders = save(*updates(("attention", "ffn"), count=1))
    code, output = diagnose(*folders)
    assert code == 0, output
    assert f"fedrot merge {folders[0]} {folders[1]}" in "".join(output.split("\n"))


def test_noise_and_other_bases_are_told_apart(save: Any) -> None:
    (noise,) = read(*save(*updates()))
    assert noise["choice"] == "plain"
    (whole,) = read(*save(*updates(fedrot.WHOLE_MODEL)))
    assert whole["choice"] == "whole"
    code, output = diagnose(*save(*updates(fedrot.WHOLE_MODEL)))
    assert code == 0
    assert "Updates matched as whole models" in output
    assert "together" in output
    assert "--parts whole --out merged" in " ".join(output.split())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("{base}", "nowhere/at/all"), "'nowhere/at/all' does not exist"),
        (
            ("{base}",),
            "neither a run folder nor a file of rows: it has no alignment.jsonl. To diagnose saved",
        ),
        (("nowhere",), "'nowhere' is neither a run folder nor a file of rows"),
        (("{base}", "{other}"), "Different architectures: architectures is"),
        (("{base}", "{base}/model.safetensors"), "Put config.json beside it"),
    ],
)
def test_what_cannot_be_diagnosed_is_said_in_one_sentence(
    names: tuple[str, ...], message: str, save: Any, tmp_path: Path
) -> None:
    (base,) = save()
    fresh_model("distilbert-mlm").float().save_pretrained(tmp_path / "other")
    filled = [name.format(base=base, other=tmp_path / "other") for name in names]
    code, output = diagnose(*filled)
    assert code == 2
    assert message in output.replace("\n", " ")
    assert output.count("Error") == 1


def test_an_unknown_family_is_refused(save: Any, tmp_path: Path) -> None:
    (base,) = save()
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "rnn"}')
    code, output = diagnose(base, unknown)
    assert code == 2
    assert "The architecture 'rnn' i" in output


def test_values_that_are_not_finite_name_their_model(save: Any) -> None:
    broken = updates(count=1)[0]
    broken["classifier.weight"][0, 0] = float("nan")
    folders = save(*updates(count=1), broken)
    code, output = diagnose(*folders)
    assert code == 2
    assert str(folders[2]) in output.replace("\n", "")
    assert "NaN or Inf" in output


# Finished runs


def test_the_rows_of_a_strategy_are_diagnosed_by_rounds_of_one_choice(tmp_path: Path) -> None:
    turned, noise = updates(("attention", "ffn"), 3), updates(count=3)
    rows = [row for number in (1, 2, 5) for row in rows_of(turned, number)]
    rows += [row for number in (3, 4) for row in rows_of(noise, number)]
    rows.append({"round": 4, "client": 7, "dropped": "NaN"})
    file = written(tmp_path / "mine.jsonl", rows)
    first, second = read(file)
    assert (first["choice"], first["rounds"]) == ("aligned", [1, 2, 5])
    assert (second["choice"], second["rounds"]) == ("plain", [3, 4])
    assert first["base"] == first["whole"] == first["cosines"] == []
    code, output = diagnose(file)
    assert code == 0
    assert "rounds 1-2, 5: Clients are in different coordinates" in output
    assert "rounds 3-4: Nothing beyond chance: average as they are" in output


def test_a_run_is_diagnosed_by_arm(tmp_path: Path) -> None:
    run = tmp_path / "run"
    simulated(run, "simulate", *SMALL, "--arms", "plain,attention+ffn@running,attention@global")
    found = read(run)
    names = {one["name"] for one in found}
    assert len(names) == 2
    assert all("same" in name for name in names)
    assert any(name.endswith("attention@global") for name in names)
    assert {number for one in found for number in one["rounds"]} == {1, 2}
    assert all(line["chance"] is not None for one in found for line in one["clients"])


def test_replies_that_were_matched_as_whole_models(tmp_path: Path) -> None:
    options = fedrot.AlignmentOptions(fedrot.WHOLE_MODEL)
    report = fedrot.align(state_of(NAME, 4), state_of(NAME), symmetry_for(NAME), options).report
    rows = [{"round": 1, "client": 0, **row} for row in report.rows()]
    file = written(tmp_path / "rows.jsonl", rows)
    assert read(file)[0]["choice"] == "whole"
    code, output = diagnose(file)
    assert code == 0
    assert "Round 1, updates matched as whole models" in output
    assert "not known" in output
    assert "chance is not known" in output


@pytest.mark.parametrize("absent", [("found",), ("found", "chance")])
def test_an_older_run_is_refused(absent: tuple[str, ...], tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k not in absent} for row in rows_of(updates())]
    code, output = diagnose(written(tmp_path / "rows.jsonl", rows))
    assert code == 2
    assert "was written by an older fedrot: its rows lack the distance that chance removes" in output


def test_rows_without_chance_are_refused(tmp_path: Path) -> None:
    rows = [{**row, "chance": None} for row in rows_of(updates(), 3)]
    code, output = diagnose(written(tmp_path / "rows.jsonl", rows))
    assert code == 2
    assert "lacks the distance that chance removes in round 3" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows of an alignment"),
        ("# Title\n", "has no rows of an alignment"),
        ('{"round": 1, "client": 0, "dropped": "NaN"}\n', "has no rows of an alignment"),
        ('{"before": 1.0}\n', "has other rows than those of Reporting(rows=...)"),
        ("[1]\n", "is no file of rows"),
        (b"\xd0\x00", "is no file of rows"),
    ],
)
def test_other_files_are_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "some.file"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    code, output = diagnose(file)
    assert code == 2
    assert message in output
