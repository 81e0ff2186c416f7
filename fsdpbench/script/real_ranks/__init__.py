"""A user's script on real CPU ranks: "cuda" is the CPU, "nccl" is gloo, the model is small.

    launch/elastic.py ─> rank.py          one real rank: the script as __main__, with these parts in place
                           │
                           ├─ host_cuda.py    "cuda" and "nccl" mean the CPU and gloo there
                           ├─ shrinking.py    fewer blocks, narrower layers, shorter batches
                           ├─ watching.py     each step's gradients, weights and losses, by parameter
                           ├─ pieces.py       the parts of parameters on each rank, assembled to whole ones
                           ├─ unsharded.py    FSDP's and DDP's wrappers disabled: the reference
                           └─ checkpoints.py  what the script saves and loads

`fsdpbench prove` compares the results of these ranks (docs/prove.md).
"""
