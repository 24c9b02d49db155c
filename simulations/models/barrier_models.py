"""Two saved transformers models of one architecture, and the data to compare them on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from fedrot.errors import FedrotError
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.tasks.task import Task, task_of

#: What has to be the same for two models to be points of one space, by the names of transformers.
ARCHITECTURE = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "image_size",
    "patch_size",
)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")


def load_pair(a: Path, b: Path, **settings: Any) -> tuple[Task, torch.nn.Module, torch.nn.Module]:
    """Load two folders written by ``save_pretrained``, and the data set to compare the models on.

    Text is tokenised as ``a`` says, or with the bundled tokenizer if ``a`` has none.

    Args:
        settings: of ``SimulationConfig``: ``task``, ``data``, ``data_dir``, ``test_limit`` and so on.

    Raises:
        FedrotError: a file is missing, the family is not supported, the models differ in
            architecture or vocabulary, or they do not fit the data.
    """
    configs = [_config(folder) for folder in (a, b)]
    _check_same(a, b, *configs)
    vision = not hasattr(configs[0], "vocab_size")
    own = vision or _has_tokenizer(a)
    length = settings.pop("max_length", 64)
    length = min(length, getattr(configs[0], "max_position_embeddings", length))
    config = SimulationConfig(
        model=str(a) if own else None, setting=f"{a.name} - {b.name}", max_length=length, **settings
    )
    if not own:
        check_bundled(a, configs[0])
    task = task_of(config.to_json())
    anchor, client = (_model(folder, task) for folder in (a, b))
    return task, anchor, client


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    from fedrot.symmetry import check_family

    if not folder.is_dir():
        raise FedrotError(f"'{folder}' is not a folder. Give one written by save_pretrained.")
    if not (folder / "config.json").is_file():
        raise FedrotError(f"'{folder}' has no config.json. Give a folder written by save_pretrained.")
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise FedrotError(f"'{folder}' has no {_WEIGHTS[0]}. Save the model with save_pretrained.")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_family(config)
    return config


def _check_same(a: Path, b: Path, ours: Any, theirs: Any) -> None:
    for name in ARCHITECTURE:
        here, there = getattr(ours, name, None), getattr(theirs, name, None)
        if here != there:
            raise FedrotError(
                f"Different architectures: {name} is {here} in '{a}' and {there} in '{b}'. Only "
                "models of one architecture have a line between them."
            )
    sizes = [getattr(config, "vocab_size", None) for config in (ours, theirs)]
    different = sizes[0] != sizes[1]
    if not different and _has_tokenizer(a) and _has_tokenizer(b):
        different = _vocabulary(a) != _vocabulary(b)
    if different:
        raise FedrotError(
            f"Different vocabularies: the tokens of '{a}' and '{b}' are not the same "
            f"({sizes[0]} and {sizes[1]} embeddings). Train both models with one "
            "tokenizer."
        )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _vocabulary(folder: Path) -> dict[str, int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab()


def check_bundled(folder: Path, config: Any) -> None:
    """Refuse a model without a tokenizer whose vocabulary is not the bundled tokenizer's."""
    from fedrot.simulations.data.tokenizer import bundled_tokenizer

    size = bundled_tokenizer().get_vocab_size()
    if config.vocab_size != size:
        raise FedrotError(
            f"'{folder}' has no tokenizer, and the bundled one has {size} tokens where the model has "
            f"{config.vocab_size}. Save the model's tokenizer into that folder."
        )


def _model(folder: Path, task: Task) -> torch.nn.Module:
    import transformers

    auto_model = getattr(transformers, task.objective.auto_model)
    model, found = auto_model.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise FedrotError(
            f"'{folder}' has no tensor '{missing[0]}' ({len(missing)} missing in all), so it was not "
            f"trained for task '{task.config.task}'. Choose the task that the models were trained for."
        )
    wanted = copy.deepcopy(model.config)
    task.objective.configure(wanted, task.data)
    if wanted.num_labels != model.config.num_labels:
        raise FedrotError(
            f"'{folder}' has {model.config.num_labels} outputs, but {task.data.name} has "
            f"{wanted.num_labels} classes. Choose the data set that the models were trained on."
        )
    return model.float().eval()
