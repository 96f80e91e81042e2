#!/usr/bin/env bash
# One run as a job of a Ray cluster that is up. `--help` says the rest.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3
exec "$python" "$root/launch/job.py" "$@"
