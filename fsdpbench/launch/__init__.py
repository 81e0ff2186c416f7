"""Processes: start the ranks of a plan's points, and produce the result of each point.

    pool.py ─> fork_server.py ─> point.py ─┬─ sim: rank 0 in that process
                                           └─ elastic.py: a process per rank; nodes.py: on several machines

`verdict.py` decides how a point ended and which rank's error is the cause. `slurm.py` runs Slurm jobs.
"""
