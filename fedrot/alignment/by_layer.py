"""Alignment of an update on a GPU piece by piece, with copies from the host in the
background.

Groups that share no tensor are independent of each other. A model is split into pieces
of such groups, and the GPU aligns one piece while the next one is copied. It holds two
pieces at a time, each one layer or a stack of small layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedrot.aggregation import Statistics
from fedrot.alignment.align import Alignment, align
from fedrot.collect.statistics import TRAINED
from fedrot.errors import UpdateError
from fedrot.matching.anchor import Anchor
from fedrot.options import AlignmentOptions
from fedrot.report import AlignmentReport
from fedrot.symmetry.canonical import canonical
from fedrot.symmetry.groups import Symmetry
from fedrot.tensors import Tensors, check_finite, check_update

#: Entries of the layers in one piece, unless a single layer has more: 256 MB in
#: float32.
STACKED = 2**26

#: Tensors in a packet start at multiples of this many bytes: aligned for every dtype
#: and vector load.
_ALIGNED = 256


@dataclass(frozen=True)
class AlignedPart:
    """The moved tensors of one piece of an update, on the device, and their
    alignment.
    """

    tensors: dict[str, Tensor]
    alignment: Alignment


def parts_of(
    symmetry: Symmetry, options: AlignmentOptions | None = None
) -> tuple[Symmetry, ...]:
    """Split a model into pieces that share no tensor, each with its own symmetry.

    A piece holds the tensors that the chosen groups of a layer act on, joined with all
    pieces that share a tensor with it: the whole model if the residual stream is
    matched. Small layers are stacked, up to ``STACKED`` entries, because their groups
    are matched together. Tensors without a chosen group are in pieces without groups,
    at most as large as the largest piece or one tensor.
    """
    options = (options or AlignmentOptions()).for_model(symmetry)
    symmetry = symmetry.rotated if options.rotates else symmetry
    groups = symmetry.select(options.parts, options.layer_indices(symmetry.layers))
    if not options.canonical:
        symmetry = replace(symmetry, redundant_biases=(), folds=(), centred=())
    layers: dict[object, set[str]] = {}
    for group in groups:
        key = group.layer if group.layer >= 0 else group.name
        layers.setdefault(key, set()).update(slot.tensor for slot in group.slots)
    bound = [r.tensors for r in symmetry.redundant_biases] + [
        fold.tensors for fold in symmetry.folds
    ]
    joined: list[set[str]] = []
    for names in (*layers.values(), *bound):
        touching = [other for other in joined if other & names]
        joined = [other for other in joined if not other & names] + [
            names.union(*touching)
        ]
    moved = set[str]().union(*joined)
    sizes = {name: math.prod(shape) for name, shape in symmetry.shapes.items()}
    layerwise, joined, room = joined, [], 0
    for names in layerwise:
        size = sum(sizes[name] for name in names)
        if size > room:
            joined.append(set())
            room = max(STACKED, size)
        joined[-1] |= names
        room -= size
    most, room = max((sum(sizes[n] for n in names) for names in joined), default=0), 0
    for name in (name for name in symmetry.shapes if name not in moved):
        if sizes[name] > room:
            joined.append(set())
            room = max(most, sizes[name])
        joined[-1].add(name)
        room -= sizes[name]
    order = {name: place for place, name in enumerate(symmetry.shapes)}
    return tuple(
        symmetry.restricted(
            names, tuple(g for g in groups if g.slots[0].tensor in names)
        )
        for names in sorted(
            joined, key=lambda names: min(map(order.__getitem__, names))
        )
    )


def align_by_layer(
    update: Tensors,
    anchor: Tensors | Anchor,
    symmetry: Symmetry,
    options: AlignmentOptions | None = None,
    device: torch.device | str = "cpu",
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
    options = (options or AlignmentOptions()).for_model(symmetry)
    anchor = anchor if isinstance(anchor, Anchor) else Anchor(anchor)
    for tensors in (update, anchor.tensors):
        check_update(tensors, symmetry.shapes)
    if options.canonical:
        check_finite(
            canonical(update, symmetry.rotated if options.rotates else symmetry)
        )
    parts = parts_of(symmetry, options)
    # Pieces without groups stay as they are and need no anchor.
    wanted = [
        [(update, name) for name in part.shapes]
        + [
            (anchor.tensors, name)
            for name in part.shapes
            if part.groups or part.redundant_biases
        ]
        for part in parts
    ]
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
    ours, alignment = _matched_part(part, copies, anchor, options)
    return AlignedPart(alignment.apply(ours), alignment)


def _matched_part(
    part: Symmetry,
    copies: Iterator[list[Tensor]],
    anchor: Anchor,
    options: AlignmentOptions,
) -> tuple[dict[str, Tensor], Alignment]:
    """Return the update's tensors and their alignment; releases the anchor's
    tensors.
    """
    found = next(copies)
    ours = dict(zip(part.shapes, found, strict=False))
    theirs = dict(zip(part.shapes, found[len(ours) :] or found, strict=True))
    try:
        return ours, align(ours, replace(anchor, tensors=theirs), part, options)
    except UpdateError:
        # Other pieces may already be in a mean. Without a move this piece computes the
        # same function.
        return ours, Alignment(
            part, (), AlignmentReport((), 0.0, 0.0, 0.0), bool(options.canonical)
        )


def merged_report(
    parts: Iterable[AlignmentReport], symmetry: Symmetry
) -> AlignmentReport:
    """Return the report of a whole model from those of its pieces, groups in the
    model's order.
    """
    given = list(parts)
    rows = {row.group: row for report in given for row in report.groups}
    return AlignmentReport(
        tuple(rows[group.name] for group in symmetry.groups if group.name in rows),
        sum(report.before for report in given),
        sum(report.after for report in given),
        sum(report.seconds for report in given),
    )


def moved_by_layer(
    update: Tensors,
    anchor: Tensors | Anchor,
    symmetry: Symmetry,
    options: AlignmentOptions | None = None,
    device: torch.device | str = "cpu",
    statistics: Statistics | None = None,
) -> tuple[Iterable[Tensors], Statistics, Callable[[], AlignmentReport]]:
    """Return an update in pieces, which are aligned on a device when they are read.

    ``Mean.fold_parts`` adds the pieces. Call ``check_finite`` before, because pieces
    cannot be removed from a mean. ``anchor`` may be the mean's own tensors. An update
    with statistics of tensors that change is aligned at once, as one piece: only the
    whole alignment shows whether the statistics can be moved with the weights.

    Returns:
        The pieces, which can be read once; the statistics of the aligned update; and a
        function that returns the alignment's report after all pieces have been read.

    Raises:
        UpdateError: see ``align``; it may be raised when the first piece is read.
        FedrotError: see ``Alignment.transport``.
    """
    options, statistics = options or AlignmentOptions(), statistics or {}
    chosen = symmetry.select(options.parts, options.layer_indices(symmetry.layers))
    moving = {slot.tensor for group in chosen for slot in group.slots}
    changed = set(moving)
    if options.for_model(symmetry).canonical:
        changed = changed.union(*(fold.tensors for fold in symmetry.folds))
        changed = changed.union(
            *(redundant.tensors for redundant in symmetry.redundant_biases)
        )
    if any(
        (moving if kind == TRAINED else changed) & by_name.keys()
        for kind, by_name in statistics.items()
    ):
        held = anchor if isinstance(anchor, Anchor) else Anchor(anchor)
        ours, theirs = (
            {n: t.to(device) for n, t in m.items()} for m in (update, held.tensors)
        )
        alignment = align(ours, replace(held, tensors=theirs), symmetry, options)
        return (
            [alignment.apply(ours)],
            alignment.transport(statistics),
            lambda: alignment.report,
        )
    reports: list[AlignmentReport] = []

    def reported(part: AlignedPart) -> Tensors:
        reports.append(part.alignment.report)
        return part.tensors

    # ``map`` holds no piece, a generator would.
    parts = map(reported, align_by_layer(update, anchor, symmetry, options, device))
    return parts, statistics, lambda: merged_report(reports, symmetry)


#: The tensors of a piece, each as a mapping and a name in it; looked up when they are
#: copied.
_Wanted = Sequence[tuple[Tensors, str]]


def copied(parts: Sequence[_Wanted], device: torch.device) -> Iterator[list[Tensor]]:
    """Yield each piece's tensors on the device; for a GPU the next two are copied in
    the background.
    """
    if device.type != "cuda":
        for part in parts:
            yield [held[name].detach().to(device) for held, name in part]
        return
    with ThreadPoolExecutor(1) as pool:
        pipeline = _Pipeline(device, pool)
        steps: list[_Wanted] = [*parts, (), ()]
        for part in steps[:2]:
            pipeline.advance(part)
        for part in steps[2:]:
            yield pipeline.advance(part)


@dataclass(frozen=True, eq=False)
class _Gathered:
    """A piece that is copied to pinned memory: its tensors and their byte offsets
    there.
    """

    tensors: list[Tensor]
    places: list[int]
    size: int
    turn: int
    done: Future[None]


class _Pipeline:
    """Copies pieces from the host's memory to a GPU in two steps, both in the
    background.

    A thread gathers the piece in pinned memory; then a CUDA stream sends it in one
    packet. There are two pinned buffers, which grow to the largest piece: one is filled
    while the other is sent.
    """

    def __init__(self, device: torch.device, pool: ThreadPoolExecutor) -> None:
        self._device, self._pool = device, pool
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._free = [torch.cuda.Event(), torch.cuda.Event()]
        self._turn = 0
        self._gathered: _Gathered | None = None
        self._sent: tuple[_Gathered, Tensor] | None = None

    def advance(self, part: _Wanted) -> list[Tensor]:
        """Gather a piece, send the last one, and return the one before the last; empty
        at first.
        """
        now, gathered = self._sent, self._gathered
        self._sent = (gathered, self._send(gathered)) if gathered is not None else None
        tensors = [held[name].detach() for held, name in part]
        self._gathered = self._gather(tensors) if tensors else None
        return self._received(*now) if now is not None else []

    def _gather(self, tensors: list[Tensor]) -> _Gathered:
        """Begin to gather tensors; tensors on the device are not copied."""
        turn, self._turn = self._turn, 1 - self._turn
        places, size = [], 0
        for tensor in tensors:
            places.append(size)
            if tensor.device.type != self._device.type:
                size += (
                    -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
                )
        if len(self._buffers[turn]) < size:
            self._buffers[turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        held = [
            (tensor, _within(self._buffers[turn], place, tensor))
            for tensor, place in zip(tensors, places, strict=True)
            if tensor.device.type != self._device.type
        ]
        done = self._pool.submit(_fill, self._free[turn], held)
        return _Gathered(tensors, places, size, turn, done)

    def _send(self, gathered: _Gathered) -> Tensor:
        """Begin to copy the gathered tensors, and return the packet that receives
        them.
        """
        gathered.done.result()
        with torch.cuda.stream(self._stream):
            packet = self._buffers[gathered.turn][: gathered.size].to(
                self._device, non_blocking=True
            )
            self._free[gathered.turn].record(self._stream)
        return packet

    def _received(self, gathered: _Gathered, packet: Tensor) -> list[Tensor]:
        """Return the tensors on the device; computations with them wait for the
        copy.
        """
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._free[gathered.turn])
        # The allocator reuses the packet's memory only after the computations on this
        # stream.
        packet.record_stream(stream)
        return [
            tensor.to(self._device)
            if tensor.device.type == self._device.type
            else _within(packet, place, tensor)
            for tensor, place in zip(gathered.tensors, gathered.places, strict=True)
        ]


def _within(packet: Tensor, place: int, like: Tensor) -> Tensor:
    """Return a view of a packet's bytes with the dtype and shape of ``like``."""
    stop = place + like.numel() * like.element_size()
    return packet[place:stop].view(like.dtype).view(like.shape)


def _fill(free: torch.cuda.Event, held: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors to their places after the buffer's last packet has been sent."""
    free.synchronize()
    with torch.no_grad():
        for tensor, place in held:
            place.copy_(tensor)
