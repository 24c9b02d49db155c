"""``fedrot.simulations``: comparisons of aligned and plain averaging with Flower's
apps.
"""

from importlib.util import find_spec

#: How to install what the commands need.
INSTALL = (
    "Install the extra 'simulation': in a checkout, pip install -c constraints.txt "
    "'.[simulation]'"
)

# The extra 'flower' brings these: enough for help, and for errors about options.
_missing = [name for name in ("pydantic", "rich", "typer") if not find_spec(name)]
if _missing:
    raise ModuleNotFoundError(
        f"The fedrot commands need {', '.join(_missing)}. {INSTALL}"
    )
