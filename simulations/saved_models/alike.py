"""Checks that two saved models, or adapters, compute the same function of their tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedrot.errors import FedrotError
from fedrot.symmetry.resolve import tied_tensors

if TYPE_CHECKING:
    from fedrot.simulations.saved_models.load import SavedModel

#: Fields on which no output depends. ``id2label`` says what ``label2id`` says.
_HARMLESS = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cls_token_id",
        "dtype",
        "finetuning_task",
        "gradient_checkpointing",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
#: Fields of an adapter that are in its scale, or on which no output depends.
_OF_ADAPTERS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "inference_mode",
        "init_lora_weights",
        "lora_alpha",
        "peft_version",
        "r",
        "rank_pattern",
        "runtime_config",
        "use_rslora",
    }
)
#: Names of fields for dropout and for random weights.
_OF_TRAINING = re.compile(r"\w*drop\w*|init(ializer)?_(std|range|factor|cutoff_factor)")


def refuse_unlike(one: SavedModel, other: SavedModel, allowed: Collection[str] = ()) -> None:
    """Raise ``FedrotError`` if the same tensors could compute different outputs in two models.

    Configurations, tokenizers and the tensors that are tied are compared.

    Args:
        allowed: fields of configurations that may differ.
    """
    refuse_different((one.name, one.config.to_dict()), (other.name, other.config.to_dict()), allowed)
    ours, theirs = (saved.tokenizer and saved.tokenizer.get_vocab() for saved in (one, other))
    if ours and theirs and ours != theirs:
        token = min(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
        raise FedrotError(
            f"Different tokenizers: {token!r} is token {ours.get(token)} of '{one.name}' and "
            f"{theirs.get(token)} of '{other.name}'. Give models that were trained with one tokenizer."
        )
    ties = [{frozenset(names) for names in tied_tensors(saved.tensors)} for saved in (one, other)]
    if ties[0] != ties[1]:
        names = " and ".join(sorted(min(ties[0] ^ ties[1], key=sorted)))
        raise FedrotError(
            f"Different tables: {names} are one tensor in only one of '{one.name}' and '{other.name}'. "
            "Save the model without separate tables again, with tie_word_embeddings false."
        )


def refuse_different(
    one: tuple[str, Mapping[str, Any]],
    other: tuple[str, Mapping[str, Any]],
    allowed: Collection[str] = (),
) -> None:
    """Raise ``FedrotError`` if two named configurations differ in a field that is not harmless."""
    ours, theirs = (dict(_fields(settings)) for _, settings in (one, other))
    for field in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(field), theirs.get(field)
        if here != there and not {field, field.partition(".")[0]} & {*allowed}:
            raise FedrotError(
                f"Different configurations: {field} is {here!r} in '{one[0]}' and {there!r} in "
                f"'{other[0]}', and may change what the same weights compute. If it does not, repeat "
                f"the command with --allow {field}."
            )


def _fields(settings: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield by path the fields, also of nested configurations, that are not harmless and not None."""
    for key, value in settings.items():
        name = str(key)
        if name in _HARMLESS | _OF_ADAPTERS or _OF_TRAINING.fullmatch(name):
            continue
        if isinstance(value, Mapping):
            yield from _fields(value, f"{path}{name}.")
        elif value is not None and value != []:
            yield f"{path}{name}", sorted(value) if isinstance(value, set) else value
