"""Spaces that cross layers, such as the residual stream, and the axes in them.

A space is a name: ``residual`` is the residual stream, other spaces are hidden units
between the last layer and the logits. Each axis of a tensor has an entry, which is a
space or None. An entry in bars, ``|residual|``, is permuted without signs: the gain of
a norm. An entry after an angle, ``<residual``, is read: the inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedrot.symmetry.actions import Permutation

RESIDUAL = "residual"

#: An entry of an axis: a space, also in bars or after an angle, or None.
Entry = str | None

#: By tensor, the entry of each of its axes.
Axes = Mapping[str, tuple[Entry, ...]]

#: By norm, the weights that read it; empty for the last norm.
Norms = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Space:
    """A family's description of one space.

    Attributes:
        action: the action on the space, with signs under RMSNorm and odd activations.
        present: a tensor; if the model lacks it, the space is the residual stream.
        absent: a tensor; if the model has it, the space is the residual stream.
    """

    action: type[Permutation] = Permutation
    present: str = ""
    absent: str = ""

    def exists(self, names: Collection[str]) -> bool:
        """Return whether a model with these tensors has the space as a separate one."""
        return (not self.present or self.present in names) and self.absent not in names


def read(space: Entry) -> Entry:
    """Return the entry of an axis that reads the space."""
    return space and f"<{space}"


def linear(module: str, out: Entry, into: Entry) -> Axes:
    """Return the axes of a ``Linear`` module that reads ``into`` and writes ``out``."""
    return {f"{module}.weight": (out, read(into)), f"{module}.bias": (out,)}


def norm(module: str, space: str = RESIDUAL) -> Axes:
    """Return the axes of a ``LayerNorm`` or ``RMSNorm``; no sign acts on its gain."""
    return {f"{module}.weight": (f"|{space}|",), f"{module}.bias": (space,)}


def embedding(module: str, space: str = RESIDUAL) -> Axes:
    """Return the axes of an ``Embedding`` module."""
    return {f"{module}.weight": (None, space)}


def merged(*axes: Axes) -> Axes:
    """Return all entries in one dictionary."""
    return {name: spaces for part in axes for name, spaces in part.items()}


def on_residual(axes: Axes, spaces: Collection[str]) -> Axes:
    """Return the axes with ``spaces`` replaced by the residual stream."""

    def renamed(entry: Entry) -> Entry:
        if entry and space_of(entry) in spaces:
            return entry.replace(space_of(entry), RESIDUAL)
        return entry

    return {name: tuple(map(renamed, entries)) for name, entries in axes.items()}


def space_of(entry: str) -> str:
    """Return the space of an entry, without bars or angle."""
    return entry.strip("|<")


def spaces_of(axes: Axes) -> set[str]:
    """Return the spaces in the entries of the axes."""
    return {space_of(entry) for entries in axes.values() for entry in entries if entry}


def read_to_the_end(axes: Axes) -> set[str]:
    """Return the spaces that task heads map, also in steps, to outputs without a space.

    A space that is itself an output of the model (a bare encoder's hidden states, a
    pooler without a task head) must not be moved, because the output would be moved
    too.
    """
    ends: set[str] = set()
    while True:
        before = len(ends)
        for entries in axes.values():
            if len(entries) == 2:
                out, into = (entry and space_of(entry) for entry in entries)
                if into and out != into and (not out or out in ends):
                    ends.add(into)
        if len(ends) == before:
            return ends
