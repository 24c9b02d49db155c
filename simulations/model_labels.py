"""Labels of saved models: their names, and which output is which class of data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedrot.simulations.scenario import Settings


def named_by_numbers(stored: Settings) -> dict[str, Any]:
    """Return the labels of a stored configuration if ``label2id`` alone names them."""
    names = stored.get("id2label") or {}
    numbers = stored.get("label2id") or {}
    labels = {int(number): name for name, number in numbers.items()}
    unnamed = all(str(name) == f"LABEL_{number}" for number, name in names.items())
    count = len(names) or len(labels)
    if not labels or not unnamed or {*labels} != {*range(count)}:
        return {}
    return {"id2label": labels}


def labels_of(config: Any) -> list[str]:
    """Return the names of a task head's outputs, in their order."""
    return [str(name) for _, name in sorted(config.id2label.items())]


def places_of(labels: Sequence[str], classes: Sequence[str]) -> tuple[list[int], bool]:
    """Return the output of each class, -1 if it has none, and whether by position.

    Names decide, in any case. Without names of outputs (``LABEL_0``), or of as many
    classes (``0``), numbers decide. One output, a score, needs no name.

    Example: ``places_of(["b", "a"], ["A", "b", "c"])`` is ``([1, 0, -1], False)``.
    """
    if len(labels) == len(classes) == 1:
        return [0], False
    outputs = [name.strip().casefold() for name in labels]
    wanted = [name.strip().casefold() for name in classes]
    numbers = [*map(str, range(len(outputs)))]
    unnamed = outputs == [f"label_{n}" for n in numbers] or wanted == numbers
    unnamed = unnamed and not {*wanted} <= {*outputs}
    if unnamed:
        outputs = wanted if len(wanted) == len(outputs) else numbers
    places = [
        outputs.index(name) if outputs.count(name) == wanted.count(name) == 1 else -1
        for name in wanted
    ]
    return places, unnamed and -1 not in places
