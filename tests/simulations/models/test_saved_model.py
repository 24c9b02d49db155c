"""``SavedModel``: one way to find, compare and load a model on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedrot.errors import FedrotError
from fedrot.simulations.data.encoding import bundled_tokenizer
from fedrot.simulations.models.alike import check_alike
from fedrot.simulations.models.saved_model import (
    check_bundled,
    longest_text,
    open_saved_model,
)
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
    said = r"Different vocabularies.*60 and 61 embeddings, and no two tokenizers.*_embeddings\(61\)"
    with pytest.raises(FedrotError, match=said):
        check_alike(open_saved_model(model), open_saved_model(other.parent))


def test_of_the_hub_pickles_are_downloaded_only_without_safetensors(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_saved_model("owner/name")
    first, second = asked
    # The configuration is read before anything large is downloaded.
    assert first == ["config.json"]
    assert {"model*.safetensors", "model.safetensors.index.json", "tokenizer.json"} <= {*second}
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    open_saved_model("name")
    assert set(asked[-1]) == {"pytorch_model*.bin", "pytorch_model.bin", "pytorch_model.bin.index.json"}
    asked.clear()
    (model / "config.json").write_text('{"model_type": "xlnet"}')
    with pytest.raises(FedrotError, match="xlnet"):
        open_saved_model("owner/name")
    assert asked == [["config.json"]]
    for name in ("a/b/c", "-x", "no such name"):
        with pytest.raises(FedrotError, match=f"'{name}' does not exist"):
            open_saved_model(name)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", ""]
)
def test_one_file_of_a_tokenizer_is_enough(name: str, model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    if name:
        (model / name).write_text("{}")
    saved = open_saved_model(model)
    assert saved.tokenizer == (model if name else None)
    assert name or saved.vocabulary is None


def test_the_class_of_a_model_is_the_one_that_it_names(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())

    def named(*classes: str) -> type:
        (model / "config.json").write_text(json.dumps({**config, "architectures": [*classes]}))
        found: type = open_saved_model(model).model_class
        return found

    assert named("BertForMaskedLM").__name__ == "BertForMaskedLM"
    assert named().__name__ == "BertModel"
    with pytest.raises(FedrotError, match="is a MyBert, which transformers does not have"):
        named("MyBert")
    with pytest.raises(FedrotError, match=r"of type 'bert', for which transformers has no AutoModelFor"):
        open_saved_model(model).class_for("AutoModelForImageClassification")


def test_tensors_of_another_shape_are_named(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        FedrotError, match=r"'classifier\.bias' has shape \[2\], but needs shape \[3\] for"
    ):
        open_saved_model(model).read()


def test_texts_are_as_long_as_the_positions_and_words_those_of_the_tokenizer(model: Path) -> None:
    assert longest_text(SimpleNamespace(max_position_embeddings=40), 9) == 40
    assert longest_text(SimpleNamespace(max_position_embeddings=None), 9) == 9
    assert longest_text(SimpleNamespace(), 9) == 9
    saved = open_saved_model(model)
    size = bundled_tokenizer().get_vocab_size()
    with pytest.raises(FedrotError, match=f"has no tokenizer. The bundled one has {size} tokens"):
        check_bundled(saved)
    (model / "vocab.txt").write_text("x")
    check_bundled(saved)
    (model / "vocab.txt").unlink()
    saved.config.vocab_size = size
    check_bundled(saved)


@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_a_hub_without_the_model_is_told_in_one_line(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str, allow_patterns: list[str]) -> str:
        raise kind("Not found.\nMore about it.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    said = r"^'owner/name' is no folder, and the hub has no model .* \(Not found\.\)\. Give the folder"
    with pytest.raises(FedrotError, match=said):
        open_saved_model("owner/name")
