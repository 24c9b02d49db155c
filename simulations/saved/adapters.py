"""``merge_adapters``: the average of saved LoRA adapters, read and written by PEFT."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedrot._io import read_json, write_tensors
from fedrot.errors import FedrotError
from fedrot.lora import AdapterOptions, AdapterUpdate, LoraSettings
from fedrot.lora.adapters import check_rank, factors, pairs_of
from fedrot.simulations.packaged import loading
from fedrot.simulations.saved.alike import refuse_different
from fedrot.simulations.saved.load import about, refuse_filled, writing
from fedrot.simulations.saved.merge import weights_of
from fedrot.tensors import Tensors

#: Methods that do not need the adapter from which the others were trained.
METHODS = ("exact", "mean")

#: Fields of an adapter that are in its scale, or on which no output depends.
_HARMLESS = re.compile(
    r"r|rank_pattern|lora_alpha|alpha_pattern|use_rslora|init_lora_weights|(eva|loftq|runtime)_config"
    r"|auto_mapping|inference_mode|peft_version"
)
#: Fields that say which modules are trained, as the names of tensors do.
_IN_NAMES = re.compile("(target|exclude)_modules|layers_to_transform|layers_pattern|modules_to_save")


def merge_adapters(
    names: Sequence[str],
    out: Path | None,
    *,
    method: str | None = None,
    rank: int | None = None,
    weights: str | None = None,
    allowed: Sequence[str] = (),
) -> list[str]:
    """Average saved LoRA adapters of one base model, write an adapter, and return sentences about it.

    Alphas may differ, and ranks with the method ``exact``. The configuration is that of the first
    adapter; only the rank may change.

    Args:
        names: two or more folders that PEFT's ``save_pretrained`` wrote.
        out, weights, allowed: as in ``merge_models``.
        method: ``exact`` (mean of the products, cut to the rank; default) or ``mean`` (of the factors).
        rank: of the result; None: the largest rank of the adapters.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    method = method or METHODS[0]
    if method not in METHODS:
        raise FedrotError(f"Unknown method '{method}'; choose from {', '.join(METHODS)}.")
    if rank is not None:
        check_rank(rank)
    shares = weights_of(weights, len(names))
    refuse_filled(out)
    configs, adapters = zip(*map(_load, names), strict=True)
    ranks = []
    for name, config, tensors in zip(names, configs, adapters, strict=True):
        same = tensors.keys() == adapters[0].keys()
        first, other = (_settings(one, same) for one in (configs[0], config))
        refuse_different((names[0], first), (name, other), allowed)
        with about(name):
            ranks.append({pair.module: len(factors(tensors, pair)[0]) for pair in pairs_of(tensors)})
    differ = any(own != ranks[0] for own in ranks)
    largest = max(rank for own in ranks for rank in own.values())
    rank = rank or (largest if differ else None)
    if method == "mean" and not differ and rank not in (None, largest):
        raise FedrotError(f"A mean of factors has their rank {largest}. Leave --rank out.")
    average = AdapterOptions(method).average(LoraSettings.of(configs[0]), rank=rank)
    for name, weight, config, tensors in zip(names, shares, configs, adapters, strict=True):
        with about(name):
            average.add(AdapterUpdate(tensors, weight, LoraSettings.of(config)))
    merged, report = average.result()
    if out is not None:
        if rank is not None:
            configs[0].r, configs[0].rank_pattern = rank, {}
        with writing(out) as folder:
            configs[0].save_pretrained(folder)
            contiguous = {name: tensor.contiguous() for name, tensor in merged.items()}
            write_tensors(folder / SAFETENSORS_WEIGHTS_NAME, contiguous, {"format": "pt"})
    return [f"{report}."]


def _load(name: str) -> tuple[Any, Tensors]:
    """Return the configuration and the tensors of an adapter; null fields have PEFT's defaults."""
    import peft
    from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

    for files in ((CONFIG_NAME,), (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
        if not any((Path(name) / file).is_file() for file in files):
            raise FedrotError(f"'{name}' has no {files[0]}. Give folders of LoRA adapters only.")
    file = Path(name) / CONFIG_NAME
    stored = {"peft_type": "LORA", **read_json(file)}
    settings = {key: value for key, value in stored.items() if value is not None}
    for key in {"peft_type", "task_type"} & settings.keys():
        settings[key] = str(settings[key]).upper()
    alpha = settings.get("lora_alpha", 1)
    if not isinstance(alpha, int | float) or alpha <= 0:
        raise FedrotError(f"'{file}' has {alpha!r} as lora_alpha. Give a number above 0.")
    with loading(name):
        config = peft.PeftConfig.from_peft_type(**settings)
        tensors = peft.load_peft_weights(name, device="cpu")
    with about(name):
        changed = LoraSettings.of(config).changed_base
    if changed:
        raise FedrotError(
            f"'{name}' was initialised by {changed}, which changes the base weights. Save it as an "
            "adapter of the original base (PEFT: save_pretrained with "
            "path_initial_model_for_weight_conversion)."
        )
    return config, tensors


def _settings(config: Any, same_names: bool) -> dict[str, Any]:
    """Return the fields that may change outputs and differ from PEFT's defaults."""
    defaults, found = type(config)().to_dict(), dict[str, Any]()
    for field, value in config.to_dict().items():
        if field == "base_model_name_or_path" and value:  # A folder, or a name on the hub.
            value = (os.path.realpath if os.path.isdir(value) else os.path.normpath)(value)
        harmless = _HARMLESS.fullmatch(field) or (same_names and _IN_NAMES.fullmatch(field))
        absent = value == defaults[field] or not (value or defaults[field])
        if not (harmless or absent or (field, value) == ("revision", "main")):
            found[field] = value
    return found
