#!/usr/bin/env bash
# One node of a Ray cluster that is made for one run. `--help` says the rest.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v "${PYTHON:-python3}") || {
  printf 'ray_node_setup: %s: no Python on %s. Run make setup-gpu there, or set PYTHON.\n' "${PYTHON:-python3}" "$(hostname)" >&2
  exit 2
}
exec "$python" "$root/launch/nodes.py" up "$@"
