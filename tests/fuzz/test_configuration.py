"""Whatever is written into a configuration is a valid one, or a documented error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedrot.simulations import settings as configuration
from fedrot.simulations import simulate
from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.commands import BAD_INPUT
from fedrot.simulations.federation import server_app
from fedrot.simulations.settings import Experiment
from fedrot.simulations.strategy import NAMED, Strategy
from reproductions.barriers.grid import read_cells
from tests.fuzz.cases import EDGES, fuzzed, misspelt

ROOT = Path(__file__).parents[2]
FILES = {
    path.name: path.read_text("utf-8")
    for folder in ("simulations/experiments", "reproductions/grids")
    for path in sorted((ROOT / folder).glob("*.toml"))
}
APP = re.search(
    r"\[tool\.flwr\.app\.config\]\n(.*)",
    (ROOT / "simulations/flower_app/pyproject.toml").read_text(),
    re.S,
)
assert APP is not None
FIELDS = sorted({*Experiment.model_fields, "local-epochs", "x", "rows"})
KEYS = sorted({*Strategy.model_fields, "checkpoints", "parts"})
WORDS = (
    *(*configuration.TASKS, *NAMED, "iid", "dirichlet:0.5", "same", "different,scrambled", "bert"),
    *("llama", "loss", "head_only", "regmean"),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.sampled_from(EDGES)
    | st.floats()
    | st.sampled_from(WORDS)
    | st.sampled_from(WORDS).flatmap(misspelt)
    | st.text(max_size=5)
)
anything = (
    scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=3), scalars, max_size=2)
)
TOML = """"" 0 -1 1e400 nan true '' "iid" [] [1,1] {} {a=1} 99999999999 [[0,0]] [1,[2]] {same=[[0,1]]}
[{name="a"}] ["fedavg","aligned"] {r=2} {parts=["ffn"]}"""
literals = st.sampled_from(TOML.split())


@pytest.fixture(autouse=True, scope="module")
def only_read() -> Iterator[None]:
    """Let commands read what they would run."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (simulate, server_app):
            patch.setattr(module, "simulate", lambda *args, **kwargs: None)
        patch.setattr(server_app, "OrderedGrid", lambda *args: None)
        yield


def valid(experiment: Experiment) -> None:
    assert Experiment.model_validate_json(experiment.to_json()) == experiment
    assert experiment.seeds
    assert all(isinstance(strategy.code(experiment), str) for strategy in experiment.strategies)


@st.composite
def documents(draw: st.DrawFn, end: str = "") -> str:
    """Draw an experiment file whose name ends so, with something else in it."""
    names = sorted(name for name in FILES if name.endswith(end))
    lines = FILES[draw(st.sampled_from(names))].splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        match draw(st.integers(0, 5)):
            case 0:
                lines[at] = draw(misspelt(lines[at]))
            case 1:
                del lines[at : at + draw(st.integers(1, 5))]
            case 2:
                lines.insert(at, lines[draw(st.integers(0, len(lines) - 1))])
            case 3:
                lines[at] = lines[at].replace("[[", "[").replace("]]", "]")
            case 4:
                lines.insert(at, f"{draw(st.sampled_from(FIELDS))} = {draw(literals)}")
            case _:
                found = [i for i, line in enumerate(lines) if "=" in line]
                if found:
                    i = draw(st.sampled_from(found))
                    lines[i] = f"{lines[i].partition('=')[0]}= {draw(literals)}"
        lines = lines or [""]
    return "\n".join(lines)


@fuzzed(3, settings=st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4))
def test_settings_are_an_experiment_or_refused(settings: dict[str, Any]) -> bool:
    try:
        found = Experiment.from_flat(settings)
    except ValueError:
        return False
    valid(found)
    return True


@fuzzed(2, table=st.dictionaries(st.sampled_from(KEYS), anything, max_size=3))
def test_a_strategy_is_read_or_refused(table: dict[str, Any]) -> bool:
    try:
        found = Experiment.from_flat({"strategies": [{"name": "a", **table}]})
    except ValueError:
        return False
    valid(found)
    return True


@fuzzed(3, text=documents())
def test_a_file_is_simulated_or_refused_in_one_line(text: str) -> bool:
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.toml")
        path.write_text(text, "utf-8")
        result = CliRunner().invoke(app, ["simulate", str(path), "--out", f"{folder}/run"])
    assert result.exit_code in (0, BAD_INPUT), result.exception
    assert result.exit_code == 0 or "Error" in result.output
    return result.exit_code == 0


@fuzzed(3, text=documents("barriers.toml"))
def test_a_file_of_barriers_is_read_or_refused(text: str) -> bool:
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.toml")
        path.write_text(text, "utf-8")
        try:
            found = read_cells(path)
        except ValueError:
            return False
    for cell in found:
        valid(cell.experiment)
    return True


dashed = st.dictionaries(
    st.sampled_from(FIELDS).map(lambda name: name.replace("_", "-")), scalars, max_size=3
)


@fuzzed(3, settings=dashed, out=st.sampled_from(("/results", "", "here", "/")))
def test_the_flower_app_runs_or_says_what_is_wrong(settings: dict[str, Any], out: str) -> bool:
    context = Context(1, 1, {}, RecordDict(), {**settings, "out": out})
    try:
        server_app.main(None, context)
    except ValueError:
        return False
    assert out.startswith("/")
    return True
