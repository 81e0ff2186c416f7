"""A user's own training script on simulated GPUs: `fsdpbench run --script train.py --gpus 64`.

    launch/point.py ─> rank.py          the process of rank 0: environment, simulation, the script as __main__
                         │
                         ├─ cuda/       "cuda" and "nccl" mean the simulated device and its backend there
                         ├─ steps.py    where steps end; which are warm-up, timed and traced
                         ├─ decisions.py   its decisions by values that do not exist
                         ├─ observed/   its calls, waits and gradients, for advice
                         ├─ variations/ a change of one of its lines, without a change of its text
                         ├─ rank_check/ whether all ranks call the same collectives
                         └─ files/      where it reads and writes its files

`ScriptSource` is the part of a configuration that describes a script. What scripts may expect:
docs/scripts.md.
"""
