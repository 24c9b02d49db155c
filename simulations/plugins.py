"""``load_plugins``: modules that add anchors, aggregations, arms, grids or sections of reports."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module

#: Environment variable: names of modules, separated by commas. Workers inherit it, or receive it.
PLUGINS = "FEDROT_PLUGINS"


@cache
def load_plugins() -> None:
    """Import the modules that the environment variable names, once in every process."""
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        import_module(name)
