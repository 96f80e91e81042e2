#!/usr/bin/env bash
# Healthy: the package and its vLLM plug-in are installed and, where this container belongs to a cluster, its head answers.
set -euo pipefail
cd "$(dirname "$0")/.."

python -c 'import importlib.metadata as m, sys; sys.exit("rlhf" not in m.entry_points(group="vllm.general_plugins").names)'
[ -z "${HEAD_ADDRESS:-}" ] || ray health-check --address "$HEAD_ADDRESS:${HEAD_PORT:-6379}"
