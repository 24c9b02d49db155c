"""``load_plugins``: modules that add anchors, aggregations, strategies or sections of reports."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module

#: Environment variable with names of modules, separated by commas. Worker processes have it, too.
PLUGINS = "FEDROT_PLUGINS"


@cache
def load_plugins() -> None:
    """Import the modules that the environment variable lists, once in every process."""
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        import_module(name)
