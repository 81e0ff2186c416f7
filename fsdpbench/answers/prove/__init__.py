"""`fsdpbench prove`: whether a training script may have its GPUs, by seven parts (docs/prove.md).

    parts.py ─┬─ gradients.py, matching.py   real CPU ranks against the script without sharding (real_runs.py)
              └─ simulated.py                one simulated run at full size: races, ranks, memory, speed

A script resumes where what it saved on some ranks is what it has when it continues on others.

`verdict.py` has the verdicts and how they are shown.
"""
