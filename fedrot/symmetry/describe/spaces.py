"""Spaces that cross layers, such as the residual stream: which tensor axis lies in which space.

A space is a name: ``residual`` is the residual stream, others are hidden units between the last
layer and the logits. A tensor's entry has one space, or None, per axis. A space in bars,
``|residual|``, is permuted there but keeps its signs: the gain of a norm. A space behind an angle,
``<residual``, is read there: the inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedrot.symmetry.actions import Permutation

RESIDUAL = "residual"

#: By tensor, the space on each of its axes.
Axes = Mapping[str, tuple[str | None, ...]]


@dataclass(frozen=True)
class Space:
    """What a family says about one space.

    Attributes:
        kind: what may act on it. Signs pass through RMSNorm and odd activations.
        present: a tensor without which the space is the residual stream.
        absent: a tensor with which the space is the residual stream.
    """

    kind: type[Permutation] = Permutation
    present: str = ""
    absent: str = ""

    def exists(self, names: Collection[str]) -> bool:
        """Whether a model with these tensors has the space beside the residual stream."""
        return (not self.present or self.present in names) and self.absent not in names


def read(space: str | None) -> str | None:
    """Return the entry of an axis that reads the space."""
    return space and f"<{space}"


def linear(module: str, out: str | None, into: str | None) -> Axes:
    """Return the axes of a ``Linear`` module that reads the space ``into`` and writes ``out``."""
    return {f"{module}.weight": (out, read(into)), f"{module}.bias": (out,)}


def norm(module: str, space: str = RESIDUAL) -> Axes:
    """Return the axes of a ``LayerNorm`` or ``RMSNorm`` module; signs pass through its gain."""
    return {f"{module}.weight": (f"|{space}|",), f"{module}.bias": (space,)}


def embedding(module: str, space: str = RESIDUAL) -> Axes:
    """Return the axes of an ``Embedding`` module."""
    return {f"{module}.weight": (None, space)}


def merged(*axes: Axes) -> Axes:
    """Return all entries in one dictionary."""
    return {name: spaces for part in axes for name, spaces in part.items()}


def on_residual(axes: Axes, spaces: Collection[str]) -> Axes:
    """Return the axes with the residual stream in place of ``spaces``."""

    def placed(entry: str | None) -> str | None:
        if entry is None or space_of(entry) not in spaces:
            return entry
        return entry.replace(space_of(entry), RESIDUAL)

    return {name: tuple(map(placed, entries)) for name, entries in axes.items()}


def space_of(entry: str) -> str:
    """Return the space of an entry, without bars or angle."""
    return entry.strip("|<")


def spaces_of(axes: Axes) -> set[str]:
    """Return the spaces that the axes name."""
    return {space_of(entry) for entries in axes.values() for entry in entries if entry}


def read_to_the_end(axes: Axes) -> set[str]:
    """Return the spaces that the task heads lead to outputs in coordinates of their own.

    A space that is itself an output of the model (a bare encoder's hidden states, a pooler that
    nothing reads) may not be moved: the outputs would be.
    """
    ends: set[str] = set()
    entries = (tuple(e and space_of(e) for e in both) for both in axes.values() if len(both) == 2)
    matrices = list(entries)
    while True:
        found = {into for out, into in matrices if into and out != into and (out is None or out in ends)}
        if found <= ends:
            return ends
        ends |= found
