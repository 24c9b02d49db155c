"""Alignment layer by layer: an accelerator holds two layers at a time, however many the model has.

Groups that share no tensor do not know of each other, so a model is aligned part by part: the groups of
a layer with what they act on, and packets of the tensors that stay as they are. While one part is being
aligned the next one is on its way: through pinned memory, on a stream of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedrot.aggregation import Mean, Statistics
from fedrot.alignment import Alignment, align
from fedrot.errors import FedrotError
from fedrot.matching.problem import Anchor
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import Tensors, check_update

#: Tensors of a packet start at multiples of so many bytes, which every dtype and vector load can take.
_ALIGNED = 256


@dataclass(frozen=True)
class AlignedPart:
    """Some of an update's tensors, moved, on the device; and the alignment of them alone."""

    tensors: dict[str, Tensor]
    alignment: Alignment


def parts_of(symmetry: Symmetry, options: AlignmentOptions | None = None) -> tuple[Symmetry, ...]:
    """Split what is aligned into parts that share no tensor, each a symmetry of its own.

    A part is what the chosen groups of a layer act on, together with all that they are connected to: the
    whole model where the residual stream is matched. What no chosen group acts on comes in packets
    without groups, no larger than the largest layer unless a single tensor is.
    """
    options = options or AlignmentOptions()
    groups = symmetry.select(options.parts, options.layer_indices(symmetry.layers))
    redundant_biases = symmetry.redundant_biases if options.canonical_biases else ()
    layers: dict[object, set[str]] = {}
    for group in groups:
        key = group.layer if group.layer >= 0 else group.name
        layers.setdefault(key, set()).update(slot.tensor for slot in group.slots)
    bound = [
        {g.bias.tensor, *([g.read.tensor, g.taken_up] if g.read is not None else [])}
        for g in redundant_biases
    ]
    joined: list[set[str]] = []
    for names in (*layers.values(), *bound):
        touching = [other for other in joined if other & names]
        joined = [other for other in joined if not other & names] + [names.union(*touching)]
    moved = set[str]().union(*joined)
    sizes = {name: math.prod(shape) for name, shape in symmetry.shapes.items()}
    most, room = max((sum(sizes[n] for n in names) for names in joined), default=0), 0
    for name in (name for name in symmetry.shapes if name not in moved):
        if sizes[name] > room:
            joined.append(set())
            room = max(most, sizes[name])
        joined[-1].add(name)
        room -= sizes[name]
    order = {name: place for place, name in enumerate(symmetry.shapes)}
    return tuple(
        replace(
            symmetry,
            groups=tuple(g for g in groups if g.slots[0].tensor in names),
            shapes={name: symmetry.shapes[name] for name in sorted(names, key=order.__getitem__)},
            tied=(),
            redundant_biases=tuple(g for g in redundant_biases if g.bias.tensor in names),
        )
        for names in sorted(joined, key=lambda names: min(map(order.__getitem__, names)))
    )


def align_by_layer(
    update: Tensors,
    anchor: Tensors | Anchor,
    symmetry: Symmetry,
    options: AlignmentOptions | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[AlignedPart]:
    """Align an update on a device, and yield its parts there one after the other.

    The device holds the part that was yielded last, with what it is computed from, and the next one. The
    parts together are ``align(...).apply(update)``, and their reports ``merged_report``.

    Args:
        update: the client's tensors, where they are; read once.
        anchor: as in ``align``; on the device or elsewhere.
        symmetry: from ``symmetry_of``.
        options: see ``AlignmentOptions``.
        device: where to compute.

    Raises:
        UpdateError: see ``align``. What is wrong with names and shapes is said before the first part.
    """
    options = options or AlignmentOptions()
    anchor = anchor if isinstance(anchor, Anchor) else Anchor(anchor)
    for tensors in (update, anchor.tensors):
        check_update(tensors, symmetry.shapes)
    parts = parts_of(symmetry, options)
    # What is only passed through needs no anchor.
    wanted = [
        [(update, name) for name in part.shapes]
        + [(anchor.tensors, name) for name in part.shapes if part.groups or part.redundant_biases]
        for part in parts
    ]
    copies = brought(wanted, torch.device(device))
    # Not in a zip, which keeps what it gave until it has the next.
    for part in parts:
        found = next(copies)
        ours = dict(zip(part.shapes, found, strict=False))
        theirs = dict(zip(part.shapes, found[len(ours) :] or found, strict=True))
        del found
        alignment = align(ours, replace(anchor, tensors=theirs), part, options)
        del theirs
        ours = alignment.apply(ours)
        yield AlignedPart(ours, alignment)
        del ours, alignment


def merged_report(parts: Iterable[AlignmentReport], symmetry: Symmetry) -> AlignmentReport:
    """Return the report of a whole model from those of its parts, groups in the model's order."""
    given = list(parts)
    rows = {row.group: row for report in given for row in report.groups}
    return AlignmentReport(
        tuple(rows[group.name] for group in symmetry.groups if group.name in rows),
        sum(report.before for report in given),
        sum(report.after for report in given),
        sum(report.seconds for report in given),
    )


def fold_by_layer(
    mean: Mean,
    update: Tensors,
    weight: float,
    anchor: Tensors | Anchor,
    symmetry: Symmetry,
    options: AlignmentOptions | None = None,
    device: torch.device | str = "cpu",
    statistics: Statistics | None = None,
) -> AlignmentReport:
    """Align an update on a device and fold it into a mean that is held there, layer by layer.

    ``anchor`` may be the mean's own tensors. Check that the update is finite before (``check_finite``):
    what has been folded in stays there.

    Where there are statistics of what moves, they may not be able to follow, which is known only at the
    end: such an update goes to the device as a whole.

    Raises:
        UpdateError: see ``align`` and ``Mean.add``. Nothing has been folded in then.
        FedrotError: see ``Alignment.transport``. Nothing has been folded in then.
    """
    options = options or AlignmentOptions()
    mean.check(update, weight, statistics)
    chosen = symmetry.select(options.parts, options.layer_indices(symmetry.layers))
    moving = {slot.tensor for group in chosen for slot in group.slots}
    if any(moving & by_name.keys() for by_name in (statistics or {}).values()):
        held = anchor if isinstance(anchor, Anchor) else Anchor(anchor)
        ours, theirs = ({n: t.to(device) for n, t in m.items()} for m in (update, held.tensors))
        alignment = align(ours, replace(held, tensors=theirs), symmetry, options)
        mean.fold(alignment.apply(ours), weight, alignment.transport(statistics or {}))
        return alignment.report
    reports: list[AlignmentReport] = []

    def folded() -> Iterator[Tensors]:
        for part in align_by_layer(update, anchor, symmetry, options, device):
            reports.append(part.alignment.report)
            yield part.tensors
            del part

    mean.fold_parts(folded(), weight, statistics)
    return merged_report(reports, symmetry)


def checked_device(device: torch.device | str) -> torch.device:
    """Return a device that tensors can be put on.

    Raises:
        FedrotError: they cannot.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise FedrotError(
            f"Nothing can be computed on device '{device}': {error}. Take 'cpu', or install the torch "
            "that is built for it."
        ) from error
    return found


#: Tensors by where they are found, read when their turn comes.
_Wanted = Sequence[tuple[Tensors, str]]


def brought(parts: Sequence[_Wanted], device: torch.device) -> Iterator[list[Tensor]]:
    """Yield the parts' tensors on the device, the next part on its way where copies take time."""
    if device.type != "cuda":
        for wanted in parts:
            yield [held[name].detach().to(device) for held, name in wanted]
        return
    with ThreadPoolExecutor(1) as pool:
        copies = _Copies(device, pool)
        gathered: _Gathered | None = None
        sent: _Sent | None = None
        for part in (*parts, None, None):
            now, sent = sent, copies.send(gathered) if gathered else None
            gathered = copies.gather([held[name].detach() for held, name in part]) if part else None
            if now is not None:
                found = copies.received(now)
                del now
                yield found
                del found


@dataclass(frozen=True, eq=False)
class _Gathered:
    """A part on its way into pinned memory: its tensors, and where each of the host's begins there."""

    tensors: list[Tensor]
    places: list[int]
    size: int
    turn: int
    done: Future[None]


@dataclass(frozen=True, eq=False)
class _Sent:
    """A part on its way to the device, in one piece."""

    gathered: _Gathered
    packet: Tensor


class _Copies:
    """Copies from the host's memory to a GPU in the background.

    A part is gathered in pinned memory by a thread, and sent on a stream of its own. There are two
    pinned buffers, which grow to the largest part: one is filled while the other one is being sent.
    """

    def __init__(self, device: torch.device, pool: ThreadPoolExecutor) -> None:
        self._device, self._pool = device, pool
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._sent = [torch.cuda.Event(), torch.cuda.Event()]
        self._turn = 0

    def gather(self, tensors: list[Tensor]) -> _Gathered:
        """Begin to gather tensors; those that are on the device stay where they are."""
        turn, self._turn = self._turn, 1 - self._turn
        places, size = [], 0
        for tensor in tensors:
            places.append(size)
            if tensor.device.type != self._device.type:
                size += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
        if len(self._buffers[turn]) < size:
            self._buffers[turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        held = [
            (tensor, _within(self._buffers[turn], place, tensor))
            for tensor, place in zip(tensors, places, strict=True)
            if tensor.device.type != self._device.type
        ]
        done = self._pool.submit(_fill, self._sent[turn], held)
        return _Gathered(tensors, places, size, turn, done)

    def send(self, gathered: _Gathered) -> _Sent:
        """Begin to copy what was gathered."""
        gathered.done.result()
        with torch.cuda.stream(self._stream):
            packet = self._buffers[gathered.turn][: gathered.size].to(self._device, non_blocking=True)
            self._sent[gathered.turn].record(self._stream)
        return _Sent(gathered, packet)

    def received(self, sent: _Sent) -> list[Tensor]:
        """Return the tensors on the device; what is computed from them waits for the copy."""
        gathered, stream = sent.gathered, torch.cuda.current_stream(self._device)
        stream.wait_event(self._sent[gathered.turn])
        # Its memory may go to another packet only when what is computed from it here is done.
        sent.packet.record_stream(stream)
        return [
            tensor.to(self._device)
            if tensor.device.type == self._device.type
            else _within(sent.packet, place, tensor)
            for tensor, place in zip(gathered.tensors, gathered.places, strict=True)
        ]


def _within(packet: Tensor, place: int, like: Tensor) -> Tensor:
    """Return the part of a packet of bytes that holds a tensor, as that tensor."""
    stop = place + like.numel() * like.element_size()
    return packet[place:stop].view(like.dtype).view(like.shape)


def _fill(free: torch.cuda.Event, held: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors to their places once what these held before has been sent."""
    free.synchronize()
    with torch.no_grad():
        for tensor, place in held:
            place.copy_(tensor)
