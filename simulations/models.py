"""Models of a simulation: small ones from scratch, pretrained ones, adapters, and their tensors."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError
from fedrot.lora import adapter_tensors, load_adapter
from fedrot.simulations.packaged import loading, source_of
from fedrot.simulations.settings import TASKS

if TYPE_CHECKING:
    from fedrot.simulations.settings import Experiment


def model_config(experiment: Experiment, data: Any) -> Any:
    """Return the transformers configuration of the model, with the task's head."""
    settings = settings_of(experiment, data)
    _objective(experiment).configure(settings, data)
    return settings


def build_model(experiment: Experiment, data: Any, seed: int, rank: int | None = None) -> nn.Module:
    """Return the model in float32; parameters that are not pretrained are drawn with ``seed``.

    With ``lora``, ``seed`` decides only the adapter: all models have the same base, with its task head.
    The classifier of a sentence-transformers model reads its pooled tokens, see ``simulations.pooled``.

    Args:
        rank: rank of the adapter; None: that of the global adapter.

    Raises:
        FedrotError: the model cannot be loaded, lacks a tensor other than a head's or pooler's, is
            quantised, or cannot have the adapter.
    """
    torch.manual_seed(0 if experiment.lora else seed)
    settings = model_config(experiment, data)
    if experiment.model is None:
        return _class(_objective(experiment).auto_model).from_config(settings)
    model = _pretrained(experiment, experiment.model, settings)
    if not experiment.lora:
        return model
    torch.manual_seed(seed)
    given = {**experiment.lora, "r": rank or max(experiment.ranks)}
    return with_adapter(model, given, TASKS[experiment.task].peft)


def _objective(experiment: Experiment) -> Any:
    from fedrot.simulations.tasks import task  # which reads data with these models' tokenizers

    return task.OBJECTIVES[experiment.task]


def _class(auto_model: str) -> Any:
    import transformers

    return getattr(transformers, auto_model)


def _pretrained(experiment: Experiment, name: str, settings: Any) -> Any:
    """Load a model in float32, whatever its files are in; log new tensors, such as a head's."""
    from fedrot.simulations import pooled

    pooling = pooled.pooling_of(name, settings) if experiment.task == "classification" else None
    auto_model = "AutoModel" if pooling else _objective(experiment).auto_model
    with loading(name):
        model, found = _class(auto_model).from_pretrained(
            source_of(name), config=settings, dtype=torch.float32, output_loading_info=True
        )
    new = set(found["missing_keys"])
    # A model saved for another task may have no pooler.
    prefix = "" if pooling else f"{model.base_model_prefix}."
    body = sorted(n for n in new if n.startswith(prefix) and "pooler." not in n)
    if body:
        raise FedrotError(
            f"'{name}' has no tensor '{body[0]}' ({len(body)} missing in all), which a "
            f"{type(model).__name__} needs: it would be random. Check that weights and configuration "
            "belong together, and save the whole model, without wrappers, with save_pretrained."
        )
    other = next((n for n, own in model.named_parameters() if own.dtype != torch.float32), "")
    if other:
        raise FedrotError(
            f"'{name}' is quantised: '{other}' is {model.get_parameter(other).dtype}, which cannot be "
            "trained or averaged. Give the model in float32, float16 or bfloat16."
        )
    if pooling:
        model = pooled.PooledForSequenceClassification(model, pooling.mode)
        new = {"classifier.bias", "classifier.weight"}
        _say(f"'{name}' is classified by {pooling.says}.")
    if new:
        _say(f"Not in '{name}', therefore random: {', '.join(sorted(new))}")
    return model


@lru_cache(maxsize=64)
def _say(message: str) -> None:
    """Log a message once per process."""
    logging.getLogger("flwr").info(message)


def settings_of(experiment: Experiment, data: Any) -> Any:
    """Return the transformers configuration of the encoder or decoder, without settings of the task."""
    if experiment.model is not None:
        return pretrained_settings(experiment.model)
    return _small_settings(experiment, data)


def pretrained_settings(model: str) -> Any:
    """Return the transformers configuration of a pretrained model, by its folder or name."""
    with loading(model):
        return _class("AutoConfig").from_pretrained(source_of(model))


def pad_id_of(settings: Any) -> int:
    """Return the id of the token for padding: the padding token, else the end of text, else 0."""
    tokens = (getattr(settings, name, None) for name in ("pad_token_id", "eos_token_id"))
    token = next((token for token in tokens if token is not None), 0)
    return int(token[0] if isinstance(token, list) else token)


def _small_settings(experiment: Experiment, data: Any) -> Any:
    """Return the configuration of a small model from scratch."""
    architecture, width, rate = experiment.architecture, experiment.width, experiment.dropout
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": experiment.layers,
        "num_attention_heads": experiment.heads,
    }
    encoder = {
        "intermediate_size": 4 * width,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), rate),
    }
    if architecture == "vit":
        own = {"image_size": data.side, "patch_size": patch_of(data.side), "num_channels": data.channels}
        return _class("AutoConfig").for_model("vit", **sizes, **encoder, **own)
    of_texts: Mapping[str, dict[str, Any]] = {
        "bert": encoder,
        "distilbert": {
            "hidden_dim": 4 * width,
            **dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), rate),
        },
        "gpt2": {
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), rate),
            # With untied tables the last norm can be folded, so that the stream can be rotated.
            "tie_word_embeddings": False,
        },
        # Three matrices of 8/3 times the width have as many entries as two of 4 times the width.
        "llama": {"intermediate_size": 8 * width // 3, "attention_dropout": rate},
    }
    text = {**_bundled_ids(), "max_position_embeddings": experiment.max_length}
    return _class("AutoConfig").for_model(architecture, **sizes, **text, **of_texts[architecture])


@lru_cache(maxsize=1)
def _bundled_ids() -> dict[str, Any]:
    from fedrot.simulations.data.encode import bundled_tokenizer

    vocabulary = bundled_tokenizer().get_vocab()
    tokens = {"pad_token_id": "[PAD]", "bos_token_id": "[CLS]", "eos_token_id": "[SEP]"}
    ids = {name: vocabulary[token] for name, token in tokens.items()}
    return {"vocab_size": len(vocabulary), **ids}


def patch_of(side: int) -> int:
    """Return the largest divisor of a side up to its square root: 2 for 8, 4 for 28 and 32, 8 for 64."""
    return next(patch for patch in range(math.isqrt(side), 0, -1) if side % patch == 0)


def with_adapter(model: Any, given: Mapping[str, Any], task_type: str) -> nn.Module:
    """Return a transformers model with a LoRA adapter; PEFT freezes the base model.

    Args:
        given: arguments of PEFT's ``LoraConfig``.
        task_type: PEFT's task type.

    Raises:
        FedrotError: PEFT is not installed, has no such argument, or cannot adapt the model, such as
            without these modules.
    """
    try:
        import peft
    except ModuleNotFoundError:
        raise FedrotError(
            "lora needs PEFT. Install fedrot's extra 'lora': in a checkout, pip install -c "
            "constraints.txt -e '.[lora]'."
        ) from None
    # PEFT leaves the heads of language models out, but not those of taggers.
    heads = ["classifier", "score"] if given.get("target_modules") == "all-linear" else None
    try:
        config = peft.LoraConfig(**{"task_type": task_type, "exclude_modules": heads, **given})
        with warnings.catch_warnings():
            # PEFT reads an attribute that transformers has renamed.
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        said = str(error).removeprefix("LoraConfig.__init__() ")
        raise FedrotError(f"lora: PEFT cannot adapt this {type(model).__name__}: {said}") from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors that clients and server exchange: all, or those of the adapter."""
    if hasattr(model, "peft_config"):
        return adapter_tensors(model)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


#: Functions that load an adapter, by the name that the server sends. Plug-ins add theirs.
LOADERS: dict[str, Callable[[Any, Mapping[str, Tensor]], None]] = {"": load_adapter}


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], how: str = "") -> None:
    """Load the tensors of ``tensors_of``; ``how`` names the loader of adapters, of any rank."""
    if hasattr(model, "peft_config"):
        LOADERS[how](model, tensors)
    else:
        model.load_state_dict(dict(tensors))


def number_of_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
