"""Merge of saved LoRA adapters: folders written by PEFT's ``save_pretrained``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedrot._io import read_json, replacing, write_json, write_tensors
from fedrot.errors import FedrotError
from fedrot.lora import AdapterOptions, AdapterReport, AdapterUpdate, LoraSettings
from fedrot.lora.adapters import factors, pairs_of
from fedrot.simulations.merge.merge_settings import ADAPTER_CONFIG, AdapterMergeSettings
from fedrot.simulations.merge.merging import weights_of
from fedrot.simulations.models.model_files import (
    about,
    below,
    clean_names,
    read_tensors,
    refuse_filled,
)
from fedrot.tensors import Tensors

CONFIG, WEIGHTS = ADAPTER_CONFIG, "adapter_model.safetensors"
#: Files of weights from PEFT before version 0.7.
PICKLED = "adapter_model.bin"
#: Prefixes that data parallelism, compilation and sharding add to names of modules.
_WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module)\.(?=.)")
#: Methods that do not need the adapter from which the others were trained.
METHODS = ("exact", "mean")
#: Fields of the configuration that must be the same in all adapters.
_ALIKE = (
    "base_model_name_or_path",
    "revision",
    "task_type",
    "fan_in_fan_out",
    "use_dora",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_qalora",
    "layer_replication",
)

#: Advice about fields that may differ although the base is the same.
_ADVICE = dict.fromkeys(
    ("base_model_name_or_path", "revision"),
    f"If it is the same base by another name or path, write the same into both {CONFIG}.",
)
#: Files of one adapter's training that Trainer saves with it; the average does not get them.
_OF_TRAINING = (
    *("checkpoint-*", "global_step*", "runs", "optimizer.pt", "scheduler.pt", "scaler.pt"),
    *("rng_state*.pth", "trainer_state.json", "latest"),
)


def merge_adapters(
    folders: Sequence[Path], out: Path | None, settings: AdapterMergeSettings | None = None
) -> AdapterReport:
    """Average saved LoRA adapters of one base model, and write the result as an adapter.

    Adapters are read one at a time. Alphas may differ, and ranks with the method ``exact``. The
    configuration with its alpha and all other files are copied from the first folder; only the rank may
    change. Files of its training (checkpoints, optimiser) are left out.

    Args:
        folders: two or more, each with ``adapter_config.json`` and ``adapter_model.safetensors``, or
            ``adapter_model.bin`` if that contains only tensors.
        out: a new or empty folder; None: nothing is written. If the merge fails, nothing is written.

    Raises:
        FedrotError: bad input; the message names the setting or the folder.
        FileExistsError: ``out`` is a file, or a folder that is not empty.
    """
    settings = settings or AdapterMergeSettings()
    if settings.method not in METHODS:
        raise FedrotError(f"Unknown method '{settings.method}'; choose from {', '.join(METHODS)}.")
    weights = weights_of(settings.weights, len(folders))
    if out is not None:
        refuse_filled(out)
        inside = next((folder for folder in folders if folder.resolve() in out.resolve().parents), None)
        if inside:
            raise FedrotError(f"'{out}' is inside '{inside}'. Choose an --out outside of the adapters.")
    configs, loras = zip(*map(_config, folders), strict=True)
    for folder, config, lora in zip(folders, configs, loras, strict=True):
        for field in _ALIKE:
            # Older versions of PEFT do not write newer fields.
            if (config.get(field) or None) != (configs[0].get(field) or None):
                raise FedrotError(
                    f"'{folder}' has {field} {config.get(field)!r}, '{folders[0]}' has "
                    f"{configs[0].get(field)!r}. Merge adapters of one base model and one kind. "
                    f"{_ADVICE.get(field, '')}".rstrip()
                )
        if lora.changed_base:
            raise FedrotError(
                f"'{folder}' was initialised by {lora.changed_base}, which changes the base "
                "weights. Save it as an adapter of the original base (PEFT: save_pretrained with "
                "path_initial_model_for_weight_conversion)."
            )
    ranks = []
    for folder in folders:
        tensors = _tensors(folder)
        with about(folder):
            ranks.append(_ranks(tensors))
    differ = any(own != ranks[0] for own in ranks)
    largest = max(rank for own in ranks for rank in own.values())
    rank = settings.rank or (largest if differ else None)
    if settings.method == "mean" and not differ and rank not in (None, largest):
        raise FedrotError(f"A mean of factors has their rank {largest}. Leave --rank out.")
    average = AdapterOptions(settings.method).average(loras[0], rank=rank)
    for folder, weight, lora in zip(folders, weights, loras, strict=True):
        with about(folder):
            average.add(AdapterUpdate(_tensors(folder), weight, lora))
    merged, report = average.result()
    if out is not None:
        changes = {} if rank is None else {"r": rank, "rank_pattern": {}}
        _write(out, merged, {**configs[0], **changes}, folders[0])
    return report


def _config(folder: Path) -> tuple[dict[str, Any], LoraSettings]:
    there = [(folder / name).is_file() for name in (CONFIG, WEIGHTS, PICKLED)]
    if not there[0] or not any(there[1:]):
        advice = below(folder, CONFIG) or (
            "Give folders of LoRA adapters written by PEFT's save_pretrained, or of whole models; one "
            "merge has one kind."
        )
        raise FedrotError(f"'{folder}' has no {WEIGHTS if there[0] else CONFIG}. {advice}")
    found = read_json(folder / CONFIG)
    with about(folder / CONFIG):
        return found, LoraSettings.of(found)


def _tensors(folder: Path) -> Tensors:
    """Return an adapter's tensors by names without wrappers; raises ``FedrotError`` for odd factors."""
    file = next(filter(Path.is_file, (folder / WEIGHTS, folder / PICKLED)))
    tensors = read_tensors(file)
    names = clean_names(file, tensors, _WRAPPERS)
    found = {clean: tensors[name] for clean, name in names.items()}
    with about(file):
        pairs_of(found)
    return found


def _ranks(tensors: Tensors) -> dict[str, int]:
    return {pair.module: len(factors(tensors, pair)[0]) for pair in pairs_of(tensors)}


def _write(out: Path, tensors: Tensors, config: dict[str, Any], first: Path) -> None:
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as target:
        skipped = shutil.ignore_patterns("*.safetensors", "*.bin", CONFIG, "README.md", *_OF_TRAINING)
        shutil.copytree(first, target, ignore=skipped)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_tensors(target / WEIGHTS, contiguous, {"format": "pt"})
        write_json(target / CONFIG, config)
