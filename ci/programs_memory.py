"""Compare the simulated peak of public programs with an independent sum, within 10 %.

    python ci/programs_memory.py ENVIRONMENT FOLDER [--only NAME]

ENVIRONMENT is the virtual environment of `ci/programs/titan.toml`. Each program of `PROGRAMS` runs on
simulated GPUs without checkpointing in FOLDER. The sum is made by torch
alone, of the program's own model on the meta device:

    parameters and the optimizer's states, sharded       bytes over ranks
    activations                                          distinct tensors that autograd saves in forward
    the loss                                             its gradient twice (chosen entries, softmax)
    the output's weight                                  gathered, since backward begins with it

The table is written to `ci/measured/programs_memory.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = {
    # name: model, flavor, GPUs, batch, sequence length, more arguments
    "llama3-debugmodel": ("llama3", "debugmodel", 8, 8, 2048),
    "llama3-8b": ("llama3", "8B", 8, 1, 2048),
    "llama3-8b-long": ("llama3", "8B", 32, 1, 8192),
    "llama3-70b": ("llama3", "70B", 128, 1, 2048),
    "qwen3-14b": ("qwen3", "14B", 64, 2, 2048),
    "qwen3-32b": ("qwen3", "32B", 128, 1, 4096),
}
SUM = """
import json, sys, torch
import torch.nn.functional as F
import functorch.compile  # looks for the real Triton
from unittest.mock import MagicMock

triton = MagicMock()  # for kernels that dense models do not launch
triton.__version__ = "0.0.0"
sys.modules |= {"triton": triton, "triton.language": MagicMock()}
from torchtitan.protocols.train_spec import get_train_spec

def flash(query, key, value, mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    # the kernels of GPUs: the meta device composes attention and norms
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    return kernel(query, key, value, 0.0, is_causal, scale=scale)[0]

class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

def fused_norm(x, shape, weight=None, eps=None):
    return FusedNorm.apply(x, weight)

F.scaled_dot_product_attention, F.rms_norm = flash, fused_norm
name, flavor, gpus, batch, length, vocabulary = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
spec = get_train_spec(name)
args = spec.model_args[flavor]
args.max_seq_len = length
if vocabulary:
    args.vocab_size = vocabulary
with torch.device("meta"):
    model = spec.model_cls(args).bfloat16()
    tokens = torch.empty(batch, length, dtype=torch.long)
parameters = sum(p.numel() for p in model.parameters())
own = {p.untyped_storage()._cdata for p in [*model.parameters(), *model.buffers()]}
kept, sizes = [], {}

def pack(tensor):
    storage = tensor.untyped_storage()
    if storage._cdata not in own and tensor.device.type == "meta":
        kept.append(tensor)
        sizes[storage._cdata] = storage.nbytes()
    return tensor

with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(0, 1))
scores = logits.numel()
print(json.dumps({
    "sharded": 4 * 3 * parameters // gpus, "activations": sum(sizes.values()), "loss": 2 * 4 * scores,
    "output": 2 * model.output.weight.numel(),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", choices=PROGRAMS)
    given = parser.parse_args()
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    variables["HF_HOME"] = str(given.folder.resolve() / "home")
    given.folder.mkdir(parents=True, exist_ok=True)
    prepare = Path(__file__).resolve().parent / "programs" / "titan" / "prepare.py"
    python = given.environment / "bin" / "python"
    subprocess.run([python, prepare], cwd=given.folder, env=variables, check=True)
    lines = [f"{'program':18} {'GPUs':>4} {'sum, GiB':>9} {'simulated':>9} {'differ':>7}   of the sum"]
    failed = False
    for name in given.only or PROGRAMS:
        model, flavor, gpus, batch, length = PROGRAMS[name]
        command = [
            *(given.environment / "bin" / "fsdpbench", "run", "--module", "torchtitan.train", "--json"),
            *("--gpus", gpus, "--hardware", "b200", "-o", "memory", "--", "--model.name", model),
            *("--model.flavor", flavor, "--model.hf_assets_path", "./tokenizer"),
            *("--training.dataset", "c4_test", "--training.steps", "20", "--training.seq_len", length),
            *("--training.local_batch_size", batch, "--activation_checkpoint.mode", "none"),
        ]
        ran = subprocess.run(
            [str(word) for word in command], cwd=given.folder, env=variables, capture_output=True, text=True
        )
        result = json.loads(ran.stdout)
        if result["status"] != "ok":
            sys.exit(f"{name}: {result['cause']}")
        simulated = result["peak_memory_bytes"]["allocated"]
        words = [str(word) for word in (model, flavor, gpus, batch, length, 0)]
        summed = subprocess.run([python, "-c", SUM, *words], capture_output=True, text=True, check=True)
        parts = json.loads(summed.stdout.splitlines()[-1])
        total = sum(parts.values())
        failed |= abs(simulated / total - 1) > 0.1
        shares = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in parts.items())
        lines.append(
            f"{name:18} {gpus:4} {total / 2**30:9.2f} {simulated / 2**30:9.2f} "
            f"{simulated / total - 1:+7.1%}   {shares}"
        )
        print(lines[-1], flush=True)
    table = "\n".join(lines) + "\n"
    if given.only is None:
        (Path(__file__).parent / "measured" / "programs_memory.txt").write_text(table)
    sys.exit(failed)


if __name__ == "__main__":
    main()
