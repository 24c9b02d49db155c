"""The notebooks of the documentation have outputs and pictures, which a new run
repeats.
"""

import re

import nbformat
import pytest

from docs.notebooks import TUTORIALS, executed

NAMES = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
LONG = [
    pytest.param(name, marks=pytest.mark.long) for name in NAMES if name != "own-model"
]
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")


def stored(name):
    return nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)


def printed(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_clean_outputs(name):
    notebook = stored(name)
    pictures = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        kinds = [output.get("name", output.output_type) for output in cell.outputs]
        assert ("stdout" in kinds) == (
            re.search(r"^ *print\(", cell.source, re.MULTILINE) is not None
        )
        assert kinds.count("display_data") == cell.source.count("plt.show()")
        assert {*kinds} <= {"stdout", "display_data"}
        assert {*cell.metadata} == ({"alt"} if "display_data" in kinds else set())
        pictures += [
            output.data["image/png"] for output in cell.outputs if "data" in output
        ]
    assert max(map(len, pictures)) < 80_000  # in base 64: 60 kB
    assert not re.search(r"(?<!\w)/\w+/|[Ww]arning|it/s", printed(notebook))
    # What the last cell says was printed.
    assert {*re.findall(r"\d+\.\d+", notebook.cells[-1].source)} <= {
        *NUMBER.findall(printed(notebook))
    }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*LONG, "own-model"])
def test_a_new_run_prints_the_same(name):
    shown = printed(stored(name))
    now = printed(executed(TUTORIALS / f"{name}.ipynb"))
    assert NUMBER.sub("#", now) == NUMBER.sub("#", shown)
    # Other processors add up in another order.
    figures = [
        [float(figure) for figure in NUMBER.findall(text)] for text in (now, shown)
    ]
    assert figures[0] == pytest.approx(figures[1], rel=0.01, abs=0.02)
