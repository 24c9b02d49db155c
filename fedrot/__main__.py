"""``python -m fedrot``: the command ``fedrot``, found as an installed script is.

The library does not know who serves the command; the distribution's metadata do.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points


def main() -> None:
    """Run the command, or say what to install for it."""
    scripts = entry_points(group="console_scripts", name="fedrot")
    if not scripts:
        sys.exit("fedrot is not installed, so it has no command: pip install 'fedrot[simulation]'")
    try:
        command = next(iter(scripts)).load()
    except ModuleNotFoundError as error:
        if error.name is not None:  # missing for another reason than that the extra is not installed
            raise
        sys.exit(str(error))
    command()


if __name__ == "__main__":
    main()
