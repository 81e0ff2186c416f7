"""Whether all ranks of a script call the same collectives: one rank after another runs, and writes them down.

==================  ===================================================================================
`calls.py`          one collective as a rank called it, with its stack, and all of a rank's, as a file
`recording.py`      every collective of this process, written down as torch asks for it
`objects.py`        the same for `broadcast_object_list` and its kind
`values.py`         values that rank 0 received from its collectives, given to the other ranks
`comparison.py`     the first call in which two ranks differ
`words.py`          that difference in a sentence
`start.py`          begins the record of a rank
==================  ===================================================================================

`launch/rank_check.py` starts the ranks.
"""
