"""``TASKS``, the registry of tasks; each task is a class in a file of this folder."""

from __future__ import annotations

from fedrot.simulations.tasks.objective import Objective

#: Every task by name. ``simulations.experiment`` adds them, since tasks import readers
#: of data, which look traits up here.
TASKS: dict[str, type[Objective]] = {}


def named_tasks(trait: str) -> list[str]:
    """Return the names of the tasks with a trait, such as ``classifies``."""
    return [name for name, task in TASKS.items() if getattr(task, trait)]
