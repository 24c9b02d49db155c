"""Checks that two saved models, or adapters, compute the same function of their tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedrot.errors import FedrotError
from fedrot.symmetry.resolve import tied_tensors

if TYPE_CHECKING:
    from fedrot.simulations.saved.load import SavedModel

#: Names of fields on which no output depends. ``label2id`` says what ``id2label`` says.
_HARMLESS = re.compile(
    r"_?name_or_path|(torch_)?dtype|transformers_version|tokenizer_class|(bos|cls|sep)_token_id"
    r"|label2id|problem_type|finetuning_task|task_specific_params|pretraining_tp|use_cache|return_dict"
    r"|output_(attentions|hidden_states)|gradient_checkpointing|chunk_size_feed_forward"
    r"|\w*drop\w*|init(ializer)?_(std|range|factor|cutoff_factor)"
)


def refuse_unlike(one: SavedModel, other: SavedModel, allowed: Collection[str] = ()) -> None:
    """Raise ``FedrotError`` if the same tensors could compute different outputs in two models.

    Configurations without ``allowed`` fields, tokenizers and the tensors that are tied are compared.
    """
    labels, others = one.labels, other.labels
    if labels != others and sorted(labels) == sorted(others) and "id2label" not in allowed:
        place = next(n for n, name in enumerate(labels) if name != others[n])
        raise FedrotError(
            f"The task heads have the same classes in another order: output {place} is "
            f"{labels[place]!r} in '{one.name}' and {others[place]!r} in '{other.name}'. Bring the rows "
            "of the last layer and id2label of one model into the order of the other, and save it; if "
            "only the names are in another order, repeat the command with --allow id2label."
        )
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
    """Yield by path the fields, also of nested configurations, that are not harmless and not empty."""
    for key, value in settings.items():
        name = str(key)
        if _HARMLESS.fullmatch(name):
            continue
        if isinstance(value, Mapping):
            yield from _fields(value, f"{path}{name}.")
        elif value is not None and value != []:
            yield f"{path}{name}", sorted(value) if isinstance(value, set) else value
