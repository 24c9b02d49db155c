"""Models by their names on the hub: ``check`` and ``merge`` find them alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from tests.models import fresh_model, near
from tests.simulations.commands import invoke

COMMANDS = {"check": ["check"], "merge": ["merge", "--dry-run", "{folder}"]}


class Hub:
    """A folder that answers as the hub, and what was downloaded from it."""

    def __init__(self, folder: Path) -> None:
        self.models, self.cache = folder / "models", folder / "cache"
        self.downloads: list[str] = []

    def publish(self, name: str, seed: int, **options: Any) -> Path:
        model = fresh_model("bert-classifier", seed=0).float()
        tensors = near(dict(model.named_parameters()), 0.01 * seed, seed)
        model.load_state_dict({**model.state_dict(), **tensors})
        model.save_pretrained(self.models / name, **options)
        for surplus in ("onnx/model.onnx", "README.md"):
            (self.models / name / surplus).parent.mkdir(exist_ok=True)
            (self.models / name / surplus).write_text("large")
        return self.models / name

    def snapshot_download(self, name: str, *, allow_patterns: list[str]) -> str:
        if not (self.models / name).is_dir():
            raise OSError("We couldn't connect to the hub.\nCheck your connection.")
        target = self.cache / name / "snapshots" / "4f2a9c"
        for file in sorted(path for path in (self.models / name).rglob("*") if path.is_file()):
            relative = str(file.relative_to(self.models / name))
            if any(fnmatch(relative, pattern) for pattern in allow_patterns):
                self.downloads.append(relative)
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target / relative)
        return str(target)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return found


def test_models_of_the_hub_are_merged_as_those_of_folders_are(hub: Hub, tmp_path: Path) -> None:
    folders = [hub.publish("owner/first", 0), hub.publish("owner/second", 1, max_shard_size="20KB")]
    options = ["--weights", "1,3"]
    code, output = invoke("merge", "owner/first", "owner/second", *options, "--out", "merged")
    assert code == 0, output
    assert "first" in output
    assert "4f2a9c" not in output
    assert invoke("merge", *folders, *options, "--out", "expected")[0] == 0
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert {"README.md", "onnx/model.onnx"}.isdisjoint(hub.downloads)


def test_a_model_of_the_hub_is_checked_under_its_name(hub: Hub) -> None:
    hub.publish("fedrot-tiny", 0)
    code, output = invoke("check", "fedrot-tiny", "--json")
    assert code == 0, output
    found = json.loads(output)
    assert (found["model"], found["holds"]) == ("fedrot-tiny", True)
    assert len(found["notes"]) == 1, "of the residual stream alone: nothing is missing or left over"


def test_pickles_are_downloaded_where_there_is_nothing_else(hub: Hub) -> None:
    folder = hub.publish("owner/old", 0)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model.safetensors.away")
    torch.save(state, folder / "pytorch_model.bin")
    assert invoke("check", "owner/old")[0] == 0
    assert "pytorch_model.bin" in hub.downloads
    assert invoke("merge", "owner/old", "owner/old", "--dry-run")[0] == 0


def _quantised(settings: dict[str, Any]) -> None:
    settings["quantization_config"] = {"quant_method": "gptq"}


def _unsupported(settings: dict[str, Any]) -> None:
    settings["model_type"] = "xlnet"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [(_quantised, "is quantised (gptq)"), (_unsupported, "The architecture 'xlnet' is not supported")],
)
def test_nothing_more_is_downloaded_of_a_model_that_cannot_be_moved(
    command: str, spoil: Callable[[dict[str, Any]], None], expected: str, hub: Hub
) -> None:
    file = hub.publish("owner/name", 0) / "config.json"
    settings = json.loads(file.read_text())
    spoil(settings)
    file.write_text(json.dumps(settings))
    fresh_model("bert-classifier").save_pretrained("local")
    line = [argument.format(folder="local") for argument in COMMANDS[command]]
    code, output = invoke(*line, "owner/name")
    assert (code, expected in output) == (2, True), output
    assert hub.downloads == ["config.json"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["fedrot-no-such-model", "owner/fedrot-no-such-model"])
def test_without_a_hub_the_name_and_the_remedy_are_told(command: str, name: str, hub: Hub) -> None:
    fresh_model("bert-classifier").save_pretrained("local")
    line = [argument.format(folder="local") for argument in COMMANDS[command]]
    code, output = invoke(*line, name)
    assert code == 2
    assert f"'{name}' is no folder, and the hub has no model of that name or cannot be reached" in output
    assert output.endswith("(We couldn't connect to the hub.). Give the folder of a saved model.")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["./nothing", "no/such/folder"])
def test_a_path_is_not_looked_for_on_the_hub(command: str, name: str, hub: Hub) -> None:
    hub.publish("nothing", 0)
    fresh_model("bert-classifier").save_pretrained("local")
    line = [argument.format(folder="local") for argument in COMMANDS[command]]
    code, output = invoke(*line, name)
    assert (code, f"'{name}' does not exist." in output) == (2, True), output
    assert hub.downloads == []
