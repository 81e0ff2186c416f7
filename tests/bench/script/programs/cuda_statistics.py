"""All of torch.cuda's questions that training loops log: memory, events, properties, NVTX, utilisation."""

import gc

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB
from torch.distributed.fsdp import fully_shard

assert torch.cuda.is_available() and torch.cuda.is_bf16_supported() and dist.is_nccl_available()
dist.init_process_group("nccl")
torch.cuda.set_device(0)
properties = torch.cuda.get_device_properties(0)
print(properties.name, properties.total_memory, properties.multi_processor_count, properties.major)
print(
    torch.cuda.get_device_capability(),
    torch.cuda.get_device_name(),
    torch.version.cuda,
    torch.cuda.nccl.version(),
)
torch.cuda.manual_seed_all(1)
torch.cuda.reset_peak_memory_stats()
torch.cuda.empty_cache()
model = fully_shard(GPT().cuda())
optimizer = torch.optim.AdamW(model.parameters())
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for step in range(8):
    start.record()
    torch.cuda.nvtx.range_push("step")
    tokens = torch.randint(0, VOCAB, (2, LENGTH), device=torch.cuda.current_device())
    with torch.cuda.nvtx.range("forward"):
        loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.nvtx.range_pop()
    end.record()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    print(
        step, f"{start.elapsed_time(end):.2f} ms", end.query(), torch.cuda.memory_allocated() >> 20,
        torch.cuda.max_memory_reserved() >> 20, stats["num_alloc_retries"], stats.get("num_ooms"),
        stats["active_bytes.all.peak"], total - free, torch.cuda.memory_reserved(0),
    )  # fmt: skip
gc.collect()
torch.cuda.ipc_collect()
assert "Allocated memory" in torch.cuda.memory_summary(abbreviated=True)
state = torch.cuda.get_rng_state()
torch.cuda.set_rng_state(state)
with torch.random.fork_rng(devices=[0]):
    torch.cuda.manual_seed(3)
print(torch.cuda.current_stream().cuda_stream, torch.cuda.default_stream(), torch.cuda.get_arch_list())
