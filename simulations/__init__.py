"""The simulation harness: comparisons of aligned and plain averaging with Flower's apps."""

from importlib.util import find_spec

_missing = [name for name in ("flwr", "ray", "transformers", "pydantic", "typer") if not find_spec(name)]
if _missing:
    raise ModuleNotFoundError(
        f"The fedrot commands need {', '.join(_missing)}. Install the extra 'simulation': in a "
        "checkout, pip install -c constraints.txt '.[simulation]'"
    )
