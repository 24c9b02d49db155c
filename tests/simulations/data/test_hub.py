"""Names that are no folder: models of the hub, which needs a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import fresh_model
from tests.simulations.commands import invoke


@pytest.mark.parametrize("command", [["check"], ["merge", "--dry-run", "local"]], ids=["check", "merge"])
@pytest.mark.parametrize(
    "name", ["fedrot-no-such-model", "owner/no-such-model", "./nothing", "no/such/one"]
)
def test_without_a_hub_the_name_and_the_remedy_are_told(
    command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    fresh_model("bert-classifier").save_pretrained("local")
    code, output = invoke(*command, name)
    assert code == 2
    assert f"'{name}' cannot be loaded" in output
    assert "There is no folder of this name" in output
