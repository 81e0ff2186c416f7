#!/usr/bin/env bash
# The quick part of the suite on each torch that could be supported, one after another, each in an environment of
# its own that is deleted afterwards. A line a part and version is added to RESULTS, and missing private names.
#
#     ci/torch_versions.sh RESULTS [VERSION ...]      2.11 2.12 2.13 2.14 unless named; each is some GB of downloads
#     ci/torch_versions.sh RESULTS here               the torch of .venv, as it is: nothing is installed
#
# PYTHON (python3) makes the environments, WORKERS (1) run the tests, PARTS are the folders and files of tests.
set -uo pipefail
cd "$(dirname "$0")/.."
[ "$#" -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
results=$(realpath -m "$1")
shift
mkdir -p "$(dirname "$results")"
versions=("$@")
[ "${#versions[@]}" -gt 0 ] || versions=(2.11 2.12 2.13 2.14)
read -ra parts <<<"${PARTS:-tests/bench/test_torch_internals.py tests/impl tests/sim tests/workloads tests/bench/script tests/bench/systems}"
folder=
failed=()
trap '[ -z "$folder" ] || rm -rf "$folder"' EXIT

say() { printf '%s  %s\n' "$(date -u +%F)" "$*" | tee -a "$results"; }

# What the tests need, but torch: a version that the project's own bounds refuse is to be tried too.
needs() {
  "${PYTHON:-python3}" - <<'END'
import re, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
tools = [name for part in ("test", "hta", "tune", "slurm", "vision", "hf", "mcp") for name in extras[part]]
without = {"torch", "fsdpbench", "mypy", "ruff", "import-linter"}
print("\n".join(name for name in project["dependencies"] + tools if re.match(r"[\w-]+", name)[0] not in without))
END
}

install() { # VERSION; the environment is in $folder
  "${PYTHON:-python3}" -m venv "$folder" &&
    "$folder/bin/pip" install -q "torch==$1.*" &&
    needs | "$folder/bin/pip" install -q -r /dev/stdin &&
    "$folder/bin/pip" install -q --no-deps -e .
}

PROBE='
import platform, torch
from fsdpbench.base import torch_internals
from fsdpbench.impl.shared import torch_internals as of_impl
print(f"torch {torch.__version__}, Python {platform.python_version()}")
print(*torch_internals.missing(), *of_impl.missing(), sep="\n")
'

try_out() { # VERSION PYTHON
  local python=$2 about log part
  if ! about=$("$python" -c "$PROBE" 2>&1); then
    say "torch $1: cannot be used: $(tail -1 <<<"$about")"
    failed+=("$1")
    return
  fi
  local name=${about%%$'\n'*}
  while IFS= read -r gone; do
    [ -z "$gone" ] || { say "$name: $gone"; failed+=("$1"); }
  done < <(tail -n +2 <<<"$about")
  for part in "${parts[@]}"; do
    log=$(mktemp)
    timeout 3600 "$python" -m pytest -q -n "${WORKERS:-1}" "$part" >"$log" 2>&1 || failed+=("$1")
    grep -E '^(FAILED|ERROR) ' "$log" | while IFS= read -r line; do say "$name: $line"; done
    say "$name: $part: $(tail -1 "$log")"
    rm -f "$log"
  done
}

for version in "${versions[@]}"; do
  if [ "$version" = here ]; then
    try_out here .venv/bin/python
    continue
  fi
  folder=$(mktemp -d)
  if install "$version"; then
    try_out "$version" "$folder/bin/python"
  else
    say "torch $version: cannot be installed"
    failed+=("$version")
  fi
  rm -rf "$folder"
  folder=
done
[ "${#failed[@]}" -eq 0 ] || { echo "failed: $(printf '%s\n' "${failed[@]}" | sort -u | tr '\n' ' ')"; exit 1; }
echo "all passed"
