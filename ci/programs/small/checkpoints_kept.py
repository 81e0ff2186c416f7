"""Checkpoints of every kind: DCP in the background, safetensors, memory maps, conversions, folders that rotate."""

# prints: kept ['step_6', 'step_8']
# prints: resumed 8 {'pos': 32, 'epoch': 0}
# prints: st 392960
# prints: done

import glob
import os
import random
import shutil

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset


class Net(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.e, self.b, self.o = (
            nn.Embedding(500, d),
            nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 2 * d, 0, batch_first=True) for _ in range(2)),
            nn.Linear(d, 500, bias=False),
        )
        self.o.weight = self.e.weight

    def forward(self, x):
        x = self.e(x)
        for b in self.b:
            x = b(x)
        return self.o(x)


class Data(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        return torch.full((33,), i % 500), i


class StatefulSampler(torch.utils.data.Sampler):
    def __init__(self, n, r, w):
        self.n, self.r, self.w, self.pos, self.epoch = n, r, w, 0, 0

    def __iter__(self):
        idx = np.random.default_rng(self.epoch).permutation(self.n)[self.r :: self.w]
        for i in idx[self.pos :]:
            self.pos += 1
            yield int(i)
        self.pos = 0
        self.epoch += 1

    def __len__(self):
        return self.n // self.w

    def state_dict(self):
        return {"pos": self.pos, "epoch": self.epoch}

    def load_state_dict(self, s):
        self.pos, self.epoch = s["pos"], s["epoch"]


def rng():
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }


def set_rng(s):
    torch.set_rng_state(s["torch"])
    torch.cuda.set_rng_state_all(s["cuda"])
    np.random.set_state(s["numpy"])
    random.setstate(s["random"])


def rotate(root, keep=2):
    ds = sorted(glob.glob(f"{root}/step_*"), key=lambda p: int(p.split("_")[-1]))
    for d in ds[:-keep]:
        shutil.rmtree(d)
    return [os.path.basename(d) for d in ds[-keep:]]


def main():
    dist.init_process_group("cpu:gloo,cuda:nccl")
    r, w = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    m = Net()
    for b in m.b:
        fully_shard(b)
    fully_shard(m)
    o = torch.optim.AdamW(m.parameters(), 1e-3)
    sch = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4)
    smp = StatefulSampler(400, r, w)
    dl = DataLoader(Data(), 4, sampler=smp, num_workers=0)
    it = iter(dl)
    fut = None
    seen = []
    for s in range(1, 9):
        x, i = next(it)
        seen += i.tolist()
        x = x.cuda()
        F.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        o.step()
        o.zero_grad()
        sch.step()
        if s % 2 == 0:
            if fut is not None:
                fut.result()
            ms, os_ = get_state_dict(m, o)
            st = {
                "model": ms,
                "optim": os_,
                "sched": sch.state_dict(),
                "sampler": smp.state_dict(),
                "rng": rng(),
                "step": s,
            }
            fut = dcp.async_save(
                st,
                storage_writer=FileSystemWriter(f"ck/step_{s}", thread_count=2, single_file_per_rank=False),
            )
            if r == 0 and s > 4:
                fut.result()
                print("kept", rotate("ck"))
    fut.result()
    dist.barrier()
    if r == 0:
        with open("ck/latest.tmp", "w") as f:
            f.write("step_8")
        os.replace("ck/latest.tmp", "ck/latest")
        os.path.islink("ck/best") and os.unlink("ck/best")
        os.symlink("step_8", "ck/best")
        print(sorted(os.listdir("ck")), open("ck/latest").read())
    ms, os_ = get_state_dict(m, o)
    st = {"model": ms, "optim": os_, "step": 0, "sampler": {"pos": 0, "epoch": 0}}
    dcp.load(st, checkpoint_id="ck/best")
    set_state_dict(m, o, model_state_dict=st["model"], optim_state_dict=st["optim"])
    print("resumed", st["step"], st["sampler"], len(seen), len(set(seen)))
    md = FileSystemReader("ck/step_8").read_metadata()
    print("metadata", len(md.state_dict_metadata) > 10)
    full = get_model_state_dict(m, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if r == 0:
        torch.save(full, "model.pt")
        a = torch.load("model.pt", mmap=True, map_location="cpu", weights_only=True)
        print("pt", sum(t.numel() for t in a.values()), os.path.getsize("model.pt") > 4 * 100000)
        dcp_to_torch_save("ck/step_8", "conv.pt")
        c = torch.load("conv.pt", weights_only=False)
        print("conv", sorted(c))
        torch_save_to_dcp("model.pt", "back")
        try:
            from safetensors.torch import load_file, safe_open, save_file

            save_file(
                {k: v.clone().contiguous() for k, v in full.items()},
                "model.safetensors",
                metadata={"format": "pt"},
            )
            l = load_file("model.safetensors", device="cuda")
            print("st", sum(t.numel() for t in l.values()))
            with safe_open("model.safetensors", "pt", device="cpu") as f:
                print(
                    f.metadata(),
                    f.get_slice("o.weight").get_shape(),
                )
        except ImportError as e:
            print(e)
        from torch.distributed.checkpoint import HuggingFaceStorageWriter
    try:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter

        dcp.save(
            dict(ms.items()),
            storage_writer=HuggingFaceStorageWriter(
                path="hf", save_distributed=True, fqn_to_index_mapping=dict.fromkeys(ms, 1)
            ),
        )
        print(sorted(os.listdir("hf"))[:2])
    except Exception as e:
        print("hf", type(e).__name__, str(e)[:120])
    set_model_state_dict(
        m, full if r == 0 else {}, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    state = rng()
    set_rng(state)
    x = torch.zeros(2, 33, dtype=torch.long, device="cuda")
    F.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
    o.step()
    print("done", sch.get_last_lr())


main()
