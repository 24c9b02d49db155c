"""Which space of the model lies on which axis of which tensor, for spaces that cross layers.

A space is a name: ``residual`` is the residual stream, others are hidden units between the last
layer and the logits. A tensor's entry has one space, or None, per axis; a space in bars,
``|residual|``, is permuted there but keeps its signs.
"""

from __future__ import annotations

from collections.abc import Mapping

RESIDUAL = "residual"

#: By tensor, the space on each of its axes.
Axes = Mapping[str, tuple[str | None, ...]]


def linear(module: str, out: str | None, into: str | None) -> Axes:
    """Return the axes of a ``Linear`` module that reads the space ``into`` and writes ``out``."""
    return {f"{module}.weight": (out, into), f"{module}.bias": (out,)}


def norm(module: str, space: str = RESIDUAL) -> Axes:
    """Return the axes of a ``LayerNorm`` or ``RMSNorm`` module; signs pass through its gain."""
    return {f"{module}.weight": (f"|{space}|",), f"{module}.bias": (space,)}


def embedding(module: str, space: str = RESIDUAL) -> Axes:
    """Return the axes of an ``Embedding`` module."""
    return {f"{module}.weight": (None, space)}


def merged(*axes: Axes) -> Axes:
    """Return all entries in one dictionary."""
    return {name: spaces for part in axes for name, spaces in part.items()}


def space_of(entry: str) -> str:
    """Return the space of an entry, with bars or without."""
    return entry.strip("|")


def spaces_of(axes: Axes) -> set[str]:
    """Return the spaces that the axes name."""
    return {space_of(entry) for entries in axes.values() for entry in entries if entry}


def read_to_the_end(axes: Axes) -> set[str]:
    """Return the spaces that the task heads lead to outputs in coordinates of their own.

    A space that is itself an output of the model (a bare encoder's hidden states, a pooler that
    nothing reads) may not be moved: the outputs would be.
    """
    ends: set[str] = set()
    matrices = [spaces for spaces in axes.values() if len(spaces) == 2]
    while True:
        found = {into for out, into in matrices if into and out != into and (out is None or out in ends)}
        if found <= ends:
            return ends
        ends |= found
