"""The program's own profiler: a schedule, a handler, record_function, and a memory history that is dumped."""

import torch
import torch.distributed as dist
from tiny import GPT, LENGTH, VOCAB, Block
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

dist.init_process_group("nccl")
model = GPT().cuda()
for module in model.modules():
    if isinstance(module, Block):
        fully_shard(module)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
torch.cuda.memory._record_memory_history(max_entries=10_000)
with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
    on_trace_ready=tensorboard_trace_handler("traces"),
    record_shapes=True,
    profile_memory=True,
    with_stack=True,
    with_flops=True,
) as profiler:
    for step in range(8):
        tokens = torch.randint(0, VOCAB, (2, LENGTH), device="cuda")
        with record_function("forward"):
            loss = model(tokens, tokens)
        with record_function("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
if dist.get_rank() == 0:
    torch.cuda.memory._dump_snapshot("memory.pickle")
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=5))
torch.cuda.memory._record_memory_history(enabled=None)
