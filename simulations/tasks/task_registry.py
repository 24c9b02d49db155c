"""``TASKS``, the registry of tasks; each task is a class in a file of this folder."""

from __future__ import annotations

from typing import TypeVar

from fedrot.simulations.scenario import Scenario
from fedrot.simulations.tasks.objective import EncodedData, Objective

Registered = TypeVar("Registered", bound=Objective)

#: Every task by name. ``simulations.experiment`` imports the files of the tasks, and a
#: file registers its classes.
TASKS: dict[str, type[Objective]] = {}


def register(task: type[Registered]) -> type[Registered]:
    """Add a task to ``TASKS``; a decorator of its class."""
    TASKS[task.name] = task
    return task


def named_tasks(trait: str) -> list[str]:
    """Return the names of the tasks with a trait, such as ``classifies``."""
    return [name for name, task in TASKS.items() if getattr(task, trait)]


def read_encoded(scenario: Scenario) -> EncodedData:
    """Return the data of a scenario, and its training and held-out rows encoded."""
    return TASKS[scenario.task].read(scenario)
