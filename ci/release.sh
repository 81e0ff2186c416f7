#!/usr/bin/env bash
# Wheel and sdist from this checkout, each installed in a fresh environment and tried out there, outside the checkout.
#
#     ci/release.sh [DIST]        folder for the files, dist unless named
#
# PYTHON (python3) builds and makes the environments; it needs the package `build`. PIP_ARGUMENTS are passed to pip.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$(realpath -m "${1:-dist}")
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
read -ra pip_arguments <<<"${PIP_ARGUMENTS:-}"

rm -rf "$dist"
"$python" -m build --outdir "$dist" .

try_out() { # FILE: installed alone, it simulates, reports, analyses and trains
  "$python" -m venv "$folder/venv"
  "$folder/venv/bin/pip" install -q "${pip_arguments[@]}" "$1"
  (
    cd "$folder"
    fsdpbench="$folder/venv/bin/fsdpbench"
    "$fsdpbench" --version
    "$fsdpbench" doctor --quick >/dev/null
    "$fsdpbench" sweep --model gpt-tiny --gpus 8 --device sim --batch 2,4 -o runs/sim >/dev/null
    test -s runs/sim/report.html
    "$fsdpbench" analyze runs/sim/*/trace --json >/dev/null
    "$fsdpbench" baseline create runs/sim baseline.json
    "$fsdpbench" check --baseline baseline.json
    "$fsdpbench" run --model gpt-tiny --gpus 2 --device cpu -o runs/cpu >/dev/null
    "$folder/venv/bin/python" -c 'from fsdpbench.impl import fully_shard; import fsdpbench; print(fsdpbench.__file__)'
  )
  rm -rf "$folder/venv" "$folder/runs" "$folder/baseline.json"
}

for file in "$dist"/*.whl "$dist"/*.tar.gz; do
  echo "== $file"
  try_out "$file"
done
echo "wheel and sdist work: $dist"
