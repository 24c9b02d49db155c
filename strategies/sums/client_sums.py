"""``regmean_mod``: a client's sums for RegMean in place of its weights, which may be masked.

``SecureRegMean`` says what they are, and which numbers the server sends for them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from logging import WARNING
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.common import log
from safetensors import SafetensorError
from torch import Tensor

from fedrot.aggregation import Statistics
from fedrot.collect.statistics import INPUT_AXIS, TRAINED, check_statistics
from fedrot.errors import FedrotError, UpdateError
from fedrot.strategies.client import Collector, check_order
from fedrot.strategies.flower_compat import (
    SECURE_AGGREGATION,
    UNNAMED_MODEL,
    largest_unclipped,
    rounding_step,
    with_equal_weight,
)
from fedrot.strategies.wire.arrays import from_arrays, to_arrays
from fedrot.strategies.wire.records import model_records
from fedrot.tensors import Tensors, check_finite, check_update

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable, Mod

#: Keys of a request's configuration: the layers, their scales and gains, as safetensors; alpha; the norm
#: to which a client clips what it adds to the sums, if it has to.
ASKED, ALPHA, CLIPPING = "fedrot-regmean", "fedrot-regmean-alpha", "fedrot-regmean-clipping"

#: What is clipped is this much shorter, so that rounding to float64 does not make it too long.
_SHORTER = 1 - 1e-9

#: Keys of the scales, as in ``statistics_record``: a kind, and the weights that read one input. Key of
#: the gains.
KIND, NAMES, GAINS = "/", "|", "gains"


def oriented(weight: Tensor, kind: str) -> Tensor:
    """Return a weight whose Gram matrix is of this kind as ``[out, in]``, or turn such a matrix back."""
    return weight if INPUT_AXIS[kind] == 1 else weight.mT


@dataclass(frozen=True)
class SharedInput:
    """Weights that read one input of ``n`` units, and the scale of each unit, float64 ``[n]``.

    ``gains`` are the factors of their products, one for each weight.
    """

    kind: str
    names: tuple[str, ...]
    scale: Tensor
    gains: tuple[float, ...]

    def oriented(self, weight: Tensor) -> Tensor:
        """Return a weight as ``[out, n]``, or such a matrix in the weight's own layout."""
        return oriented(weight, self.kind)

    def gram(self, found: Statistics) -> Tensor:
        """Return a client's Gram matrix ``[n, n]``, float64."""
        by_name, size = found.get(self.kind, {}), [len(self.scale)] * 2
        for name in self.names:
            if name not in by_name:
                raise UpdateError(
                    f"The Gram matrix of '{name}' is missing, and the server asks for it: let the "
                    "function that regmean_mod is given return collect_gram(model, batches)."
                )
        gram = by_name[self.names[0]]
        if list(gram.shape) != size:
            raise UpdateError(
                f"The Gram matrix of '{self.names[0]}' has shape {list(gram.shape)}; under secure "
                f"aggregation it has to be full, {size}."
            )
        for name in self.names[1:]:
            if by_name[name] is not gram and not torch.equal(by_name[name], gram):
                raise UpdateError(
                    f"'{self.names[0]}' and '{name}' read one input at the server, and have different "
                    "Gram matrices here. Clients and server have to run the same model."
                )
        return gram.detach().cpu().double()


def regmean_mod(names: Iterable[str], statistics: Collector) -> Mod:
    """Return a mod that sends what ``SecureRegMean`` adds up, in place of the weights.

    Use it between the mods that mask and that align:
    ``ClientApp(client_fn, mods=[secaggplus_mod, regmean_mod(names, grams), align_mod(symmetry)])``.
    Requests of other strategies it passes on, and their replies stay as they are.

    Args:
        names: of the tensors that a client returns, in their order; ``model.state_dict()`` has them.
            Messages of Flower's legacy workflows hold no names.
        statistics: a function of the message, the context and the reply's tensors by name, aligned ones
            if ``align_mod`` comes after. It returns their full Gram matrices, from ``collect_gram``.

    Raises:
        UpdateError: by the mod: the reply is not a finite update of the received model, or a Gram matrix
            is missing, wrong or not full. The client leaves the round.
        FedrotError: by the mod: a mod that masks, clips or adds noise runs before it.
    """
    order = tuple(names)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != MessageType.TRAIN or _asked(message) is None:
            return call_next(message, context)
        check_order(call_next, "regmean_mod")
        groups, alpha, clipping = _read(message)
        received = _named(message.content.array_records[UNNAMED_MODEL], order)
        secure = SECURE_AGGREGATION in message.content
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        ((record, arrays),) = model_records(reply.content).items()
        update = _named(arrays, order)
        shapes = {name: tuple(tensor.shape) for name, tensor in received.items()}
        check_update(update, shapes)
        check_finite(update)
        found = statistics(message, context, update)
        _check_found(found, groups, shapes)
        content = RecordDict(dict(reply.content))
        if clipping is not None:
            content = with_equal_weight(context, content, secure)
        largest = largest_unclipped(context, content) if secure else math.inf
        products, grams = _sums(groups, alpha, update, received, found, largest)
        if clipping is not None:
            step = rounding_step(context, content) if secure else 0.0
            products, grams = clipped(products, grams, update, received, clipping, step)
        keys = dict(zip(order, arrays, strict=True))
        sent = {keys[name]: tensor for name, tensor in products.items()}
        more = {str(len(order) + place): tensor for place, tensor in enumerate(grams)}
        replaced = copy.copy(reply)
        replaced.content = content
        replaced.content[record] = ArrayRecord({**arrays, **to_arrays({**sent, **more})})
        return replaced

    return mod


def _asked(message: Message) -> Any:
    return next((c[ASKED] for c in message.content.config_records.values() if ASKED in c), None)


def _read(message: Message) -> tuple[list[SharedInput], float, float | None]:
    """Return the layers that the server asks for, alpha, and the norm to clip to."""
    config: Any
    (config,) = (c for c in message.content.config_records.values() if ASKED in c)
    try:
        scales = safetensors.torch.load(config[ASKED])
        alpha = float(config[ALPHA])
        clipping = float(config[CLIPPING]) if CLIPPING in config else None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FedrotError(
            f"What the server asks for in '{ASKED}' cannot be read, {type(error).__name__}: {error}. "
            "Clients and server need the same version of fedrot."
        ) from error
    return groups_of(scales), alpha, clipping


def groups_of(scales: Mapping[str, Tensor]) -> list[SharedInput]:
    """Return the groups of what the server sends: scales by kind and names, and all gains in order."""
    gains, found = iter(scales[GAINS].tolist()), []
    for key in sorted(scales.keys() - {GAINS}):
        kind, _, joined = key.partition(KIND)
        names = tuple(joined.split(NAMES))
        found.append(SharedInput(kind, names, scales[key].double(), tuple(islice(gains, len(names)))))
    return found


def _named(arrays: ArrayRecord, names: tuple[str, ...]) -> dict[str, Tensor]:
    if len(arrays) != len(names):
        raise UpdateError(
            f"There are {len(arrays)} tensors without names, but regmean_mod was given {len(names)} "
            "names. Give it model.state_dict(), and send all of its tensors in this order."
        )
    return from_arrays(ArrayRecord(dict(zip(names, arrays.values(), strict=True))))


def _check_found(
    found: Statistics, groups: Iterable[SharedInput], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check what is asked for; other statistics are left out."""
    if found.get(TRAINED):
        raise UpdateError("Rows that a client has not trained cannot be left out of masked sums.")
    for group in groups:
        for name in group.names:
            if name not in shapes:
                raise UpdateError(f"The server asks for '{name}', which is no tensor of this model.")
        check_statistics({group.kind: {group.names[0]: group.gram(found)}}, shapes)


def _sums(
    groups: Iterable[SharedInput],
    alpha: float,
    update: Tensors,
    received: Tensors,
    found: Statistics,
    largest: float = math.inf,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return ``c D G S`` by weight in its own layout, and upper triangles of ``S G S``; float64.

    Where an entry is above ``largest``, all of a layer are multiplied by the same number below 1.
    """
    products, grams = dict[str, Tensor](), list[Tensor]()
    for group in groups:
        gram = group.gram(found)
        shrunk = alpha * gram + (1 - alpha) * torch.diag(gram.diagonal())
        sums = []
        for name, gain in zip(group.names, group.gains, strict=True):
            apart = gain * group.oriented(update[name].double() - received[name].double())
            sums.append(group.oriented(apart @ shrunk * group.scale).contiguous())
        scaled = group.scale[:, None] * shrunk * group.scale
        upper = torch.triu_indices(*scaled.shape)
        sums.append(scaled[upper[0], upper[1]])
        reached = max(float(one.abs().max()) for one in sums)
        if reached > largest:
            message = (
                "The sums of '%s' reach %.3g, and secure aggregation clips at %.3g: this client counts "
                "less in this layer. Give SecureRegMean a larger headroom."
            )
            log(WARNING, message, group.names[0], reached, largest)
            sums = [one * (largest / reached) for one in sums]
        products.update(zip(group.names, sums, strict=False))
        grams.append(sums[-1])
    return products, grams


def clipped(
    products: Tensors, grams: list[Tensor], update: Tensors, received: Tensors, norm: float, step: float
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return all that a client sends, by tensor and the appended sums, with a bounded part of its own.

    Its part is one vector: products, sums, and the differences of all other floating-point tensors to
    the received ones. It is shortened to the norm, less what rounding to steps can add. Tensors of
    integers are sent as received.

    Raises:
        UpdateError: rounding alone can exceed the norm.
    """
    own = {
        name: products[name] if name in products else update[name].double() - received[name].double()
        for name, tensor in received.items()
        if tensor.is_floating_point()
    }
    parts = [*own.values(), *grams]
    left = norm - step * math.sqrt(sum(part.numel() for part in parts))
    if left <= 0:
        raise UpdateError(
            f"Secure aggregation rounds to steps of {step:.3g}, which alone can exceed the clipping "
            f"norm {norm:g}. Give SecAggPlusWorkflow a larger quantization_range, or Privacy a larger "
            "clipping_norm."
        )
    length = math.sqrt(sum(float(part.square().sum()) for part in parts))
    shrink = min(1.0, _SHORTER * left / length) if length else 1.0
    sent = {
        name: tensor
        if name not in own
        else shrink * own[name] + (0 if name in products else tensor.double())
        for name, tensor in received.items()
    }
    return sent, [shrink * part for part in grams]
