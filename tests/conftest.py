"""Settings of all test processes, made before torch is imported: one thread, wide terminals, no hub."""

from __future__ import annotations

import gc
import os

# Test processes share the cores; more threads than cores only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Messages with long paths stay on one line.
os.environ["COLUMNS"] = "1000"
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_finish() -> None:
    """Spare garbage collections the libraries: QFedAvg and Bulyan ask for one with every reply."""
    gc.collect()
    gc.freeze()
