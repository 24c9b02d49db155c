"""Alignment at the client: for what leaves it clipped, noisy or masked, and cannot be aligned later."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.common import log
from torch import Tensor

from fedrot.aggregation import Statistics
from fedrot.alignment import Alignment, align
from fedrot.errors import FedrotError, SymmetryError, UpdateError
from fedrot.options import AlignmentOptions
from fedrot.strategies.client_matching import ACTION
from fedrot.strategies.wire.arrays import TIED, from_arrays, same_bits, to_arrays
from fedrot.strategies.wire.records import (
    STATISTICS,
    model_records,
    read_statistics,
    statistics_record,
)
from fedrot.symmetry import Symmetry, symmetry_of
from fedrot.tensors import check_finite

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable, Mod

#: Computes statistics of an update in the coordinates in which it leaves the client.
Collector = Callable[[Message, Context, Mapping[str, Tensor]], Statistics]

#: A symmetry, or the configuration from which it is built, or what returns one of them.
Described = Symmetry | Mapping[str, Any] | object | Callable[[Message, Context], Any]

#: Mods that change the update, so that it cannot be aligned behind them.
_CHANGING = {"fixedclipping_mod", "adaptiveclipping_mod", "LocalDpMod", "secagg_mod", "secaggplus_mod"}

#: The record that Flower's legacy workflows send the model in, without names, shapes and dtypes.
_UNNAMED = "fitins.parameters"

#: The record that marks a message of secure aggregation (``secaggplus_constants``).
_SECURE = "secaggplus_configs"


def align_mod(
    symmetry: Described,
    options: AlignmentOptions | None = None,
    statistics: Collector | None = None,
    dtype: torch.dtype = torch.float32,
) -> Mod:
    """Return a mod that aligns every training reply to the model that the message brought.

    ``@app.train(mods=[fixedclipping_mod, align_mod(config)])``: mods see a reply from the last to the
    first, so alignment is put behind whatever clips, adds noise or encrypts. (On the ``ClientApp``
    itself, Flower's clipping mods answer every evaluation with an error.) A reply that is not a finite
    update of the received model leaves as it is, with a warning, for the server to drop; under
    secure aggregation, where the server cannot, the client drops out of the round.

    Args:
        symmetry: a ``Symmetry``, or the model's transformers configuration (object or dictionary), or
            a function of message and context that returns one of them, where it is known only then or
            would import too much. Messages of Flower's legacy workflows (``SecAggPlusWorkflow``) name
            no tensors: for them it must be a ``Symmetry`` whose ``shapes`` are in the order of the
            parameters.
        options: what to align, see ``fedrot.AlignmentOptions``.
        statistics: called with the message as training left it, the context and the aligned tensors,
            by name; what it returns goes into the reply. Diagonal Fisher information, which cannot
            follow a rotation, is computed here. ``wanted_statistics`` tells what the server asks for;
            nothing is added for an empty result. Statistics that the client has put into its reply
            are moved with it.
        dtype: in which they leave, see ``statistics_record``.

    Raises:
        FedrotError: by the mod, on a training message: a mod that clips, adds noise or encrypts would
            run before alignment (as far as the mods can be seen through), the model does not fit the
            symmetry, or statistics cannot follow or would be lost under secure aggregation.
        UpdateError: by the mod, under secure aggregation: the reply is not an update of the model.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        category, _, action = message.metadata.message_type.partition(".")
        if category != MessageType.TRAIN or action == ACTION:
            return call_next(message, context)
        _check_order(call_next)
        models = model_records(message.content)
        if len(models) != 1:
            log(WARNING, "Not aligned: the message holds %d ArrayRecords instead of one.", len(models))
            return call_next(message, context)
        described = symmetry(message, context) if callable(symmetry) else symmetry
        model = _received(*models.popitem(), described)
        secure = _SECURE in message.content
        reply = call_next(message, context)
        if reply.has_error():
            log(WARNING, "Not aligned: the client failed: %s", reply.error.reason)
            return reply
        try:
            name, update = _update(reply.content, model)
            alignment = _align(update, model, options)
            found: Statistics = alignment.transport(read_statistics(reply.content))
        except UpdateError as error:
            if secure:
                raise
            log(WARNING, "Not aligned, for the server to drop the reply: %s", error)
            return reply
        moved = alignment.apply(update)
        if statistics is not None:
            found = {**found, **statistics(message, context, moved)}
        if found and secure:
            raise FedrotError(
                f"Secure aggregation drops the statistics '{next(iter(found))}': it adds up the model's "
                "parameters and nothing else. Do not compute them, or do not aggregate securely."
            )
        content = RecordDict(dict(reply.content))
        content[name] = _changed(content.array_records[name], update, moved)
        if found:
            content[STATISTICS] = statistics_record(found, dtype)
        aligned = copy.copy(reply)
        aligned.content = content
        return aligned

    return mod


def _check_order(call_next: ClientAppCallable) -> None:
    """Refuse mods between this one and the client that change the update before it is aligned."""
    for mod in _inner_mods(call_next):
        names = {getattr(mod, "__name__", ""), *(base.__name__ for base in type(mod).__mro__)}
        wrong = sorted(names & _CHANGING)
        if wrong:
            raise FedrotError(
                f"{wrong[0]} stands behind align_mod in the client's mods, so it would change the "
                "update before it is aligned: mods see a reply from the last to the first. Write "
                f"mods=[{wrong[0]}, align_mod(...)]."
            )


def _inner_mods(call_next: ClientAppCallable) -> Iterator[Any]:
    """Walk the chain that Flower's ``make_ffn`` builds: closures over a mod and the next link."""
    link: Any = call_next
    while True:
        code, cells = getattr(link, "__code__", None), getattr(link, "__closure__", None)
        free = dict(zip(code.co_freevars, cells, strict=True)) if code and cells else {}
        if not {"_mod", "_ffn"} <= free.keys():
            return
        yield _unwrapped(free["_mod"].cell_contents)
        link = free["_ffn"].cell_contents


def _unwrapped(mod: Any) -> Any:
    while isinstance(mod, partial) or hasattr(mod, "__wrapped__"):
        mod = mod.func if isinstance(mod, partial) else mod.__wrapped__
    return mod


@dataclass(frozen=True)
class _Model:
    """The model that a message brought; ``names`` where its records have none."""

    arrays: ArrayRecord
    symmetry: Symmetry
    names: tuple[str, ...] | None = None

    def named(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return arrays by the names of the model's tensors."""
        if self.names is None:
            return arrays
        if len(arrays) != len(self.names):
            raise UpdateError(
                f"There are {len(arrays)} tensors without names, but the symmetry names "
                f"{len(self.names)}. Pass all parameters and buffers in the order of its shapes."
            )
        return ArrayRecord(dict(zip(self.names, arrays.values(), strict=True)))


def _received(record: str, arrays: ArrayRecord, described: object) -> _Model:
    # Clients may empty the record to save memory.
    kept = arrays.copy()
    if record != _UNNAMED:
        shapes = {name: tuple(array.shape) for name, array in kept.items()}
        if not isinstance(described, Symmetry):
            return _Model(kept, symmetry_of(described, shapes))
        model = _Model(kept, described)
    elif isinstance(described, Symmetry):
        model = _Model(kept, described, tuple(described.shapes))
        # Legacy arrays do not know their shapes either.
        shapes = {name: tuple(t.shape) for name, t in from_arrays(model.named(kept)).items()}
    else:
        raise FedrotError(
            "The message's tensors have no names, as in all of Flower's legacy workflows. Give "
            "align_mod a Symmetry (fedrot.symmetry_of) whose shapes are in their order."
        )
    different = sorted(dict(shapes.items() ^ described.shapes.items()))
    if different:
        raise SymmetryError(
            f"The symmetry was built for another model: '{different[0]}' differs from what was "
            "received. Give align_mod the configuration, or the symmetry, of this model."
        )
    return model


def _update(content: RecordDict, model: _Model) -> tuple[str, dict[str, Tensor]]:
    """Return the name of the reply's record that holds the update, and the update."""
    models = model_records(content)
    if len(models) != 1:
        raise UpdateError(f"The reply holds {len(models)} ArrayRecords; send exactly one.")
    ((name, arrays),) = models.items()
    return name, from_arrays(model.named(arrays), model.named(model.arrays))


def _align(update: Mapping[str, Tensor], model: _Model, options: AlignmentOptions | None) -> Alignment:
    check_finite(update)
    anchor = from_arrays(model.named(model.arrays))
    alignment = align(_alike(update, anchor), anchor, model.symmetry, options)
    report = alignment.report
    log(
        INFO,
        "Alignment: distance to the received model %.4g -> %.4g, %.2f s",
        report.before,
        report.after,
        report.seconds,
    )
    return alignment


def _alike(update: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the update in the anchor's precision.

    Clients may train in half precision, and secure aggregation broadcasts float64.
    """

    def alike(tensor: Tensor, other: Tensor) -> Tensor:
        floating = tensor.is_floating_point() and other.is_floating_point()
        return tensor.to(other.dtype) if floating else tensor

    return {name: alike(tensor, anchor.get(name, tensor)) for name, tensor in update.items()}


def _changed(
    arrays: ArrayRecord, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> ArrayRecord:
    """Return the arrays, in their order and under their keys, with those that were moved.

    What was tied to a moved tensor stays tied to it if both were moved alike.
    """
    names = dict(zip(arrays, before, strict=True))
    moved = {key: after[name] for key, name in names.items() if after[name] is not before[name]}
    for key, array in arrays.items():
        other = array.data.decode() if array.stype == TIED else None
        if other in moved:
            own = after[names[key]]
            moved[key] = moved[other] if same_bits(own, moved[other]) else own
    return ArrayRecord({**arrays, **to_arrays(moved)})
