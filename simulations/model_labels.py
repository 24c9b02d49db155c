"""Labels of saved models: their names, and which output is which class of data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedrot.simulations.data.read import clean
from fedrot.simulations.data.spelling import reading
from fedrot.simulations.scenario import Settings


def named_by_numbers(stored: Settings) -> Settings:
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

    Names decide: equal ones, else those that a person reads as one (``reading``).
    Without names of outputs (``LABEL_0``), or of as many classes (``0``) if no output
    has one of these names, numbers decide. One output, a score, needs no name.

    Example: ``places_of(["b", "a"], ["A", "b", "c"])`` is ``([1, 0, -1], False)``.
    """
    count = len(labels)
    if count == len(classes) == 1:
        return [0], False
    numbers = {str(number): number for number in range(count)}
    for same in (clean, reading):
        outputs = [same(label) for label in labels]
        wanted = [same(name) for name in classes]
        places = [
            outputs.index(name)
            if outputs.count(name) == wanted.count(name) == 1
            else -1
            for name in wanted
        ]
        if -1 not in places:
            return places, False
    unnamed = [label.strip().lower() for label in labels] == [
        f"label_{number}" for number in numbers
    ]
    named = [*map(clean, classes)]
    if {*places} != {-1} or not (unnamed or named == [*numbers]):
        return places, False
    if len(classes) == count:
        return [*range(count)], True
    places = [numbers.get(name, -1) for name in named]
    return places, -1 not in places
