"""Alignment of an update on a GPU, piece by piece.

The pieces are copied from the host in the background.
Groups that share no tensor are independent of each other. A model is split into pieces
of such groups, and the GPU aligns one piece while the next one is copied. It holds two
pieces at a time, each one layer or a stack of small layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedrot.aggregation import Statistics
from fedrot.alignment.align import Alignment, align_checked
from fedrot.collect.statistics import TRAINED
from fedrot.errors import UpdateError
from fedrot.matching.anchor import Anchor
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport
from fedrot.symmetry.canonical import canonical
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import Device, TensorDict, Tensors, check_finite, check_update

#: Entries of the layers in one piece, unless a single layer has more: 256 MB in
#: float32.
STACKED = 2**26

#: Names of tensors that stay together.
Names = set[str]

#: Tensors in a packet start at multiples of this many bytes: aligned for every dtype
#: and vector load.
_ALIGNED = 256


@dataclass(frozen=True)
class AlignedPart:
    """The moved tensors of one piece, on the device, and their alignment."""

    tensors: TensorDict
    alignment: Alignment


def parts_of(
    symmetry: Symmetry,
    options: AlignmentOptions | None = None,
) -> tuple[Symmetry, ...]:
    """Split a model into pieces that share no tensor, each with its own symmetry.

    A piece holds the tensors that the chosen groups of a layer act on, joined with all
    pieces that share a tensor with it: the whole model if the residual stream is
    matched. Small layers are stacked, up to ``STACKED`` entries, because their groups
    are matched together. Tensors without a chosen group are in pieces without groups,
    at most as large as the largest piece or one tensor.
    """
    options = (options or AlignmentOptions()).for_model(symmetry)
    if options.rotates:
        symmetry = symmetry.rotated
    groups = options.groups(symmetry)
    if not options.canonical:
        symmetry = replace(symmetry, redundant_biases=(), folds=(), centred=())
    layers: dict[object, Names] = defaultdict(set)
    for group in groups:
        key = group.layer if group.layer >= 0 else group.name
        layers[key].update(slot.tensor for slot in group.slots)
    joined: list[Names] = []
    for names in (*layers.values(), *symmetry.changed_together):
        touching = [other for other in joined if other & names]
        joined = [other for other in joined if not other & names]
        joined.append(names.union(*touching))
    moved = Names().union(*joined)
    sizes = {name: math.prod(shape) for name, shape in symmetry.shapes.items()}
    stacks = _stacked(joined, sizes, STACKED)
    largest = max((_size(stack, sizes) for stack in stacks), default=0)
    still = [{name} for name in symmetry.shapes if name not in moved]
    stacks += _stacked(still, sizes, largest)
    order = {name: place for place, name in enumerate(symmetry.shapes)}
    parts = []
    for names in sorted(stacks, key=lambda stack: min(order[name] for name in stack)):
        inside = tuple(group for group in groups if group.slots[0].tensor in names)
        parts.append(symmetry.restricted(names, inside))
    return tuple(parts)


def _size(names: Iterable[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes[name] for name in names)


def _stacked(
    pieces: Iterable[Names],
    sizes: Mapping[str, int],
    most: int,
) -> list[Names]:
    """Join pieces in order, up to ``most`` entries; a larger piece stays alone."""
    stacks: list[Names] = []
    room = 0
    for names in pieces:
        size = _size(names, sizes)
        if size > room or not stacks:
            stacks.append(set())
            room = max(most, size)
        stacks[-1] |= names
        room -= size
    return stacks


def align_by_layer(
    update: Tensors,
    anchor: Tensors | Anchor,
    symmetry: Symmetry,
    options: AlignmentOptions | None = None,
    device: Device = "cpu",
) -> Iterator[AlignedPart]:
    """Align an update on a device, and yield its pieces there one after the other.

    Together the pieces are ``align(...).apply(update)``; ``merged_report`` joins their
    reports. Update and anchor may be on any device. The device holds the last piece,
    its anchor, and the next piece. A piece that cannot be matched is yielded without a
    move.

    Raises:
        UpdateError: before the first piece, if names or shapes differ, or the canonical
            form overflows.
    """
    anchor = anchor if isinstance(anchor, Anchor) else Anchor(anchor)
    for tensors in (update, anchor.tensors):
        check_update(tensors, symmetry.shapes)
    return _aligned_parts(update, anchor, symmetry, options, device)


def _aligned_parts(
    update: Tensors,
    anchor: Anchor,
    symmetry: Symmetry,
    options: AlignmentOptions | None,
    device: Device,
) -> Iterator[AlignedPart]:
    options = (options or AlignmentOptions()).for_model(symmetry)
    if options.canonical:
        check_finite(
            canonical(update, symmetry.rotated if options.rotates else symmetry)
        )
    parts = parts_of(symmetry, options)
    wanted = []
    for part in parts:
        tensors = [(update, name) for name in part.shapes]
        # Pieces without groups stay as they are and need no anchor.
        if part.groups or part.redundant_biases:
            tensors += [(anchor.tensors, name) for name in part.shapes]
        wanted.append(tensors)
    copies = copied(wanted, torch.device(device))
    for part in parts:
        # No variable here holds a piece: its memory would stay in use until the next
        # one is aligned.
        yield _aligned_part(part, copies, anchor, options)


def _aligned_part(
    part: Symmetry,
    copies: Iterator[list[Tensor]],
    anchor: Anchor,
    options: AlignmentOptions,
) -> AlignedPart:
    both = next(copies)
    tensors = dict(zip(part.shapes, both, strict=False))
    # A piece that needs no anchor comes without one; it is then its own.
    of_anchor = both[len(tensors) :] or both
    to = replace(anchor, tensors=dict(zip(part.shapes, of_anchor, strict=True)))
    try:
        alignment = align_checked(tensors, to, part, options)
    except UpdateError:
        # Other pieces may already be in a mean. Without a move this piece computes the
        # same function.
        report = AlignmentReport((), 0.0, 0.0, 0.0)
        alignment = Alignment(part, (), report, bool(options.canonical))
    # The device needs the memory of the piece's anchor for the move.
    del both, of_anchor, to
    return AlignedPart(alignment.move(tensors), alignment)


def merged_report(
    reports: Sequence[AlignmentReport],
    symmetry: Symmetry,
) -> AlignmentReport:
    """Return a model's report from those of its pieces, in the order of the groups."""
    rows = {row.group: row for report in reports for row in report.groups}
    groups = tuple(rows[group.name] for group in symmetry.groups if group.name in rows)
    before = sum(report.before for report in reports)
    after = sum(report.after for report in reports)
    return AlignmentReport(
        groups, before, after, sum(report.seconds for report in reports)
    )


def moved_by_layer(
    update: Tensors,
    anchor: Tensors | Anchor,
    symmetry: Symmetry,
    options: AlignmentOptions | None,
    device: Device,
    statistics: Statistics | None = None,
) -> tuple[Iterable[Tensors], Statistics, Callable[[], AlignmentReport]]:
    """Return an update in pieces, which are aligned on a device when they are read.

    ``Mean.fold_parts`` adds the pieces. Update and anchor were checked before, also by
    ``check_finite``, because pieces cannot be removed from a mean. ``anchor`` may be
    the mean's own tensors. An update with statistics of tensors that change is aligned
    at once, as one piece: only the whole alignment shows whether the statistics can be
    moved with the weights.

    Returns:
        The pieces, which can be read once; the statistics of the aligned update; and a
        function that returns the alignment's report after all pieces have been read.

    Raises:
        UpdateError: see ``align``; it may be raised when the first piece is read.
        FedrotError: see ``Alignment.transport``.
    """
    options = options or AlignmentOptions()
    statistics = statistics or {}
    anchor = anchor if isinstance(anchor, Anchor) else Anchor(anchor)
    moving = {slot.tensor for group in options.groups(symmetry) for slot in group.slots}
    changed = moving
    if options.for_model(symmetry).canonical:
        changed = moving.union(*symmetry.changed_together)
    # Masks of trained rows follow moves; the canonical form does not change them.
    if any(
        (moving if kind == TRAINED else changed) & by_name.keys()
        for kind, by_name in statistics.items()
    ):
        whole, to = (
            {name: tensor.to(device) for name, tensor in tensors.items()}
            for tensors in (update, anchor.tensors)
        )
        alignment = align_checked(whole, replace(anchor, tensors=to), symmetry, options)
        statistics = alignment.transport(statistics)
        return [alignment.move(whole)], statistics, lambda: alignment.report
    reports: list[AlignmentReport] = []

    def reported(part: AlignedPart) -> Tensors:
        reports.append(part.alignment.report)
        return part.tensors

    # ``map`` holds no piece, a generator would.
    parts = map(reported, _aligned_parts(update, anchor, symmetry, options, device))
    return parts, statistics, lambda: merged_report(reports, symmetry)


#: The tensors of a piece, each as a mapping and a name in it; looked up when they are
#: copied.
_Wanted = Sequence[tuple[Tensors, str]]


def copied(parts: Sequence[_Wanted], device: torch.device) -> Iterator[list[Tensor]]:
    """Yield each piece's tensors on the device.

    For a GPU, the next two pieces are copied in the background.
    """
    if device.type != "cuda":
        for part in parts:
            yield [held[name].detach().to(device) for held, name in part]
        return
    with ThreadPoolExecutor(1) as pool:
        pipeline = _Pipeline(device, pool)
        # Two empty pieces push the last two out.
        queue: list[_Wanted] = [*parts, (), ()]
        for part in queue[:2]:
            pipeline.advance(part)
        for part in queue[2:]:
            yield pipeline.advance(part)


#: A tensor and its byte offset in a packet; None if it is on the device already.
_Placed = tuple[Tensor, int | None]


@dataclass(frozen=True, eq=False)
class _Gathered:
    """A piece that is copied to ``pinned`` memory, which is ``free`` after sending."""

    placed: list[_Placed]
    pinned: Tensor
    free: torch.cuda.Event
    done: Future[None]


class _Pipeline:
    """Copies pieces from the host's memory to a GPU in two steps, both in the
    background.

    A thread gathers the piece in pinned memory; then a CUDA stream sends it in one
    packet. There are two pinned buffers, which grow to the largest piece: one is filled
    while the other is sent.
    """

    def __init__(self, device: torch.device, pool: ThreadPoolExecutor) -> None:
        self._device = device
        self._pool = pool
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._free = [torch.cuda.Event(), torch.cuda.Event()]
        self._turn = 0
        self._gathered: _Gathered | None = None
        self._sent: tuple[_Gathered, Tensor] | None = None

    def advance(self, part: _Wanted) -> list[Tensor]:
        """Gather a piece, send the last one, and return the one before the last.

        The first two calls return nothing.
        """
        arrived = self._sent
        gathered = self._gathered
        self._sent = (gathered, self._send(gathered)) if gathered else None
        tensors = [held[name].detach() for held, name in part]
        self._gathered = self._gather(tensors) if tensors else None
        return self._received(*arrived) if arrived else []

    def _gather(self, tensors: list[Tensor]) -> _Gathered:
        """Begin to gather tensors; tensors on the device are not copied."""
        turn = self._turn
        self._turn = 1 - turn
        placed: list[_Placed] = []
        size = 0
        for tensor in tensors:
            if tensor.device.type == self._device.type:
                placed.append((tensor, None))
                continue
            placed.append((tensor, size))
            size += math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED
        if len(self._buffers[turn]) < size:
            self._buffers[turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pinned = self._buffers[turn][:size]
        free = self._free[turn]
        done = self._pool.submit(_fill, free, pinned, placed)
        return _Gathered(placed, pinned, free, done)

    def _send(self, gathered: _Gathered) -> Tensor:
        """Begin to copy the gathered tensors, and return the packet they arrive in."""
        gathered.done.result()
        with torch.cuda.stream(self._stream):
            packet = gathered.pinned.to(self._device, non_blocking=True)
            gathered.free.record(self._stream)
        return packet

    def _received(self, gathered: _Gathered, packet: Tensor) -> list[Tensor]:
        """Return the tensors on the device; computations wait for the copy."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(gathered.free)
        # The allocator reuses the packet's memory only after the computations on this
        # stream.
        packet.record_stream(stream)
        return [
            tensor.to(self._device) if place is None else _within(packet, place, tensor)
            for tensor, place in gathered.placed
        ]


def _within(packet: Tensor, place: int, like: Tensor) -> Tensor:
    """Return a view of a packet's bytes with the dtype and shape of ``like``."""
    return packet[place : place + like.nbytes].view(like.dtype).view(like.shape)


def _fill(free: torch.cuda.Event, pinned: Tensor, placed: Iterable[_Placed]) -> None:
    """Copy tensors to their places after the buffer's last packet has been sent."""
    free.synchronize()
    with torch.no_grad():
        for tensor, place in placed:
            if place is not None:
                _within(pinned, place, tensor).copy_(tensor)
