"""``merge_adapters``: the average of saved LoRA adapters, read and written by PEFT."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedrot._io import read_json, write_tensors
from fedrot.errors import FedrotError
from fedrot.lora import AdapterOptions, AdapterUpdate, LoraSettings
from fedrot.lora.adapters import factors, pairs_of
from fedrot.simulations.models import loading
from fedrot.simulations.saved.load import about, writing
from fedrot.simulations.saved.merge import refuse_different
from fedrot.tensors import Tensors


def merge_adapters(
    names: list[str], out: Path | None, weights: list[float], allowed: list[str], rank: int | None
) -> list[str]:
    """Average the products of saved LoRA adapters of one base model, and write an adapter.

    Ranks and alphas may differ. The configuration is that of the first adapter with another rank.
    Returns a sentence about the average.

    Args:
        names: two or more folders that PEFT's ``save_pretrained`` wrote.
        out, weights, allowed: as in ``merge_models``.
        rank: of the result; None: the largest rank of the adapters.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    configs, adapters, ranks = zip(*map(_load, names), strict=True)
    first, rank = configs[0], rank or max(ranks)
    settings = LoraSettings.of(first)
    average = AdapterOptions("exact").average(settings, rank=rank)
    for name, weight, config, tensors in zip(names, weights, configs, adapters, strict=True):
        refuse_different((names[0], _compared(first)), (name, _compared(config)), allowed)
        with about(name):
            average.add(AdapterUpdate(tensors, weight, LoraSettings.of(config)))
    merged, report = average.result()
    if out is not None:
        first.r, first.rank_pattern, first.lora_alpha = rank, {}, settings.alpha
        with writing(out) as folder:
            first.save_pretrained(folder)
            contiguous = {name: tensor.contiguous() for name, tensor in merged.items()}
            write_tensors(folder / SAFETENSORS_WEIGHTS_NAME, contiguous, {"format": "pt"})
    return [f"{report}."]


def _load(name: str) -> tuple[Any, Tensors, int]:
    """Return an adapter's configuration, tensors and largest rank; null fields have PEFT's defaults."""
    import peft
    from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

    for files in ((CONFIG_NAME,), (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
        if not any((Path(name) / file).is_file() for file in files):
            raise FedrotError(f"'{name}' has no {files[0]}. Give folders of LoRA adapters only.")
    stored = {"peft_type": "LORA", **read_json(Path(name) / CONFIG_NAME)}
    settings = {key: value for key, value in stored.items() if value is not None}
    with loading(name), about(name):
        config = peft.PeftConfig.from_peft_type(**settings)
        changed = LoraSettings.of(config).changed_base
        tensors = peft.load_peft_weights(name, device="cpu")
        rank = max(len(factors(tensors, pair)[0]) for pair in pairs_of(tensors))
    if changed:
        raise FedrotError(
            f"'{name}' was initialised by {changed}, which changes the base weights. Save it with "
            "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    return config, tensors, rank


def _compared(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration; a base, folder or name on the hub, is written in one way."""
    found = config.to_dict()
    if base := found["base_model_name_or_path"]:
        found["base_model_name_or_path"] = os.path.relpath(os.path.realpath(base))
    return found if found["revision"] != "main" else {**found, "revision": None}
