"""The solvers of the groups' actions, one module each."""

from importlib import import_module
from pkgutil import iter_modules

# Solvers register themselves when their module is imported: a new solver is a new module alone.
for _found in iter_modules(__path__, f"{__name__}."):
    import_module(_found.name)
