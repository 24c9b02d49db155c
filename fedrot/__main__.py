"""The command ``fedrot``, also as ``python -m fedrot``.

It is served by ``fedrot.simulations``, which needs the extra ``simulation``.
"""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> None:
    """Run the command, or say what to install for it."""
    try:
        command = import_module("fedrot.simulations.cli.app")
    except ModuleNotFoundError as error:
        if error.name is not None:  # missing for another reason than that the extra is not installed
            raise
        sys.exit(str(error))
    command.main()


if __name__ == "__main__":
    main()
