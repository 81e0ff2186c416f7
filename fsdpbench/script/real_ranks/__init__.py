"""A user's script on real CPU ranks: "cuda" is the CPU, "nccl" is gloo, the model is small.

    launch/elastic.py ─> rank.py          one real rank: the script as __main__, with what follows in place
                           │
                           ├─ host_cuda.py    "cuda" and "nccl" mean the CPU and gloo there
                           ├─ shrinking.py    fewer blocks, narrower layers, shorter batches
                           ├─ watching.py     each step's gradients, weights and losses, by parameter
                           ├─ pieces.py       the parts of parameters that ranks hold, and whole ones of them
                           ├─ unsharded.py    the wrappers of FSDP and DDP left out: the reference
                           └─ checkpoints.py  what the script saves and loads

`fsdpbench prove` compares what these ranks leave (docs/prove.md).
"""
