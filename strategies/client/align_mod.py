"""``align_mod``: alignment at the client, for clipped, noisy or masked updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import log

from fedrot.aggregation import Statistics
from fedrot.alignment.align import Alignment, align
from fedrot.errors import FedrotError, UpdateError
from fedrot.options import AlignmentOptions, checked_options
from fedrot.strategies.arguments import Described, check_shapes
from fedrot.strategies.client.moves import ACTION
from fedrot.strategies.wire.arrays import (
    STATISTICS,
    TIED,
    from_arrays,
    model_records,
    only_model,
    shapes_of,
    to_arrays,
)
from fedrot.strategies.wire.flower_compat import (
    SECURE_AGGREGATION,
    UNNAMED_MODEL,
    inner_mods,
)
from fedrot.strategies.wire.statistics_record import read_statistics, statistics_record
from fedrot.symmetry import Symmetry, symmetry_of
from fedrot.tensors import Tensors, check_finite, same_bits

#: Computes statistics of an aligned update.
Collector = Callable[[Message, Context, Tensors], Statistics]

#: What describes a model, or a function that returns it.
Describing = Described | Callable[[Message, Context], Any]

#: Mods that change the update, which must be aligned before.
_CHANGING = {
    "fixedclipping_mod",
    "adaptiveclipping_mod",
    "LocalDpMod",
    "secagg_mod",
    "secaggplus_mod",
}


def align_mod(
    symmetry: Describing,
    options: AlignmentOptions | None = None,
    statistics: Collector | None = None,
    dtype: torch.dtype = torch.float32,
) -> Mod:
    """Return a mod that aligns every training reply to the model in the message.

    Use it as ``@app.train(mods=[fixedclipping_mod, align_mod(config)])``. Mods see a
    reply from the last to the first, so ``align_mod`` comes after the mods that clip,
    add noise or encrypt. (Put mods on the function, not on the ``ClientApp``: there
    Flower's clipping mods answer evaluations with an error.)

    A reply that is not a finite update of the received model is sent unchanged, with a
    warning, and the server drops it. Under secure aggregation the server cannot; there
    the client leaves the round.

    Args:
        symmetry: a ``Symmetry``; or the model's transformers configuration (object or
            dictionary); or a function of message and context that returns one of them,
            called for every message. Messages of Flower's legacy workflows
            (``SecAggPlusWorkflow``) have no tensor names: there give a ``Symmetry``
            whose ``shapes`` are in the order of the parameters.
        options: what to align, see ``fedrot.AlignmentOptions``.
        statistics: a function of the message before alignment, the context and the
            aligned tensors by name. It returns statistics that are added to the reply,
            or an empty mapping. Use it for the diagonal Fisher information, which
            cannot follow a rotation; ``wanted_statistics`` tells what the server asks
            for. Statistics that are in the reply already are moved with the update.
        dtype: of the statistics on the wire, see ``statistics_record``.

    Raises:
        FedrotError: by the mod: a mod that clips, adds noise or encrypts runs before
            alignment (as far as this can be detected), the model does not fit the
            symmetry, or statistics cannot follow or would be lost under secure
            aggregation.
        UpdateError: by the mod, under secure aggregation: the reply is not an update of
            the model.
    """

    def mod(
        message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        category, _, action = message.metadata.message_type.partition(".")
        if category != MessageType.TRAIN or action == ACTION:
            return call_next(message, context)
        _check_order(call_next)
        models = model_records(message.content)
        if len(models) != 1:
            log(
                WARNING,
                "Not aligned: the message holds %d ArrayRecords instead of one.",
                len(models),
            )
            return call_next(message, context)
        described = symmetry(message, context) if callable(symmetry) else symmetry
        model = _received(*models.popitem(), described)
        secure = SECURE_AGGREGATION in message.content
        reply = call_next(message, context)
        if reply.has_error():
            log(WARNING, "Not aligned: the client failed: %s", reply.error.reason)
            return reply
        try:
            name, arrays = only_model(reply.content)
            update = from_arrays(model.named(arrays))
            alignment = _align(update, model, options)
            collected: Statistics = alignment.transport(read_statistics(reply.content))
        except UpdateError as error:
            if secure:
                raise
            log(WARNING, "Not aligned, for the server to drop the reply: %s", error)
            return reply
        moved = alignment.apply(update)
        if statistics is not None:
            collected = {**collected, **statistics(message, context, moved)}
        if collected and secure:
            raise FedrotError(
                f"Secure aggregation drops the statistics '{next(iter(collected))}': "
                "it adds up the model's parameters and nothing else. Do not compute "
                "them."
            )
        content = RecordDict(dict(reply.content))
        content[name] = _changed(arrays, update, moved)
        if collected:
            content[STATISTICS] = statistics_record(collected, dtype)
        aligned = copy.copy(reply)
        aligned.content = content
        return aligned

    return mod


def _check_order(call_next: ClientAppCallable) -> None:
    """Refuse mods between ``align_mod`` and the client that change the update."""
    for mod in inner_mods(call_next):
        names = {
            getattr(mod, "__name__", ""),
            *(base.__name__ for base in type(mod).__mro__),
        }
        wrong = sorted(names & _CHANGING)
        if wrong:
            raise FedrotError(
                f"{wrong[0]} is behind align_mod in the client's mods, so it changes "
                "the update first: mods see a reply from the last to the first. Write "
                f"mods=[{wrong[0]}, align_mod(...)]."
            )


@dataclass(frozen=True)
class _Model:
    """The model in a message, and the names of its tensors if the message has none."""

    arrays: ArrayRecord
    symmetry: Symmetry
    names: tuple[str, ...] | None = None

    def named(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return arrays under the names of the model's tensors."""
        if self.names is None:
            return arrays
        if len(arrays) != len(self.names):
            raise UpdateError(
                f"There are {len(arrays)} tensors without names, but the symmetry "
                f"names {len(self.names)}. Pass all parameters and buffers in the "
                "order of its shapes."
            )
        return ArrayRecord(dict(zip(self.names, arrays.values(), strict=True)))


def _received(record: str, arrays: ArrayRecord, described: object) -> _Model:
    # A copy: clients may empty the record to save memory.
    kept = arrays.copy()
    if record != UNNAMED_MODEL:
        shapes = shapes_of(kept)
        if not isinstance(described, Symmetry):
            return _Model(kept, symmetry_of(described, shapes))
        model = _Model(kept, described)
    elif isinstance(described, Symmetry):
        model = _Model(kept, described, tuple(described.shapes))
        # Legacy arrays have no shapes either.
        shapes = shapes_of(from_arrays(model.named(kept)))
    else:
        raise FedrotError(
            "The message's tensors have no names, as in all of Flower's legacy "
            "workflows. Give align_mod a Symmetry (fedrot.symmetry_of) whose shapes "
            "are in their order."
        )
    check_shapes(described, shapes)
    return model


def _align(
    update: Tensors, model: _Model, options: AlignmentOptions | None
) -> Alignment:
    check_finite(update)
    anchor = from_arrays(model.named(model.arrays))
    # Clients may train in half precision, and secure aggregation broadcasts float64.
    cast = dict(update)
    for name, tensor in update.items():
        wanted = anchor.get(name, tensor).dtype
        if tensor.is_floating_point() and wanted.is_floating_point:
            cast[name] = tensor.to(wanted)
    # Whether the model ties its tables is not in the message: only options that ask for
    # it fold norms.
    alignment = align(cast, anchor, model.symmetry, checked_options(options).as_it_is())
    report = alignment.report
    log(
        INFO,
        "Alignment: distance to the received model %.4g -> %.4g, %.2f s",
        report.before,
        report.after,
        report.seconds,
    )
    return alignment


def _changed(arrays: ArrayRecord, before: Tensors, after: Tensors) -> ArrayRecord:
    """Return the arrays, in their order and under their keys, with the moved tensors.

    An array that was tied to a moved tensor stays tied to it if both were moved alike.
    """
    names = dict(zip(arrays, before, strict=True))
    moved = {
        key: after[name]
        for key, name in names.items()
        if after[name] is not before[name]
    }
    for key, array in arrays.items():
        other = array.data.decode() if array.stype == TIED else None
        if other in moved:
            tensor = after[names[key]]
            moved[key] = moved[other] if same_bits(tensor, moved[other]) else tensor
    return ArrayRecord({**arrays, **to_arrays(moved)})
