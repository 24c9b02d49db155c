"""Pretrained models that packages carry."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrot.errors import FedrotError
from fedrot.simulations.models import packaged
from fedrot.simulations.models.packaged import source_of


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
    monkeypatch.setitem(packaged.PACKAGED, "minilm", ("no_such_package", "model"))
    with pytest.raises(FedrotError, match=r"'no-such-package'\. Install .* -e '\.\[minilm\]'"):
        source_of("minilm")
