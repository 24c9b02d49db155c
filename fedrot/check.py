"""The function-preservation check: a model's outputs before and after random moves."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedrot.collect.random_inputs import random_inputs
from fedrot.errors import SymmetryError
from fedrot.symmetry.canonical import canonical, check_rotates
from fedrot.symmetry.groups import WHOLE_MODEL, Group, Move, Symmetry, apply_moves
from fedrot.symmetry.resolve import settings_of, tied_tensors
from fedrot.tensors import Tensors

#: Accepted change of an output, relative to the output's largest entry, in float64.
TOLERANCE = 1e-6

#: Standard deviation of the noise added to the parameters: zero biases and unit gains
#: hide mistakes.
_NOISE = 0.05

#: Maximum number of a group's tensors that a message names.
_SHOWN = 8

#: Maximum number of draws while elements move nothing.
_DRAWS = 65

#: Outputs that are not compared, because their coordinates may move: caches of keys and
#: values, encoder states that a decoder reads, and hidden states if the embeddings
#: projected from them are outputs too.
_INSIDE = frozenset({"past_key_values", "encoder_last_hidden_state"})
_PROJECTED = frozenset({"text_embeds", "image_embeds"})
_BESIDE_PROJECTED = frozenset({"last_hidden_state"})

#: Inputs that are texts.
_TEXT = frozenset({"input_ids", "attention_mask"})

#: Which groups are moved.
Selection = Callable[[Group], bool]

#: The largest change of an output if the selected groups are moved.
Change = Callable[[Selection], float]


def output_change(
    model: nn.Module,
    config: object,
    symmetry: Symmetry,
    parts: Sequence[str] = WHOLE_MODEL,
    seed: int = 0,
    batch: Tensors | None = None,
) -> Change:
    """Draw one element per group; return a function that applies those it selects.

    This function returns the largest change of an output relative to that output's
    largest entry, NaN if an output is NaN. The elements are the same in every call. If
    the symmetry rotates the residual stream, the norms are folded first
    (``fedrot.canonical``), and the result includes this change.

    Only tensors at the top level of the model's output are compared. Nested outputs
    (each tower of CLIP returns one), caches, encoder states that a decoder reads, and
    the hidden states beside CLIP's projected embeddings are left out: their coordinates
    may move.

    Args: those of ``check_function``.

    Raises:
        SymmetryError: a part cannot be moved, also because tensors are tied; or the
            model does not run on random inputs, or returns no tensor.
    """
    settings = settings_of(config)
    model = _doubled(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                _NOISE * torch.randn(parameter.shape, generator=generator).to(parameter)
            )
    if batch is None:
        # Classifiers on decoders accept one text at a time if the configuration has no
        # padding token.
        rows = 1 if settings.get("pad_token_id", 0) is None else 4
        batch = next(random_inputs(settings, rows=rows, seed=seed))
    inputs = _prepared(model, batch)
    before = _outputs(model, inputs)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if symmetry.rotates:
        check_rotates(replace(symmetry, tied=tied_tensors(model.state_dict())))
        state = canonical(state, symmetry)
    moves = [Move(group, _drawn(group, generator)) for group in symmetry.select(parts)]

    def change(selected: Selection) -> float:
        model.load_state_dict(
            apply_moves(state, (move for move in moves if selected(move.group)))
        )
        changes = []
        for after, old in zip(_outputs(model, inputs), before, strict=True):
            size = old.abs().max().clamp_min(1e-30)
            changes.append((after - old).abs().max() / size)
        # A maximum of torch is NaN if an entry is; Python's depends on the order.
        return float(torch.stack(changes).max())

    return change


def check_function(
    model: nn.Module,
    config: object,
    symmetry: Symmetry,
    parts: Sequence[str] = WHOLE_MODEL,
    seed: int = 0,
    batch: Tensors | None = None,
) -> float:
    """Move a model by random elements of its groups; return the largest change of an
    output.

    Changes are relative to the largest entry of that output. A family's description
    only names tensors: a run shows whether the model uses them as described.

    Args:
        model: a copy of it is run in evaluation mode and float64, with noise on its
            parameters.
        config: its transformers configuration, object or dictionary.
        symmetry: of this model.
        seed: of noise, elements and inputs.
        batch: keyword arguments of the model's forward; ``random_inputs`` if None.

    Raises:
        SymmetryError: the model does not run on its inputs, or the change exceeds
            ``TOLERANCE``. The message names, for each part, the first group that
            changes the outputs, with its tensors.
    """
    change = output_change(model, config, symmetry, parts, seed, batch)
    largest = change(lambda group: True)
    # NaN is not within the tolerance either.
    if not largest <= TOLERANCE:
        broken = [x for x in parts if _breaks(change, symmetry.select((x,)))]
        raise SymmetryError(
            f"Moving {' and '.join(broken) or 'all parts together'} changes this "
            f"model's outputs by {largest:.2g} of their size. "
            f"{suspects(symmetry, change, broken)}"
        )
    return largest


def suspects(symmetry: Symmetry, change: Change, parts: Sequence[str]) -> str:
    """Return an error message with the first wrong group of each part.

    ``parts`` are those that change the outputs, ``change`` is from ``output_change``.
    """
    named = []
    for part in parts:
        for group in symmetry.select((part,)):
            if _breaks(change, (group,)):
                named.append(f"group '{group.name}' ({part}), {_acting(group)}")
                break
    return (
        f"The description of family '{symmetry.family}' is wrong for this model. Look "
        f"at {'; and '.join(named) or 'its groups'}. Correct the description, or "
        "describe the model as a family of its own (docs/how-to/own-model.md; if "
        "forward adds something to the stream that is no tensor, refuse the part "
        "'residual'), or align it without these parts."
    )


def _acting(group: Group) -> str:
    """Return on which tensors a group acts."""
    names = list(dict.fromkeys(f"'{slot.tensor}'" for slot in group.slots))
    shown = f"which acts on {', '.join(names[:_SHOWN])}"
    more = len(names) - _SHOWN
    return f"{shown} and {more} more tensors" if more > 0 else shown


def _breaks(change: Change, groups: Iterable[Group]) -> bool:
    """Return whether moving only these groups changes an output."""
    names = {group.name for group in groups}
    # NaN is not within the tolerance.
    return not change(lambda group: group.name in names) <= TOLERANCE


def _doubled(model: nn.Module) -> nn.Module:
    """Return a copy in float64 and evaluation mode."""
    model = copy.deepcopy(model).double().eval()
    choose_experts = getattr(model, "set_experts_implementation", None)
    if callable(choose_experts):
        # transformers' default for experts has no float64
        choose_experts("eager")
    return model


def _prepared(model: nn.Module, batch: Tensors) -> dict[str, Any]:
    """Return a batch for a model in float64, with ``use_cache`` off.

    Texts are removed if the model's class reads only images (its configuration may
    describe both).
    """
    taken = inspect.signature(model.forward).parameters
    only_images = "pixel_values" in taken and "input_ids" not in taken
    inputs: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.double()
        if not (only_images and name in _TEXT):
            inputs[name] = value
    if "use_cache" in taken:
        inputs.setdefault("use_cache", False)
    return inputs


def _drawn(group: Group, generator: torch.Generator) -> Tensor:
    """Return a random element that moves something, if the group has any."""
    for _ in range(_DRAWS):
        element = group.action.random(generator)
        if group.action.moved(element).any():
            break
    return element


def _outputs(model: nn.Module, batch: Mapping[str, Any]) -> list[Tensor]:
    try:
        with torch.no_grad(), Float64():
            out = model(**batch)
    except Exception as error:
        raise SymmetryError(
            f"The model does not run on its inputs ({error}), so its symmetry cannot "
            "be checked. If its inputs are neither rows of tokens nor images, call "
            "check_function with a batch of your own."
        ) from error
    if isinstance(out, Mapping):
        inside = _INSIDE
        if _PROJECTED & out.keys():
            inside |= _BESIDE_PROJECTED
        values = [value for name, value in out.items() if name not in inside]
    else:
        values = list(out) if isinstance(out, tuple) else [out]
    outputs = [value for value in values if isinstance(value, Tensor)]
    if not outputs:
        raise SymmetryError(
            f"The model returns a {type(out).__name__} without a tensor at its top "
            "level, so its symmetry cannot be checked. Wrap it in a module that "
            "returns the tensors to compare."
        )
    return outputs


class Float64(TorchFunctionMode):
    """Replace ``float32`` by ``float64`` in all calls of torch functions inside.

    Norms and softmaxes of many models compute in float32, whatever the model's dtype.
    Sums in another order then differ by 1e-7, which would hide small mistakes.
    ``torch.full`` of a float without a dtype makes float64 too, because XGLM fills a
    mask with the smallest number of its dtype.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [_wide(value) for value in args]
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        if func is torch.full and named.get("dtype") is None:
            last = args[-1] if args else None
            if isinstance(named.get("fill_value", last), float):
                named["dtype"] = torch.float64
        return func(*args, **named)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
