"""A check that all ranks of a script call the same collectives: one rank after another runs and records them.

`launch/rank_check.py` starts the ranks.
"""
