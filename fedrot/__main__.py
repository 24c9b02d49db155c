"""The command ``fedrot``, also as ``python -m fedrot``.

Its code is in ``fedrot.simulations``, which needs the extra ``simulation``.
"""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> None:
    """Run the command; exit with what to install if the extra is missing."""
    try:
        command = import_module("fedrot.simulations.cli.app")
    except ModuleNotFoundError as error:
        # The extra is installed, another module is missing.
        if error.name is not None:
            raise
        sys.exit(str(error))
    command.main()


if __name__ == "__main__":
    main()
