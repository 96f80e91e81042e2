#!/usr/bin/env bash
# One run as a job of a Ray cluster that is up. `--help` says the rest.
set -euo pipefail

usage() {
  cat <<'TEXT'
One run as a job of a Ray cluster that is up, with this checkout as its working directory.

  launch/submit.sh [flags] --config FILE ... [section.key=value ...]

  --address URL    of the head's dashboard     default: RAY_API_SERVER_ADDRESS, or port 8265 of this machine
  --nodes N        nodes that must be there before the program starts     default: 1
  --module NAME    the program     default: rlhf.grpo
  --id ID          of the job      default: rlhf- with date, time and a number
  --no-wait        print the job's id instead of following its log
  --               the rest belongs to the program; so does the first argument that is not listed here, and all after it

The log follows until the job ends, also where the connection breaks on the way, and the exit status is the job's.
Ctrl-C stops the job. An --id that Ray knows already is refused, and the job that has it goes on.
The token is that of the cluster: RAY_AUTH_TOKEN, or the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token.
Ray uploads what git does not ignore (at most 500 MiB): configs and code, but not runs/. Data, model and run.dir are
paths or hub names that every node of the cluster reads. The package itself must be installed on every node, which is
checked before the program starts. JOB_PYTHON is the interpreter there (default python), PYTHON the one here.
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
address=${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}
id=rlhf-$(date +%Y%m%d-%H%M%S)-$$
nodes=1 wait=1 flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --address) address=${2:?--address needs a URL} && shift 2 ;;
    --nodes) nodes=${2:?--nodes needs a number} && shift 2 ;;
    --module) flags+=("$1" "${2:?$1 needs a value}") && shift 2 ;;
    --id) id=${2:?--id needs a name} && shift 2 ;;
    --no-wait) wait='' && shift ;;
    --) shift && break ;;
    *) break ;;
  esac
done

fail() {
  printf 'submit: %s\n' "$*" >&2
  exit 2
}

python=${PYTHON:-$root/.venv/bin/python}
ray=${RAY:-$(dirname "$python")/ray}
command -v "$ray" >/dev/null || ray=ray
command -v "$ray" >/dev/null || fail "no ray command beside $python or on PATH: activate the environment or set PYTHON."
command -v "$python" >/dev/null || python=$(dirname "$(command -v "$ray")")/python
if [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
  fail "no Ray token: set RAY_AUTH_TOKEN to that of the cluster, or copy the head's ~/.ray/auth_token here."
fi
export RAY_AUTH_MODE=token

SUBMISSION_GRACE_S=60
submitting='' submitted='' following='' interrupted=''

# A signal stops the job, and nothing else does: not a broken connection, nor an id that belongs to another job.
# shellcheck disable=SC2329 # a trap calls it
finish() {
  local status=$?
  trap - EXIT
  trap '' INT TERM HUP
  if [ -n "$interrupted" ]; then
    [ -z "$following" ] || kill "$following" 2>/dev/null || true
    [ -z "$submitting" ] || end_of_submission
    if [ -n "$submitted" ]; then
      printf 'submit: stopping job %s\n' "$id" >&2
      "$ray" job stop --address "$address" "$id" >/dev/null 2>&1 || true
    fi
  fi
  exit "$status"
}

# Only its end tells whether the job is there.
# shellcheck disable=SC2329 # a trap calls it
end_of_submission() {
  local patience=$((SECONDS + SUBMISSION_GRACE_S))
  printf 'submit: stopping job %s once it is known whether Ray took it\n' "$id" >&2
  while kill -0 "$submitting" 2>/dev/null && [ "$SECONDS" -lt "$patience" ]; do
    sleep 0.2
  done
  if kill -KILL "$submitting" 2>/dev/null; then
    printf 'submit: Ray did not answer in %s s; ask it with: ray job status --address %s %s\n' \
      "$SUBMISSION_GRACE_S" "$address" "$id" >&2
  fi
  ! wait "$submitting" 2>/dev/null || submitted=1
}
trap finish EXIT
trap 'interrupted=1; exit 130' INT
trap 'interrupted=1; exit 143' TERM
trap 'interrupted=1; exit 129' HUP

submit=(--submission-id "$id" --no-wait --working-dir "$root")
submit+=(--runtime-env-json '{"excludes": [".git", "/runs", "/tests"]}')
entry=("${JOB_PYTHON:-python}" launch/nodes.py run --nodes "$nodes" ${flags[@]+"${flags[@]}"} -- "$@")
# Not with the signals of a terminal, which go to all that it started: a submission that is cut short may have arrived.
(
  trap '' INT TERM HUP
  exec "$ray" job submit --address "$address" "${submit[@]}" -- "${entry[@]}"
) &
submitting=$!
status=0
wait "$submitting" || status=$?
submitting=''
if [ "$status" != 0 ]; then
  printf 'submit: Ray did not take job %s; its message is above\n' "$id" >&2
  exit "$status"
fi
submitted=1
if [ -z "$wait" ]; then
  printf '%s\n' "$id"
  exit 0
fi
"$python" "$root/launch/nodes.py" follow-job "$address" "$id" &
following=$!
wait "$following" || status=$?
exit "$status"
