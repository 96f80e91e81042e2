#!/usr/bin/env bash
# One run on a few machines that are reached by ssh. `--help` says the rest.
set -euo pipefail

usage() {
  cat <<'TEXT'
One run on machines that are reached by ssh, each with this checkout in the same folder.

  launch/ssh_cluster.sh --hosts FILE [flags] --config FILE ... [section.key=value ...]

  --hosts FILE      one machine a line, as ssh takes it (name or user@name); # begins a comment. The first is the head
  --head ADDRESS    how the others reach the head     default: the first host without its user
  --dir FOLDER      the checkout on the machines      default: the folder of this one
  --port P          Ray's port on the head; P+1 is used too     default: 6379
  --module NAME     the program     default: rlhf.grpo
  --deadline S      seconds to wait for the nodes     default: 600
  --                the rest belongs to the program; so does the first argument that is not listed here, and all after it

A new Ray token goes to every machine through ssh's standard input. The exit status is the program's. When this script
ends, on whatever way, or the connection breaks, so does everything that it started. SSH is the ssh command with flags.
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
hosts_file='' head='' dir=$root port=6379 flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit 0 ;;
    --hosts) hosts_file=${2:?--hosts needs a file} && shift 2 ;;
    --head) head=${2:?--head needs an address} && shift 2 ;;
    --dir) dir=${2:?--dir needs a folder} && shift 2 ;;
    --port) port=${2:?--port needs a number} && shift 2 ;;
    --module | --deadline) flags+=("$1" "${2:?$1 needs a value}") && shift 2 ;;
    --) shift && break ;;
    *) break ;;
  esac
done

fail() {
  printf 'ssh_cluster: %s\n' "$*" >&2
  exit 2
}

[ -n "$hosts_file" ] || fail '--hosts is missing: a file with one machine a line.'
[ -r "$hosts_file" ] || fail "--hosts $hosts_file: there is no such file."
mapfile -t hosts < <(sed -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' "$hosts_file")
[ ${#hosts[@]} -gt 0 ] || fail "--hosts $hosts_file: names no machine."
head=${head:-${hosts[0]#*@}}
read -r -a ssh <<<"${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4}"

# One argument as any POSIX shell reads it back.
quote() {
  local text
  for text in "$@"; do
    printf " '%s'" "${text//\'/\'\\\'\'}"
  done
}

HEAD_NOTICES_S=${HEAD_NOTICES_S:-30}
scratch=$(mktemp -d)
pids=()
inputs=()

# Closed inputs end the far sides, which takes the program its time; then ssh itself is ended.
# shellcheck disable=SC2329 # a trap calls it
finish() {
  local status=$? input pid
  trap - EXIT
  trap '' INT TERM HUP
  for input in ${inputs[@]+"${inputs[@]}"}; do
    exec {input}>&-
  done
  local patience=$((SECONDS + 90))
  for pid in ${pids[@]+"${pids[@]}"}; do
    while kill -0 "$pid" 2>/dev/null && [ "$SECONDS" -lt "$patience" ]; do
      sleep 0.2
    done
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  rm -rf "$scratch"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
for rank in "${!hosts[@]}"; do
  mkfifo "$scratch/$rank"
  command="cd $(quote "$dir") && IFS= read -r RAY_AUTH_TOKEN && export RAY_AUTH_TOKEN && exec launch/ray_node_setup.sh"
  command+=$(quote --rank "$rank" --nodes "${#hosts[@]}" --head "$head" --port "$port" --end-with-stdin)
  command+=$(quote ${flags[@]+"${flags[@]}"} -- "$@")
  # A shell of its own to read the command, whichever the login shell is.
  "${ssh[@]}" "${hosts[$rank]}" "bash -c $(quote "$command")" <"$scratch/$rank" &
  pids+=($!)
done
for rank in "${!hosts[@]}"; do
  # Opened here after all are started, so that none of them holds the input of another.
  exec {input}<>"$scratch/$rank"
  inputs+=("$input")
  printf '%s\n' "$token" >&"$input"
done

# A node that is lost once the run is under way is the head's business; one that never came is seen here.
status=0 lost=''
while kill -0 "${pids[0]}" 2>/dev/null; do
  for rank in "${!hosts[@]}"; do
    if [ -z "$lost" ] && ! kill -0 "${pids[$rank]}" 2>/dev/null && [ "$rank" != 0 ]; then
      wait "${pids[$rank]}" || status=$?
      lost=$SECONDS
    fi
  done
  if [ -n "$lost" ] && [ $((SECONDS - lost)) -ge "$HEAD_NOTICES_S" ]; then
    printf 'ssh_cluster: a machine ended with status %s while the head went on; its message is above.\n' "$status" >&2
    exit "$((status > 0 ? status : 1))"
  fi
  sleep 0.5
done
status=0
wait "${pids[0]}" || status=$?
exit "$status"
