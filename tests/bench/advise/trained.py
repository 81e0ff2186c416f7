"""A training script with one mistake, or none: `script(mistake)` is its text.

The blocks are a GPT's; what stands between `<<` and `>>` below is what a mistake replaces.
"""

from __future__ import annotations

_TEXT = """
import contextlib, os, time
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    BackwardPrefetch, CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy,
    fully_shard
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset

LAYERS, WIDTH, LENGTH, BATCH = $size

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, WIDTH // 128, 128).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50304, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50304, bias=False)
    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

class Tokens(Dataset):
    def __len__(self):
        return 1 << 20
    def __getitem__(self, index):
        $item
        return torch.full((LENGTH + 1,), index % 50304)

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
with torch.device("meta"):
    model = Model()
bf16 = torch.bfloat16
policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
mixed = MixedPrecision(param_dtype=bf16, reduce_dtype=torch.float32, buffer_dtype=bf16)
$wrap
$optimizer
loader = iter($loader)
for step in range(20):
    batch = next(loader)$move
    $forwardF.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
    $backward
    $clip
    optimizer.step()
    $zero
    $after
"""
_FSDP2 = """
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device="cuda")
"""
_FSDP1 = """
model.to_empty(device="cuda")
model = FullyShardedDataParallel(
    model, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=mixed, use_orig_params=True,
    device_id=torch.cuda.current_device(),
)
"""
_PARTS = {
    "size": "8, 2048, 2048, 8",
    "item": "pass",
    "wrap": _FSDP2,
    "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)",
    "loader": "DataLoader(Tokens(), BATCH, pin_memory=True)",
    "forward": "loss = ",
    "backward": "loss.backward()",
    "clip": "pass",
    "zero": "optimizer.zero_grad()",
    "move": '.to("cuda", non_blocking=True)',
    "after": """if step % 10 == 9:
        print(step, loss.item(), flush=True)""",
}
_CHECKPOINTED = """index, block in enumerate(model.blocks):
    model.blocks[index] = block = checkpoint_wrapper(block)"""
_AUTOCAST = 'with torch.autocast("cuda", bf16):\n     loss = '
_CLIP = """total = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad.mul_(1.0 / (total + 1.0))"""
_EACH = "for block in model.blocks:\n    fully_shard(block, mp_policy=policy)\n"
MISTAKES: dict[str, dict[str, str]] = {
    "item": {"after": "print(step, loss.item(), flush=True)"},
    "synchronize": {"after": "torch.cuda.synchronize()"},
    "empty_cache": {"after": "torch.cuda.empty_cache()"},
    "barrier": {"after": "dist.barrier()"},
    "one_unit": {"wrap": _FSDP2.replace(_EACH, "")},
    "one_unit_fsdp1": {"wrap": _FSDP1.replace("auto_wrap_policy=ModuleWrapPolicy({Block}), ", "")},
    "root": {
        "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)",
        "wrap": """
model.to(bf16)
for block in model.blocks:
    fully_shard(block)
model.to_empty(device="cuda")
""",
    },
    "loader": {"item": "sum(range(3_000_000))"},
    "sleeping_loader": {"item": "time.sleep(0.02)"},
    "starving_workers": {
        "item": "time.sleep(0.1)",
        "loader": "DataLoader(Tokens(), BATCH, pin_memory=True, num_workers=1)",
    },
    "checkpoint": {"wrap": _FSDP2.replace("block in model.blocks:", _CHECKPOINTED)},
    "fp32": {"wrap": _FSDP2.replace(", mp_policy=policy", "")},
    "foreach": {"optimizer": _PARTS["optimizer"].replace("fused=True", "foreach=False")},
    "offload": {
        "wrap": _FSDP2.replace("policy)", "policy, offload_policy=CPUOffloadPolicy())").replace("cuda", "cpu")
    },
    "pageable": {"loader": "DataLoader(Tokens(), BATCH)"},
    "no_prefetch_fsdp1": {
        "wrap": _FSDP1.replace("use_orig", "backward_prefetch=None, use_orig"),
        "size": "8, 4096, 1024, 2",
    },
    "tiny_batch": {
        "size": "8, 2048, 2048, 1",
        # So little work that resharding costs too; what is free would come first.
        "wrap": _FSDP2.replace("block, mp", "block, reshard_after_forward=False, mp"),
    },
    "early_optimizer": {
        "wrap": 'model.to_empty(device="cuda")\n'
        + "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)\n"
        + _FSDP2.replace('model.to_empty(device="cuda")', ""),
        "optimizer": "",
    },
    "gathers_fp32": {"wrap": _FSDP2.replace(", mp_policy=policy", ""), "forward": _AUTOCAST},
    "backward_in_autocast": {"forward": _AUTOCAST, "backward": " loss.backward()"},
    "zeros": {"zero": "optimizer.zero_grad(set_to_none=False)"},
    "norms_item": {"clip": _CLIP.replace("norm() ** 2", "norm().item() ** 2")},
    "norms": {"clip": _CLIP},
    "no_limit_fsdp1": {"wrap": _FSDP1.replace("use_orig", "limit_all_gathers=False, use_orig")},
    "halves": {
        "wrap": _FSDP2.replace(
            _EACH,
            "".join(f"fully_shard([*model.blocks[{half}]], mp_policy=policy)\n" for half in ("0:4", "4:8")),
        ),
        "size": "8, 4096, 1024, 2",
    },
    "needless_reshard": {"size": "8, 4096, 1024, 2"},
    "anomaly": {"optimizer": _PARTS["optimizer"] + "\ntorch.autograd.set_detect_anomaly(True)"},
    "launch_blocking": {"optimizer": 'os.environ["CUDA_LAUNCH_BLOCKING"] = "1"\n' + _PARTS["optimizer"]},
    "clip_item": {"clip": "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()"},
    "nan_check": {"after": "if torch.isnan(loss): raise SystemExit(1)"},
}
GOOD: dict[str, dict[str, str]] = {
    "fsdp2": {},
    "fsdp1": {"wrap": _FSDP1},
    "ddp": {
        "wrap": 'model.to_empty(device="cuda")\n'
        "model = nn.parallel.DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)",
        "forward": _AUTOCAST,
    },
    "impl": {
        "wrap": "from fsdpbench.impl import MixedPrecisionPolicy, fully_shard\n"
        "policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)" + _FSDP2
    },
    "one_gpu": {
        "wrap": 'dist.destroy_process_group()\nmodel.to_empty(device="cuda")',
        "forward": _AUTOCAST,
    },
    "fsdp2_workers": {
        "loader": "DataLoader(Tokens(), BATCH, num_workers=2, pin_memory=True)",
        "size": "12, 3072, 2048, 6",
    },
}


def script(name: str) -> str:
    """The text of the script with that mistake, or of a good one."""
    parts = _PARTS | (MISTAKES.get(name) or GOOD.get(name) or {})
    text = _TEXT
    for part, value in parts.items():
        text = text.replace(f"${part}", value)
    return text
