"""Checks that the configurations, vocabularies, labels and tied tables of two saved models agree."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedrot.errors import FedrotError

if TYPE_CHECKING:
    from fedrot.simulations.models.saved_model import SavedModel

#: Fields that are compared first, so that an error names one of them if possible.
ARCHITECTURE = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("hidden_act", "image_size", "patch_size"),
)

#: Fields on which no output depends, in addition to those of text generation. Others are compared.
_HARMLESS = frozenset(
    (
        # origin and storage of a model
        *("_name_or_path", "name_or_path", "_commit_hash", "auto_map", "architectures", "dtype"),
        *("finetuning_task", "task_specific_params", "prefix", "language"),
        *("tokenizer_class", "processor_class", "tf_legacy_loss"),
        # how the model is run, and what it returns in addition to its outputs
        *("chunk_size_feed_forward", "gradient_checkpointing", "output_attentions", "use_cache"),
        *("output_hidden_states", "return_dict", "use_return_dict", "torchscript", "use_bfloat16"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("pretraining_tp", "slow_but_exact", "reorder_and_upcast_attn", "deterministic_flash_attn"),
        *("reference_compile", "output_router_logits", "repad_logits_with_grad"),
        # how the model is trained
        *("router_aux_loss_coef", "router_jitter_noise", "sparse_prediction"),
        *("sparse_pred_ignore_index", "logit_scale_init_value"),
        # tokens that only tokenizers and text generation use
        *("bos_token_id", "cls_token_id", "sep_token_id", "mask_token_id", "unk_token_id"),
        *("forced_bos_token_id", "forced_eos_token_id"),
        # fields that follow from shapes, tied tables, ``layer_types`` or ``rope_type``
        *("n_inner", "tie_word_embeddings", "tie_encoder_decoder", "max_window_layers", "type"),
        # fields with a comparison of their own
        *("id2label", "label2id", "num_labels"),
    )
)
#: Names of fields for initialisation, dropout and the version that wrote a file.
_HARMLESS_NAMES = re.compile(r"init_(std|range|factor)|initializer_\w+|\w*drop\w*|\w*_version")

#: Fields that transformers reads although the configuration's class does not declare them.
_UNDECLARED = frozenset(
    (
        *("attention_chunk_size", "conv_act", "conv_groups", "conv_kernel_size", "embedding_size"),
        *("head_dim", "is_causal", "layer_types", "max_relative_positions", "norm_rel_ebd"),
        *("partial_rotary_factor", "position_biased_input", "position_buckets", "sliding_window"),
        *("relative_attention", "share_att_key", "talking_head", "token_classification_bias"),
    )
)

#: Types of models whose positions or decoder inputs depend on the padding token.
_PADDED = ("roberta", "xlm-roberta", "camembert", "mpnet", "xglm", "bart", "t5", "mt5")
#: Encoders: their classifiers use the first token. Other classifiers search the end or padding token.
_ENCODERS = (
    *("bert", "electra", "distilbert", "deberta", "deberta-v2", "albert", "modernbert"),
    *("roberta", "xlm-roberta", "camembert", "mpnet"),
)
#: Types of models with classes that use the token at the end of a text.
_ENDED = ("bart", "t5", "mt5")
_CLIP = ("clip", "clip_text_model")

#: Kinds of rotary positions that do not depend on the largest position.
_ANY_LENGTH = frozenset({"default", "linear"})

_CLASSIFIER = "Classification"


def check_alike(one: SavedModel, other: SavedModel) -> None:
    """Raise ``FedrotError`` if the same weights could compute different outputs in the two models.

    All fields of the configurations except harmless ones are compared, the vocabularies, and for
    classifiers the order of labels. Fields that a file leaves out have their default.
    """
    check_fields(one, other)
    check_vocabularies(one, other)
    check_labels(one, other)


def check_fields(one: SavedModel, other: SavedModel, first: Collection[str] = ()) -> None:
    """Raise ``FedrotError`` if two configurations differ in a field that is not harmless.

    Args:
        first: fields to compare before all others.
    """
    for name in (*first, *ARCHITECTURE):
        here, there = getattr(one.config, name, None), getattr(other.config, name, None)
        if here != there and not _same_activation(here, there):
            raise FedrotError(
                f"Different architectures: {name} is {here} in '{one.path}' and {there} in "
                f"'{other.path}'. Give models of one architecture. A base model without the others' "
                "head can be left out."
            )
    classes = [_class_name(model) for model in (one, other)]
    ours, theirs = _fields(one.config, classes), _fields(other.config, classes)
    known = _UNDECLARED.union(*(_declared(model.config) for model in (one, other)))
    for name in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(name), theirs.get(name)
        if here == there or _same_activation(here, there):
            continue
        # One file has a field that no class declares, and therefore none reads.
        if None in (here, there) and not any(f"{name}.".startswith(f"{own}.") for own in known):
            continue
        # Training sets this field if it is None.
        if name == "problem_type" and None in (here, there):
            continue
        raise FedrotError(
            f"Different configurations: {name} is {_shown(here)} in '{one.config_file}' and "
            f"{_shown(there)} in '{other.config_file}', so that the same weights compute different "
            "outputs. Give models of one configuration."
        )


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _fields(config: Any, classes: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a configuration that matter to these classes: values by path."""
    found = dict(_described(config, classes))
    found.pop("vocab_size", None)
    if not all(_CLASSIFIER in name for name in classes):
        found.pop("problem_type", None)
    return found


def _class_name(saved: SavedModel) -> str:
    return next(iter(saved.config.architectures or []), "")


def _described(config: Any, classes: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration, and of nested ones, that are not harmless and not None."""
    from transformers import GenerationConfig, PreTrainedConfig

    generation = GenerationConfig().to_dict()
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            yield from ((f"{name}.{own}", v) for own, v in _described(inner, classes))
        elif name in ("pad_token_id", "eos_token_id"):
            if all(_reads_token(name, config.model_type, given) for given in classes):
                yield name, value
        elif name == "max_position_embeddings" and _of_any_length(config):
            continue
        elif name == "decoder_start_token_id" or not (name in generation or _harmless(name)):
            yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield paths and values in nested dictionaries; None is left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not _harmless(str(key)):
                yield from _leaves(f"{name}.{key}", inner)
    elif value is not None:
        yield name, list(value) if isinstance(value, tuple) else value


def _harmless(name: str) -> bool:
    return name in _HARMLESS or _HARMLESS_NAMES.fullmatch(name) is not None


def _reads_token(name: str, model_type: str, class_name: str) -> bool:
    """Return whether the forward pass of this type and class depends on a token's id."""
    classifies = "ForSequence" in class_name
    if name == "eos_token_id":
        return model_type in _CLIP or (model_type in _ENDED and classifies)
    return model_type in _PADDED or (classifies and model_type not in _ENCODERS)


def _of_any_length(config: Any) -> bool:
    """Return whether positions are rotary and do not depend on the largest position."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [*parameters.values()]
    kinds = [kind for kind in kinds if isinstance(kind, Mapping)]
    return bool(kinds) and all(kind.get("rope_type") in _ANY_LENGTH for kind in kinds)


def _declared(config: Any) -> frozenset[str]:
    """Return the paths of the fields that the classes of a configuration and nested ones declare."""
    from transformers import PreTrainedConfig

    found = set[str]()
    for name in type(config)().to_dict():
        inner = getattr(config, name, None)
        nested = isinstance(inner, PreTrainedConfig)
        found |= {f"{name}.{own}" for own in _declared(inner)} if nested else {name}
    return frozenset(found)


def _same_activation(here: Any, there: Any) -> bool:
    """Return whether two names, such as ``silu`` and ``swish``, are of one activation."""
    from transformers.activations import ACT2CLS, ACT2FN

    if not (isinstance(here, str) and isinstance(there, str) and {here, there} <= ACT2CLS.keys()):
        return False
    values = torch.linspace(-16, 16, 129)  # Some are clipped, at 6 or 10.
    return torch.allclose(ACT2FN[here](values), ACT2FN[there](values), atol=1e-6)


def check_vocabularies(one: SavedModel, other: SavedModel) -> None:
    """Raise ``FedrotError`` if the tokens of two models, or the sizes of their tables, differ."""
    a, b = one.path, other.path
    size, own_size = (getattr(model.config, "vocab_size", None) for model in (one, other))
    ours, theirs = one.vocabulary, other.vocabulary
    sizes = f"{size} and {own_size} embeddings"
    if ours is not None and theirs is not None and ours != theirs:
        _, token = min((number, token) for token, number in ours ^ theirs)
        places = [
            f"has id {number} in '{path}'" if number is not None else f"is not in '{path}'"
            for path, number in ((a, dict(ours).get(token)), (b, dict(theirs).get(token)))
        ]
        raise FedrotError(
            f"Different vocabularies: the tokens of '{a}' and '{b}' are not the same ({sizes}): "
            f"{token!r} {' and '.join(places)}. Give models that were trained with one tokenizer."
        )
    if size != own_size:
        tokens = "the same tokens" if ours == theirs and ours else "no two tokenizers to compare"
        raise FedrotError(
            f"Different vocabularies: '{a}' and '{b}' have {sizes}, and {tokens}. Tables are often "
            "padded, to a multiple of 64. If both have the same tokenizer, give both one size: "
            f"resize_token_embeddings({max(size or 0, own_size or 0)}) with transformers, and save them."
        )


def check_labels(one: SavedModel, other: SavedModel) -> None:
    """Raise ``FedrotError`` if two classifiers have a label at different outputs."""
    if not all(_CLASSIFIER in _class_name(model) for model in (one, other)):
        return
    found = moved_label(one.config.id2label, other.config.id2label)
    if found:
        name, here, there = found
        raise FedrotError(
            f"Different labels: '{name}' is output {here} of '{one.path}' and output {there} of "
            f"'{other.path}'. Reorder the rows of one model's head, and its id2label, as in the other "
            "model, and save it again."
        )


def moved_label(
    ours: Mapping[Any, str] | None, theirs: Mapping[Any, str] | None
) -> tuple[str, int, int] | None:
    """Return the first label with different outputs in two mappings, and its output in each."""
    here, there = _outputs(ours), _outputs(theirs)
    for name, outputs in sorted(here.items(), key=lambda item: min(item[1])):
        if name in there and not outputs & there[name]:
            output = min(outputs)
            return str((ours or {})[output]), output, min(there[name])
    return None


def label_elsewhere(config: Any, data: Any) -> str:
    """Return a clause about a label that has different numbers in classifier and data; else empty."""
    names: Sequence[str] = getattr(data, "tags", ()) or getattr(data, "label_names", ())
    found = moved_label(config.id2label, dict(enumerate(names)))
    if _CLASSIFIER not in next(iter(config.architectures or []), "") or found is None:
        return ""
    name, here, there = found
    return f"'{name}' is output {here} of the model, and label {there} of {data.name}"


def _outputs(labels: Mapping[Any, str] | None) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for output, name in (labels or {}).items():
        plain = re.sub(r"[\s_-]+", " ", str(name)).strip().casefold()
        found.setdefault(plain, set()).add(int(output))
    return found


def check_ties(
    one: SavedModel, ours: Mapping[str, str], other: SavedModel, theirs: Mapping[str, str]
) -> None:
    """Raise ``FedrotError`` if tables are one tensor in one model, and several in the other.

    Args:
        ours, theirs: for every name of a state dict, the first name of the same tensor.
    """
    for name in ours.keys() & theirs.keys():
        if ours[name] != theirs[name]:
            tied, separate, first = (one, other, ours) if ours[name] != name else (other, one, theirs)
            raise FedrotError(
                f"Different tables: '{name}' and '{first[name]}' are one tensor in '{tied.path}', and "
                f"two in '{separate.path}'. Save '{tied.path}' with untied tables: load it with "
                "transformers, set tie_word_embeddings to false in its configuration, copy the first "
                "table to the second, and save it."
            )
