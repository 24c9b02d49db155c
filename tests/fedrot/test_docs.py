"""The code in the documentation runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_about_own_models_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "own-model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    torch.manual_seed(0)
    scope: dict[str, Any] = {"__name__": "own_model"}
    for block in blocks:
        exec(compile(block, "own-model.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert re.fullmatch(r"\d+ groups, largest change of an output: \S+\n", printed)
    assert 0 < scope["change"] <= 1e-9
    parts = {group.part for group in scope["symmetry"].groups}
    assert parts == {"residual", "heads", "attention", "rescale", "ffn"}
