"""How the best element of each group is found: coordinate descent, and one module per solver."""

from importlib import import_module
from pkgutil import iter_modules

# Solvers register themselves when their module is imported: a new solver is a new module alone.
for _found in iter_modules(__path__, f"{__name__}."):
    import_module(_found.name)
