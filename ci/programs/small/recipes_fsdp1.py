"""Fine-tuning with FSDP1 by a recipe: frozen layers, a sharded gradient scaler, whole states from rank 0, memory traces."""

import contextlib
import dataclasses
import functools
import gc
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from tqdm import tqdm


def b2gb(x):
    return int(x / 2**30)


class MemoryTrace:
    def __enter__(self):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_max_memory_allocated()
        self.begin = b2gb(torch.cuda.memory_allocated())
        return self

    def __exit__(self, *exc):
        gc.collect()
        torch.cuda.empty_cache()
        self.end = b2gb(torch.cuda.memory_allocated())
        self.peak = b2gb(torch.cuda.max_memory_allocated())
        info = torch.cuda.memory_stats()
        self.peak_active = b2gb(info["active_bytes.all.peak"])
        self.malloc_retries = info.get("num_alloc_retries", 0)


@dataclasses.dataclass
class train_config:
    lr: float = 1e-4
    gamma: float = 0.85
    num_epochs: int = 2
    batch: int = 2
    use_fp16: bool = True
    freeze_layers: bool = True
    num_freeze_layers: int = 1
    cpu_offload: bool = False
    gradient_clipping: bool = True
    accum: int = 2
    out: str = "ckpt"


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.n, self.f = (
            nn.MultiheadAttention(d, 4, batch_first=True),
            nn.LayerNorm(d),
            nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d)),
        )

    def forward(self, x):
        y = self.n(x)
        x = x + self.a(y, y, y, need_weights=False)[0]
        return x + self.f(x)


class LM(nn.Module):
    def __init__(self, V=300, d=64, n=4):
        super().__init__()
        self.emb, self.layers, self.head = (
            nn.Embedding(V, d),
            nn.ModuleList(Layer(d) for _ in range(n)),
            nn.Linear(d, V),
        )

    def forward(self, x):
        h = self.emb(x)
        for l in self.layers:
            h = l(h)
        return self.head(h)


def fsdp_policy():
    def leaf(m):
        return (
            len(list(m.named_children())) == 0
            and getattr(m, "weight", None) is not None
            and m.weight.requires_grad
        )

    return functools.partial(
        _or_policy,
        policies=[
            functools.partial(lambda_auto_wrap_policy, lambda_fn=leaf),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer}),
        ],
    )


def main(**kw):
    cfg = train_config(**kw)
    torch.manual_seed(42)
    dist.init_process_group("nccl")
    local, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    torch.cuda.set_device(local)
    os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
    m = LM()
    if cfg.freeze_layers:
        for i, l in enumerate(m.layers):
            if i < cfg.num_freeze_layers:
                for p in l.parameters():
                    p.requires_grad = False
    m = FSDP(
        m,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer}),
        cpu_offload=CPUOffload(True) if cfg.cpu_offload else None,
        mixed_precision=None,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.cuda.current_device(),
        limit_all_gathers=True,
        sync_module_states=True,
        use_orig_params=True,
    )
    opt = torch.optim.AdamW(m.parameters(), lr=cfg.lr)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=cfg.gamma)
    scaler = ShardedGradScaler() if cfg.use_fp16 else None
    autocast = torch.cuda.amp.autocast if cfg.use_fp16 else contextlib.nullcontext
    gen = torch.Generator().manual_seed(rank)
    best = float("inf")
    for epoch in range(cfg.num_epochs):
        with MemoryTrace() as mt:
            m.train()
            total = 0.0
            bar = tqdm(total=4, desc=f"Training Epoch: {epoch + 1}", dynamic_ncols=True, disable=rank != 0)
            for step in range(8):
                ids = torch.randint(0, 300, (cfg.batch, 33), generator=gen).to(local)
                with autocast():
                    loss = F.cross_entropy(m(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
                loss = loss / cfg.accum
                total += loss.detach().float()
                if cfg.use_fp16:
                    scaler.scale(loss).backward()
                else:
                    loss.backward()
                if (step + 1) % cfg.accum == 0:
                    if cfg.use_fp16:
                        if cfg.gradient_clipping:
                            scaler.unscale_(opt)
                            m.clip_grad_norm_(1.0)
                        scaler.step(opt)
                        scaler.update()
                    opt.zero_grad()
                    bar.update(1)
            bar.close()
        if rank == 0:
            print(f"Max CUDA memory allocated was {mt.peak} GB, retries {mt.malloc_retries}")
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        avg = total / 8 / dist.get_world_size()
        ppl = torch.exp(avg)
        m.eval()
        with torch.no_grad():
            ev = F.cross_entropy(m(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
            dist.all_reduce(ev)
            ev = ev / dist.get_world_size()
        sched.step()
        if ev < best:
            best = ev
            dist.barrier()
            with FSDP.state_dict_type(
                m,
                StateDictType.FULL_STATE_DICT,
                FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
                FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
            ):
                sd, od = m.state_dict(), FSDP.optim_state_dict(m, opt)
            if rank == 0:
                os.makedirs(cfg.out, exist_ok=True)
                torch.save(sd, f"{cfg.out}/model-{epoch}.pt")
                torch.save(od, f"{cfg.out}/optim-{epoch}.pt")
                yaml.safe_dump(dataclasses.asdict(cfg), open(f"{cfg.out}/train_params.yaml", "w"))
            dist.barrier()
        if rank == 0:
            print(f"Epoch {epoch + 1}: train_perplexity={ppl:.4f}, lr={sched.get_last_lr()[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
