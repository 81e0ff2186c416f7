"""Processes: from a plan's points to ranks that run, and to the result of each.

    pool.py ─> fork_server.py ─> point.py ─┬─ sim: rank 0 in that process
                                           └─ elastic.py: a process a rank; nodes.py: on several machines

`verdict.py` says how they ended and which rank's word to believe. `slurm.py` does the same by jobs.
"""
