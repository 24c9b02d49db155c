"""``resolve``: a model's ``Symmetry`` from its family's description and its tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedrot.errors import SymmetryError
from fedrot.symmetry.describe.family import Config, Family
from fedrot.symmetry.describe.layers import Block
from fedrot.symmetry.describe.spaces import (
    Axes,
    Norms,
    Space,
    merged,
    read,
    read_to_the_end,
    space_of,
    spaces_of,
)
from fedrot.symmetry.groups import (
    NO_LAYER,
    Group,
    Reasons,
    Slice,
    Slot,
    Symmetry,
    Ties,
)
from fedrot.symmetry.signs import SignedPermutation
from fedrot.symmetry.stream import Fold, Place, folds_of, without_mean
from fedrot.tensors import Shapes, Tensors, unusable

#: A state dict, or the shapes of one.
TensorsOrShapes = Tensors | Mapping[str, Sequence[int]]

#: ``model_type`` of ``fedrot.strategies.PooledClassifier``; its ``text_config`` is the
#: configuration of its encoder.
POOLED_CLASSIFIER = "fedrot_pooled_classifier"

#: The layers that its task head reads by default: the last one alone.
LAST_LAYER = [-1]

#: The model's names, by the names without wrappers' pieces, and without prefix.
RealNames = dict[str, str]

#: Prefix for a tensor outside the encoder whose module has the name of a module of the
#: encoder. No family has this prefix, so the tensor is not in the description.
_BESIDE = "(beside the encoder) "

#: Pieces that wrappers insert into names: data parallel, compiled, sharded, adapted
#: models.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "base_layer"})

#: The dtypes that can be moved. Weights of smaller floating-point types are quantised.
_MOVABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

#: Parameters of adapters.
_ADAPTERS = re.compile(
    r"(^|\.)(lora_\w+|ia3_l|vera_\w+|hada_w\w+|lokr_w\w+|oft_\w+|boft_\w+|prompt_encoder|adaption_\w+)(\.|$)"
)


def resolve(
    config: object, tensors: TensorsOrShapes, families: Sequence[Family]
) -> Symmetry:
    """Return the symmetry of a model; see ``symmetry_of``."""
    settings = settings_of(config)
    if not isinstance(tensors, Mapping):
        raise SymmetryError(
            f"The model is a {type(tensors).__name__}, not tensors by name; pass "
            "model.state_dict()."
        )
    for name, tensor in tensors.items():
        # Shapes are enough, so tensors without values are accepted here.
        on_meta = isinstance(tensor, Tensor) and tensor.is_meta
        why = unusable(tensor)
        if why and not on_meta:
            raise SymmetryError(f"The tensor '{name}' {why}.")
    family = family_of(settings, families, next(iter(tensors), None))
    shapes = {name: tuple(getattr(x, "shape", x)) for name, x in tensors.items()}
    unwrapped = _unwrapped(shapes)
    prefix = _prefix(family, unwrapped, families)
    names = _without_prefix(unwrapped, prefix, family.encoder)
    body, outside = _described(family, settings, names)
    moved = [slot.tensor for group in body.groups for slot in group.slots]
    moved += [bias.taken_up for bias in body.redundant_biases if bias.taken_up]
    for name in moved:
        if name not in names:
            raise SymmetryError(
                f"The tensor '{prefix}{name}' of family '{family.name}' is missing. "
                f"Pass the complete state dict of a model with {body.layers} layers."
            )
    unplaced = [x for x in names if x not in body.axes and x not in outside]
    stacks = tuple(f"{stack}." for stack in family.stacks)
    for name in unplaced:
        if name.startswith(stacks):
            raise SymmetryError(_unplaced(names[name], family, families))
    # Biases are optional: many configurations leave them out.
    missing = [
        name for name in body.axes if name not in names and not name.endswith(".bias")
    ]
    inside = _renamed(body, names)
    heads = _axes_in(outside, names)
    layers = layers_read(settings)
    across, refused = _across_layers(
        inside.axes, heads, shapes, family.spaces, len(layers)
    )
    refused |= body.refused
    refused |= _refusals([names[name] for name in unplaced], missing)
    allowed = (group for group in across if group.part not in refused)
    symmetry = Symmetry(
        family.name,
        body.layers,
        (*allowed, *inside.groups),
        shapes,
        tied=tied_tensors(tensors),
        refused=refused,
        redundant_biases=inside.redundant_biases,
    )
    _check_slots(symmetry, tensors)
    _check_ties(symmetry)
    axes = merged(inside.axes, heads)
    return _with_folds(symmetry, axes, inside.norms, layers == LAST_LAYER)


def _with_folds(
    symmetry: Symmetry, axes: Axes, norms: Norms, only_last: bool
) -> Symmetry:
    """Return the symmetry with the norms to fold, and why other streams have none.

    ``only_last``: whether the task head reads no other layer than the last.
    """
    folds: list[Fold] = []
    centred: list[Place] = []
    unfolded: Reasons = {}
    for group in symmetry.groups:
        if group.part != "residual":
            continue
        norms_or_reason = folds_of(group.name, axes, norms)
        if not only_last and not isinstance(norms_or_reason, str):
            norms_or_reason = "the task head reads layers without a norm"
        if isinstance(norms_or_reason, str):
            unfolded[group.name] = norms_or_reason
            continue
        folds += norms_or_reason
        # Under RMSNorm, signs may move; it does not remove the mean.
        if not isinstance(group.action, SignedPermutation):
            places = ((slot.tensor, slot.axis) for slot in group.slots)
            centred += without_mean(places, norms_or_reason)
    return replace(
        symmetry, folds=tuple(folds), centred=tuple(centred), unfolded=unfolded
    )


def _axes_in(axes: Axes, names: RealNames) -> Axes:
    """Return the axes of the tensors that the model has, by the model's names."""
    return {names[name]: spaces for name, spaces in axes.items() if name in names}


def _renamed(body: Block, names: RealNames) -> Block:
    """Return the body with the model's names, without tensors that the model lacks."""

    def real(slot: Slot) -> Slot:
        return replace(slot, tensor=names[slot.tensor])

    groups = (replace(g, slots=tuple(map(real, g.slots))) for g in body.groups)
    biases = []
    for bias in body.redundant_biases:
        read = bias.read and real(bias.read)
        taken_up = names.get(bias.taken_up, "")
        biases.append(replace(bias, bias=real(bias.bias), read=read, taken_up=taken_up))
    norms = {}
    for module, weights in body.norms.items():
        gain = names.get(f"{module}.weight")
        if gain:
            norms[gain] = tuple(names[name] for name in weights if name in names)
    return Block(tuple(groups), _axes_in(body.axes, names), tuple(biases), norms=norms)


def _described(
    family: Family, settings: Config, names: Collection[str]
) -> tuple[Block, Axes]:
    try:
        return family.describe(settings, names)
    except KeyError as missing:
        raise SymmetryError(
            f"The config has no {missing}, which family '{family.name}' needs. Pass "
            "the complete transformers configuration of the model."
        ) from missing
    except SymmetryError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise SymmetryError(
            f"The config does not describe a model of family '{family.name}': {error}. "
            "Pass the transformers configuration that the model was built from."
        ) from error


def _across_layers(
    body: Axes,
    task_heads: Axes,
    shapes: Shapes,
    spaces: Mapping[str, Space],
    layers: int,
) -> tuple[list[Group], Reasons]:
    """Return a group for every space that may be moved, and the refused parts.

    Task heads read so many ``layers``, side by side.
    """
    streams = spaces_of(body)
    slots: dict[str, list[Slot]] = defaultdict(list)
    refused: Reasons = {}
    for name, axes in merged(body, task_heads).items():
        shape = shapes[name]
        fits = len(axes) == len(shape)
        for axis, entry in enumerate(axes if fits else ()):
            if entry:
                space = space_of(entry)
                members = slots[space]
                reads_layers = name in task_heads and entry == read(space)
                blocks = layers if reads_layers and space in streams else 1
                width = shape[axis] // blocks
                unsigned = entry.startswith("|")
                for number in range(blocks):
                    block = Slice(number * width, (number + 1) * width)
                    members.append(Slot(name, axis, block, unsigned=unsigned))
                fits &= members[0].size * blocks == shape[axis]
        if not fits:
            reason = (
                f"the tensor '{name}' of shape {list(shape)} does not fit other "
                "tensors."
            )
            refused = {"residual": reason, "output": reason}
    # A layer of the body without a space on its outputs is inside a block.
    writing = {name: axes for name, axes in body.items() if axes[0]}
    ends = read_to_the_end(merged(writing, task_heads))
    if not streams <= ends:
        refused.setdefault(
            "residual",
            "no task head reads the residual stream, so the stream is the model's "
            "output; describe the model together with its task head.",
        )
    groups = []
    for space, members in slots.items():
        if space in ends:
            part = "residual" if space in streams else "output"
            action = spaces.get(space, Space()).action(members[0].size)
            groups.append(Group(space, NO_LAYER, part, action, tuple(members)))
    return groups, refused


def _refusals(unplaced: Sequence[str], missing: Sequence[str]) -> Reasons:
    """Return why parts across layers cannot be moved because of these tensors."""
    if unplaced:
        reason = (
            f"the tensor '{unplaced[0]}' ({len(unplaced)} in all) is not in the "
            "family's description and may read coordinates that move."
        )
        return {"residual": reason, "output": reason}
    if missing:
        return {
            "residual": f"the tensor '{missing[0]}' is missing; pass the whole model."
        }
    return {}


def settings_of(config: object) -> Config:
    """Return a transformers configuration, or a dictionary, as a dictionary.

    That of a ``PooledClassifier`` has the settings of its encoder, its own labels,
    ``pooling`` and ``layers``.
    """
    to_dict = getattr(config, "to_dict", None)
    settings = to_dict() if callable(to_dict) else config
    if not isinstance(settings, Mapping):
        raise SymmetryError(
            f"The config is a {type(config).__name__}; pass a transformers "
            "configuration, model.config, or its dictionary."
        )
    if settings.get("model_type") != POOLED_CLASSIFIER:
        return settings
    names = ("id2label", "problem_type", "pooling", "layers")
    outer = {name: settings.get(name) for name in names}
    return {**settings, **settings.get("text_config", {}), **outer}


def layers_read(settings: Config) -> list[int]:
    """Return the layers that a task head reads, counted from the last one, -1.

    Only a ``PooledClassifier`` reads others than the last.

    Raises:
        SymmetryError: they are counted in another way, as in an edited dictionary.
    """
    layers = settings.get("layers")
    # Another model's configuration may have settings of this name.
    if "pooling" not in settings or not layers:
        return LAST_LAYER
    if not isinstance(layers, list) or max(layers) >= 0:
        raise SymmetryError(
            f"layers is {layers!r:.60}, not a list of numbers such as [-2, -1]. Pass "
            "the model's own configuration, model.config."
        )
    return layers


def family_of(
    settings: Config, families: Sequence[Family], first_tensor: str | None = None
) -> Family:
    """Return the family of ``model_type``; raise ``SymmetryError`` if there is none."""
    model_type = settings.get("model_type")
    for family in families:
        if model_type in family.model_types:
            return family
    unplaced = f" First tensor: '{first_tensor}'." if first_tensor else ""
    raise SymmetryError(
        f"The architecture '{model_type}' is not supported (config key 'model_type'); "
        f"supported: {', '.join(model_types(families))}.{unplaced}"
    )


def _unwrapped(shapes: Shapes) -> RealNames:
    """Return the model's names by the names without the pieces of wrappers."""
    names: RealNames = {}
    for name in shapes:
        if _ADAPTERS.search(name):
            raise SymmetryError(
                f"The tensor '{name}' belongs to an adapter, which must move with the "
                "adapted weights. Average LoRA adapters with "
                "fedrot.strategies.FedRotLoRA, or merge adapters into the model first "
                "(peft: merge_and_unload), or pass only the base model's tensors."
            )
        clean = ".".join(piece for piece in name.split(".") if piece not in _WRAPPERS)
        if clean in names:
            raise SymmetryError(
                f"The tensors '{names[clean]}' and '{name}' differ only in a wrapper "
                "prefix. Pass the state dict of one model."
            )
        names[clean] = name
    return names


def _without_prefix(
    names: RealNames, prefix: str, encoder: Collection[str]
) -> RealNames:
    """Return the model's names by the family's, which have no prefix ``bert.``."""
    outer = prefix.rstrip(".").rpartition(".")[0]
    real_names = {}
    for name, real in names.items():
        short = name.removeprefix(prefix)
        if not name.startswith(prefix):
            short = name.removeprefix(f"{outer}.")
            if short.partition(".")[0] in encoder:
                short = _BESIDE + short
        real_names[short] = real
    return real_names


def _prefix(family: Family, names: RealNames, families: Sequence[Family]) -> str:
    """Return the prefix of the names of the family's stacks."""
    stacks = "|".join(map(re.escape, family.stacks))
    layer = re.compile(rf"((?:.+\.)?)(?:{stacks})\.\d+\.")
    matches = filter(None, map(layer.match, names))
    prefixes = sorted({match[1] for match in matches})
    if not prefixes:
        first = next(iter(names.values()), "(no tensors)")
        raise SymmetryError(
            f"No tensor lies under '{family.stacks[0]}.0'. "
            f"{_unplaced(first, family, families)}"
        )
    if len(prefixes) > 1:
        raise SymmetryError(
            f"Several stacks of family '{family.name}' were found, under the prefixes "
            f"{prefixes}. Describe one model at a time."
        )
    return prefixes[0]


def _unplaced(name: str, family: Family, families: Sequence[Family]) -> str:
    return (
        f"The tensor '{name}' has no place in family '{family.name}', so moving other "
        "tensors could change the model's function. Supported: "
        f"{', '.join(model_types(families))}."
    )


def model_types(families: Sequence[Family]) -> tuple[str, ...]:
    """Return the ``model_type`` names of families."""
    return tuple(name for family in families for name in family.model_types)


def _check_slots(symmetry: Symmetry, tensors: TensorsOrShapes) -> None:
    """Raise ``SymmetryError`` if a tensor has another size or is quantised."""
    ends: dict[Place, int] = defaultdict(int)
    for group in symmetry.groups:
        for slot in group.slots:
            place = (slot.tensor, slot.axis)
            ends[place] = max(ends[place], slot.slice.stop)
            tensor = tensors[slot.tensor]
            if isinstance(tensor, Tensor) and tensor.dtype not in _MOVABLE:
                raise SymmetryError(
                    f"The tensor '{slot.tensor}' is {tensor.dtype}: quantised weights "
                    "cannot be moved. Load the model without quantisation, or "
                    "dequantise it (transformers: model.dequantize())."
                )
    for (name, axis), end in ends.items():
        shape = symmetry.shapes[name]
        if axis >= len(shape) or shape[axis] != end:
            raise SymmetryError(
                f"The tensor '{name}' has shape {list(shape)}, but family "
                f"'{symmetry.family}' with this config needs length {end} on axis "
                f"{axis}. Check that config and tensors belong together."
            )


def tied_tensors(tensors: TensorsOrShapes) -> Ties:
    """Return the sets of names whose tensors share storage; empty for shapes."""
    places: dict[object, list[str]] = defaultdict(list)
    for name, x in tensors.items():
        if isinstance(x, Tensor) and not x.is_meta and x.numel():
            places[x.device, x.data_ptr(), x.dtype, x.shape, x.stride()].append(name)
    return tuple(tuple(names) for names in places.values() if len(names) > 1)


def equal_tables(symmetry: Symmetry, tensors: Tensors) -> Ties:
    """Return pairs of an embedding and an equal output table, which were tied."""
    streams = {
        s.tensor for g in symmetry.groups if g.part == "residual" for s in g.slots
    }
    others = sorted(streams - symmetry.readers)
    pairs = list[tuple[str, str]]()
    for reader in sorted(symmetry.readers):
        table = tensors[reader]
        alike = [name for name in others if tensors[name].shape == table.shape]
        pairs += ((name, reader) for name in alike if torch.equal(tensors[name], table))
    return tuple(pairs)


def _check_ties(symmetry: Symmetry) -> None:
    """Raise ``SymmetryError`` if tensors that share storage would move differently."""
    moves: dict[str, set[object]] = defaultdict(set)
    for group in symmetry.groups:
        for slot in group.slots:
            moves[slot.tensor].add((group.name, replace(slot, tensor="")))
    for names in symmetry.tied:
        if any(moves[name] != moves[names[0]] for name in names):
            raise SymmetryError(
                f"The tensors {list(names)} share storage, but family "
                f"'{symmetry.family}' would move them separately. Models with shared "
                "layers need a family of their own."
            )
