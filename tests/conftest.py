"""Settings of all test processes, made before torch is imported: one thread, wide
terminals, no hub.
"""

import gc
import os
import tempfile

import pytest

# Test processes share the cores; more threads than cores only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Clients keep models between requests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fedrot-tests-")
# Messages with long paths stay on one line.
os.environ["COLUMNS"] = "1000"
os.environ["HF_HUB_OFFLINE"] = "1"
# Flower's simulations start a Ray of their own, and do not join a cluster that another
# test has started.
os.environ["RAY_ADDRESS"] = "local"
# Ray's workers would run at niceness 15, behind all other test processes: tests of Ray
# would time out.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112

#: The laboratory changes registries that other tests read: its tests run in processes
#: of their own, ``make lab``.
collect_ignore = (
    [] if "reproductions" in os.environ.get("FEDROT_PLUGINS", "") else ["reproductions"]
)


def pytest_collection_modifyitems(config, items):
    """Leave tests marked ``long`` to ``make test-all``."""
    if not os.environ.get("FEDROT_TEST_ALL"):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Spare garbage collections what is older than the module: Flower asks for many of
    them.
    """
    gc.collect()
    gc.freeze()
