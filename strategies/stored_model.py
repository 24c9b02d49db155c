"""Stored models: checks of a model's files, and what they say of its pooling.

A model is a folder, or a name on the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from fedrot._io import inner, read_json, shallow
from fedrot.errors import FedrotError

#: Poolings of a ``PooledClassifier``: the mean of the tokens, the first one, or the
#: last one.
POOLINGS = ("mean", "cls", "last")
#: The names of these and other poolings in folders of sentence-transformers; those of
#: ``pooling_mode_...`` were written before its version 6.
_SAVED_NAMES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
}
#: Files that name the shards of a model.
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
#: Fields of a configuration, as JSON, that may name a kernel of the hub, or hide it
#: under the name of another field. Others are null or a name without an owner.
_KERNEL = re.compile(r'_implementation": (?!null|"[^"/\\]*")|"attribute_map": ')


def stored_settings(model: str | Path, **places: Any) -> dict[str, Any]:
    """Return the stored configuration of a model, before anything else is loaded.

    Args:
        model: a folder or a name on the hub.
        places: ``revision`` and other options of ``from_pretrained``.

    Raises:
        FedrotError: the model is an adapter, needs code of its own, or consists of
            files outside of its folder.
    """
    # transformers would load the base that it names.
    if optional_file(model, "adapter_config.json", **places):
        raise FedrotError(
            f"'{model}' is an adapter of PEFT, no model. Give the model that "
            "peft_model.merge_and_unload() returns; fedrot merge averages adapters."
        )
    stored, _ = PretrainedConfig.get_config_dict(model, **places)
    if _KERNEL.search(json.dumps(stored)):
        raise own_code(model)
    for name in {*_INDEXES, stored.get("transformers_weights") or _INDEXES[0]}:
        file = optional_file(model, inner(name, model), **places)
        if file and name.endswith(".json"):
            for shard in read_json(Path(file))["weight_map"].values():
                inner(shard, file)
    return stored


def own_code(model: object) -> FedrotError:
    """Return the error of a model that needs code of its own."""
    return FedrotError(
        f"'{model}' needs code of its own (auto_map or attn_implementation in its "
        "configuration), and fedrot never runs a model's code. Give a model of a class "
        "that transformers has; for your own class use fedrot.check_function and "
        "fedrot.align in Python."
    )


def refuse_random(name: object, model: Any, missing: Collection[str]) -> None:
    """Raise ``FedrotError`` if the files of a model lack a tensor of its body.

    ``missing`` are names of tensors. The body has all but task head and pooler.
    """
    # A model saved for another task may have no pooler.
    prefix = f"{model.base_model_prefix}."
    if model.base_model is model:
        prefix = ""
    body = sorted(n for n in missing if n.startswith(prefix) and "pooler." not in n)
    if body:
        raise FedrotError(
            f"'{name}' has no tensor '{body[0]}' ({len(body)} missing in all), which a "
            f"{type(model).__name__} needs: it would be random. Save the whole model, "
            "without wrappers, with save_pretrained."
        )


def saved_pooling(encoder: str | Path, **places: Any) -> str | None:
    """Return the pooling of a sentence-transformers model; None for other models.

    Args:
        encoder: a folder or a name on the hub.
        places: ``revision`` and other options of ``from_pretrained``.

    Raises:
        FedrotError: a file is damaged, or the model is pooled in another way than by
            mean, cls or last token.
    """
    listed = optional_file(encoder, "modules.json", **places)
    if listed is None:
        return None
    modules: Any = json.loads(shallow(Path(listed).read_bytes()))
    kinds = [entry["type"].rpartition(".")[2] for entry in modules]
    settings = None
    if kinds[:2] == ["Transformer", "Pooling"]:
        name = inner(f"{modules[1]['path']}/config.json", listed)
        settings = optional_file(encoder, name, **places)
    modes = _modes(read_json(Path(settings)) if settings else {})
    if settings is None or len(modes) > 1 or modes[0] not in POOLINGS:
        raise FedrotError(
            f"'{encoder}' has the modules {', '.join(kinds)} and the pooling "
            f"{' and '.join(modes)}; a classifier reads tokens that are pooled by "
            "mean, cls or last token. Give such a model. Or copy the folder without "
            "modules.json: it is then a transformers model like any other."
        )
    return modes[0]


def _modes(pooling: Any) -> list[str]:
    """Return the modes of a saved pooling, of old and new versions; by default mean."""
    switched = [
        key for key, on in pooling.items() if key.startswith("pooling_mode_") and on
    ]
    modes = pooling.get("pooling_mode", switched)
    if not isinstance(modes, list):
        modes = [modes]
    return [_SAVED_NAMES.get(mode, str(mode)) for mode in modes] or ["mean"]


def optional_file(model: str | Path, name: str, **places: Any) -> str | None:
    """Return the path of a model's file, or None if there is none."""
    return cached_file(
        str(model), name, _raise_exceptions_for_missing_entries=False, **places
    )
