"""Pretrained models of a simulation: nothing in their body is random."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from fedrot.errors import FedrotError
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.encoding import bundled_tokenizer
from fedrot.simulations.models.build import _say_new, build_model
from fedrot.simulations.models.federated import number_of_bytes, tensors_of
from fedrot.simulations.tasks.task import task_of
from tests.models import State
from tests.simulations.commands import SMALL


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "pretrained"
    config = SimulationConfig(task="mlm", **SMALL)
    build_model(config, task_of(config.to_json()).data, 0).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=bundled_tokenizer()).save_pretrained(folder)
    return folder


def write(tensors: State, like: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in like.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def built(folder: Path, task: Any = "classification") -> State:
    config = SimulationConfig(task=task, model=str(folder), **{**SMALL, "layers": 2})
    return build_model(config, task_of(config.to_json()).data, seed=3).state_dict()


@pytest.mark.parametrize("change", ["without one", "other names", "wrapped"])
def test_a_body_that_would_be_random_is_refused(change: str, pretrained: Path, tmp_path: Path) -> None:
    tensors = load_file(pretrained / "model.safetensors")
    if change == "without one":
        del tensors["bert.encoder.layer.0.attention.self.query.weight"]
    else:
        prefix = "module." if change == "wrapped" else "backbone."
        tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    folder = write(tensors, pretrained, tmp_path / "lacking")
    with pytest.raises(FedrotError, match=rf"'{folder}' has no tensor 'bert\..*it would be random"):
        built(folder)


def test_a_new_task_head_is_said_once(pretrained: Path, caplog: pytest.LogCaptureFixture) -> None:
    _say_new.cache_clear()
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "flwr"):
            for _ in range(2):
                built(pretrained)
            built(pretrained, "mlm")
    finally:
        logger.removeHandler(caplog.handler)
    messages = [record.getMessage() for record in caplog.records]
    said = [message for message in messages if "therefore random" in message]
    assert len(set(said)) == 1
    assert f"Not in '{pretrained}', therefore random: " in said[0]
    assert "classifier.weight" in said[0]


def test_adapters_of_any_seed_have_one_base(pretrained: Path) -> None:
    """The task head, which the pretrained model lacks, is drawn alike for all."""
    config = SimulationConfig(model=str(pretrained), lora="r=2,targets=query", **{**SMALL, "layers": 2})
    data = task_of(config.to_json()).data
    one, same, other = (build_model(config, data, seed).state_dict() for seed in (3, 3, 4))
    drawn = {name for name in one if not torch.equal(one[name], other[name])}
    assert drawn == {name for name in one if "lora_A" in name}
    assert any("classifier" in name for name in one)
    assert all(torch.equal(one[name], same[name]) for name in one)
    (wide,) = {
        len(t) for n, t in build_model(config, data, 3, rank=5).state_dict().items() if "lora_A" in n
    }
    assert (wide, {len(one[name]) for name in drawn}) == (5, {2})


def test_an_adapter_is_as_it_was_asked_for(pretrained: Path) -> None:
    about = {"model": str(pretrained), **{**SMALL, "layers": 2}}
    parts = "alpha=6,dropout=0.25,rslora=1,dora=1"
    config = SimulationConfig(lora=f"r=2+4,targets=query+value,{parts}", **about)
    data = task_of(config.to_json()).data
    model: Any = build_model(config, data, 0)
    found = model.peft_config["default"]
    names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "task_type")
    assert [getattr(found, name) for name in names] == [4, 6, 0.25, True, True, "SEQ_CLS"]
    assert found.target_modules == {"query", "value"}
    plain: Any = build_model(config.model_copy(update={"lora": "r=3,targets=all-linear"}), data, 0)
    found = plain.peft_config["default"]
    assert [getattr(found, name) for name in names[:-1]] == [3, 16, 0, False, False]
    adapted = {
        name.split(".lora_A")[0].split(".")[-1] for name in plain.state_dict() if "lora_A" in name
    }
    assert adapted == {"query", "key", "value", "dense"}


def test_tensors_to_exchange_are_copies_and_have_a_size() -> None:
    model = torch.nn.Linear(2, 3)
    copied = tensors_of(model)
    with torch.no_grad():
        model.weight.zero_()
    assert copied["weight"].any()
    assert not copied["weight"].requires_grad
    kinds = {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.float16), "c": torch.zeros(0)}
    assert number_of_bytes(kinds) == 3 * 4 + 4 * 2


def test_adapters_need_peft(pretrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimulationConfig(model=str(pretrained), lora="r=2,targets=query", **{**SMALL, "layers": 2})
    data = task_of(config.to_json()).data
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(FedrotError, match=r"lora needs PEFT.*pip install -c constraints.txt"):
        build_model(config, data, seed=0)
