#!/usr/bin/env bash
# Makes the environment and installs the project into it, editable. Quick when nothing changed.
#
#   tools/setup.sh [cpu | gpu] [EXTRA ...]     without a kind ("" before an EXTRA): that of the environment, or cpu
#
# An EXTRA of pyproject.toml adds its packages, such as dev for the tests. What was added before stays.
#
# PYTHON  interpreter that a new environment is made with   default: the newest suitable 3.11 to 3.13 on PATH
# VENV    folder of the environment                         default: .venv
# PROJECT a wheel to install                                default: this checkout, editable
# Packages come from where pip's own settings say (index, extra index, links, certificate): uv is told the same.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
UV_RANGE='uv>=0.13,<1'
CPU_NEEDS_GIB=5  # the environment takes 3.7 on disk
GPU_NEEDS_GIB=16 # CUDA libraries, torch and vllm built for it
MIN_DRIVER=580   # the wheels are built for CUDA 13
MIN_CAPABILITY=8 # bfloat16 and flash attention
MIN_MINOR=11     # of Python 3, as in pyproject.toml
MAX_MINOR=13

say() { printf 'setup: %s\n' "$*"; }

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# --- pip's settings ---

# Value of one of pip's settings; what the environment says wins over files.
pip_setting() {
  local scope value
  for scope in ':env:' install global; do
    value=$(sed -n "s/^$scope\.$1='\(.*\)'\$/\1/p" <<<"$pip_settings")
    if [ -n "$value" ]; then
      printf '%s' "${value//\\n/ }"
      return
    fi
  done
}

# The first folder among pip's links that holds a CPU build of a package ($1) for this Python ($2, such as cp311).
local_cpu_wheel() {
  local place
  for place in $(pip_setting find-links); do
    place=${place#file://}
    if compgen -G "$place/$1-*[+B]cpu-$2-*.whl" >/dev/null; then
      printf '%s' "$place"
      return
    fi
  done
}

# Tell uv what pip was told. A variable of uv's that is set already stays as it is.
follow_pip() {
  local links index more certificate
  links=$(pip_setting find-links)
  index=$(pip_setting index-url)
  more=$(pip_setting extra-index-url)
  certificate=$(pip_setting cert)
  [ -z "$links" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-${links// /,}}"
  [ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
  if [ -n "$more" ]; then
    export UV_INDEX="${UV_INDEX:-$more}"
    export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" # pip takes the best version of all its indexes
  fi
  [ -z "$certificate" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$certificate}"
}

# --- what the machine has ---

# Print "TAG PROBLEM" of an interpreter: its wheel tag, such as cp311, and why it will not do, empty when it will.
probe_python() {
  "$1" - "$MIN_MINOR" "$MAX_MINOR" 2>/dev/null <<'PY' || printf 'none does not run\n'
import os, sys, sysconfig
low, high = int(sys.argv[1]), int(sys.argv[2])
include = sysconfig.get_path("include") or ""
version = "%d.%d" % sys.version_info[:2]
try:
    import ensurepip, venv
    has_venv = True
except ImportError:
    has_venv = False
problem = ""
if not (3, low) <= sys.version_info[:2] <= (3, high):
    problem = "is Python %s; 3.%d to 3.%d is needed" % (version, low, high)
elif not has_venv:
    problem = "has no venv module: install it (on Debian and Ubuntu the package python%s-venv)" % version
elif not os.path.exists(os.path.join(include, "Python.h")):
    problem = "has no headers, which DeepSpeed's op needs: install python%s-dev (Debian and Ubuntu) or the like" % version
print("cp%d%d %s" % (sys.version_info[0], sys.version_info[1], problem))
PY
}

# Print the interpreter to use: the newest that will do, or before it the newest that a CPU torch at hand is made for.
find_python() {
  local name candidate tag problem usable='' first_problem=''
  local names=(python3 python)
  for name in $(seq "$MIN_MINOR" "$MAX_MINOR"); do
    names=("python3.$name" "${names[@]}")
  done
  [ -z "${PYTHON:-}" ] || names=("$PYTHON")
  while read -r candidate; do
    read -r tag problem < <(probe_python "$candidate")
    if [ -n "$problem" ]; then
      [ "$tag" = none ] || first_problem=${first_problem:-$candidate $problem}
    elif [ "$kind" = cpu ] && [ -n "$(local_cpu_wheel torch "$tag")" ]; then
      printf '%s' "$candidate"
      return
    else
      usable=${usable:-$candidate}
    fi
  done < <(type -aP "${names[@]}" || true)
  if [ -z "$usable" ]; then
    fail "no Python 3.$MIN_MINOR to 3.$MAX_MINOR to make $VENV with: ${first_problem:-${PYTHON:-python3} does not run}."
  fi
  printf '%s' "$usable"
}

check_machine() {
  command -v "${CXX:-c++}" >/dev/null ||
    fail "no C++ compiler (${CXX:-c++}), which DeepSpeed's op needs: install g++ (on Debian and Ubuntu build-essential), or name one with CXX=."
  local needed=$CPU_NEEDS_GIB free_kib
  [ "$kind" = cpu ] || needed=$GPU_NEEDS_GIB
  free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
  [ "$free_kib" -ge $((needed * 1024 * 1024)) ] || [ -d "$VENV" ] ||
    fail "$((free_kib / 1024 / 1024)) GiB free in $PWD, and $needed are needed: make room, or name another place with VENV=."
  [ "$kind" = cpu ] || check_gpus
}

check_gpus() {
  if ! command -v nvidia-smi >/dev/null; then
    say "warning: no NVIDIA driver here (nvidia-smi is not on PATH); installing the CUDA builds all the same"
    return
  fi
  local driver best
  driver=$(query_gpus driver_version)
  [ "${driver%%.*}" -ge "$MIN_DRIVER" ] ||
    fail "the NVIDIA driver here is $driver, and CUDA 13 needs $MIN_DRIVER: install a newer one (for a container, on its host)."
  best=$(query_gpus compute_cap)
  [ "${best%%.*}" -ge "$MIN_CAPABILITY" ] ||
    fail "the best GPU here has compute capability $best, and $MIN_CAPABILITY.0 is needed: use an A100 or newer, or set up for CPU with 'make setup'."
}

# The largest value of a field of nvidia-smi over the GPUs.
query_gpus() {
  local values
  values=$(nvidia-smi --query-gpu="$1" --format=csv,noheader) && [[ $values =~ ^[0-9] ]] ||
    fail "nvidia-smi does not tell $1 of a GPU (${values:-no answer}): repair the NVIDIA driver, or restart the machine."
  sort -V <<<"$values" | tail -n 1
}

# --- the environment ---

make_environment() {
  if [ -e "$VENV" ] && ! [ -f "$VENV/pyvenv.cfg" ]; then
    fail "VENV=$VENV exists and is no Python environment: name another folder."
  fi
  local python
  if ! "$VENV/bin/python" -c '' 2>/dev/null; then
    rm -rf "$VENV"
    python=$(find_python)
    say "making $VENV with $python ($("$python" -c 'import platform; print(platform.python_version())'))"
    "$python" -m venv "$VENV" || fail "$python could not make $VENV; its message is above."
  fi
  if ! "$VENV/bin/python" -m uv --version >/dev/null 2>&1; then
    "$VENV/bin/python" -m pip install --quiet "$UV_RANGE" </dev/null ||
      fail "pip could not install $UV_RANGE: no network, or no package registry that pip's settings lead to (pip's message is above)."
  fi
}

install_project() {
  local arguments=(--python "$VENV/bin/python" --compile-bytecode) tag
  tag=$("$VENV/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  if [ "$kind" = cpu ]; then
    arguments+=(--excludes tools/not-on-cpu.txt)
    if [ -z "$(local_cpu_wheel torch "$tag")" ]; then
      arguments+=(--torch-backend cpu)
    fi
  else
    arguments+=(--constraint gpu-constraints.txt)
  fi
  local project=(--editable ".[$extras]")
  [ -z "${PROJECT:-}" ] || project=("$PROJECT[$extras]")
  [ -t 2 ] || arguments+=(--quiet) # a log is better off without progress bars; errors still show
  say "installing the project and its packages ($extras)"
  # A distribution named rlhf, as older checkouts install, has the same command and plug-in, so it may not stay.
  "$VENV/bin/python" -m uv pip uninstall --python "$VENV/bin/python" --quiet rlhf </dev/null
  "$VENV/bin/python" -m uv pip install "${arguments[@]}" "${project[@]}" </dev/null ||
    fail "uv could not install the packages: no network, a registry without one of them, or no CPU build of torch for $tag (uv's message is above)."
}

# vLLM's Qwen 3.5 imports torchvision. The registry's build is for CUDA and breaks `import transformers` beside a CPU
# torch, so a CPU build is taken where one is found, and the set-up goes on where none is.
add_torchvision() {
  local tag torch backend=()
  ! "$VENV/bin/python" -c 'import torchvision' 2>/dev/null || return 0
  tag=$("$VENV/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  torch=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
  [ -n "$(local_cpu_wheel torch "$tag")" ] || backend=(--torch-backend cpu)
  if [ -n "${backend[*]}$(local_cpu_wheel torchvision "$tag")" ] &&
    "$VENV/bin/python" -m uv pip install --python "$VENV/bin/python" --compile-bytecode --quiet "${backend[@]}" \
      "torch==$torch" torchvision </dev/null && "$VENV/bin/python" -c 'import torchvision'; then
    return
  fi
  "$VENV/bin/python" -m uv pip uninstall --python "$VENV/bin/python" --quiet torchvision </dev/null 2>&1 || true
  say "no CPU build of torchvision for torch $torch was found: engines on CPU cannot run Qwen 3.5 to 3.8, which import it. Nothing else needs it."
}

# The last look: the plug-in that vLLM's processes load, and the build of torch.
verify() {
  "$VENV/bin/python" - "$kind" <<'PY'
import sys
from importlib.metadata import entry_points

kind = sys.argv[1]
if "rlhf" not in entry_points(group="vllm.general_plugins").names:
    sys.exit("setup: the entry point vllm.general_plugins:rlhf is missing after the installation; delete the environment and try again.")
import torch

if (torch.version.cuda is None) != (kind == "cpu"):
    sys.exit(f"setup: torch {torch.__version__} was installed, which is no {kind} build; delete the environment and try again.")
PY
}

# --- the whole of it ---

kind=${1:-}
shift $(($# > 0))
stamp=$VENV/rlhf-setup
installed_kind='' installed_extras='' installed_fingerprint=''
if [ -f "$stamp" ]; then
  { read -r installed_kind && read -r installed_extras && read -r installed_fingerprint; } <"$stamp" || true
fi
kind=${kind:-${installed_kind:-cpu}}
case $kind in cpu | gpu) ;; *) fail "$kind is no kind of set-up: cpu or gpu." ;; esac
[ "${installed_kind:-$kind}" = "$kind" ] ||
  fail "$VENV was set up for $installed_kind: delete it first, or name another folder with VENV=."

more=$(printf '%s\n' "$@" "${installed_extras//,/$'\n'}" | sort -u | grep -vx -e "$kind" -e '' | paste -sd, - || true)
extras=$kind${more:+,$more}
fingerprint=$(cat pyproject.toml tools/setup.sh tools/not-on-cpu.txt gpu-constraints.txt <(printf '%s' "$PWD") | cksum)
if [ "$installed_extras" = "$extras" ] && [ "$installed_fingerprint" = "$fingerprint" ] &&
  [ -x "$VENV/bin/python" ]; then
  exit 0
fi

pip_settings=$("${PYTHON:-python3}" -m pip config list 2>/dev/null || printf ":env:.find-links='%s'" "${PIP_FIND_LINKS:-}")
check_machine
make_environment
pip_settings=$("$VENV/bin/python" -m pip config list)
follow_pip
install_project
[ "$kind" = gpu ] || add_torchvision
verify
printf '%s\n' "$kind" "$extras" "$fingerprint" >"$stamp"
say "$VENV is ready ($extras)"
