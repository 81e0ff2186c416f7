#!/usr/bin/env bash
# Training frameworks on simulated GPUs: TorchTitan's own script with Llama 3.1 8B as its paper ran it, and the
# examples of docs/examples for accelerate, transformers and Lightning.
#
#   bash ci/frameworks.sh [FOLDER]     a fresh environment is made in FOLDER (default: build/frameworks)
#
# Not a part of .ci/run: it installs all of them. Tokenizer and text are made here; of the text only the number
# of tokens counts.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
folder=$(realpath -m "${1:-build/frameworks}")
mkdir -p "$folder/tests/assets/c4_test" "$folder/tokenizer"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q -e "$checkout" "torch>=2.11,<2.14" "torchtitan==0.2.2" tensorboard \
  accelerate transformers lightning
cd "$folder"

venv/bin/python - <<'END'
import json

from tokenizers import Tokenizer, models, pre_tokenizers

words = [f"word{number}" for number in range(1900)]
marks = {"<unknown>": 0, "<s>": 1, "</s>": 2}
vocabulary = marks | {word: number for number, word in enumerate(words, len(marks))}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.save("tokenizer/tokenizer.json")
with open("tokenizer/tokenizer_config.json", "w") as file:
    json.dump({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}, file)
with open("tests/assets/c4_test/data.json", "w") as file:
    for _ in range(400):
        file.write(json.dumps({"text": " ".join(words)}) + "\n")
END

export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
for gpus in 8 128; do
  venv/bin/fsdpbench run --module torchtitan.train --gpus "$gpus" --hardware h100-96gb-hbm2e -o runs --json -- \
    --model.name llama3 --model.flavor 8B --model.hf_assets_path ./tokenizer \
    --training.dataset c4_test --training.steps 20 --training.seq_len 8192 --training.local_batch_size 2 \
    --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op >"result-$gpus.json"
done
for words in "accelerate -- --fsdp-version 1" "accelerate -- --fsdp-version 2" transformers lightning; do
  # shellcheck disable=SC2086 # the words are words
  set -- $words
  name=$1
  shift
  venv/bin/fsdpbench run --script "$checkout/docs/examples/train_$name.py" --gpus 8 -o runs --json "$@" \
    >"result-$name${3:+-fsdp$3}.json"
done
venv/bin/python - <<'END'
import json
from importlib.metadata import version
from pathlib import Path

print(f"torchtitan {version('torchtitan')}, torch {version('torch')}")
print(f"{'GPUs':>5} {'tokens/s/GPU':>13} {'published':>10} {'GiB reserved':>13} {'published':>10}")
for gpus, tokens, gib in ((8, 6258, 81.9), (128, 5645, 67.0)):
    with open(f"result-{gpus}.json") as file:
        result = json.load(file)
    rate = 2 * 8192 / result["step_time_s"]
    reserved = result["peak_memory_bytes"]["reserved"] / 2**30
    print(f"{gpus:5} {rate:13,.0f} {tokens:10,} {reserved:13.1f} {gib:10}")
for name in ("accelerate-fsdp1", "accelerate-fsdp2", "transformers", "lightning"):
    result = json.loads(Path(f"result-{name}.json").read_text())
    print(f"{name:20} {result['status']}, {result['step_time_s'] * 1e3:.1f} ms a step")
print(*(f"{name} {version(name)}" for name in ("accelerate", "transformers", "lightning")), sep=", ")
END
