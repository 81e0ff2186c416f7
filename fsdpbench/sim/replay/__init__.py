"""Steps that were executed before, done again on the allocator and the clock alone (docs/lengths.md).

log.py            what a step did, operation by operation
world.py          names for blocks and markers, the same for every step of its kind
recorded_step.py  a step in names, and doing it again
session.py        which steps of a soak are executed, which are done again
"""
