"""The remains of runs: records of ranks, the result made of them, and the folder that keeps results.

    records.py (a rank) ─> result.py (a configuration) ─> store.py (a sweep's folder, its index)

The configuration folders are the record; everything else can be made from them.
"""
