"""The supported families of models, one module each."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

from fedrot.symmetry.family import Family


def _declared() -> Iterator[Family]:
    """Find what the modules of this package declare, so that a new family is a new module alone."""
    for found in walk_packages(__path__, f"{__name__}."):
        values = vars(import_module(found.name)).values()
        yield from (value for value in values if isinstance(value, Family))


#: Every supported family; each passes the contract in the tests.
FAMILIES: tuple[Family, ...] = tuple(dict.fromkeys(_declared()))
