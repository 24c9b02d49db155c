"""Which space of the model lies on which axis of which tensor, for spaces that cross layers.

A space is a name: ``residual`` is the residual stream, others are hidden units between the last
layer and the logits. A tensor's entry has one space, or None, per axis.
"""

from __future__ import annotations

from collections.abc import Mapping

RESIDUAL = "residual"

Axes = dict[str, tuple[str | None, ...]]


def linear(module: str, out: str | None, into: str | None) -> Axes:
    """Return the axes of a ``Linear`` module that reads the space ``into`` and writes ``out``."""
    return {f"{module}.weight": (out, into), f"{module}.bias": (out,)}


def norm(module: str, space: str) -> Axes:
    """Return the axes of a ``LayerNorm`` (or RMSNorm) module."""
    return {f"{module}.weight": (space,), f"{module}.bias": (space,)}


def embedding(module: str, space: str) -> Axes:
    """Return the axes of an ``Embedding`` module."""
    return {f"{module}.weight": (None, space)}


def merged(*axes: Mapping[str, tuple[str | None, ...]]) -> Axes:
    """Return all entries in one dictionary."""
    return {name: spaces for part in axes for name, spaces in part.items()}


def spaces_of(axes: Axes) -> set[str]:
    """Return the spaces that the axes name."""
    return {space for spaces in axes.values() for space in spaces if space}


def read_to_the_end(axes: Mapping[str, tuple[str | None, ...]]) -> set[str]:
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
