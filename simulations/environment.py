"""Environment variables of the commands and of the processes that they start."""

from __future__ import annotations

import os

#: Variables to set before Flower and Ray are imported: no telemetry, no update checks, less output.
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
    """Set the variables of ``ENVIRONMENT`` that are not set; call before importing Flower."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
