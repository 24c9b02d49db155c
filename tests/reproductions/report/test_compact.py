"""Compact copies of run folders, and the published ones in docs/results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.report.run_page import write_report
from fedrot.simulations.report.summaries import results
from fedrot.simulations.report.tables import format_difference, format_score
from reproductions.report.compact import compact, write_parquet

DOCS = Path(__file__).parents[3] / "docs"
ROW = {"setting": "s", "arm": "plain", "start": "same", "seed": 0, "round": 1, "scope": "central"}
ROWS = [{**ROW, "metric": "loss", "value": 0.1 + 0.2}, {**ROW, "metric": "accuracy", "value": None}]
GROUP = {"group": "layer.0.qk", "layer": 0, "part": "attention", "before": 2.0, "after": 1.0}
ALIGNED = {key: value for key, value in ROW.items() if key != "scope"}
ALIGNMENT = [{**ALIGNED, "client": 0, **GROUP}, {**ALIGNED, "client": 1, "dropped": "not finite"}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "plots").mkdir(parents=True)
    for name, rows in (("rows.jsonl", ROWS), ("alignment.jsonl", ALIGNMENT)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name in ("config.json", "versions.json", "rows.csv", "report.html", "plots/loss.png"):
        (folder / name).write_text("{}\n", encoding="utf-8")
    return folder


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: "NaN" if v != v else v for k, v in row.items()} for row in rows]


def test_a_compact_copy_has_the_same_rows_and_gives_the_same_page(run: Path, tmp_path: Path) -> None:
    # The page carries the folder's name.
    copy = compact(run, tmp_path / "copies" / "run")
    assert {path.name for path in copy.iterdir()} == {
        *("config.json", "versions.json", "rows.parquet", "alignment.parquet")
    }
    for name in ("rows.jsonl", "alignment.jsonl"):
        assert comparable(read_rows(copy, name)) == comparable(read_rows(run, name))
    assert math.isnan(read_rows(copy)[1]["value"])
    assert "before" not in read_rows(copy, "alignment.jsonl")[1]
    assert write_report(copy).read_text() == write_report(run).read_text()


def test_alignments_are_rounded_and_results_are_not(run: Path, tmp_path: Path) -> None:
    row = {**ALIGNED, "client": 0, **GROUP, "before": 0.1 + 0.2, "after": 1e-3}
    (run / "alignment.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    copy = compact(run, tmp_path / "copy")
    assert read_rows(copy)[0]["value"] == 0.1 + 0.2
    (found,) = read_rows(copy, "alignment.jsonl")
    assert found["before"] == pytest.approx(0.3, rel=1e-7)
    assert found["before"] != 0.1 + 0.2
    assert (found["client"], found["group"]) == (0, "layer.0.qk")


def test_a_copied_partition_is_the_same_in_less_space(run: Path, tmp_path: Path) -> None:
    partition = {"emotion": {"label_names": ["anger", "joy"], "seeds": {"0": {"sizes": [26, 90]}}}}
    (run / "partition.json").write_text(json.dumps(partition, indent=2), encoding="utf-8")
    copy = compact(run, tmp_path / "copy")
    files = run / "partition.json", copy / "partition.json"
    whole, small = (json.loads(file.read_text()) for file in files)
    assert small == whole
    assert files[1].stat().st_size < files[0].stat().st_size


def test_a_folder_without_rows_cannot_be_made_compact(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"rows\.jsonl"):
        compact(tmp_path, tmp_path / "copy")


def test_numbers_survive_to_the_last_bit(tmp_path: Path) -> None:
    rows = [{"value": value} for value in (1 / 3, 5e-324, 1.7976931348623157e308, -0.0)]
    write_parquet(tmp_path / "rows.parquet", rows)
    assert [row["value"].hex() for row in read_rows(tmp_path)] == [row["value"].hex() for row in rows]


@pytest.mark.parametrize(
    ("name", "document", "left_out"),
    [
        ("one-shot", "results/one-shot.md", ("start", "seeds")),
        ("rounds", "results/rounds.md", ("start", "seeds")),
        ("different-one-shot", "results/different-one-shot.md", ("start",)),
        ("different-rounds", "results/different-rounds.md", ("start",)),
        ("different-short-rounds", "results/different-short-rounds.md", ("start",)),
    ],
)
def test_published_rows_give_the_published_table(
    name: str, document: str, left_out: tuple[str, ...]
) -> None:
    found = {one.place: one for one in results(read_rows(DOCS / "results" / name))}
    published = (DOCS / document).read_text(encoding="utf-8").splitlines()
    places = [place for place in found if place.metric == "accuracy"]
    assert places
    for place in places:
        both = [found[place], found[place._replace(metric="loss")]]
        differences = [format_difference(one.difference) if one.difference else "-" for one in both]
        line = {
            "setting": place.setting,
            "start": place.start,
            "arm": place.arm,
            "seeds": str(both[0].n),
            **{f"score {index}": format_score(one) for index, one in enumerate(both)},
            # Pages were published before the smallest difference stood beside this verdict.
            **{
                f"difference {index}": re.sub("noise of .*", "noise", said)
                for index, said in enumerate(differences)
            },
        }
        shown = [cell for title, cell in line.items() if title not in left_out]
        assert f"| {' | '.join(shown)} |" in published


def test_published_results_stay_small() -> None:
    drawn = {"plots", "report.html"}  # by `fedrot report`; git ignores them
    files = [path for path in (DOCS / "results").rglob("*") if path.is_file()]
    kept = [path for path in files if not drawn & set(path.parts)]
    assert sum(path.stat().st_size for path in kept) < 2_000_000


def test_a_copy_of_a_copy_is_the_same(run: Path, tmp_path: Path) -> None:
    copy = compact(run, tmp_path / "copy")
    again = compact(copy, tmp_path / "again")
    for file in copy.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_a_value_that_is_null_is_not_left_out(run: Path, tmp_path: Path) -> None:
    row = {**ALIGNED, "client": 0, **GROUP, "found": None, "chance": 0.5}
    (run / "alignment.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (found,) = read_rows(compact(run, tmp_path / "copy"), "alignment.jsonl")
    assert found.keys() == row.keys()
    assert math.isnan(found["found"])


def test_what_a_run_says_of_itself_is_copied(run: Path, tmp_path: Path) -> None:
    small = ("config.json", "versions.json", "status.json", "models.jsonl", "summary.md")
    for name in small:
        (run / name).write_text(f"{name}\n", encoding="utf-8")
    copy = compact(run, tmp_path / "copy")
    assert all((copy / name).read_text() == f"{name}\n" for name in small)
