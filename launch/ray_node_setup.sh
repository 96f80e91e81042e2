#!/usr/bin/env bash
# One node of a Ray cluster that this run makes. `--help` says the rest.
set -euo pipefail

usage() {
  cat <<'TEXT'
One node of a cluster: run it on every node, by hand or from any launcher.

  launch/ray_node_setup.sh --rank R --nodes N --head ADDRESS [flags] --config FILE ... [section.key=value ...]

Rank 0 is the head: it waits for the others, checks that all have the same versions, starts Ray and runs the program;
the others join and wait. All end when the program ends, with its exit status. When a node is lost the run ends with 1.

  --rank R          this node, 0 to N-1     default: NODE_RANK, or SLURM_PROCID
  --nodes N         number of nodes         default: NUM_NODES, or SLURM_NNODES, or 1
  --head ADDRESS    name or address of rank 0, as the others reach it     default: HEAD_ADDRESS
  --port P          Ray's port on the head; P+1 is used too     default: HEAD_PORT, or 6379
  --module NAME     the program     default: rlhf.grpo
  --deadline S      seconds to wait for the nodes, and for Ray on each     default: 600
  --ray-args ARGS   more flags for `ray start` on this node, in one argument     default: RAY_ARGS
  --status-file F   rank 0 writes the status to it, unless a signal ends it first
  --end-with-stdin  end when standard input is closed
  --                the rest belongs to the program; so does the first argument that is not listed here, and all after it

RAY_AUTH_TOKEN, or the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, is the token that all nodes share. Where neither
is, rank 0 makes the file; the others wait for it, which is enough where the home folder is shared.
PYTHON is the interpreter with the package: default .venv/bin/python of this checkout, or python3. RAY is the ray command.
RAY_TMPDIR (default /tmp) is where Ray keeps sockets and logs; the logs of a run that failed stay there.
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
rank=${NODE_RANK:-${SLURM_PROCID:-}}
nodes=${NUM_NODES:-${SLURM_NNODES:-1}}
head=${HEAD_ADDRESS:-}
port=${HEAD_PORT:-6379}
flags=()

while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --rank) rank=${2:?--rank needs a number} && shift 2 ;;
    --nodes) nodes=${2:?--nodes needs a number} && shift 2 ;;
    --head) head=${2:?--head needs an address} && shift 2 ;;
    --port) port=${2:?--port needs a number} && shift 2 ;;
    --module | --deadline | --status-file) flags+=("$1" "${2:?$1 needs a value}") && shift 2 ;;
    --ray-args) RAY_ARGS=${2?--ray-args needs a value} && shift 2 ;;
    --end-with-stdin) flags+=("$1") && shift ;;
    --) shift && break ;;
    *) break ;;
  esac
done

if [ -z "$rank" ] && [ "$nodes" = 1 ]; then
  rank=0
fi
if [ -z "$rank" ]; then
  printf 'ray_node_setup: --rank is missing: number the nodes 0 to %s.\n' "$((nodes - 1))" >&2
  exit 2
fi
if [ -z "$head" ] && [ "$rank" != 0 ]; then
  printf 'ray_node_setup: --head is missing: name the node of rank 0.\n' >&2
  exit 2
fi

python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v "${PYTHON:-python3}") || {
  printf 'ray_node_setup: %s: no Python on %s. Run make setup-gpu there, or set PYTHON.\n' "${PYTHON:-python3}" "$(hostname)" >&2
  exit 2
}
exec "$python" "$root/launch/nodes.py" up --rank "$rank" --nodes "$nodes" --head "${head:-127.0.0.1}" --port "$port" \
  --ray-args="${RAY_ARGS:-}" ${flags[@]+"${flags[@]}"} -- "$@"
