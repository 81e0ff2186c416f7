"""A user's own training script on simulated GPUs: `fsdpbench run --script train.py --gpus 64`.

    launch/point.py ─> rank.py          the process of rank 0: environment, simulation, the script as __main__
                         │
                         ├─ cuda/       "cuda" and "nccl" mean the simulated device and its backend there
                         ├─ steps.py    where steps end; which are warm-up, timed and traced
                         ├─ decisions.py   what it decides by values that are not there
                         └─ files/      where its files go

`configuration/script_source.py` says what of a script a configuration holds. What scripts may expect:
docs/scripts.md.
"""
