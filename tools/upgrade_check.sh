#!/usr/bin/env bash
# Tests this project with the newest releases of its packages that resolve together, in a scratch environment.
#
#   tools/upgrade_check.sh [FOLDER]     default: runs/upgrade-check; what is there is replaced
#
# In a copy of the tracked files the upper bounds of pyproject.toml are removed. The output names the packages that
# other packages hold back, and the tests that fail. The exit status is 1 if the set-up or a test fails.
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=${1:-runs/upgrade-check}
rm -rf "$scratch"
mkdir -p "$scratch/tree"
git ls-files -z --deduplicate | while IFS= read -r -d '' file; do
  [ ! -e "$file" ] || cp --parents "$file" "$scratch/tree"
done
scratch=$(cd "$scratch" && pwd)
cd "$scratch/tree"
git init --quiet && git add --all # some tests list the committed files
sed -Ei '/^requires-python/! s/(>=[^",]+),<[0-9.]+"/\1"/' pyproject.toml
export VENV=$scratch/env OMP_NUM_THREADS=1
tools/setup.sh cpu dev || { echo "upgrade-check: the newest releases do not install together; the message is above." >&2; exit 1; }

echo "--- packages of pyproject.toml that are older than their newest release: other packages hold them back"
names=$(sed -En 's/^ +"([a-z-]+)[[>].*/\1/p' pyproject.toml | paste -sd'|')
"$VENV/bin/python" -m uv pip list --outdated --python "$VENV/bin/python" | grep -E "^($names|Package|vllm.*) " || true

status=0
for tests in "private" "not private and not stack and not slow and not registry and not faults"; do
  echo "--- tests: $tests"
  "$VENV/bin/python" -m pytest -q -n 2 --dist loadscope -m "$tests" || status=1
done
exit "$status"
