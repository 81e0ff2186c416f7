#!/usr/bin/env bash
# What only a GPU shows, in one go: the cuda path, impl beside torch's FSDP, sim's predictions, the allocator, a profile.
# Writes text into ci/measured/gpu/ (or the folder given). Needs one GPU; with more, FSDP runs on all of them.
#   bash ci/gpu.sh [FOLDER]
#   FSDPBENCH_SIMULATED_CUDA=h100-80gb:2 bash ci/gpu.sh FOLDER     a rehearsal: every part on simulated GPUs
# QUICK=1 takes small models, for rehearsals; PARTS="doctor allocator" runs those parts alone; LIMIT_S caps each part.
# Each part has a limit of its own, and a part that fails leaves its log and does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-ci/measured/gpu}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
gpus=$(python3 -c 'from fsdpbench.engine.devices.detection import visible_gpus; print(visible_gpus())')
[ "$gpus" -gt 0 ] || { echo "no GPU is visible"; exit 1; }
work=$(mktemp -d)
failed=()

part() { # NAME LIMIT_S COMMAND...
  local name=$1 limit=$2
  shift 2
  [[ " ${PARTS:-$name} " == *" $name "* ]] || return 0
  [ "$limit" -le "${LIMIT_S:-$limit}" ] || limit=$LIMIT_S
  echo "== $name"
  echo "\$ $*" >"$out/$name.txt"
  timeout -k 5 "$limit" "$@" >>"$out/$name.txt" 2>&1 || failed+=("$name")
  tail -n 20 "$out/$name.txt"
}


# One point a system: every setting that the default sweep would vary has one value.
fixed=(--wrap block --backward-prefetch pre --limit-all-gathers 2 --reduce-dtype fp32)
fixed+=(--strategy FULL_SHARD --forward-prefetch 0 --compile false --activation-checkpointing none)
fixed+=(--system impl-fsdp2,torch-fsdp2,impl-fsdp1,torch-fsdp1)
small=gpt-350m large=gpt-2.8b repeat=3 families=()
[ "${QUICK:-0}" = 1 ] && small=gpt-tiny large=gpt-tiny repeat=1 families=(--tiny)

{
  [ -z "${FSDPBENCH_SIMULATED_CUDA:-}" ] || echo "a rehearsal on simulated GPUs ($FSDPBENCH_SIMULATED_CUDA): nothing here is measured"
  nvidia-smi --query-gpu=name,memory.total,driver_version,power.limit,clocks.max.sm --format=csv
  python3 -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda)'
  git rev-parse HEAD 2>/dev/null
} >"$out/machine.txt"

part doctor 120 python3 -m fsdpbench doctor
part calibrate 400 python3 -m fsdpbench calibrate -o "$out/profile.toml"

# The cuda path end to end, and impl beside torch's FSDP1 and FSDP2: step time, memory, retries, overlap.
part systems 500 python3 -m fsdpbench sweep --model "$small" --device cuda --gpus "$gpus" "${fixed[@]}" --batch 4 \
  --repeat "$repeat" -o "$work/systems"

# The same on simulated GPUs of the profile that was just measured: predicted beside measured.
part predicted 200 python3 -m fsdpbench sweep --model "$large" --device sim --hardware "$out/profile.toml" --gpus 8 \
  "${fixed[@]}" --batch 2 -o "$work/predicted"
part families 500 python3 ci/families_on_gpu.py "$out/profile.toml" "${families[@]}"
part allocator 200 python3 ci/allocator_on_gpu.py

[ "${#failed[@]}" -eq 0 ] || { echo "failed: ${failed[*]} (logs in $out)"; exit 1; }
