"""A Ray cluster on this machine in a process of its own: Ray reads its token once a process, a test sets its own.

Prints one line of JSON (`address`, `nodes`: a list of [id, ip]), kills a node for each line `kill INDEX` on its
standard input (and says `killed`), and ends the cluster when its input ends.
"""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(int(sys.argv[1]))]
        about = {"address": cluster.address, "nodes": [[node.node_id, node.node_ip_address] for node in nodes]}
        print(json.dumps(about), flush=True)
        for line in sys.stdin:
            cluster.remove_node(nodes[int(line.removeprefix("kill "))], allow_graceful=False)
            print("killed", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
