"""Run folders: what they hold, how they grow, what they refuse, and one writer at a
time.
"""

import math
import subprocess
import sys

import pandas
import pytest

from fedrot.errors import FedrotError
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.run_folder import (
    RunFolder,
    cells_of,
    only_writer,
    read_rows,
    read_run,
    versions,
)
from tests.simulations.report import runs as reports


def of(**fields):
    return Experiment.from_flat(
        {"name": "a", "seeds": [0], "strategies": "fedavg,aligned", **fields}
    )


def described(*experiments, counts=((1, 2),)):
    """Return experiments by name, as in ``config.json``."""
    found = {}
    for experiment in experiments:
        about = found[experiment.name] = experiment.model_dump(mode="json")
        about["label_names"] = ["x", "y"]
        about["seeds"] = {str(n): [*map(list, counts)] for n in experiment.seeds}
        about["strategies"] = {own["name"]: own for own in about["strategies"]}
    return found


def row(cell, value=0.5):
    name = cell.experiment.name
    return reports.row(cell.strategy.name, cell.seed, value, experiment=name)


def filled(path, *experiments, command="first"):
    """Return a folder in which every missing cell was added."""
    folder = RunFolder(path, described(*experiments), command)
    for cell in cells_of(experiments):
        if not folder.has(cell):
            folder.add(
                cell, [row(cell)], [{"strategy": cell.strategy.name, "round": 1}], "log"
            )
    folder.write_rows()
    return folder


def test_a_folder_tells_the_whole_run(tmp_path):
    filled(tmp_path, of())
    run = read_run(tmp_path)
    assert run.commands == ["first"]
    assert run.versions.keys() >= {"date", "python", "fedrot", "torch"}
    assert run.versions == versions()
    assert run.experiments == described(of())
    assert [r["strategy"] for r in run.rows] == ["fedavg", "aligned"]
    assert [r["strategy"] for r in run.alignment] == ["fedavg", "aligned"]
    assert run.missing == []
    assert pandas.read_csv(tmp_path / "rows.csv").to_dict("records") == run.rows


def test_a_run_that_grows_forgets_nothing(tmp_path):
    filled(tmp_path, of())
    other = of(name="b", rounds=7)
    folder = RunFolder(
        tmp_path, described(other, of(seeds=[1], strategies="fit_head")), "second"
    )
    run = read_run(tmp_path)
    assert run.commands == ["first", "second"]
    assert [*run.experiments] == ["a", "b"]
    assert [*run.experiments["a"]["seeds"]] == ["0", "1"]
    assert [*run.experiments["a"]["strategies"]] == ["fedavg", "aligned", "fit_head"]
    assert len(run.rows) == 2
    assert len(run.missing) == 2 * 1 + 4
    assert not any(map(folder.has, cells_of([other])))
    assert all(map(folder.has, cells_of([of()])))


def test_values_that_are_not_finite_are_nan_when_they_are_read(tmp_path):
    folder = RunFolder(tmp_path, described(of()), "first")
    for cell, value in zip(cells_of([of()]), (math.nan, math.inf), strict=True):
        folder.add(cell, [row(cell, value)], [])
    assert all(math.isnan(r["value"]) for r in read_run(tmp_path).rows)


def test_files_of_cells_are_of_their_own_and_short():
    names = ["a/b", "a b", "a-b", "x" * 300, "x" * 301, "ü", "é"]
    found = {cell.name for name in names for cell in cells_of([of(name=name)])}
    assert len(found) == 2 * len(names)
    assert all(
        len(name) < 120 and name.replace(".", "-").replace("-", "").isalnum()
        for name in found
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", '{"commands": [], "experiments": [3]}', "is not that of a run"),
        ("config.json", "[", "damaged"),
        ("cell", "{}", "Delete it to run that part again"),
        (
            "cell",
            '{"rows": [{}], "alignment": []}',
            "row that fedrot did not write: {}",
        ),
        ("cell", '{"rows": [3], "alignment": []}', "row that fedrot did not write: 3"),
        ("cell", '{"rows": [], "alignment": [{"before": 1}]}', "did not write"),
        (
            "cell",
            '{"rows": [], "alignment": [{"strategy": "a", "before": "x"}]}',
            "did not write",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path, name, text, said):
    filled(tmp_path, of())
    file = next((tmp_path / "cells").iterdir()) if name == "cell" else tmp_path / name
    file.write_text(text)
    with pytest.raises(FedrotError, match=file.name) as caught:
        read_run(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rounds": 5}, "another rounds"),
        (
            {"strategies": [{"name": "aligned", "guard": "loss"}]},
            "another strategy of the same name",
        ),
    ],
)
def test_results_of_other_settings_are_not_mixed(tmp_path, fields, said):
    filled(tmp_path, of())
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(FedrotError, match=said):
        RunFolder(tmp_path, described(of(**fields)), "second")
    assert (tmp_path / "config.json").read_text() == before
    with pytest.raises(FedrotError, match="the data have changed"):
        RunFolder(tmp_path, described(of(), counts=[[2, 2]]), "second")
    RunFolder(tmp_path, described(of(data_dir="elsewhere")), "third")


def test_a_folder_of_something_else_stays(tmp_path):
    for text in (
        '{"model_type": "bert"}',
        '{"commands": [], "versions": {}, "experiments": []}',
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(FileExistsError, match=r"has config\.json, which no run"):
            RunFolder(tmp_path, described(of()), "first")
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(FileNotFoundError, match="not a run folder"):
        read_run(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ('{"round": 1}\n{"round": 2}\n', 2),
        ('{"round": 1}\n{"rou', 1),
        ("\xff", 0),
    ],
)
def test_rows_end_where_a_line_is_unfinished(tmp_path, text, count):
    file = tmp_path / "rows.jsonl"
    file.write_text(text, "latin-1")
    assert len(read_rows(file)) == count


@pytest.mark.parametrize("data", [b'{"round": "one"}\n', b"3\n", b'{"layer": 0.5}\n'])
def test_rows_that_no_strategy_wrote_are_named(tmp_path, data):
    (file := tmp_path / "rows.jsonl").write_bytes(data)
    with pytest.raises(FedrotError, match=r"rows\.jsonl"):
        read_rows(file)


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    code = (
        "import sys; from pathlib import Path; from fedrot.simulations.run_folder "
        "import only_writer\nwith only_writer(Path(sys.argv[1])): print('mine', "
        "flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    first = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "mine\n"
    with pytest.raises(FedrotError, match="Another run"), only_writer(tmp_path):
        pass
    first.kill()
    first.communicate()
    with only_writer(tmp_path):
        pass


def test_a_link_out_of_a_folder_is_refused(tmp_path):
    inside = tmp_path / "in"
    outside = tmp_path / "out"
    outside.mkdir()
    with only_writer(inside / "deep"):
        pass
    (inside / "cells").symlink_to(outside)
    with pytest.raises(FedrotError, match="outside of the folder"), only_writer(inside):
        pass
    (tmp_path / "link").symlink_to(outside)
    (outside / "own").symlink_to(outside)
    with only_writer(tmp_path / "link"):
        pass
