"""A cluster on this machine."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def two_nodes():
    """Start two Ray nodes of one core each; return their address."""
    from ray._private.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    # Cluster also writes into Ray's default folder, which nobody has made on a new
    # machine.
    Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
    # In a folder of their own: other tests run beside this one, and Ray joins the
    # cluster that its folder names. A short one: it becomes part of the names of
    # sockets.
    with tempfile.TemporaryDirectory(
        prefix="ray-", ignore_cleanup_errors=True
    ) as folder:
        head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1)
        try:
            yield cluster.address
        finally:
            cluster.shutdown()
