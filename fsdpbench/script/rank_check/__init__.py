"""A check that all ranks of a script call the same collectives: one rank after another runs and records them.

==================  ===================================================================================
`calls.py`          a rank's collectives as a file, and rank 0's results, which other ranks get too
`recording.py`      records every collective that torch calls in this process, with its stack
`comparison.py`     the first call in which two ranks differ, and that difference in a sentence
==================  ===================================================================================

`launch/rank_check.py` starts the ranks.
"""
