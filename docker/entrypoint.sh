#!/usr/bin/env bash
# The container's command: arguments of the program run it; anything that is a command on PATH is run instead, which is
# how compose.yaml, KubeRay and a person start something else (ray, bash, launch/ray_node_setup.sh).
set -euo pipefail

if [ $# -gt 0 ] && [[ $1 != -* && $1 != *=* ]] && command -v "$1" >/dev/null; then
  exec "$@"
fi
exec python -m rlhf.grpo "$@"
