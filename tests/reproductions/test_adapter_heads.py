"""Adapters and fitted heads where each client has one class, with a model of one layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from fedrot.simulations.data.encode import bundled_tokenizer
from fedrot.simulations.settings import Experiment
from fedrot.strategies.flower_compat import outside_of_the_engine
from reproductions import adapter_heads as heads


def test_every_arm_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pd.DataFrame({"label": [0, 0, 1, 1, 1, 1, 2, 2] * 30, "split": "train"})
    rows.loc[180:, "split"] = "test"
    words = rows.label.map({0: "happy", 1: "angry", 2: "sad"})
    rows["text"] = [f"{word} " * 3 + "you " * (place % 5) for place, word in enumerate(words)]
    rows.to_parquet(tmp_path / "words.parquet")
    small = Experiment(data="words", data_dir=tmp_path, layers=1, width=16, heads=2)
    model: Any = heads.build_model(small, heads.task_of(small.to_json()).data, 0)
    model.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=bundled_tokenizer()).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(heads, "ARMS", dict.fromkeys(heads.ARMS, 0.1))
    with outside_of_the_engine():
        heads.main(tmp_path, tmp_path / "rows.csv", "words", str(tmp_path / "model"), clients=3)
    rows = pd.read_csv(tmp_path / "rows.csv").set_index("arm")
    assert list(rows.index) == list(heads.ARMS)
    assert rows.worst_client.drop("fedavg").min() > 0.9
    config = small.model_copy(update={"partition": "pathological:1", "clients": 3})
    model.classifier.weight.data.zero_()
    model.classifier.bias.data = torch.tensor([0.0, 9, 0])
    found = heads.scores(model, heads.task_of(config.to_json()), 0)
    assert [found[name] for name in ("accuracy", "mean_client", "worst_client")] == [0.5, 1 / 3, 0]
