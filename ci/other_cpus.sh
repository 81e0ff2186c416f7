#!/usr/bin/env bash
# The suite as other CPUs compute it: ATen's kernels for AVX2 and for no vector unit at all, and matrix products that
# round in another order (tests/products). Runs beside the native suite of `.ci/run`; takes three times as long.
#
#     ci/other_cpus.sh [PYTEST ARGUMENT ...]
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
failed=()

suite() { # NAME, then pytest's arguments
  local name=$1
  shift
  printf '\n== %s\n' "$name"
  "$python" -m pytest -q "$@" || failed+=("$name")
}

for capability in avx2 default; do
  ATEN_CPU_CAPABILITY=$capability suite "ATEN_CPU_CAPABILITY=$capability" "$@"
done
# A plain `import torch` in every process: not for what counts imports or start-up.
for seed in 1 2; do
  PYTHONPATH=tests/products${PYTHONPATH:+:$PYTHONPATH} FSDPBENCH_PRODUCTS=noise-$seed \
    suite "products rounded in another order, seed $seed" tests/impl tests/workloads tests/docs tests/bench/systems "$@"
done

[ "${#failed[@]}" -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
echo "all passed"
