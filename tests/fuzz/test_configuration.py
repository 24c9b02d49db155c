"""Whatever is written into a configuration is a valid one, or a documented error."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedrot.simulations import simulate
from fedrot.simulations.cli.app import app
from fedrot.simulations.cli.commands import BAD_INPUT
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.strategy import NAMED, Strategy
from fedrot.simulations.tasks.task_registry import TASKS
from tests.fuzz.cases import EDGES, fuzzed, misspelt, values

ROOT = Path(__file__).parents[2]
FILES = {
    path.name: path.read_text("utf-8")
    for path in sorted((ROOT / "simulations/experiments").glob("*.toml"))
}
FIELDS = sorted({*Experiment.model_fields, "local-epochs", "x", "rows"})
KEYS = sorted({*Strategy.model_fields, "checkpoints", "parts"})
WORDS = (
    *(
        *TASKS,
        *NAMED,
        "iid",
        "dirichlet:0.5",
        "same",
        "different,scrambled",
        "bert",
    ),
    *("llama", "loss", "head_only", "regmean"),
)
words = st.sampled_from(WORDS)
anything = values(
    st.sampled_from(EDGES) | words | words.flatmap(misspelt) | st.text(max_size=5)
)
TOML = """"" 0 -1 1e400 nan true '' "iid" [] [1,1] {} {a=1} 99999999999
[[0,0]] [1,[2]] {same=[[0,1]]}
[{name="a"}] ["fedavg","aligned"] {r=2} {parts=["ffn"]}"""
literals = st.sampled_from(TOML.split())


@pytest.fixture(autouse=True, scope="module")
def only_read():
    """Let the command read what it would run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "simulate", lambda *args, **kwargs: None)
        yield


@st.composite
def documents(draw):
    """Draw an experiment file with something else in it."""
    lines = FILES[draw(st.sampled_from(sorted(FILES)))].splitlines()
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


tables = st.dictionaries(st.sampled_from(KEYS), anything, max_size=3)


@fuzzed(
    8,
    settings=st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4)
    | tables.map(lambda table: {"strategies": [{"name": "a", **table}]}),
)
def test_settings_are_an_experiment_or_refused(settings):
    try:
        found = Experiment.from_flat(settings)
    except ValueError:
        return False
    assert Experiment.model_validate_json(found.to_json()) == found
    assert found.seeds
    assert all(isinstance(strategy.code(found), str) for strategy in found.strategies)
    return True


@fuzzed(7, text=documents())
def test_a_file_is_simulated_or_refused_in_one_line(text):
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.toml")
        path.write_text(text, "utf-8")
        result = CliRunner().invoke(
            app, ["simulate", str(path), "--out", f"{folder}/run"]
        )
    assert result.exit_code in (0, BAD_INPUT), result.exception
    assert result.exit_code == 0 or "Error" in result.output
    return result.exit_code == 0
