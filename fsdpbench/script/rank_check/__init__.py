"""Whether all ranks of a script call the same collectives: one rank after another runs, and writes them down.

==================  ===================================================================================
`calls.py`          one collective as a rank called it, and all of a rank's, as a file
`stacks.py`         where it was called: the script's own lines first
`recording.py`      every collective of this process, written down as torch asks for it
`objects.py`        the same for `broadcast_object_list` and its kind
`values.py`         what rank 0 got out of its collectives, which the other ranks get too
`arrivals.py`       the files that it saved, likewise
`comparison.py`     the first call in which two ranks differ
`words.py`          that difference in a sentence
`start.py`          begins the record of a rank
==================  ===================================================================================

`launch/rank_check.py` starts the ranks.
"""
