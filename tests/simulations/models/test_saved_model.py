"""``SavedModel``: one way to find, compare and load a model on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedrot.errors import FedrotError
from fedrot.simulations.models.alike import check_alike
from fedrot.simulations.models.saved_model import open_saved_model
from tests.models import fresh_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    fresh_model("bert-classifier").float().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("prefix", ["", "module."])
def test_it_is_loaded_as_the_class_of_a_task(prefix: str, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    named = {f"{prefix}{name}": tensor.clone() for name, tensor in tensors.items()}
    save_file(named, model / "model.safetensors", metadata={"format": "pt"})
    saved = open_saved_model(model)
    loaded, missing, unknown = saved.load(saved.class_for("AutoModelForSequenceClassification"))
    assert (missing, unknown, loaded.training) == ([], [], False)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    assert all(torch.equal(saved.read()[name], tensor) for name, tensor in tensors.items())


def test_tensors_keep_the_precision_of_the_file_not_of_the_configuration(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    saved = open_saved_model(model)
    loaded, _, _ = saved.load(saved.class_for("AutoModelForSequenceClassification"))
    state, tensors = loaded.state_dict(), load_file(model / "model.safetensors")
    assert all(state[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_a_model_of_the_hub_comes_with_its_tokenizer_and_without_its_other_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    def download(name: str, allow_patterns: list[str]) -> str:
        assert name == "owner/name"
        cache.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            for file in model.glob(pattern):
                shutil.copyfile(file, cache / file.name)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    beside = ("tokenizer.json", "merges.txt", "generation_config.json")
    for name in (*beside, "README.md", "pytorch_model.bin"):
        (model / name).write_text("{}")
    saved = open_saved_model("owner/name")
    assert {file.name for file in cache.iterdir()} == {"config.json", "model.safetensors", *beside}
    assert (saved.path, saved.tokenizer) == (cache, cache)


def test_a_task_of_another_kind_lacks_tensors(model: Path) -> None:
    saved = open_saved_model(model)
    _, missing, unknown = saved.load(saved.class_for("AutoModelForMaskedLM"))
    assert any(name.startswith("cls.") for name in missing)
    assert "classifier.weight" in unknown


def test_models_are_compared_without_their_weights(model: Path, tmp_path: Path) -> None:
    """Only the configurations are read, so that neither folder needs weights."""
    (tmp_path / "other").mkdir()
    text = (model / "config.json").read_text()
    other = tmp_path / "other" / "config.json"
    other.write_text(text)
    (model / "model.safetensors").unlink()
    check_alike(open_saved_model(model), open_saved_model(other.parent))
    other.write_text(text.replace('"num_attention_heads": 4', '"num_attention_heads": 2'))
    with pytest.raises(FedrotError, match=r"num_attention_heads is 4 in .* and 2 in"):
        check_alike(open_saved_model(model), open_saved_model(other.parent))
    other.write_text(text.replace('"vocab_size": 60', '"vocab_size": 61'))
    with pytest.raises(FedrotError, match=r"Different vocabularies.*60 and 61 embeddings"):
        check_alike(open_saved_model(model), open_saved_model(other.parent))
