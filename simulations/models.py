"""Models of a simulation, small or pretrained, their adapters and tensors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
import transformers
from torch.nn import Module

from fedrot.errors import FedrotError
from fedrot.lora import load_adapter
from fedrot.simulations.data.labels import PROBLEM_TYPES
from fedrot.simulations.data.read import listed
from fedrot.simulations.model_labels import labels_of, places_of
from fedrot.simulations.pretrained import (
    loading,
    pad_id_of,
    pretrained_settings,
    source_of,
)
from fedrot.simulations.scenario import Scenario, Settings
from fedrot.simulations.tasks.task_registry import TASKS
from fedrot.strategies.pooled_classifier import (
    PooledClassifier,
    PooledClassifierConfig,
    usual_pooling,
)
from fedrot.strategies.stored_model import refuse_random, saved_pooling
from fedrot.task_head.names import task_head_of
from fedrot.tensors import Tensors

#: The names of the feed-forward width in configurations; the first that there is.
_INNER = ("intermediate_size", "hidden_dim", "n_inner")
#: Standard deviation of random rows of a saved task head.
_DEVIATION = 0.02
_LOG = logging.getLogger("flwr")


def model_config(scenario: Scenario, data: Any) -> Any:
    """Return the transformers configuration of the model, with the task's head.

    The classifier of a sentence-transformers model, and one that reads several layers,
    is a ``PooledClassifier``.

    Raises:
        FedrotError: there is no such layer, or the model has a task head, which reads
            what it was saved for.
    """
    settings = settings_of(scenario, data)
    model = scenario.model
    task = TASKS[scenario.task]
    layers = scenario.layers
    # A saved task head keeps its class.
    if model and task.reads_pooling and not _has_task_head(settings):
        with loading(model):
            pooling = saved_pooling(source_of(model))
        if pooling or layers != "last":
            pooling = pooling or usual_pooling(settings)
            settings = PooledClassifierConfig(settings, pooling, layers)
    elif layers != "last":
        raise FedrotError(
            f"layers is {layers}, but '{model}' has a task head, which reads "
            "the layers that it was saved for. Leave layers out, or give an encoder."
        )
    if classes := _classes(scenario, data):
        _name_outputs(settings, classes)
    if task.classifies:
        settings.problem_type = PROBLEM_TYPES[data.kind]
        # Decoders classify with the last token that is not padding.
        settings.pad_token_id = pad_id_of(settings)
    return settings


def _classes(scenario: Scenario, data: Any) -> Sequence[str]:
    """Return what the outputs of a model are, nothing for language models.

    The score of a regression is one class, too.
    """
    if data.tags:
        return data.tags
    return data.label_names if TASKS[scenario.task].classifies else ()


def _name_outputs(settings: Any, names: Sequence[str]) -> None:
    """Give a configuration as many outputs as there are names."""
    settings.id2label = dict(enumerate(names))
    settings.label2id = {name: number for number, name in enumerate(names)}


def _has_task_head(settings: Any) -> bool:
    """Return whether a model was saved with a task head."""
    return any("Classifi" in name for name in settings.architectures or ())


def build_model(
    scenario: Scenario,
    data: Any,
    seed: int,
    rank: int | None = None,
) -> Module:
    """Return the model in float32.

    Parameters that are not pretrained are drawn with ``seed``.

    With ``lora``, ``seed`` decides only the adapter: all models have the same base,
    with its task head. The outputs of a saved task head are found by the names of the
    data's classes, see ``places_of``. The attribute ``remark`` of such a model is a
    sentence about them.

    Args:
        rank: rank of the adapter; None: that of the global adapter.

    Raises:
        FedrotError: the model cannot be loaded, lacks a tensor other than a head's or
            pooler's, is quantised, or cannot have the adapter.
    """
    torch.manual_seed(0 if scenario.lora else seed)
    settings = model_config(scenario, data)
    task = TASKS[scenario.task]
    auto = getattr(transformers, f"AutoModelFor{task.auto_model}")
    if scenario.model is None:
        return auto.from_config(settings)
    classes = _classes(scenario, data)
    labels = []
    if classes and _has_task_head(settings):
        labels = labels_of(pretrained_settings(scenario.model))
        _name_outputs(settings, labels)
    model = _pretrained(scenario.model, auto, settings)
    if labels:
        _match_task_head(model, scenario.model, labels, classes)
    if not scenario.lora:
        return model
    torch.manual_seed(seed)
    return _with_adapter(
        model,
        {**scenario.lora, "r": rank or max(scenario.ranks)},
        task.peft,
    )


def _pretrained(name: str, auto: Any, settings: Any) -> Any:
    """Load a model in float32, whatever its files are in.

    New tensors, such as those of a task head, are logged.
    """
    source = source_of(name)
    # A saved one has its class among its architectures.
    pooled = isinstance(settings, PooledClassifierConfig) and not settings.architectures
    with loading(name):
        if pooled:
            model = PooledClassifier.from_encoder(
                source,
                settings.pooling,
                settings.layers,
                id2label=settings.id2label,
                label2id=settings.label2id,
                problem_type=settings.problem_type,
                dtype=torch.float32,
            )
            new = {"classifier.bias", "classifier.weight"}
        else:
            model, info = auto.from_pretrained(
                source,
                config=settings,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
            )
            new = info["missing_keys"]
            refuse_random(name, model, new)
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise FedrotError(
            f"'{name}' is quantised. Give it in float32, float16 or bfloat16."
        )
    if pooled:
        layers = len(settings.layers)
        where = f", side by side for {layers} layers" if layers > 1 else ""
        _LOG.info(
            f"'{name}' is classified by the {settings.pooling} of its tokens{where}, "
            "without later modules."
        )
    if new:
        _LOG.info(f"Not in '{name}', therefore random: {', '.join(sorted(new))}")
    return model


def _match_task_head(
    model: Any, name: str, labels: Sequence[str], classes: Sequence[str]
) -> None:
    """Give a task head with labels of its own the classes of the data.

    Rows of classes without an output are random.
    """
    places, unnamed = places_of(labels, classes)
    if unnamed:
        model.remark = by_position(name, classes)
    if places != [*range(len(labels))]:
        head = model.get_submodule(task_head_of(model.config, model.state_dict()))
        new = torch.tensor(places) < 0
        for kind, values in [*head.named_parameters()]:
            moved = values.detach()[places]
            moved[new] = _DEVIATION * torch.randn_like(moved[new])
            setattr(head, kind, torch.nn.Parameter(moved))
        head.out_features = model.num_labels = len(classes)
        model.remark = (
            f"The rows of the task head of '{name}' are found by names of classes; "
            f"random, without such a label: {listed(compress(classes, new)) or 'none'}."
        )
    _name_outputs(model.config, classes)


def by_position(name: str, classes: Sequence[str]) -> str:
    """Return a sentence: outputs or classes have no names, so numbers decide."""
    return (
        f"The outputs of '{name}' are, by position, {listed(classes)}: model or data "
        "have no names of classes (id2label)."
    )


def settings_of(scenario: Scenario, data: Any) -> Any:
    """Return the transformers configuration, without settings of the task."""
    if scenario.model is not None:
        return pretrained_settings(scenario.model)
    architecture = scenario.architecture
    width = scenario.width
    usual = transformers.AutoConfig.for_model(architecture).to_dict()
    inner = next(name for name in _INNER if name in usual)
    dropouts = [
        name
        for name, value in usual.items()
        if "drop" in name and isinstance(value, float)
    ]
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": scenario.depth,
        "num_attention_heads": scenario.heads,
        # Three matrices of 8/3 times the width have as many entries as two of 4 times
        # the width.
        inner: 8 * width // 3 if architecture == "llama" else 4 * width,
        **dict.fromkeys(dropouts, scenario.dropout),
        **TASKS[scenario.task].sizes_of_inputs(scenario, data),
    }
    if architecture == "gpt2":
        # With untied tables the last norm can be folded, so that the stream can be
        # rotated.
        sizes["tie_word_embeddings"] = False
    return transformers.AutoConfig.for_model(architecture, **sizes)


def _with_adapter(model: Any, adapter: Settings, task_type: str) -> Module:
    """Return a model with a LoRA adapter of PEFT's ``LoraConfig``.

    PEFT freezes the base model.
    """
    # PEFT leaves the heads of language models out, but not those of taggers.
    heads = None
    if adapter.get("target_modules") == "all-linear":
        heads = ["classifier", "score"]
    arguments = {"task_type": task_type, "exclude_modules": heads, **adapter}
    try:
        import peft
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

        # PEFT does not see the encoder in a PooledClassifier.
        kind = model.config.get_text_config().model_type
        targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
        arguments.setdefault("target_modules", targets)
        config = peft.LoraConfig(**arguments)
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


#: Functions that load an adapter, by the name that the server sends. Plug-ins add
#: theirs.
LOADERS: dict[str, Callable[[Any, Tensors], None]] = {"": load_adapter}


def load_tensors(model: Module, tensors: Tensors, how: str = "") -> None:
    """Load the tensors of ``tensors_of``.

    ``how`` names the loader of adapters, of any rank.
    """
    if hasattr(model, "peft_config"):
        LOADERS[how](model, tensors)
    else:
        model.load_state_dict(tensors)
