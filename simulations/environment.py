"""Environment variables of the commands and of the processes that they start;
plug-ins.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module

#: Names of modules that add anchors, aggregations, strategies or sections of reports,
#: with commas between them. Worker processes have it, too.
PLUGINS = "FEDROT_PLUGINS"
#: Variables to set before Flower and Ray are imported: no telemetry, no update checks,
#: less output.
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default, niceness 15, lets every other process of the machine go first.
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def prepare_environment() -> None:
    """Set the variables of ``ENVIRONMENT`` that are not set; call before importing
    Flower.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@cache
def load_plugins() -> None:
    """Import the modules that ``PLUGINS`` lists, once in every process."""
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        import_module(name)
