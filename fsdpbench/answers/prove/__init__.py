"""`fsdpbench prove`: check in seven parts whether a training script is ready for its GPUs (docs/prove.md).

    parts.py ─┬─ gradients.py, matching.py   real CPU ranks against the script without sharding (real_runs.py)
              └─ simulated.py                one simulated run at full size: races, ranks, memory, speed

A script resumes correctly if it saves on some ranks and has the same state when it continues on others.

`verdict.py` has the verdicts and their output formats.
"""
