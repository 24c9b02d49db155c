"""``merge_adapters``: the average of saved LoRA adapters, read and written by PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedrot._io import write_tensors
from fedrot.errors import FedrotError
from fedrot.lora import AdapterOptions, AdapterUpdate, LoraSettings
from fedrot.lora.adapters import factors, pairs_of
from fedrot.simulations.models.packaged import loading
from fedrot.simulations.saved_models.alike import refuse_different
from fedrot.simulations.saved_models.load import about, refuse_filled, writing
from fedrot.simulations.saved_models.merge import Say, weights_of
from fedrot.tensors import Tensors

#: Methods that do not need the adapter from which the others were trained.
METHODS = ("exact", "mean")


def merge_adapters(
    names: Sequence[str],
    out: Path | None,
    say: Say,
    *,
    method: str = "exact",
    rank: int | None = None,
    weights: str | None = None,
    allowed: Sequence[str] = (),
) -> None:
    """Average saved LoRA adapters of one base model, and write the result as an adapter.

    Alphas may differ, and ranks with the method ``exact``. The configuration is that of the first
    adapter; only the rank may change.

    Args:
        names: two or more folders that PEFT's ``save_pretrained`` wrote.
        out, say, weights, allowed: as in ``merge_models``.
        method: ``exact`` (mean of the products, truncated to the rank) or ``mean`` (of the factors).
        rank: of the result; None: the largest rank of the adapters.

    Raises:
        FedrotError: bad input; the message names the setting or the folder.
        FileExistsError: ``out`` is not an empty folder.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    if method not in METHODS:
        raise FedrotError(f"Unknown method '{method}'; choose from {', '.join(METHODS)}.")
    shares = weights_of(weights, len(names))
    if out is not None:
        refuse_filled(out)
    configs, adapters = zip(*map(_load, names), strict=True)
    ranks = []
    for name, config, tensors in zip(names, configs, adapters, strict=True):
        refuse_different((names[0], configs[0].to_dict()), (name, config.to_dict()), allowed)
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
    say(f"{report}.")
    if out is not None:
        if rank is not None:
            configs[0].r, configs[0].rank_pattern = rank, {}
        with writing(out) as folder:
            configs[0].save_pretrained(folder)
            contiguous = {name: tensor.contiguous() for name, tensor in merged.items()}
            write_tensors(folder / SAFETENSORS_WEIGHTS_NAME, contiguous, {"format": "pt"})


def _load(name: str) -> tuple[Any, Tensors]:
    """Return the configuration and the tensors of an adapter."""
    import peft
    from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

    for files in ((CONFIG_NAME,), (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
        if not any((Path(name) / file).is_file() for file in files):
            raise FedrotError(f"'{name}' has no {files[0]}. Give folders of LoRA adapters only.")
    with loading(name):
        config = peft.PeftConfig.from_pretrained(name)
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
