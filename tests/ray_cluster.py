"""A Ray cluster on this machine in a process of its own: Ray reads its token once a process, a test sets its own.

Prints one line of JSON (`address`, `nodes`: a list of [id, ip]), kills a node for each line `kill INDEX` on its
standard input (and says `killed`), and ends the cluster when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def ray_folder() -> Iterator[str]:
    """A RAY_TMPDIR that is gone afterwards. Its path is short: that of a socket below it has at most 107 characters."""
    folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(int(sys.argv[1]))]
        cluster_nodes = {"address": cluster.address, "nodes": [[node.node_id, node.node_ip_address] for node in nodes]}
        print(json.dumps(cluster_nodes), flush=True)
        for line in sys.stdin:
            cluster.remove_node(nodes[int(line.removeprefix("kill "))], allow_graceful=False)
            print("killed", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
